"""Loads any sequence-to-sequence model of transformers for a Translator."""

import os

import torch
from accelerate.utils import patch_environment
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..translation_vanilla_transformer import TRANSLATOR_OPTIONS, GenerateEngine, Translator, load_models


def load_any(
    name_or_path: str | os.PathLike, device: str | torch.device | None = None, dtype="auto", **kwargs
) -> Translator:
    """A Translator with any model, from the arguments of `Translator.from_pretrained`.

    The weights may be a pickle, whose code never runs.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    own = {name: kwargs.pop(name) for name in TRANSLATOR_OPTIONS if name in kwargs}
    kwargs.setdefault("trust_remote_code", False)  # None would prompt on the terminal
    # Otherwise transformers asks a service to convert a pickle on the Hub, and loads what that service proposes.
    with patch_environment(DISABLE_SAFETENSORS_CONVERSION=1):
        (model,) = load_models([name_or_path], device, dtype, use_safetensors=None, **kwargs)
    tokenizer = AutoTokenizer.from_pretrained(name_or_path, **kwargs)  # now that the config is checked
    return Translator(GenerateEngine(model), tokenizer, **own)


def set_languages(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str | None, target: str | None):
    """Sets the languages of a multilingual model, such as NLLB, mBART or M2M100; does nothing for other models.

    Raises ValueError if its tokenizer does not have these languages.
    """
    if not hasattr(tokenizer, "set_src_lang_special_tokens"):  # bilingual; that of FSMT has a `src_lang`, too
        return
    # M2M100 has a method; the others have the languages as tokens.
    token_id = getattr(tokenizer, "get_lang_id", tokenizer.get_vocab().__getitem__)
    try:
        _, model.generation_config.forced_bos_token_id = token_id(source), token_id(target)
    except KeyError as error:
        raise ValueError(
            "it translates between many languages; give --source_lang and --target_lang as its tokenizer names "
            "them, such as eng_Latn for NLLB, and name columns with --source_column and --target_column."
        ) from error
    tokenizer.src_lang = source
