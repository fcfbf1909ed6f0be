"""Load a checkpoint of this model or of one that can be converted, completely or not at all."""

from pathlib import Path
from typing import Any

from accelerate.utils import patch_environment
from transformers import MarianMTModel, PretrainedConfig, PreTrainedModel

from .. import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from .marian import from_marian


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
        ValueError: The model is of another kind, the checkpoint is incomplete, or see [`from_marian`].
        OSError: There is no such checkpoint, or it is a pickle where safetensors are asked for.
    """
    model_type = PretrainedConfig.get_config_dict(name_or_path)[0].get("model_type")
    if model_type == "marian":
        theirs = load_complete(MarianMTModel, name_or_path, use_safetensors, **options)
        ours = from_marian(theirs)
        ours.set_attn_implementation(theirs.config._attn_implementation)
        return ours
    if model_type == VanillaTransformerConfig.model_type:
        return load_complete(VanillaTransformerForConditionalGeneration, name_or_path, use_safetensors, **options)
    raise ValueError(
        f"Models of type {model_type or 'unknown'} cannot be converted; only marian and vanilla_transformer can."
    )


def load_complete(
    model_class: type[PreTrainedModel], name_or_path: str, use_safetensors: bool | None, **options: Any
) -> PreTrainedModel:
    """`model_class.from_pretrained`, but raises ValueError for missing or unexpected weights, where transformers warns."""
    options |= {"use_safetensors": use_safetensors, "weights_only": True, "output_loading_info": True}
    try:
        # Otherwise transformers asks a service to convert a pickle on the Hub, and loads what that service proposes.
        with patch_environment(DISABLE_SAFETENSORS_CONVERSION=1):
            model, info = model_class.from_pretrained(name_or_path, **options)
    except OSError as error:
        is_pickle_on_hub = "`use_safetensors=True`" in str(error)  # quoted by transformers
        if use_safetensors and (is_pickle_on_hub or any(Path(name_or_path).glob("pytorch_model*.bin"))):
            raise OSError(
                f"{name_or_path} has no model.safetensors. A pickle such as pytorch_model.bin can run any code and is "
                f"not loaded; if you trust it, convert it with `vanilla-transformer convert {name_or_path} NEW_DIR`."
            ) from error
        raise
    for kind in ("missing", "unexpected"):
        if names := sorted(info[f"{kind}_keys"]):
            raise ValueError(
                f"{name_or_path} does not match {model_class.__name__}: {len(names)} {kind} weights (such as "
                f"{names[0]}). Download it again."
            )
    return model
