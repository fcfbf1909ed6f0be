"""Converts models to this one and back: transformers' own, torch.nn.Transformer, fairseq, CTranslate2 and ONNX.

The modules `ctranslate2` and `onnx` need those packages, and are not imported here.
"""

from .fairseq import fairseq_tokenizer, from_fairseq, from_fsmt
from .loading import load_foreign
from .native import from_native, to_native
from .torch_transformer import from_torch_transformer
