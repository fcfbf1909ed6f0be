"""Loads a model, a tokenizer or a [`Translator`] from a directory or a Hub id.

Nothing else in the package opens a model.
"""

import json
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import GENERATION_CONFIG_NAME, is_sentencepiece_available
from transformers.utils.hub import cached_file, extract_commit_hash

from .errors import UserError, explaining, noting
from .files import CONVERTED
from .languages import known_code
from .modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .translation_vanilla_transformer import TRANSLATOR_OPTIONS, BaseTranslator, Engine, TorchEngine, is_vanilla

TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.spm")  # every tokenizer has at least one of these files
WHERE = ("cache_dir", "local_files_only", "proxies", "revision", "subfolder", "token")  # locate a model

# ----------------------------------------------------------------------------------------------------- a translator


class Translator(BaseTranslator):
    """Translates texts with a model.

        Translator.from_pretrained("outputs/sample")(["The dog sleeps."], num_beams=5)
        Translator.from_pretrained(["outputs/seed1", "outputs/seed2"])(["The dog sleeps."], num_beams=5)

    The arguments, the call and the n best are those of [`BaseTranslator`].
    """

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike | Sequence[str | os.PathLike],
        *,
        backend: Literal["torch", "ctranslate2"] = "torch",
        quantization: str | None = None,
        device: str | torch.device | None = None,
        dtype="auto",
        **kwargs,
    ) -> "Translator":
        """Loads model and tokenizer from a directory or a Hub id, or an ensemble from a list of them.

        Any sequence-to-sequence model of transformers can be loaded, such as those of OPUS-MT; it translates with its
        own `generate`. An ensemble and `ctranslate2` need vanilla_transformer models.

        Args:
            backend: `ctranslate2` is faster, and needs `pip install ctranslate2`. It converts the model once, into the
                cache of the user (`HF_HOME`).
            quantization: Of the weights with `ctranslate2`: `int8`, `int8_float16`, `int16`, `float16`, ...
            device: Where to translate. None: the GPU, if there is one.
            dtype: Of the weights with `torch`. "auto": as they were saved.
            kwargs: Options of a [`BaseTranslator`], such as `max_tokens`. All others, such as `revision`, go to
                `from_pretrained` of model and tokenizer. `attn_implementation` defaults to "eager" on a CPU, where it
                is faster for short sentences.

        Raises:
            UserError: There is no such model, an argument is wrong, the saved weights do not match the config, or the
                models of an ensemble have different vocabularies.
            ImportError: CTranslate2 is not installed.
        """
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        kwargs.setdefault("trust_remote_code", False)  # None would prompt on the terminal
        own = {name: kwargs.pop(name) for name in TRANSLATOR_OPTIONS if name in kwargs}
        names = [name_or_path] if isinstance(name_or_path, str | os.PathLike) else list(name_or_path)
        if not names:
            raise UserError("No model was given; name a directory or a Hub id.")
        if backend == "torch":
            if quantization is not None:
                raise UserError(f"`quantization={quantization!r}` needs `backend='ctranslate2'`.")
            loaded = load_torch(names, device, dtype, **kwargs)
        elif backend == "ctranslate2":
            if dtype != "auto":
                raise UserError(f"`dtype={dtype!r}` is for the backend torch; give `quantization` to ctranslate2.")
            loaded = load_ctranslate2(names, quantization, device, **kwargs)
        else:
            raise UserError(f"`backend` is {backend!r}; it must be 'torch' or 'ctranslate2'.")
        return cls(*loaded, **own)


def load_torch(
    names: list[str | os.PathLike], device: torch.device, dtype, **kwargs
) -> tuple[TorchEngine, PreTrainedTokenizerBase]:
    """The models in `names` as an engine, and their tokenizer; `use_safetensors` as in [`load_model`].

    Switches cuDNN's attention off for the whole process.
    """
    use_safetensors = kwargs.pop("use_safetensors", True)
    of_model = {"attn_implementation": "eager"} | kwargs if device.type == "cpu" else kwargs  # the fastest there
    avoid_cudnn_attention()
    models = [load_model(name, use_safetensors, dtype=dtype, **of_model).to(device) for name in names]
    if device.type == "cpu" and any(model.dtype == torch.bfloat16 for model in models) and not cpu_has_bfloat16():
        warnings.warn("This CPU emulates bfloat16, which is slow; use dtype='float32'.", stacklevel=3)
    tokenizers = [load_tokenizer(name, **kwargs) for name in names]
    for name, tokenizer in zip(names, tokenizers, strict=True):
        if tokenizer.get_vocab() != tokenizers[0].get_vocab():
            raise UserError(
                f"{name} has a different vocabulary from {names[0]}, so the probabilities of tokens cannot be "
                "averaged; train the models of an ensemble with the same --tokenizer_name."
            )
    return TorchEngine(models), tokenizers[0]


def load_ctranslate2(
    names: list[str | os.PathLike], quantization: str | None, device: torch.device, **kwargs
) -> tuple[Engine, PreTrainedTokenizerBase]:
    """A converted directory, or the conversion of a model, which is made on first use and when its files change.

    Conversions are in the user's cache, `HF_HOME/vanilla_transformer/ctranslate2`.
    """
    try:
        from .engines.ctranslate2 import FILES, CTranslate2Engine, convert_once, digests, read_config
    except ModuleNotFoundError as error:
        raise ImportError("Run `pip install ctranslate2` for this backend.") from error
    if len(names) > 1:
        raise UserError("CTranslate2 runs one model at a time; an ensemble needs `backend='torch'`.")
    name, directory = str(names[0]), Path(names[0])
    if not read_config(directory):
        check_exists(name, **where_of(kwargs))
        config = Path(cached_file(name, "config.json", **where_of(kwargs)))
        source = [kwargs.get("subfolder"), kwargs.get("variant")]
        if directory.is_dir():
            weights = map(Path, find_weights(name, kwargs.get("variant"), **where_of(kwargs)))
            source += digests([*map(config.parent.joinpath, FILES), *weights])
            name = str(config.parent.resolve())
        else:
            source.append(extract_commit_hash(str(config), None))

        def load() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
            model = load_model(names[0], dtype=torch.float32, **kwargs).eval()
            if not is_vanilla(model.config):
                kind = model.config.model_type
                raise UserError(f"{names[0]} is of type {kind}; convert it first, with `vanilla-transformer convert`.")
            return model, load_tokenizer(names[0], **kwargs)

        directory = convert_once(name, source, quantization, load)
    found = read_config(directory)["quantization"]
    if quantization not in (None, found):
        raise UserError(f"{directory} was converted with `quantization={found!r}`, not {quantization!r}.")
    tokenizer = load_tokenizer(directory, trust_remote_code=kwargs.get("trust_remote_code", False))
    return CTranslate2Engine(directory, tokenizer, device), tokenizer


def allow_long_translations(translator: BaseTranslator):
    """Sets a limit of 256 tokens if a model has none, as T5: without any, transformers would stop after 20 tokens."""
    saved = translator.engine.generation_config
    if not (saved.max_length or saved.max_new_tokens or is_vanilla(translator.engine.config)):
        saved.max_new_tokens = 256


def is_multilingual(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether it has languages to set; that of FSMT has a `src_lang`, but is bilingual."""
    return hasattr(tokenizer, "set_src_lang_special_tokens")


def set_languages(translator: BaseTranslator, source: str | None, target: str | None):
    """Sets the languages of a multilingual model, such as NLLB, mBART or M2M100; does nothing for other models.

    Raises UserError if its tokenizer does not have these languages.
    """
    tokenizer = translator.tokenizer
    if not is_multilingual(tokenizer):
        return
    # M2M100 has a method; the others have the languages as tokens.
    token_id = getattr(tokenizer, "get_lang_id", tokenizer.get_vocab().__getitem__)
    try:
        _, translator.model.generation_config.forced_bos_token_id = token_id(source), token_id(target)
    except KeyError as error:
        raise UserError(
            f"{tokenizer.name_or_path} translates between many languages; give --source_lang and --target_lang as its "
            "tokenizer names them, such as eng_Latn for NLLB, and name columns with --source_column and "
            "--target_column."
        ) from error
    tokenizer.src_lang = source


# ------------------------------------------------------------------------------------- a model, a tokenizer, a config


def load_model(name: str | os.PathLike, use_safetensors: bool | None = True, **kwargs) -> PreTrainedModel:
    """Loads a sequence-to-sequence model of any type.

    Args:
        use_safetensors: True: only safetensors are loaded. None: also a pickle if there are no safetensors, with
            `weights_only=True`.
        kwargs: For `from_pretrained`.

    Raises UserError if there is no such model; if weights are missing, unexpected or of another shape, which
    transformers would fill at random or drop with only a warning; or if an id of the generation config is not in the
    vocabulary.
    """
    where = where_of(kwargs)
    check_exists(name, **where)
    with opening(name, "config"):
        raw, _ = PretrainedConfig.get_config_dict(name, **where)
    attention = ("attn_implementation", "_attn_implementation")
    wrong = [key for key in attention if raw.get(key) not in (None, "eager", "sdpa", "flex_attention")]
    wrong += ["transformers_weights"] if raw.get("transformers_weights") else []
    if wrong:
        raise UserError(
            f"The config of {name} has the `{wrong[0]}` {raw[wrong[0]]!r}, which may load code or other weights; "
            "remove it."
        )
    if file := cached_file(name, GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False, **where):
        with explaining(f"{file} is damaged", ValueError):  # transformers would search as if it were not there
            json.loads(Path(file).read_text(encoding="utf-8"))
    weights = find_weights(name, kwargs.get("variant"), **where)
    if not weights and Path(name, CONVERTED).is_file():
        raise UserError(f"{name} was converted for CTranslate2; give --backend ctranslate2 (`backend='ctranslate2'`).")
    if not weights and use_safetensors:
        raise UserError(
            f"{name} has no model.safetensors; if its weights are a pickle, such as pytorch_model.bin, convert it "
            f"with `vanilla-transformer convert {name} NEW_DIR`."
        )
    options = {"ignore_mismatched_sizes": True, "output_loading_info": True, "weights_only": True}
    with opening(name, "model", raw.get("model_type")), patch.dict(os.environ, DISABLE_SAFETENSORS_CONVERSION="1"):
        # By default, transformers asks a service to convert a pickle on the Hub, and loads what that service proposes.
        model, info = AutoModelForSeq2SeqLM.from_pretrained(name, use_safetensors=use_safetensors, **options | kwargs)
    problems = [(kind, sorted(map(str, info[f"{kind}_keys"]))) for kind in ("missing", "unexpected", "mismatched")]
    if found := " and ".join(f"{len(keys)} {kind} (such as {keys[0]})" for kind, keys in problems if keys):
        raise UserError(f"The weights in {name} do not match its config: {found}; download or save it again.")
    head = model.get_output_embeddings()
    size = sys.maxsize if head is None else len(head.weight)  # no output embeddings: the size is unknown
    for key, value in vars(model.generation_config).items():
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if key.endswith("_token_id") and not all(isinstance(one, int) and 0 <= one < size for one in ids):
            raise UserError(
                f"The generation config of {name} has {key} {value}, but the vocabulary has the tokens 0 to "
                f"{size - 1}; correct it."
            )
    return model


def load_foreign(
    name: str | os.PathLike, use_safetensors: bool | None = None, **options: Any
) -> VanillaTransformerForConditionalGeneration:
    """Loads a vanilla_transformer model, or converts a Marian, Pegasus, Blenderbot or FSMT model to one.

    The arguments are those of [`load_model`]. Raises UserError as it does, or if the model is of another kind, and
    ValueError if it cannot be converted.
    """
    from .conversion import CONVERSIONS  # which takes a second that few need

    check_exists(name)
    with opening(name, "config"):
        model_type = PretrainedConfig.get_config_dict(name)[0].get("model_type", "unknown")
    if model_type not in CONVERSIONS:
        raise UserError(f"Models of type {model_type} cannot be converted; only {', '.join(CONVERSIONS)} can.")
    theirs = load_model(name, use_safetensors, trust_remote_code=False, **options)
    ours = CONVERSIONS[model_type](theirs)
    ours.set_attn_implementation(theirs.config._attn_implementation)
    return ours


def load_tokenizer(name: str | os.PathLike, **kwargs) -> PreTrainedTokenizerBase:
    """Loads a tokenizer. Raises UserError if there is none, or if it needs a package that is not installed."""
    check_exists(name, *TOKENIZERS, **where_of(kwargs))
    with opening(name, "tokenizer"):
        try:
            return AutoTokenizer.from_pretrained(name, **{"trust_remote_code": False} | kwargs)  # None would ask
        except Exception as error:
            # For a Marian model whose tokenizer_config.json names no class, transformers complains about the config.
            if is_sentencepiece_available() or not re.search("SentencePiece|configuration_marian", str(error)):
                raise
            raise UserError(f"The tokenizer of {name} needs sentencepiece; `pip install sentencepiece`.") from error


def load_results(name: str | os.PathLike, revision: str | None = None) -> dict:
    """What train.py noted in `all_results.json` beside a model; nothing if there is no such file.

    Raises UserError if it is damaged.
    """
    missing = {f"_raise_exceptions_for_{kind}": False for kind in ("missing_entries", "connection_errors")}
    file = cached_file(name, "all_results.json", revision=revision, **missing)
    with explaining(f"all_results.json of {name} cannot be read", Exception):  # it may hold anything
        return {} | json.loads(Path(file).read_text(encoding="utf-8")) if file else {}


def noted_languages(
    name: str | os.PathLike, tokenizer: PreTrainedTokenizerBase, revision: str | None
) -> tuple[str, str] | None:
    """The languages in the results that train.py wrote beside a model, or in its tokenizer, as for OPUS-MT models.

    None if there are none, or several on a side.
    """
    notes = tokenizer.init_kwargs | load_results(name, revision)
    source, target = (str(notes.get(key)) for key in ("source_lang", "target_lang"))
    return (source, target) if known_code(source) and known_code(target) else None


def load_config(name: str | os.PathLike, trust_remote_code: bool = False, **where) -> PretrainedConfig:
    """Loads a config. Raises UserError if there is none."""
    check_exists(name, **where)
    with opening(name, "config"):
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **where)


# ---------------------------------------------------------------------------------------------------------- the files


def check_exists(name: str | os.PathLike, *patterns: str, **where):
    """Raises UserError if there is no such directory, none of these files in it, or no such model on the Hub.

    Without this, transformers takes a misspelt directory for an id, and tries for a minute to reach the Hub.
    """
    folder = Path(name, where.get("subfolder") or "")
    if folder.is_dir():
        if any(any(folder.glob(pattern)) for pattern in patterns or ["config.json"]):
            return
        if patterns:
            raise UserError(f"{folder} has no tokenizer; save it there with `tokenizer.save_pretrained`.")
        raise UserError(f"{folder} is a directory without a config.json; give one that holds a model.")
    if Path(name).is_file():
        raise UserError(f"{name} is a file; give the directory that it is in.")
    cache, revision = Path(where.get("cache_dir") or constants.HF_HUB_CACHE), where.get("revision")
    is_cached = (cache / f"models--{str(name).replace('/', '--')}").is_dir()
    if where.get("local_files_only") or (is_cached and revision is None):
        return
    try:
        HfApi().model_info(str(name), revision=revision, timeout=10, token=where.get("token"))
    except HFValidationError as error:
        raise UserError(f"The directory '{name}' does not exist.") from error
    except RevisionNotFoundError as error:
        raise UserError(f"{name} has no revision {revision} on the Hub; name a commit, branch or tag.") from error
    except RepositoryNotFoundError as error:
        raise UserError(f"{name} is neither a directory nor a model on the Hub that you may read.") from error
    except HfHubHTTPError:  # the Hub answered; transformers gives a better message
        return
    except (HTTPError, ConnectionError) as error:
        if is_cached:
            return
        raise UserError(f"The directory '{name}' does not exist, and the Hub cannot be reached.") from error


def find_weights(name: str | os.PathLike, variant: str | None = None, **where) -> list[str]:
    """The safetensors files of a model; an empty list if there are none. `where` are options of `from_pretrained`.

    Raises UserError if they are not all in the directory of the model, or if transformers would load other files.
    """

    def find(file: str) -> str | None:
        return cached_file(name, file, _raise_exceptions_for_missing_entries=False, **where)

    if find("adapter_config.json"):
        raise UserError(f"{name} has an adapter; merge it into its model, and save that elsewhere.")
    variant = f".{variant}" if variant else ""
    if file := find(f"model{variant}.safetensors"):
        return [file]
    if index := find(f"model.safetensors.index{variant}.json"):
        names = sorted(set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
        for one in names:  # transformers would also load a pickle, or a file elsewhere
            if Path(one).name != one or not one.endswith(".safetensors"):
                raise UserError(f"{index} refers to {one}; only safetensors files in its own directory are loaded.")
        return [cached_file(name, one, **where) for one in names]
    return []


@contextmanager
def opening(name: str | os.PathLike, what: str, model_type: str | None = None) -> Iterator[None]:
    """Adds a note with the name to any exception.

    Raises UserError if the model brings code, which is not trusted; if its weights are damaged; and if `model_type` is
    not that of a sequence-to-sequence model.
    """
    damaged = explaining(f"the weights of {name} are damaged", SafetensorError, remedy="download or save them again")
    with noting(f"while loading the {what} of {name}"), damaged:
        try:
            yield
        except ValueError as error:
            if model_type and "Unrecognized configuration class" in str(error):
                kind = f"of type {model_type}, which is no sequence-to-sequence model"
                raise UserError(f"{name} is {kind}; give one that translates.") from error
            if "trust_remote_code" not in str(error):
                raise
            raise UserError(
                f"The {what} of {name} needs code that it brings; read that, and if you trust it, give "
                "trust_remote_code (--trust_remote_code)."
            ) from error


def where_of(options: dict) -> dict:
    """The options of `from_pretrained` that locate a model."""
    return {name: options[name] for name in WHERE if name in options}


def avoid_cudnn_attention():
    """Makes sdpa choose another kernel than cuDNN's, which needs 0.2 s and more for each new shape (docs/LOG.md)."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def cpu_has_bfloat16() -> bool:
    """Whether this CPU computes in bfloat16; others emulate it, about ten times slower than float32."""
    return any(has for name, has in torch.cpu.get_capabilities().items() if name.endswith("bf16"))
