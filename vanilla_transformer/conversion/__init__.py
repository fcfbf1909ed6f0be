"""Converts models of transformers, torch.nn.Transformer, fairseq and Marian to this one, and this one to those of
transformers, Marian, CTranslate2 and ONNX.

The modules `ctranslate2` and `onnx` need those packages, and are not imported here.
"""

from .fairseq import fairseq_tokenizer, from_fairseq, from_fsmt
from .marian import FAMILIES, from_native, to_native
from .torch_transformer import from_torch_transformer

# How a model of each type becomes one of this package; `loading.load_foreign` loads it first.
CONVERSIONS = {"vanilla_transformer": lambda model: model, "fsmt": from_fsmt, **dict.fromkeys(FAMILIES, from_native)}
