"""The Transformer of *Attention Is All You Need* as a Hugging Face model."""

import importlib
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .configuration_vanilla_transformer import VanillaTransformerConfig
    from .modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration, VanillaTransformerModel
    from .translation_vanilla_transformer import Translator, VanillaTranslationPipeline

__version__ = "0.1.0"  # read by pyproject.toml
__all__ = [
    "Translator",
    "VanillaTransformerConfig",
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerModel",
    "VanillaTranslationPipeline",
]

AUTO_NAMES = "transformers.models.auto.configuration_auto"


class WhenAutoNamesAreLoaded(MetaPathFinder):
    """Adds this model to the names of transformers' models once these are imported, which it leaves to others."""

    def find_spec(self, name: str, path, target=None):
        """What loads the module of these names and then adds ours to them; None for every other module."""
        if name != AUTO_NAMES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None:  # it comes from elsewhere than a file
            return None
        load = spec.loader.exec_module

        def load_and_add(module):
            load(module)
            add_name(module)

        spec.loader.exec_module = load_and_add
        return spec


def add_name(auto_names):
    auto_names.CONFIG_MAPPING_NAMES["vanilla_transformer"] = "VanillaTransformerConfig"


# The classes are loaded when one is asked for: by name, or by an Auto class, which looks for a model type that it does
# not have yet among those names, and then for its classes in the module below.
sys.modules["transformers.models.vanilla_transformer"] = sys.modules[__name__]
if AUTO_NAMES in sys.modules:
    add_name(sys.modules[AUTO_NAMES])
else:
    sys.meta_path.insert(0, WhenAutoNamesAreLoaded())


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(".registration", __name__), name)  # which registers all of them


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
