"""Converts models: from Marian and torch.nn.Transformer to this model, and from this model to CTranslate2."""

from .loading import load_foreign
from .marian import from_marian
from .torch_transformer import from_torch_transformer

__all__ = ["from_marian", "from_torch_transformer", "load_foreign"]
