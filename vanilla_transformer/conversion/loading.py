"""Load a saved model of this package, or one that can be converted to it."""

from pathlib import Path
from typing import Any

from accelerate.utils import patch_environment
from transformers import PretrainedConfig

from .. import VanillaTransformerForConditionalGeneration
from ..translation_vanilla_transformer import load_model
from .fairseq import from_fsmt
from .native import FAMILIES, from_native

CONVERSIONS = {"vanilla_transformer": lambda model: model, "fsmt": from_fsmt, **dict.fromkeys(FAMILIES, from_native)}


def load_foreign(
    name_or_path: str | Path, use_safetensors: bool | None = None, **options: Any
) -> VanillaTransformerForConditionalGeneration:
    """Loads a vanilla_transformer model, or converts a Marian, Pegasus, Blenderbot or FSMT model to one.

    Args:
        name_or_path: A directory or a Hub id.
        use_safetensors: True: only safetensors are loaded. None: also a pickle if there are no safetensors, with
            `weights_only=True`.
        options: For `from_pretrained`.

    Raises:
        ValueError: The model is of another kind, or its weights do not match its config.
        OSError: There is no such model, or it is a pickle although `use_safetensors` is True.
    """
    model_type = PretrainedConfig.get_config_dict(name_or_path)[0].get("model_type", "unknown")
    if model_type not in CONVERSIONS:
        raise ValueError(f"Models of type {model_type} cannot be converted; only {', '.join(CONVERSIONS)} can.")
    options |= {"use_safetensors": use_safetensors, "weights_only": True, "trust_remote_code": False}
    try:
        # Otherwise transformers asks a service to convert a pickle on the Hub, and loads what that service proposes.
        with patch_environment(DISABLE_SAFETENSORS_CONVERSION=1):
            theirs = load_model(name_or_path, **options)
    except OSError as error:
        if not use_safetensors:
            raise
        raise OSError(
            f"{name_or_path} has no model.safetensors that can be loaded: {error} If its weights are a pickle, "
            f"such as pytorch_model.bin, convert it with `vanilla-transformer convert {name_or_path} NEW_DIR`."
        ) from error
    ours = CONVERSIONS[model_type](theirs)
    ours.set_attn_implementation(theirs.config._attn_implementation)
    return ours
