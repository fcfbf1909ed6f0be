"""The classes of this package, known to `Auto*.from_pretrained` and `pipeline` without remote code."""

from transformers import AutoModel, AutoModelForSeq2SeqLM
from transformers.pipelines import PIPELINE_REGISTRY

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration, VanillaTransformerModel
from .translation_vanilla_transformer import Translator as Translator  # which the package hands out from here
from .translation_vanilla_transformer import VanillaTranslationPipeline

AutoModel.register(VanillaTransformerConfig, VanillaTransformerModel, exist_ok=True)
AutoModelForSeq2SeqLM.register(VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, exist_ok=True)
PIPELINE_REGISTRY.register_pipeline(
    "vanilla-translation", pipeline_class=VanillaTranslationPipeline, pt_model=AutoModelForSeq2SeqLM, type="text"
)
