"""Load a saved model of this package, or one that can be converted to it."""

from typing import Any

from accelerate.utils import patch_environment
from transformers import MarianMTModel, PretrainedConfig

from .. import VanillaTransformerForConditionalGeneration
from ..translation_vanilla_transformer import check_weights
from .marian import from_marian

MODELS = {"marian": MarianMTModel, "vanilla_transformer": VanillaTransformerForConditionalGeneration}


def load_foreign(
    name_or_path: str, use_safetensors: bool | None = None, **options: Any
) -> VanillaTransformerForConditionalGeneration:
    """Loads a vanilla_transformer model, or a Marian model and converts it.

    Args:
        name_or_path: A directory or a Hub id.
        use_safetensors: True: only safetensors are loaded. None: also a pickle if there are no safetensors, with
            `weights_only=True`.
        options: For `from_pretrained`.

    Raises:
        ValueError: The model is of another kind, weights are missing or unexpected, or see [`from_marian`].
        OSError: There is no such model, or it is a pickle although `use_safetensors` is True.
    """
    model_type = PretrainedConfig.get_config_dict(name_or_path)[0].get("model_type", "unknown")
    if model_type not in MODELS:
        raise ValueError(f"Models of type {model_type} cannot be converted; only {' and '.join(MODELS)} can.")
    options |= {"use_safetensors": use_safetensors, "weights_only": True, "output_loading_info": True}
    try:
        # Otherwise transformers asks a service to convert a pickle on the Hub, and loads what that service proposes.
        with patch_environment(DISABLE_SAFETENSORS_CONVERSION=1):
            model, info = MODELS[model_type].from_pretrained(name_or_path, **options)
    except OSError as error:
        if not use_safetensors:
            raise
        raise OSError(
            f"{name_or_path} has no model.safetensors that can be loaded: {error} If its weights are a pickle, "
            f"such as pytorch_model.bin, convert it with `vanilla-transformer convert {name_or_path} NEW_DIR`."
        ) from error
    check_weights(name_or_path, info)
    if model_type == "marian":
        theirs, model = model, from_marian(model)
        model.set_attn_implementation(theirs.config._attn_implementation)
    return model
