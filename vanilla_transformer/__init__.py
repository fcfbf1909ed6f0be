"""The Transformer of *Attention Is All You Need* as a Hugging Face model.

Importing the package registers its classes with transformers' Auto classes and `pipeline`.
"""

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM
from transformers.pipelines import PIPELINE_REGISTRY

from . import versions  # noqa: F401  first, so that its warning precedes an import that fails
from .configuration_vanilla_transformer import VanillaTransformerConfig
from .loading import Translator
from .modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration, VanillaTransformerModel
from .translation_vanilla_transformer import VanillaTranslationPipeline

__version__ = "0.1.0"  # read by pyproject.toml
__all__ = [
    "Translator",
    "VanillaTransformerConfig",
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerModel",
    "VanillaTranslationPipeline",
]

AutoConfig.register(VanillaTransformerConfig.model_type, VanillaTransformerConfig, exist_ok=True)
AutoModel.register(VanillaTransformerConfig, VanillaTransformerModel, exist_ok=True)
AutoModelForSeq2SeqLM.register(VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, exist_ok=True)
PIPELINE_REGISTRY.register_pipeline(
    "vanilla-translation", pipeline_class=VanillaTranslationPipeline, pt_model=AutoModelForSeq2SeqLM, type="text"
)
