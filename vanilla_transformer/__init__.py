"""The Transformer of *Attention Is All You Need* as a Hugging Face model."""

import importlib
import sys
from typing import TYPE_CHECKING

from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

if TYPE_CHECKING:
    from .configuration_vanilla_transformer import VanillaTransformerConfig
    from .modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration, VanillaTransformerModel
    from .pipeline_vanilla_transformer import Translator, VanillaTranslationPipeline

__version__ = "0.1.0"  # read by pyproject.toml
__all__ = [
    "Translator",
    "VanillaTransformerConfig",
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerModel",
    "VanillaTranslationPipeline",
]

# The classes are loaded when one is asked for: by name, or by an Auto class, which looks for a model type that it does
# not have yet among these names, and then for its classes in the module below.
CONFIG_MAPPING_NAMES["vanilla_transformer"] = "VanillaTransformerConfig"
sys.modules["transformers.models.vanilla_transformer"] = sys.modules[__name__]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(".registration", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
