"""The Transformer of *Attention Is All You Need* as a Hugging Face model."""

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM
from transformers.pipelines import PIPELINE_REGISTRY

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

# `Auto*.from_pretrained` finds the classes without remote code where this package is installed ...
AutoConfig.register("vanilla_transformer", VanillaTransformerConfig, exist_ok=True)
AutoModel.register(VanillaTransformerConfig, VanillaTransformerModel, exist_ok=True)
AutoModelForSeq2SeqLM.register(VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, exist_ok=True)
PIPELINE_REGISTRY.register_pipeline(
    "vanilla-translation", pipeline_class=VanillaTranslationPipeline, pt_model=AutoModelForSeq2SeqLM, type="text"
)

# ... and `save_pretrained` puts their source files beside the weights for where it is not.
VanillaTransformerConfig.register_for_auto_class()
VanillaTransformerModel.register_for_auto_class("AutoModel")
VanillaTransformerForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")
