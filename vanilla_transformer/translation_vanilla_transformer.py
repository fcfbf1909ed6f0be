# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""Texts in, translations out: [`Translator`], and the same as a pipeline. This file travels with every saved model."""

import json
import math
import os
import re
import sys
import unicodedata
import warnings
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, pairwise
from numbers import Integral, Real
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    Pipeline,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import ModelOutput, cached_file

from .decoding_vanilla_transformer import Unsupported, beam_search, greedy_search
from .sentences_vanilla_transformer import sentence_ends

# The other options are those of `generate`.
TRANSLATOR_OPTIONS = ("max_tokens", "max_source_length", "max_source_sentences", "max_source_lines", "too_long")
VOCABULARY = ("vocab_size", "decoder_vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id")
AT_LEAST_ONE = ("n", "max_tokens", "max_source_length", "num_beams", "max_length", "max_new_tokens")
AT_LEAST_ONE += ("model_max_length", "max_source_sentences", "max_source_lines")
# What a stranger's model or text may demand.
MOST_TOKENS = 4096  # of a text in one piece, unless `max_source_length` allows more: attention takes their square
LONGEST_TEXT = 10_000  # characters that are always tokenized, see `longest_text`
LARGEST_STEP = 2**26  # numbers in the largest tensor of a decoding step, of which several exist at a time
LARGEST_NUMBER = 2**20  # in a generation config, but for beams and lengths
MOST_UNSAVED = 2**24  # numbers of a model that its file lacks, as the position tables of Marian
WHERE = ("cache_dir", "local_files_only", "proxies", "revision", "subfolder", "token")  # locate a model
IMPORTED_BY = os.getpid()  # the process that imported this file; in one that was forked, it is the parent
WIDE_END = re.compile(r"[。！？，；：、][」』”’）》】]*$")  # what no space follows
LINE = re.compile(r"[^\n\r\u2028\u2029]+(?:[\n\r\u2028\u2029]\s*)?")  # with the breaks after it


class TextTooLong(ValueError):
    """Text `number`, counted from 0, has more tokens than can be translated in one piece.

    Of a text that is longer than [`longest_text`], only the beginning is counted.
    """

    def __init__(self, number: int, tokens: int, limit: int):
        super().__init__(
            f"Text {number + 1} has {tokens} tokens; at most {limit} can be translated in one piece, unless you raise "
            "`max_source_length`."
        )
        self.number, self.tokens, self.limit = number, tokens, limit


class Hypothesis(NamedTuple):
    """One of the n best translations of a text."""

    text: str
    score: float  # the sum of the log-probabilities, divided by the length to the power `length_penalty`
    tokens: int  # without special tokens; the length is one more if the translation ended, for the end token


class Engine:
    """A model and its search, as a [`Translator`] needs them: token ids in, token ids out.

    Args:
        config: Of the model.
        generation_config: The options of the search that are used unless a call gives others.

    Attributes:
        max_positions: Tokens of the longest source or target that the model can compute.
        default_positions: Tokens of the longest source, unless a user allows more.

    Raises ValueError if a value of the generation config is out of range.
    """

    max_positions = default_positions = sys.maxsize

    def __init__(self, config: PretrainedConfig, generation_config: GenerationConfig):
        check_generation_config(generation_config)
        self.config, self.generation_config = config, generation_config
        self.process = os.getpid()
        self.most_sentences(self.num_beams({}))  # raises now, not at the first text

    def translate(self, batches: Iterable[list[list[int]]], options: dict) -> Iterator[list[list[int]]]:
        """The ids of the translation of each source in each batch, with or without special tokens.

        `options` are those of `generate`; [`stopping_options`] complete them.
        """
        raise NotImplementedError

    def n_best(
        self, batches: Iterable[list[list[int]]], options: dict, n: int, streamer=None
    ) -> Iterator[list[list[tuple[list[int], float]]]]:
        """The ids and the score of the `n` best translations of each source in each batch, the best first.

        The score is that of a [`Hypothesis`].
        """
        raise NotImplementedError

    def enter_process(self):
        """Makes the engine work in this process, which may be a fork of the one in which it was made."""

    def num_beams(self, options: dict) -> int:
        config = options.get("generation_config", self.generation_config)
        return options.get("num_beams") or config.num_beams or 1

    def most_sentences(self, rows: int) -> int:
        """How many sentences fit into a batch, with so many beams or samples each. Raises ValueError if none does."""
        vocabulary = getattr(self.config, "decoder_vocab_size", None) or getattr(self.config, "vocab_size", 1)
        # Each beam has a score for each token, and attends to the keys of all beams, of several steps and heads.
        most_rows = min(LARGEST_STEP // vocabulary, math.isqrt(LARGEST_STEP // 64))
        if rows > most_rows:
            raise ValueError(
                f"{rows:,} beams or samples of a text do not fit into memory; with a vocabulary of {vocabulary:,} "
                f"tokens, at most {most_rows:,} do."
            )
        return LARGEST_STEP // (rows * max(vocabulary, 64 * rows))

    def stopping_options(self, source_length: int, options: dict) -> dict:
        """`max_length`, `early_stopping` and the end token of a search, which take the place of those in `options`.

        They are those in `options` or, failing that, those saved with the model, within the positions of the model.
        """
        saved = self.generation_config
        lengths = options if options.keys() & {"max_length", "max_new_tokens"} else vars(saved)
        if lengths.get("max_new_tokens") is not None:
            max_length = 1 + lengths["max_new_tokens"]  # with the start token
        else:
            max_length = lengths.get("max_length") or 1 + source_length + 50
        found = {"max_length": min(max_length, self.max_positions + 1), "max_new_tokens": None}
        if self.num_beams(options) > 1:
            early = options.get("early_stopping", saved.early_stopping)
            found["early_stopping"] = True if early is None else early
        if saved.eos_token_id is None:
            found["eos_token_id"] = options.get("eos_token_id", self.config.eos_token_id)
        return found


class GenerateEngine(Engine):
    """Any sequence-to-sequence model of transformers, in evaluation mode, with its own `generate` and its defaults."""

    def __init__(self, model: PreTrainedModel):
        super().__init__(model.config, model.generation_config)
        self.model = model
        if positions := getattr(model.config, "max_position_embeddings", None):  # T5 has none
            self.max_positions = self.default_positions = positions

    def enter_process(self):
        """As in [`Engine`]. OpenMP's threads are not forked, and torch would wait for them for ever."""
        if os.getpid() not in (self.process, IMPORTED_BY):  # a spawned process imports this file anew
            torch.set_num_threads(1)
        self.process = os.getpid()

    def translate(self, batches, options):
        options = {**options, "num_return_sequences": 1, "return_dict_in_generate": False}
        return (self.generate(sources, options).tolist() for sources in batches)

    def n_best(self, batches, options, n, streamer=None):
        """As in [`Engine`]; the scores of transformers' greedy search and of its samples are computed here."""
        options = {**options, "num_return_sequences": n, "return_dict_in_generate": True, "streamer": streamer}
        for sources in batches:
            output = self.generate(sources, options)
            scores = getattr(output, "sequences_scores", None)
            if scores is None:  # from transformers' greedy search or sampling
                scores = self.sequences_scores(output, options)
            found = list(zip(output.sequences[:, 1:].tolist(), scores.tolist(), strict=True))
            yield [found[first : first + n] for first in range(0, len(found), n)]

    def sequences_scores(self, output: ModelOutput, options: dict) -> torch.Tensor:
        """The scores that our own searches call `sequences_scores`: tokens after the first end token do not count."""
        log_probs = self.model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
        saved = self.generation_config
        ends = options.get("eos_token_id", saved.eos_token_id or self.config.eos_token_id)
        is_end = torch.isin(output.sequences[:, 1:], torch.tensor(ends, device=log_probs.device)).int()
        is_written = is_end.cumsum(dim=1) == is_end
        penalty = options.get("length_penalty", saved.length_penalty)
        lengths = is_written.sum(dim=1) ** (1.0 if penalty is None else penalty)
        return log_probs.where(is_written, 0.0).sum(dim=1) / lengths

    @torch.no_grad()
    def generate(self, sources: list[list[int]], options: dict) -> torch.Tensor | ModelOutput:
        """What `generate` returns for a batch."""
        beams = self.num_beams(options)
        max_length = options.get("max_length") or self.generation_config.max_length or 0
        if beams > 1 and len(sources) * beams * max_length > LARGEST_STEP // 2:  # transformers reserves them all
            raise ValueError(f"`max_length` is {max_length:,}, which is too long for {beams} beams; lower it.")
        inputs = pad_batch(sources, self.config.pad_token_id, self.model.device)
        return self.model.generate(**inputs, **options | {"output_scores": options.get("return_dict_in_generate")})


class TorchEngine(GenerateEngine):
    """Vanilla_transformer models with our search: one model, or an ensemble.

    Args:
        models: In evaluation mode. At each step, an ensemble averages their probabilities of the next token; the
            generation config is that of the first.

    Raises:
        ValueError: A model is of another type; or models of an ensemble differ in size or special tokens of their
            vocabularies.
    """

    def __init__(self, models: Sequence[PreTrainedModel]):
        for model in models:
            # A changed model may have a config, derived from ours, with a type of its own.
            kinds = [getattr(one, "model_type", None) for one in type(model.config).__mro__]
            if "vanilla_transformer" not in kinds:
                raise ValueError(
                    f"The model is of type {kinds[0]}; convert it first, with `vanilla-transformer convert`."
                )
            for name in VOCABULARY:
                if getattr(model.config, name) != getattr(models[0].config, name):
                    raise ValueError(f"The models differ in `{name}`; train an ensemble with one tokenizer.")
        super().__init__(models[0])
        self.others = models[1:]
        self.max_positions = min(model.config.longest_sequence for model in models)
        self.default_positions = min(model.config.max_position_embeddings for model in models)

    @torch.no_grad()
    def generate(self, sources: list[list[int]], options: dict) -> torch.Tensor | ModelOutput:
        """What `generate` returns, with our search, or transformers' own if ours does not support model or options."""
        if "generation_config" not in options:
            options = options | self.stopping_options(max(map(len, sources)), options)
        # Our searches call the layers one by one, which wrapped and sharded models do not allow.
        models = [self.model, *self.others]
        is_ours = all(type(model).__name__ == "VanillaTransformerForConditionalGeneration" for model in models)
        unsupported = "wrapped models and streamers"
        if is_ours and options.get("streamer") is None:
            search = beam_search if self.num_beams(options) > 1 else greedy_search
            inputs = pad_batch(sources, self.config.pad_token_id, self.model.device)
            others = [(model, model.get_encoder()(**inputs)) for model in self.others]
            try:
                return self.model.generate(**inputs, **options, custom_generate=search, others=others)
            except Unsupported as error:
                unsupported = error.options
        if self.others:
            raise ValueError(f"An ensemble does not support {unsupported}; leave it out, or translate with one model.")
        return super().generate(sources, options)


class Translator:
    """Translates texts with an engine, which has the model, and its tokenizer.

        Translator.from_pretrained("outputs/sample")(["The dog sleeps."], num_beams=5)
        Translator.from_pretrained(["outputs/seed1", "outputs/seed2"])(["The dog sleeps."], num_beams=5)

    A text is translated in pieces of as many lines and sentences as sources had in training. The spaces and line
    breaks around them are kept; a text that is empty or only spaces becomes an empty one. All pieces are
    translated in batches of similar length. Translations end at the `max_length` of the model's generation config, as
    in `generate`. If that is None, they end 50 tokens after the length of the longest source in the batch (section
    6.1). Beam search stops with as many finished hypotheses as beams (`early_stopping=True`, as in CTranslate2),
    unless the call or the generation config sets `early_stopping`.

    Args:
        engine: An [`Engine`]. A vanilla_transformer model, or a list of them for an ensemble, becomes a
            [`TorchEngine`].
        tokenizer: The tokenizer of its model.
        max_tokens: Source tokens in a batch, including padding.
        max_source_length: Tokens of the longest piece. None: for several sentences, the tokenizer's
            `model_max_length`, which train.py sets to the longest training source; for a single one that is longer,
            the smaller of the `max_position_embeddings` of each model and 4,096.
        max_source_sentences: The most sentences of a piece. None: as many as train.py has noted in the tokenizer or,
            if it has not, as many as fit.
        max_source_lines: The most lines of a piece. None: as many as train.py has noted, or else one.
        too_long: `split` cuts a longer sentence after clauses, else between words, else anywhere. `refuse` raises
            [`TextTooLong`].

    Raises:
        ValueError: An argument is out of range, or a [`TorchEngine`] cannot have these models.
    """

    def __init__(
        self,
        engine: Engine | PreTrainedModel | Sequence[PreTrainedModel],
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int = 4096,
        max_source_length: int | None = None,
        max_source_sentences: int | None = None,
        max_source_lines: int | None = None,
        too_long: Literal["split", "refuse"] = "split",
    ):
        if too_long not in ("split", "refuse"):
            raise ValueError(f"`too_long` is {too_long!r}; it must be 'split' or 'refuse'.")
        if not isinstance(engine, Engine):
            engine = TorchEngine(engine if isinstance(engine, Sequence) else [engine])
        sentences = max_source_sentences or tokenizer.init_kwargs.get("max_source_sentences")
        lines = max_source_lines or tokenizer.init_kwargs.get("max_source_lines", 1)
        own = {"max_source_length": max_source_length, "max_source_sentences": max_source_sentences}
        check_options(max_tokens=max_tokens, model_max_length=tokenizer.model_max_length, **own)
        check_options(max_source_sentences=sentences, max_source_lines=lines)
        self.engine = engine
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.too_long = too_long
        self.longest_source = min(max_source_length or engine.default_positions, engine.max_positions)
        if max_source_length is None:
            self.longest_source = min(self.longest_source, MOST_TOKENS)
        self.usual_source = min(max_source_length or tokenizer.model_max_length, self.longest_source)
        self.max_source_sentences = sentences or sys.maxsize
        self.max_source_lines = lines
        self.is_verbatim = bool(tokenizer.init_kwargs.get("verbatim"))  # spaces around a text mean something

    @property
    def model(self) -> PreTrainedModel:
        """The model of a [`TorchEngine`], the first of an ensemble; its generation config is the one that is used."""
        return self.engine.model

    @property
    def longest_text(self) -> int:
        """The characters of the longest text that is tokenized whole."""
        return longest_text(self.longest_source)

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

        Args:
            backend: `ctranslate2` is faster, and needs this package and `pip install ctranslate2`. It converts the
                model once, into the cache of the user (`HF_HOME`).
            quantization: Of the weights with `ctranslate2`: `int8`, `int8_float16`, `int16`, `float16`, ...
            device: Where to translate. None: the GPU, if there is one.
            dtype: Of the weights with `torch`. "auto": as they were saved.
            kwargs: Options of a [`Translator`], such as `max_tokens`. All others, such as `revision`, go to
                `from_pretrained` of model and tokenizer. `attn_implementation` defaults to "eager" on a CPU, where it
                is faster for short sentences.

        Raises:
            ValueError: An argument is wrong, the saved weights do not match the config, or the models of an ensemble
                have different vocabularies.
            OSError: There is no such model, or it has no safetensors.
            ImportError: CTranslate2 is not installed.
        """
        if backend not in BACKENDS:
            where = "" if len(BACKENDS) > 1 else " where the package vanilla_transformer is not installed"
            raise ValueError(f"`backend` is {backend!r}; it must be {' or '.join(map(repr, BACKENDS))}{where}.")
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        kwargs.setdefault("trust_remote_code", False)  # None would prompt on the terminal
        names = [name_or_path] if isinstance(name_or_path, str | os.PathLike) else list(name_or_path)
        own = {name: kwargs.pop(name) for name in TRANSLATOR_OPTIONS if name in kwargs}
        return cls(*BACKENDS[backend](names, quantization, device, dtype, **kwargs), **own)

    def __call__(self, texts: Iterable[str], progress: str | None = None, **generation) -> list[str]:
        """Translates `texts`; `generation` goes to `generate` (`num_beams`, `length_penalty`, `max_new_tokens`, ...).

        Args:
            progress: The label of a progress bar on stderr; None: no bar.

        Raises:
            TypeError: `texts` is a single string, a mapping or a table, or an item is not a string.
            TextTooLong: A sentence is too long and `too_long` is "refuse". Nothing is translated.
            ValueError: A text has a lone surrogate, or an option is out of range or changes what `generate` returns.
        """
        if isinstance(texts, str):
            raise TypeError("Give a list of texts; one text alone would be translated letter by letter.")
        generation = check_options(**generation)
        texts = list_texts(texts)
        text_indices, sources, gaps = self.tokenize(texts, self.too_long)
        translate = partial(self.engine.translate, options=generation)
        found = self.run(translate, sources, self.max_tokens, self.engine.num_beams(generation), progress)
        translations = [[] for _ in texts]
        pieces = self.tokenizer.batch_decode(found, skip_special_tokens=True)
        for index, piece in zip(text_indices, pieces, strict=True):
            translations[index].append(piece)
        return [join(parts, between) for parts, between in zip(translations, gaps, strict=True)]

    def n_best(
        self, texts: str | Iterable[str], n: int = 5, streamer=None, progress: str | None = None, **generation
    ) -> list[list[Hypothesis]] | list[Hypothesis]:
        """The `n` best translations of each text, the best first; none of an empty text. With `do_sample=True`, `n`
        samples of each text instead. Beams may write one text in different tokens; it is returned once, with the best
        score, so there may be fewer than `n`.

        Args:
            texts: A list of texts, or one text, for which its hypotheses alone are returned.
            streamer: As in `generate`: with one text and one beam, it gets each token as it is written.
            progress: As in a call.
            generation: As in a call; beam search has at least `n` beams unless `num_beams` is given.

        Raises:
            TextTooLong: A text is too long to be translated in one piece.
            ValueError: As in a call, or there are fewer beams than `n`.
        """
        if isinstance(texts, str):
            return self.n_best([texts], n, streamer, progress, **generation)[0]
        texts = list_texts(texts)
        pieces = self.tokenize(texts, too_long="refuse", is_whole=True)
        hypotheses = [[] for _ in texts]
        for index, found in zip(
            pieces[0], self.n_best_of(pieces[1], n, streamer, progress, **generation), strict=True
        ):
            hypotheses[index] = found
        return hypotheses

    def n_best_of(
        self, sources: list[list[int]], n: int, streamer=None, progress: str | None = None, **generation
    ) -> list[list[Hypothesis]]:
        """The `n` best translations of each of `sources`, the token ids of pieces; as in [`n_best`]."""
        check_options(n=n)
        generation = check_options(**generation)
        saved = generation.get("generation_config", self.engine.generation_config)
        samples = generation.get("do_sample", saved.do_sample)
        generation = {"num_beams": 1 if samples else max(n, saved.num_beams or 1), **generation}
        if n > generation["num_beams"] and not samples:
            raise ValueError(f"`n` is {n}; there are only {generation['num_beams']} beams to choose from.")
        translate = partial(self.engine.n_best, options=generation, n=n, streamer=streamer)
        max_tokens = self.max_tokens // n if samples else self.max_tokens  # beams share their source, samples do not
        rows = max(n, generation["num_beams"])
        special, hypotheses = set(self.tokenizer.all_special_ids), []
        for found in self.run(translate, sources, max_tokens, rows, progress):
            written = self.tokenizer.batch_decode([ids for ids, _ in found], skip_special_tokens=True)
            hypotheses.append(
                [
                    Hypothesis(text, score, sum(token not in special for token in ids))
                    for number, (text, (ids, score)) in enumerate(zip(written, found, strict=True))
                    if samples or text not in written[:number]
                ]
            )
        return hypotheses

    def run(
        self, translate: Callable, sources: list[list[int]], max_tokens: int, rows: int, progress: str | None
    ) -> list:
        """Runs `translate` on batches by length, of at most `max_tokens`; one result per source, in their order.

        `rows` are the beams or samples of a source, which limit the size of a batch too.
        """
        self.engine.enter_process()
        found = [None] * len(sources)
        batches = list(batches_by_length(list(map(len, sources)), max_tokens, self.engine.most_sentences(rows)))
        inputs = ([sources[index] for index in batch] for batch in batches)
        with tqdm(total=len(sources), desc=progress, unit="sentence", disable=progress is None, leave=False) as bar:
            for batch, results in zip(batches, translate(inputs), strict=True):
                for index, result in zip(batch, results, strict=True):
                    found[index] = result
                bar.update(len(batch))
        return found

    def tokenize(
        self, texts: list[str], too_long: str, is_whole: bool = False
    ) -> tuple[list[int], list[list[int]], list[list[str]]]:
        """For each piece to translate, the index of its text and its token ids; and for each text, what stands before,
        between and after its pieces. Most texts are one piece; with `is_whole`, all are.
        """
        for number, text in enumerate(texts, 1):
            if not isinstance(text, str):
                raise TypeError(f"Text {number} is {text!r}, of type {type(text).__name__}; give texts only.")
            if re.search("[\ud800-\udfff]", text):
                raise ValueError(f"Text {number} contains a lone surrogate, which is not a character; remove it.")
        pieces, gaps = [], []  # the index of a text, one of its pieces and what follows; what stands before the first
        for index, text in enumerate(texts):
            found, (before, *between) = ([text], ["", ""]) if is_whole else self.pieces_of(text)
            pieces += [(index, piece, after) for piece, after in zip(found, between, strict=True)]
            gaps.append([before])
        beginnings = self.encode([piece[: self.longest_text] for _, piece, _ in pieces])
        text_indices, sources = [], []
        nothing = self.encode([""])
        for (index, piece, after), source in zip(pieces, beginnings, strict=True):
            if [source] == nothing or all(map(is_invisible, piece)):
                gaps[index][-1] += after
                continue
            found = [(source, after)]
            if len(piece) > self.longest_text or len(source) > self.limit_of(piece, source, too_long):
                found = self.split(piece, after) if too_long == "split" else []
            if not found:
                raise TextTooLong(index, max(len(source), self.longest_source + 1), self.longest_source)
            for ids, gap in found:
                text_indices.append(index)
                sources.append(ids)
                gaps[index].append(gap)
        self.check_tokens(text_indices, sources, len(texts))
        return text_indices, sources, gaps

    def pieces_of(self, text: str) -> tuple[list[str], list[str]]:
        """A text in pieces of at most `max_source_lines` and `max_source_sentences`, each with the tags of the text;
        and what stands before, between and after them.
        """
        tags = self.tags_of(text)
        body = text.lstrip()[len(tags) :].lstrip()
        pieces, gaps = [], [text.removesuffix(body).replace(tags, "", 1)]
        lines = LINE.findall(body)
        for first in range(0, len(lines), self.max_source_lines):
            line = "".join(lines[first : first + self.max_source_lines])
            ends = [len(line)]
            if self.max_source_sentences < sys.maxsize:
                ends = sentence_ends(line.rstrip())[self.max_source_sentences - 1 : -1 : self.max_source_sentences]
                ends.append(len(line))
            for start, end in pairwise([0, *ends]):
                piece = line[start:end].rstrip()
                gaps.append(line[start + len(piece) : end])
                pieces.append(tags + piece)
        return ([text], ["", ""]) if self.is_verbatim and len(pieces) == 1 else (pieces, gaps)

    def limit_of(self, piece: str, source: list[int], too_long: str) -> int:
        """The tokens that a piece with the ids `source` may have. Warns if a sentence has more than usual."""
        if len(source) <= self.usual_source or too_long == "refuse" or len(source) > self.longest_source:
            return self.longest_source
        if len(CUTS[SENTENCES](piece)) > 1:
            return self.usual_source
        warnings.warn(  # always the same sentence, which Python shows only once
            f"Some sentences have more tokens than the longest training source, {self.usual_source:,}. They are "
            "translated whole, and the end of their translations may be missing.",
            stacklevel=4,
        )
        return self.longest_source

    def check_tokens(self, text_indices: list[int], sources: list[list[int]], count: int):
        """Raises ValueError if a source has a token that the model lacks; warns of characters without a token."""
        size = getattr(self.engine.config, "vocab_size", sys.maxsize)
        for index, source in zip(text_indices, sources, strict=True):
            if (largest := max(source, default=0)) >= size:
                token = self.tokenizer.convert_ids_to_tokens(largest)
                raise ValueError(
                    f"Text {index + 1} has the token {token!r}, number {largest:,}, but the model has only {size:,} "
                    "tokens; resize its embeddings."
                )
        unknown = self.tokenizer.unk_token_id
        if texts := {index for index, ids in zip(text_indices, sources, strict=True) if unknown in ids[:-1]}:
            warnings.warn(
                f"{len(texts):,} of {count:,} texts have characters that the tokenizer does not know; they are not "
                "translated. Remove them, or use a model that knows them.",
                stacklevel=4,
            )

    def encode(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, return_attention_mask=False, verbose=False).input_ids if texts else []

    @cached_property
    def tags(self) -> re.Pattern:
        """Tags at the beginning of a text: tokens that were added to the tokenizer and do not begin with a letter or a
        digit, and >>deu<< and the like of Marian models.
        """
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values() if not token.special]
        known = [token for token in added if not token[0].isalnum()]
        known += filter(re.compile(r">>\S+<<").fullmatch, self.tokenizer.get_vocab())
        return re.compile(rf"\s*(?:(?:{'|'.join(map(re.escape, known)) or '(?!)'})[^\S\n]*)+")

    def tags_of(self, text: str) -> str:
        """The tags at the beginning of a text, which each of its pieces repeats."""
        found = self.tags.match(text)
        return found[0].lstrip() if found else ""

    def split(self, piece: str, after: str) -> list[tuple[list[int], str]]:
        """Token ids of the parts of a piece that is too long, and what stands after each, `after` at the end.

        An empty list if not even a single character fits.
        """
        tags = self.tags_of(piece)

        def has(limit: int) -> Callable[[str], bool]:
            def fits(part: str) -> bool:
                whole = tags + part.strip()
                return len(whole) <= self.longest_text and len(self.encode([whole])[0]) <= limit

            return fits

        fits, is_possible = has(self.usual_source), has(self.longest_source)
        parts = list(cut(piece.removeprefix(tags), fits, is_possible))
        if not all(map(is_possible, parts)):
            return []
        gaps = [*(part[len(part.rstrip()) :] for part in parts[:-1]), after]
        return list(zip(self.encode([tags + part.strip() for part in parts]), gaps, strict=True))


def load_torch(
    names: list[str | os.PathLike], quantization: str | None, device: torch.device, dtype, **kwargs
) -> tuple[TorchEngine, PreTrainedTokenizerBase]:
    """The models in `names` as an engine, and their tokenizer."""
    if quantization is not None:
        raise ValueError(f"`quantization={quantization!r}` needs `backend='ctranslate2'`.")
    models = load_models(names, device, dtype, **kwargs)  # first, since this checks the configs
    tokenizers = [AutoTokenizer.from_pretrained(name, **kwargs) for name in names]
    for name, tokenizer in zip(names, tokenizers, strict=True):
        if tokenizer.get_vocab() != tokenizers[0].get_vocab():
            raise ValueError(
                f"{name} has a different vocabulary from {names[0]}, so the probabilities of tokens cannot be "
                "averaged; train the models of an ensemble with the same --tokenizer_name."
            )
    return TorchEngine(models), tokenizers[0]


def load_models(names: list[str | os.PathLike], device: torch.device, dtype="auto", **kwargs) -> list[PreTrainedModel]:
    """The models in `names` on `device`, with the attention that is the fastest there."""
    if device.type == "cpu":
        kwargs.setdefault("attn_implementation", "eager")
    # cuDNN's attention, which sdpa prefers on some GPUs, would spend up to seconds on each new shape.
    torch.backends.cuda.enable_cudnn_sdp(False)
    models = [load_model(name, dtype=dtype, **kwargs).to(device) for name in names]
    if device.type == "cpu" and any(model.dtype == torch.bfloat16 for model in models) and not cpu_has_bfloat16():
        warnings.warn("This CPU emulates bfloat16, which is slow; use dtype='float32'.", stacklevel=4)
    return models


# What `Translator.from_pretrained` calls for each backend, which is the name of a loader: its arguments are those of
# `load_torch`. vanilla_transformer/__init__.py adds ctranslate2.
BACKENDS: dict[str, Callable[..., tuple[Engine, PreTrainedTokenizerBase]]] = {"torch": load_torch}


def list_texts(texts: Iterable[str]) -> list[str]:
    """The texts as a list. Raises TypeError for a mapping or a table: its keys or columns would be translated."""
    if isinstance(texts, Mapping) or getattr(texts, "ndim", 1) != 1:  # a DataFrame has 2 dimensions, a Series has 1
        raise TypeError(f"Give a list of texts, such as one column, not a {type(texts).__name__}.")
    return list(texts)


def pad_batch(sources: list[list[int]], pad_token_id: int | None, device: torch.device) -> dict[str, torch.Tensor]:
    """`input_ids` (B,S), padded on the right, and `attention_mask` (B,S), which is 0 at padding."""
    ids = [torch.tensor(source) for source in sources]
    mask = pad_sequence([torch.ones_like(source) for source in ids], batch_first=True)
    ids = pad_sequence(ids, batch_first=True, padding_value=pad_token_id or 0)  # the mask hides whatever it is
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def check_options(**options) -> dict:
    """The options that are not None.

    Raises ValueError if one is out of range, or makes `generate` return anything but one translation of each text.
    """
    options = {name: value for name, value in options.items() if value is not None}
    for name in AT_LEAST_ONE:
        value = options.get(name, 1)
        if not isinstance(value, Integral):
            raise ValueError(f"`{name}` is {value!r}; it must be an integer.")
        if value < 1:
            raise ValueError(f"`{name}` is {value}; it must be at least 1.")
    penalty = options.get("length_penalty", 1.0)
    if not isinstance(penalty, Real) or not -10 <= penalty < 10:  # not for NaN either
        raise ValueError(f"`length_penalty` is {penalty!r}; it must be at least -10 and below 10.")
    for name, expected in [("num_return_sequences", 1), ("return_dict_in_generate", False)]:
        if options.get(name, expected) != expected:
            raise ValueError(f"A Translator does not take `{name}`; call its `n_best`, or `generate` of the model.")
    return options


def check_generation_config(config: GenerationConfig):
    """Raises ValueError for a value that would be wrong as an option, or for which memory would be reserved."""
    ours = ("num_beams", "max_length", "max_new_tokens", "length_penalty")
    check_options(**{name: getattr(config, name) for name in ours})
    for name, value in config.to_dict().items():
        if isinstance(value, Real) and name not in ours and not abs(value) <= LARGEST_NUMBER:
            raise ValueError(f"`{name}` of the generation config is {value}; it must be at most {LARGEST_NUMBER:,}.")
    if config.cache_implementation not in (None, "dynamic"):
        cache = f"`cache_implementation` of the generation config is {config.cache_implementation!r}"
        raise ValueError(f"{cache}, which reserves memory up to `max_length`; remove it, or give it as an option.")


def longest_text(max_tokens: int) -> int:
    """The characters of a text that may have at most `max_tokens` tokens, generously.

    A longer text is not tokenized as a whole, since time and memory for that have no limit.
    """
    return max(LONGEST_TEXT, 100 * max_tokens)


def load_model(name_or_path: str | os.PathLike, **kwargs) -> PreTrainedModel:
    """Loads a model from safetensors.

    Raises ValueError if weights are missing, unexpected or of another shape: transformers would initialize missing
    ones at random and drop unexpected ones, with only a warning. A config that describes a larger model than the
    weights are is refused before memory is taken. So are ids of a generation config that are not in the vocabulary.
    """
    strict = {"use_safetensors": True, "ignore_mismatched_sizes": True, "output_loading_info": True} | kwargs
    where = {name: kwargs[name] for name in WHERE if name in kwargs}
    check_raw_config(name_or_path, PretrainedConfig.get_config_dict(name_or_path, **where)[0])
    files = find_weights(name_or_path, strict["use_safetensors"], kwargs.get("variant"), **where)
    if files and not kwargs.get("trust_remote_code"):  # code that may run may also take memory
        config = AutoConfig.from_pretrained(name_or_path, trust_remote_code=False, **where)
        check_sizes(name_or_path, config, files)
    model, info = AutoModelForSeq2SeqLM.from_pretrained(name_or_path, **strict)
    problems = [(kind, sorted(map(str, info[f"{kind}_keys"]))) for kind in ("missing", "unexpected", "mismatched")]
    found = " and ".join(f"{len(keys)} {kind} (such as {keys[0]})" for kind, keys in problems if keys)
    if found:
        raise mismatch(name_or_path, found)
    head = model.get_output_embeddings()
    size = sys.maxsize if head is None else len(head.weight)  # none: a foreign model that does not tell
    for name, value in vars(model.generation_config).items():
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if name.endswith("_token_id") and not all(isinstance(one, int) and 0 <= one < size for one in ids):
            raise ValueError(
                f"The generation config of {name_or_path} has {name} {value}, but the vocabulary has the tokens 0 to "
                f"{size - 1}; correct it."
            )
    return model


def check_raw_config(name_or_path: str | os.PathLike, config: dict):
    """Raises ValueError for keys by which transformers would load code or other weights, or take memory."""
    attention = ("attn_implementation", "_attn_implementation")
    wrong = [name for name in attention if config.get(name) not in (None, "eager", "sdpa", "flex_attention")]
    wrong += ["transformers_weights"] if config.get("transformers_weights") else []
    labels = config.get("num_labels")
    wrong += ["num_labels"] if isinstance(labels, Real) and labels > LARGEST_NUMBER else []
    for name in wrong:
        raise ValueError(
            f"The config of {name_or_path} has the `{name}` {config[name]!r}, which may load code or other weights or "
            "take memory; remove it."
        )


def mismatch(name_or_path: str | os.PathLike, found: str) -> ValueError:
    return ValueError(f"The weights in {name_or_path} do not match its config: {found}; download or save it again.")


def find_weights(
    name_or_path: str | os.PathLike, use_safetensors: bool | None, variant: str | None = None, **where
) -> list[str]:
    """The files that transformers will load, or none if there are none. `where` are options of `from_pretrained`.

    Raises ValueError if they are not all in the directory of the model, or if transformers would load other files.
    """

    def find(file: str) -> str | None:
        try:
            return cached_file(name_or_path, file, **where)
        except OSError:
            return None

    if find("adapter_config.json"):
        raise ValueError(f"{name_or_path} has an adapter; merge it into its model, and save that elsewhere.")
    if any(Path(name_or_path, where.get("subfolder") or "").glob("shard-*.safetensors")):
        raise ValueError(f"{name_or_path} has the parts of a distributed checkpoint; save the whole model elsewhere.")
    variant = f".{variant}" if variant else ""
    kinds = [("model", ".safetensors")] + ([] if use_safetensors else [("pytorch_model", ".bin")])
    for stem, suffix in kinds:
        if file := find(f"{stem}{variant}{suffix}"):
            return [file]
        if index := find(f"{stem}{suffix}.index{variant}.json"):
            names = set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values())
            for name in names:  # transformers would also load a pickle, or a file elsewhere
                if Path(name).name != name or not name.endswith(suffix):
                    only = f"only {suffix.removeprefix('.')} files in its own directory are loaded"
                    raise ValueError(f"{index} refers to {name}; {only}.")
            return [cached_file(name_or_path, name, **where) for name in sorted(names)]
    return []


def check_sizes(name_or_path: str | os.PathLike, config: PretrainedConfig, files: list[str]):
    """Raises ValueError if `config` describes a larger model than the weights in `files`, or one of other shapes.

    Only headers are read, and the model that is built takes no memory. The shapes of pickles, which may lie, and of
    quantized weights are not compared.
    """
    size, shapes = sum(map(os.path.getsize, files)), {}
    tensors, numbers = size // 100, 4 * size  # at most
    if files[0].endswith(".safetensors") and getattr(config, "quantization_config", None) is None:
        shapes = read_shapes(files)
        tensors, numbers = len(shapes), sum(map(math.prod, shapes.values()))
    values = config.to_dict()
    nested = [one for part in values.values() if isinstance(part, dict) for one in part.items()]
    for name, value in [*values.items(), *nested]:
        if str(name).endswith("layers") and isinstance(value, int) and value > tensors:  # takes minutes to build
            raise mismatch(name_or_path, f"`{name}` is {value:,}, but there are {tensors:,} tensors")
    try:
        with torch.device("meta"):
            kwargs = {"dtype": torch.float32, "attn_implementation": "eager", "trust_remote_code": False}
            model = AutoModelForSeq2SeqLM.from_config(config, **kwargs)
    except Exception as error:  # libraries say in many ways that no tensor can have such a size
        reason = str(error).partition("\n")[0]  # without torch's trace of C++
        raise ValueError(f"No model can be built from the config of {name_or_path}: {reason}") from error
    prefix = f"{model.base_model_prefix}."  # saved without a head, weights lack it
    shapes = {name.removeprefix(prefix): shape for name, shape in shapes.items()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        expected = list(parameter.shape)
        if (found := shapes.get(name.removeprefix(prefix), expected)) != expected:
            raise mismatch(name_or_path, f"1 mismatched (such as {name}: {found}, and {expected} by the config)")
    described = sum(tensor.numel() for tensor in chain(model.parameters(), model.buffers()))
    if described > numbers + MOST_UNSAVED:
        raise mismatch(name_or_path, f"it describes {described:,} numbers, but there are at most {numbers:,}")


def read_shapes(files: list[str]) -> dict[str, list[int]]:
    """The shape of each tensor, from the headers of safetensors files. Raises ValueError if one is damaged."""
    shapes = {}
    try:
        for file in files:
            with safe_open(file, "pt") as tensors:
                shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged: {error}; download it again.") from error
    return shapes


def cpu_has_bfloat16() -> bool:
    """Whether this CPU computes in bfloat16; others emulate it, about ten times slower than float32."""
    return any(has for name, has in torch.cpu.get_capabilities().items() if name.endswith("bf16"))


def batches_by_length(lengths: list[int], max_tokens: int, max_sentences: int = sys.maxsize) -> Iterator[list[int]]:
    """Indices in batches of at most `max_tokens`, padding included, and at most `max_sentences`.

    The longest come first, so that running out of memory shows at once.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    start = 0
    while start < len(order):
        end = start + max(1, min(max_tokens // lengths[order[start]], max_sentences))
        yield order[start:end]
        start = end


def is_invisible(letter: str) -> bool:
    """Whether it is a space, or a joiner or a mark of direction, which mean nothing by themselves."""
    return letter.isspace() or unicodedata.category(letter) == "Cf"


def ends_of(pattern: str, text: str) -> list[int]:
    """Where the parts of a text end that `pattern` separates; the last end is that of the text."""
    ends = [found.end() for found in re.finditer(pattern, text)]
    return ends if ends[-1:] == [len(text)] else [*ends, len(text)]


# Where a long text is cut: after sentences, else after clauses, else between words, else anywhere.
SENTENCES, CLAUSES, WORDS, CHARACTERS = range(4)
CUTS = {
    SENTENCES: lambda text: sorted({*sentence_ends(text), *ends_of(r"(?<=[\n\r\u2028\u2029])\s*", text)}),
    CLAUSES: partial(ends_of, r"(?<=[,;:])\s+|(?<=[，；：、])"),
    WORDS: partial(ends_of, r"\s+"),
    CHARACTERS: lambda text: list(range(1, len(text) + 1)),
}


def cut(
    text: str, fits: Callable[[str], bool], is_possible: Callable[[str], bool], level: int = SENTENCES
) -> Iterator[str]:
    """Splits `text` into pieces that fit, each as long as the places to cut at allow.

    A sentence or a word that does not fit is kept whole if that is possible. A piece that cannot be split is returned
    even if it is not.
    """
    if level not in CUTS:
        yield text
        return
    ends = CUTS[level](text)
    start = first = 0
    count = 1
    while first < len(ends):

        def fit(parts: int) -> bool:
            if parts < 1 or first + parts > len(ends):  # noqa: B023
                return parts < 1
            return fits(text[start : ends[first + parts - 1]])  # noqa: B023

        # A text of one part is not tried again: the next cuts will tell.
        found = 0 if len(ends) == 1 else largest(count, fit)
        count = max(found, 1)
        piece = text[start : ends[first + count - 1]]
        if not found and not (level in (SENTENCES, WORDS) and is_possible(piece)):
            yield from cut(piece, fits, is_possible, level + 1)
        elif piece.strip():
            yield piece
        start, first = ends[first + count - 1], first + count


def largest(guess: int, fit: Callable[[int], bool]) -> int:
    """The largest number that fits, near `guess`: found by growing steps, then by bisection."""
    step = 1
    if fit(guess):
        low = guess
        while fit(low + step):
            low, step = low + step, 2 * step
        high = low + step
    else:
        high = guess
        while not fit(high - step):
            high, step = high - step, 2 * step
        low = high - step
    return low + bisect(range(low + 1, high), False, key=lambda number: not fit(number))


def join(translations: list[str], gaps: list[str]) -> str:
    """The translations of the pieces of a text, with what stood before, between and after them.

    Pieces that nothing separated, as Chinese sentences, get a space between them; after Chinese or Japanese
    punctuation, a single space goes.
    """
    if not translations:
        return ""
    before, *between = gaps
    for number, (translation, gap) in enumerate(zip(translations, between, strict=True), 1):
        if number < len(translations) and gap in ("", " "):
            gap = "" if WIDE_END.search(translation) else " "
        before += translation + gap
    return before


class VanillaTranslationPipeline(Pipeline):
    """`pipeline("vanilla-translation", model=..., trust_remote_code=True)`: [`Translator`] as a transformers pipeline.

    Takes a text or a list of them and returns `[{"translation_text": ...}, ...]`. Options of [`Translator`] and of
    `generate` are given when the pipeline is made or when it is called.
    """

    _load_processor = _load_image_processor = _load_feature_extractor = False
    _load_tokenizer = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.process = os.getpid()

    def _sanitize_parameters(self, **options):
        return {}, options, {}

    def __call__(self, texts: str | Iterable[str], **kwargs) -> list[dict[str, str]]:
        # One input for all texts: the Translator puts them in batches by length.
        return super().__call__({"texts": [texts] if isinstance(texts, str) else list_texts(texts)}, **kwargs)

    def preprocess(self, inputs):
        return inputs

    def _forward(self, inputs, **options):
        own = {name: options.pop(name) for name in TRANSLATOR_OPTIONS if name in options}
        translator = Translator(self.model, self.tokenizer, **own)
        translator.engine.process = self.process  # which made the model
        return translator(inputs["texts"], **options)

    def postprocess(self, translations):
        return [{"translation_text": text} for text in translations]
