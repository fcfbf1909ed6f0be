# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""Texts in, translations out: [`Translator`], and the same as a pipeline. This file travels with every saved model."""

import importlib
import json
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, Pipeline, PreTrainedModel, PreTrainedTokenizerBase

from .decoding_vanilla_transformer import FAST_ATTENTION, beam_search, greedy_search

# Options that our searches know; with any other one, transformers' own loop translates.
# fmt: off
FAST_OPTIONS = {
    "num_beams", "length_penalty", "early_stopping", "num_return_sequences", "use_cache", "max_length",
    "max_new_tokens", "min_length", "min_new_tokens", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids",
    "suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "renormalize_logits", "pad_token_id",
    "bos_token_id", "eos_token_id", "decoder_start_token_id", "transformers_version",
}
# fmt: on
# Where a text may be cut: after sentences, or where these are too long after clauses, or else between words.
CUTS = [re.compile(r"(?<=[.!?…])\s+|(?<=[。！？])"), re.compile(r"(?<=[,;:])\s+|(?<=[，；：、])"), re.compile(r"\s+")]


class TextTooLong(ValueError):
    """Text `number` (from 0 on) has more tokens than can be translated as one."""

    def __init__(self, number: int, tokens: int, limit: int):
        super().__init__(f"Text {number + 1} has {tokens} tokens, and the longest that can be translated {limit}.")
        self.number, self.tokens, self.limit = number, tokens, limit


class Translator:
    """A model and its tokenizer as a function from texts to texts.

        Translator.from_pretrained("outputs/sample")(["The dog sleeps."], num_beams=5)

    Texts are translated in batches of similar length and come back in their order; an empty text stays empty.
    Translations end where `generate` ends them, at the `max_length` of the model's generation config, or if there is
    none at the longest source of the batch plus 50 tokens (section 6.1). Beam search stops with as many finished
    hypotheses as beams (`early_stopping=True`, as in CTranslate2), unless the call or the generation config says
    otherwise.

    Args:
        model: A vanilla_transformer model, in evaluation mode.
        tokenizer: Its tokenizer.
        max_tokens: Source tokens in a batch, padding included.
        max_source_length: Tokens of the longest text that is translated in one piece. None: the tokenizer's
            `model_max_length`, which train.py sets to the longest training source, or `max_position_embeddings` of the
            model, whichever is smaller.
        too_long: `split` translates a longer text in pieces that fit: sentences, or where these are too long clauses
            or words. `refuse` raises [`TextTooLong`].

    Raises:
        ValueError: An argument is not one of these, the model is of another kind, or the tokenizer cannot pad.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int = 4096,
        max_source_length: int | None = None,
        too_long: Literal["split", "refuse"] = "split",
    ):
        if too_long not in ("split", "refuse"):
            raise ValueError(f"`too_long` is {too_long!r}; it must be 'split' or 'refuse'.")
        if model.config.model_type != "vanilla_transformer":
            raise ValueError(
                f"The model is a {model.config.model_type} model; convert a marian one by "
                "`vanilla-transformer convert`, others cannot be used."
            )
        if tokenizer.pad_token is None:
            raise ValueError("The tokenizer has no padding token; set its `pad_token`.")
        check_at_least_one(max_tokens=max_tokens, max_source_length=max_source_length)
        self.model = model
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.too_long = too_long
        positions = model.config.max_position_embeddings
        # The hard limit of source and target, which only a table of learned positions has.
        self.max_positions = positions if model.config.position_embedding_type == "learned" else sys.maxsize
        longest = max_source_length or min(tokenizer.model_max_length, positions)
        self.longest_source = min(longest, self.max_positions)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        *,
        backend: Literal["torch", "ctranslate2"] = "torch",
        quantization: str | None = None,
        device: str | torch.device | None = None,
        dtype="auto",
        **kwargs,
    ) -> "Translator":
        """Loads model and tokenizer from a directory or a Hub id.

        Args:
            backend: `ctranslate2` is faster, and needs `pip install vanilla-transformer[ctranslate2]`. It converts the
                model once, into the folder `ctranslate2` beside it, or a cache folder for a Hub id.
            quantization: Of the weights with `ctranslate2`: `int8`, `int8_float16`, `int16`, `float16`, ...
            device: Where to translate. None: the GPU, if there is one.
            dtype: Of the weights with `torch`. "auto": as they were saved.
            kwargs: `max_tokens`, `max_source_length` and `too_long`; all others, such as `revision` and
                `trust_remote_code`, go to `from_pretrained` of both. `attn_implementation` defaults to "eager" on a
                CPU, where it is faster for short sentences.

        Raises:
            ValueError: An argument is wrong, or the checkpoint lacks weights or has others than the model.
            OSError: There is no such model, or it has no safetensors.
            ImportError: CTranslate2 is not installed.
        """
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        kwargs.setdefault("trust_remote_code", False)  # None would ask on standard input
        if backend == "ctranslate2":
            try:
                # By name, since this file also works without the package.
                engine = importlib.import_module("vanilla_transformer.conversion.ctranslate2")
            except ImportError as error:
                remedy = "`pip install vanilla-transformer[ctranslate2]`"
                raise ImportError(f"The backend ctranslate2 is not installed: {remedy}.") from error
            return engine.load_translator(name_or_path, quantization, device, dtype, **kwargs)
        if backend != "torch":
            raise ValueError(f"`backend` is {backend!r}; it must be 'torch' or 'ctranslate2'.")
        if quantization is not None:
            raise ValueError(f"`quantization={quantization!r}` needs `backend='ctranslate2'`.")
        own = {key: kwargs.pop(key) for key in ("max_tokens", "max_source_length", "too_long") if key in kwargs}
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, **kwargs)
        if device.type == "cpu":
            kwargs.setdefault("attn_implementation", "eager")
        model = load_model(name_or_path, dtype=dtype, **kwargs).to(device)
        if device.type == "cpu" and model.dtype == torch.bfloat16 and not cpu_has_bfloat16():
            warnings.warn(
                "This CPU computes bfloat16 many times slower than float32; use dtype='float32'.", stacklevel=2
            )
        return cls(model, tokenizer, **own)

    def __call__(self, texts: Iterable[str], progress: str | None = None, **generation) -> list[str]:
        """Translates `texts`; `generation` goes to `generate` (`num_beams`, `length_penalty`, `max_new_tokens`, ...).

        Args:
            progress: The label of a progress bar on stderr; None: no bar.

        Raises:
            TypeError: `texts` is one text instead of a list, or holds something that is not a text.
            TextTooLong: A text is refused for its length, or has a word that is too long; nothing is translated.
            ValueError: A text has a lone surrogate, or an option is out of range or returns more than translations.
        """
        if isinstance(texts, str):
            raise TypeError("Give a list of texts; one text alone would be translated letter by letter.")
        generation = {name: value for name, value in generation.items() if value is not None}
        check_generation(generation)
        texts = list(texts)
        text_indices, sources = self.tokenize(texts)
        pieces = [""] * len(sources)
        with tqdm(total=len(sources), desc=progress, unit="sentence", disable=progress is None, leave=False) as bar:
            for batch in batches_by_length(list(map(len, sources)), self.max_tokens):
                translated = self.translate_batch([sources[index] for index in batch], generation)
                for index, text in zip(batch, translated, strict=True):
                    pieces[index] = text
                bar.update(len(batch))
        translations = [[] for _ in texts]
        for index, piece in zip(text_indices, pieces, strict=True):
            translations[index].append(piece)
        return [" ".join(parts) for parts in translations]

    def tokenize(self, texts: list[str]) -> tuple[list[int], list[list[int]]]:
        """The index of the text of each piece, and the token ids of the piece; most texts are one piece."""
        for number, text in enumerate(texts, 1):
            if not isinstance(text, str):
                raise TypeError(f"Text {number} is {text!r}, of type {type(text).__name__}; give texts only.")
            if not text.isascii() and re.search("[\ud800-\udfff]", text):
                raise ValueError(f"Text {number} contains a lone surrogate, which is not a character; remove it.")
        filled = [index for index, text in enumerate(texts) if text.strip()]
        text_indices, sources = [], []
        for index, source in zip(filled, self.encode([texts[index] for index in filled]), strict=True):
            pieces = [source] if len(source) <= self.longest_source else self.split(texts[index], index)
            text_indices += [index] * len(pieces)
            sources += pieces
        return text_indices, sources

    def encode(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, return_attention_mask=False, verbose=False).input_ids if texts else []

    def split(self, text: str, index: int) -> list[list[int]]:
        """Token ids of the pieces of a text that is too long.

        A token such as >>deu<< at its beginning, which tells a Marian model the language, begins each of them.
        """
        found = re.match(r"(>>\S+?<<)\s*", text)
        language = found[0] if found and found[1] in self.tokenizer.get_vocab() else ""

        def fits(piece: str) -> bool:
            return len(self.encode([language + piece.strip()])[0]) <= self.longest_source

        text = text.removeprefix(language)
        pieces = cut(text, fits) if self.too_long == "split" else [text]
        if not all(fits(piece) for piece in pieces):
            raise TextTooLong(index, len(self.encode([language + text])[0]), self.longest_source)
        return self.encode([language + piece.strip() for piece in pieces])

    @torch.no_grad()
    def translate_batch(self, sources: list[list[int]], generation: dict) -> list[str]:
        """The translations of one batch of token ids."""
        inputs = self.tokenizer.pad({"input_ids": sources}, return_tensors="pt").to(self.model.device)
        options = generation
        if "generation_config" not in generation:
            options = {**generation, **self.defaults(inputs.input_ids.shape[1], generation)}
            options["custom_generate"] = self.fast_search(options)
        output = self.model.generate(**inputs, **options)
        return self.tokenizer.batch_decode(output, skip_special_tokens=True)

    def defaults(self, source_length: int, generation: dict) -> dict:
        """Where translations and beam search end; learned positions end all translations."""
        saved = self.model.generation_config
        options = generation if generation.keys() & {"max_length", "max_new_tokens"} else vars(saved)
        if options.get("max_new_tokens") is not None:
            max_length = 1 + options["max_new_tokens"]  # with the start token
        else:
            max_length = options.get("max_length") or 1 + source_length + 50
        found = {"max_length": min(max_length, self.max_positions + 1), "max_new_tokens": None}
        if (generation.get("num_beams") or saved.num_beams or 1) > 1:
            early = generation.get("early_stopping", saved.early_stopping)
            found["early_stopping"] = True if early is None else early
        return found

    def merge(self, generation: dict) -> dict:
        """All options that are set, by the caller or in the model's generation config."""
        options = {**self.model.generation_config.to_diff_dict(), **generation}
        return {name: value for name, value in options.items() if value is not None and not name.startswith("_")}

    def fast_search(self, generation: dict) -> Callable | None:
        """The search that suits the options; None for transformers' own, which takes any option and wrapped model."""
        options = self.merge(generation)
        is_plain = type(self.model).__name__ == "VanillaTransformerForConditionalGeneration"  # not wrapped or sharded
        is_known = all(name in FAST_OPTIONS or value is False for name, value in options.items())
        if not is_plain or not is_known or self.model.config._attn_implementation not in FAST_ATTENTION:
            return None
        return beam_search if options.get("num_beams", 1) > 1 else greedy_search


def check_at_least_one(**numbers: int | None):
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"`{name}` is {number}; it must be at least 1.")


def check_generation(generation: dict):
    """Raises ValueError for options that make no translation, or more than one of a text."""
    check_at_least_one(**{name: generation.get(name) for name in ("num_beams", "max_length", "max_new_tokens")})
    for name in ("min_length", "min_new_tokens"):
        if generation.get(name, 0) < 0:
            raise ValueError(f"`{name}` is {generation[name]}; it must be at least 0.")
    if not math.isfinite(generation.get("length_penalty", 1.0)):
        raise ValueError(f"`length_penalty` is {generation['length_penalty']}; it must be a finite number.")
    for name, expected in [("num_return_sequences", 1), ("return_dict_in_generate", False)]:
        if generation.get(name, expected) != expected:
            raise ValueError(f"A Translator returns one text for each, without `{name}`; call the model's `generate`.")


def load_model(name_or_path: str, **kwargs) -> PreTrainedModel:
    """Loads a model from safetensors. Raises ValueError if weights are missing, unexpected or of another shape.

    Transformers would initialize missing weights at random and drop others, with a warning only.
    """
    index = Path(name_or_path) / "model.safetensors.index.json"
    if index.is_file():
        for file in set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()):
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise ValueError(f"{index} names {file}; only safetensors files beside it are loaded.")
    strict = {"use_safetensors": True, "ignore_mismatched_sizes": True, "output_loading_info": True}
    model, info = AutoModelForSeq2SeqLM.from_pretrained(name_or_path, **strict, **kwargs)
    if model.config.model_type != "vanilla_transformer":
        return model  # which the Translator refuses
    problems = {kind: info[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched")}
    said = [f"{len(keys)} {kind} (such as {min(map(str, keys))})" for kind, keys in problems.items() if keys]
    if said:
        raise ValueError(
            f"The weights in {name_or_path} do not match its config: {' and '.join(said)}; download or save it again."
        )
    return model


def cpu_has_bfloat16() -> bool:
    """Whether this CPU computes in bfloat16; others emulate it, about ten times slower than float32."""
    return any(has for name, has in torch.cpu.get_capabilities().items() if name.endswith("bf16"))


def batches_by_length(lengths: list[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices in batches of at most `max_tokens`, padding included.

    The longest come first, so that running out of memory shows at once.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    start = 0
    while start < len(order):
        end = start + max(1, max_tokens // lengths[order[start]])
        yield order[start:end]
        start = end


def cut(text: str, fits: Callable[[str], bool], level: int = 0) -> list[str]:
    """Splits `text` into the longest pieces that `fits`, between sentences, else clauses, else words."""
    if fits(text) or level == len(CUTS):
        return [text]
    pieces, piece = [], ""
    for start, end in pairwise([0, *(found.end() for found in CUTS[level].finditer(text)), len(text)]):
        if piece and not fits(piece + text[start:end]):
            pieces.append(piece)
            piece = ""
        piece += text[start:end]
    return [part for piece in [*pieces, piece] for part in cut(piece, fits, level + 1) if part.strip()]


class VanillaTranslationPipeline(Pipeline):
    """`pipeline("vanilla-translation", model=..., trust_remote_code=True)`: a [`Translator`] in transformers' shape.

    Takes a text or a list of them and returns `[{"translation_text": ...}, ...]`. Options of [`Translator`] and of
    `generate` are given when the pipeline is made or when it is called.
    """

    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True

    def _sanitize_parameters(self, max_tokens=None, max_source_length=None, too_long=None, **generation):
        own = {"max_tokens": max_tokens, "max_source_length": max_source_length, "too_long": too_long}
        return {}, {key: value for key, value in own.items() if value is not None} | generation, {}

    def __call__(self, texts: str | Iterable[str], **kwargs) -> list[dict[str, str]]:
        if isinstance(texts, Mapping):
            raise TypeError("Give a text or a list of them, and not a mapping.")
        # One input for all texts: the Translator puts them in batches by length.
        return super().__call__({"texts": [texts] if isinstance(texts, str) else list(texts)}, **kwargs)

    def preprocess(self, inputs):
        return inputs

    def _forward(self, inputs, max_tokens=4096, max_source_length=None, too_long="split", **generation):
        translator = Translator(self.model, self.tokenizer, max_tokens, max_source_length, too_long)
        return translator(inputs["texts"], **generation)

    def postprocess(self, translations):
        return [{"translation_text": text} for text in translations]
