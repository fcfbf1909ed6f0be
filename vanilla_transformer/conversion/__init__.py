"""Convert other implementations' Transformers to this model."""

from .loading import load_foreign
from .marian import from_marian
from .torch_transformer import from_torch_transformer

__all__ = ["from_marian", "from_torch_transformer", "load_foreign"]
