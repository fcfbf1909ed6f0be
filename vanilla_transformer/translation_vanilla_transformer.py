# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""Texts in, translations out: [`Translator`], and the same as a pipeline. This file travels with every saved model."""

import math
import re
import sys
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import Literal

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    Pipeline,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from .decoding_vanilla_transformer import LongestOutput, is_direct


class Translator:
    """A model and its tokenizer as a function from texts to texts.

        Translator.from_pretrained("outputs/sample")(["The dog sleeps."], num_beams=5)

    Texts are translated in batches of similar length, sentences times source tokens at most `max_tokens`, and come
    back in their order; an empty text stays empty.

    Args:
        model: A vanilla_transformer model, in evaluation mode.
        tokenizer: Its tokenizer.
        max_tokens: Source tokens in a batch, padding included; on a CPU up to four batches are translated at once.
        max_source_length: Tokens of the longest text that is translated as one. None: `max_position_embeddings` of the
            model, beyond which only positions that are not learned reach, and more than it saw in training.
        too_long: What becomes of a longer text. `split`: its sentences are translated in pieces that fit, or its
            clauses or words, where a sentence does not. `refuse`: none of the texts is translated.

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
        for name, number in [("max_tokens", max_tokens), ("max_source_length", max_source_length)]:
            if number is not None and number < 1:
                raise ValueError(f"`{name}` is {number}; it must be at least 1.")
        self.model = model
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.too_long = too_long
        positions = model.config.max_position_embeddings
        self.reach = positions if model.config.position_embedding_type == "learned" else sys.maxsize
        self.longest_source = min(max_source_length or positions, tokenizer.model_max_length, self.reach)

    @classmethod
    def from_pretrained(
        cls, name_or_path: str, *, device: str | torch.device | None = None, dtype="auto", **kwargs
    ) -> "Translator":
        """Loads model and tokenizer from a directory or a Hub id.

        Args:
            device: Where to translate. None: the GPU, if there is one.
            dtype: Of the weights. "auto": as they were saved. "int8": see [`to_int8`].
            kwargs: `max_tokens`, `max_source_length` and `too_long`; all others, such as `revision` and
                `trust_remote_code`, go to `from_pretrained` of both. `attn_implementation` is "eager" on a CPU, unless
                given, and the faster one there, where sentences are short.

        Raises what `from_pretrained` does. Code from the Hub is not run unless `trust_remote_code=True`.
        """
        own = {key: kwargs.pop(key) for key in ("max_tokens", "max_source_length", "too_long") if key in kwargs}
        kwargs.setdefault("trust_remote_code", False)  # None would ask on standard input
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        in_int8 = dtype == "int8"
        if in_int8 and device.type != "cpu":
            raise ValueError(f"The dtype int8 is for a CPU, and the device is {device}; change one of them.")
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, **kwargs)
        dtype = torch.float32 if in_int8 else dtype
        if device.type == "cpu":
            kwargs.setdefault("attn_implementation", "eager")
        model = AutoModelForSeq2SeqLM.from_pretrained(name_or_path, dtype=dtype, **kwargs).to(device)
        return cls(to_int8(model) if in_int8 else model, tokenizer, **own)

    def __call__(self, texts: Iterable[str], progress: str | None = None, **generation) -> list[str]:
        """Translates `texts`; `generation` goes to `generate` (`num_beams`, `length_penalty`, `max_new_tokens`, ...).

        Args:
            progress: The label of a progress bar on stderr; None: no bar.

        Raises:
            TypeError: `texts` is one text and not a list of them, or holds what is no text.
            TextTooLong: A text is refused for its length, or cannot be split; nothing has been translated then.
            ValueError: A text holds half a character, or several translations of each are asked for.
        """
        if isinstance(texts, str):
            raise TypeError("Give a list of texts; one text alone would be translated letter by letter.")
        generation = {name: value for name, value in generation.items() if value is not None}
        if generation.get("num_return_sequences", 1) != 1:
            raise ValueError("A Translator gives one translation of each text; for more, call the model's `generate`.")
        texts = list(texts)
        numbers, ids = self.tokenize(texts)
        translated = [""] * len(ids)
        lengths = [len(source) for source in ids]
        threads = self.threads(sum(lengths), generation)
        batches = list(batches_by_length(lengths, self.max_tokens, threads))
        bar = tqdm(total=len(ids), desc=progress, unit="sentence", disable=progress is None, leave=False)
        with bar, side_by_side(min(threads, len(batches))) as on_each:
            found = on_each(lambda batch: self.translate([ids[index] for index in batch], generation), batches)
            for batch, texts_of_batch in zip(batches, found, strict=True):
                for index, text in zip(batch, texts_of_batch, strict=True):
                    translated[index] = text
                bar.update(len(batch))
        translations = [[] for _ in texts]
        for number, text in zip(numbers, translated, strict=True):
            translations[number].append(text)
        return [" ".join(parts) for parts in translations]

    def tokenize(self, texts: list[str]) -> tuple[list[int], list[list[int]]]:
        """Token ids of all that is translated as one, texts or pieces of them, and the number of the text of each."""
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(f"Text {number + 1} is {text!r}, of type {type(text).__name__}; give texts only.")
            if not text.isascii() and re.search("[\ud800-\udfff]", text):
                raise ValueError(f"Text {number + 1} holds half a character (a lone surrogate); decode it anew.")
        filled = [number for number, text in enumerate(texts) if text.strip()]
        if not filled:
            return [], []
        numbers, ids = [], []
        for number, source in zip(filled, self.encode([texts[number] for number in filled]), strict=True):
            sources = [source] if len(source) <= self.longest_source else self.split(texts[number], number)
            numbers += [number] * len(sources)
            ids += sources
        return numbers, ids

    def encode(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, return_attention_mask=False, verbose=False).input_ids

    def split(self, text: str, number: int) -> list[list[int]]:
        """Token ids of the pieces in which a text is translated that is too long as a whole.

        A token such as >>deu<< at its beginning, which tells a Marian model the language, begins each of them.
        """
        found = re.match(r"(>>\S+?<<)\s*", text)
        language = found[0] if found and found[1] in self.tokenizer.get_vocab() else ""

        def fits(piece: str) -> bool:
            return len(self.encode([language + piece.strip()])[0]) <= self.longest_source

        text = text.removeprefix(language)
        pieces = cut(text, fits) if self.too_long == "split" else [text]
        if not all(fits(piece) for piece in pieces):
            raise TextTooLong(number, len(self.encode([language + text])[0]), self.longest_source)
        return self.encode([language + piece.strip() for piece in pieces])

    def threads(self, num_tokens: int, generation: dict) -> int:
        """How many translate so many source tokens: on a CPU one for each core, but at most `SIDE_BY_SIDE`.

        Only one for few tokens, where much of the time is Python's, which runs one thread at once. And only one where
        batches share something that is for one thread: random numbers, an object of the caller's, a hook around the
        model or a compiled one.
        """
        samples = generation.get("do_sample", self.model.generation_config.do_sample) or self.model.training
        has_objects = not all(isinstance(value, (int, float, str)) for value in generation.values())
        is_elsewhere = self.model.device.type != "cpu" or torch.is_autocast_enabled("cpu")
        if samples or has_objects or is_elsewhere or not is_direct(self.model, {}):
            return 1
        return max(1, min(SIDE_BY_SIDE, torch.get_num_threads(), num_tokens // TOKENS_OF_A_THREAD))

    @torch.no_grad()
    def translate(self, sources: list[list[int]], generation: dict) -> list[str]:
        """The translations of one batch of token ids."""
        inputs = self.tokenizer.pad({"input_ids": sources}, return_tensors="pt").to(self.model.device)
        output = self.model.generate(**inputs, **generation | self.bound(inputs.attention_mask.sum(dim=1), generation))
        return self.tokenizer.batch_decode(output, skip_special_tokens=True)

    def bound(self, lengths: torch.Tensor, generation: dict) -> dict:
        """Ends each translation at the length of its source plus 50 (section 6.1), unless `generation` has a bound.

        But for a `generation_config`, which is taken as it is, also at the end of learned positions.
        """
        if "generation_config" in generation:
            return {}
        bounds = {
            name: min(generation[name], self.reach) for name in ("max_length", "max_new_tokens") if name in generation
        }
        if bounds:
            return {"max_length": None} | bounds  # in the place of the model's own
        longest = (lengths + 50).clamp(max=self.reach)
        criteria = [*generation.get("stopping_criteria", []), LongestOutput(longest)]
        return {"max_length": int(longest.max()), "stopping_criteria": StoppingCriteriaList(criteria)}


SIDE_BY_SIDE = 4  # batches at most, as Python runs one thread at once
TOKENS_OF_A_THREAD = 1000  # of the source at least, for which a thread of their own pays (docs/LOG.md)
SHARING_CORES = Lock()  # held by the caller of `side_by_side` that has them


def batches_by_length(lengths: list[int], max_tokens: int, threads: int = 1) -> Iterator[list[int]]:
    """Indices in batches of at most `max_tokens`, padding included; for several threads, as much work for each.

    The longest come first, so that a batch that does not fit the memory shows at once.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    left = sum(lengths)
    batches_left = math.ceil(left / (max_tokens * threads)) * threads
    start = 0
    while start < len(order):
        share = left if threads == 1 else left / max(1, batches_left)
        end, tokens, most = start, 0, start + max(1, max_tokens // lengths[order[start]])
        while end < min(most, len(order)) and tokens < share:
            tokens += lengths[order[end]]
            end += 1
        yield order[start:end]
        start, left, batches_left = end, left - tokens, batches_left - 1


@contextmanager
def side_by_side(count: int) -> Iterator[Callable]:
    """A `map` that calls its function `count` times at once, each with its share of the cores.

    Two batches on a core each take less time than one after the other on both, whose matrices are too small to share.
    Only one caller at a time has them, as all threads of a process share the number of threads.
    """
    if count <= 1 or not SHARING_CORES.acquire(blocking=False):
        yield map
        return
    cores, waits = torch.get_num_threads(), False
    pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=[cores // count])
    try:
        yield pool.map
        waits = True
    finally:  # after an error or a stop, without waiting for what is begun
        pool.shutdown(waits, cancel_futures=True)
        torch.set_num_threads(cores)  # which new threads of this process begin with
        SHARING_CORES.release()


def to_int8(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, on a CPU, with its weight matrices in int8 and what they are multiplied with rounded to it.

    Attention is in bfloat16, where the processor has it.

    Raises ValueError where torch has no int8 matrix products.
    """
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    try:
        with warnings.catch_warnings():
            # torch points to torchao, which is several times slower than float32 here (docs/LOG.md).
            warnings.simplefilter("ignore")
            # In bfloat16 small batches of matrices are multiplied several times as fast, where the processor has it.
            has_bfloat16 = getattr(torch.cpu, "get_capabilities", dict)().get("avx512_bf16")
            is_ours = model.config.model_type == "vanilla_transformer"  # whose attention takes it beside float32
            of_attention = ("q_proj", "k_proj", "v_proj") if has_bfloat16 and is_ours else ()
            rounded = {
                name: Int8Linear(module, torch.bfloat16 if name.endswith(of_attention) else torch.float32)
                for name, module in linear.items()
            }
    except (AttributeError, RuntimeError) as error:
        raise ValueError(f"torch {torch.__version__} has no int8 for this processor; take another dtype.") from error
    for name, module in rounded.items():
        model.set_submodule(name, module)
    return model.eval()


class Int8Linear(nn.Module):
    """`x W^T + b` in int8: (...,d) -> (...,f) in `dtype`. Each row of `W` (f,d) is rounded by a scale of its own.

    All rows of `x` are rounded by one, and so what comes out for one depends a little on the others of the batch. The
    module that torch.ao.quantization.quantize_dynamic makes calls the same product by a longer way (docs/LOG.md).
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.dtype = dtype
        weight = linear.weight.detach()
        scales = weight.abs().amax(dim=1).clamp(min=1e-9) / 127
        weight = torch.quantize_per_channel(weight, scales, torch.zeros_like(scales, dtype=torch.long), 0, torch.qint8)
        engine = torch.backends.quantized.engine
        if engine == "x86" and weight.shape[0] > weight.shape[1]:
            torch.backends.quantized.engine = "onednn"  # faster where much comes out, such as logits (docs/LOG.md)
        try:
            self.packed = torch.ops.quantized.linear_prepack(weight, linear.bias)
        finally:
            torch.backends.quantized.engine = engine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Inputs in 7 bits of the 8: processors without VNNI add the products of two pairs in 16 bits.
        return torch.ops.quantized.linear_dynamic.default(x.float(), self.packed, True).to(self.dtype)

    def _save_to_state_dict(self, *_):
        raise ValueError("A model in int8 cannot be saved; save the one that it was made of.")


class TextTooLong(ValueError):
    """Text `number` (from 0 on) has more tokens than can be translated as one."""

    def __init__(self, number: int, tokens: int, limit: int):
        super().__init__(f"Text {number + 1} has {tokens} tokens, and the longest that can be translated {limit}.")
        self.number, self.tokens, self.limit = number, tokens, limit


# Where a text may be cut: after sentences, or where these are too long after clauses, or else between words.
CUTS = [re.compile(r"(?<=[.!?…])\s+|(?<=[。！？])"), re.compile(r"(?<=[,;:])\s+|(?<=[，；：、])"), re.compile(r"\s+")]


def cut(text: str, fits: Callable[[str], bool], level: int = 0) -> list[str]:
    """Pieces of `text`, each as many of its sentences, clauses or words in a row as `fits`; a word stays whole."""
    if fits(text) or level == len(CUTS):
        return [text]
    places = [0, *(found.end() for found in CUTS[level].finditer(text)), len(text)]
    pieces = []
    start = 0  # of the next piece, in `places`
    while start < len(places) - 1:

        def fits_to(end: int, start=start) -> bool:
            return fits(text[places[start] : places[end]])

        # From here on the first end that is too far, within twice the distance of one that is not.
        near, far = start + 1, start + 2
        while far < len(places) and fits_to(far):
            near, far = far, 2 * far - start
        far = min(far, len(places))
        end = near + bisect_left(range(near + 1, far), True, key=lambda end: not fits_to(end))
        pieces += cut(text[places[start] : places[end]], fits, level + 1)
        start = end
    return [piece for piece in pieces if piece.strip()]


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
        # As one input, however many texts: they are put in batches by length.
        return super().__call__({"texts": [texts] if isinstance(texts, str) else list(texts)}, **kwargs)

    def preprocess(self, inputs):
        return inputs

    def _forward(self, inputs, max_tokens=4096, max_source_length=None, too_long="split", **generation):
        translator = Translator(self.model, self.tokenizer, max_tokens, max_source_length, too_long)
        return translator(inputs["texts"], **generation)

    def postprocess(self, translations):
        return [{"translation_text": text} for text in translations]


def cpu_has_bfloat16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
