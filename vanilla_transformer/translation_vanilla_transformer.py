# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""Texts in, translations out: a model, its search and its tokenizer, also as a pipeline. Travels with every model."""

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Literal, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import GenerationConfig, Pipeline, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from .decoding_vanilla_transformer import Unsupported, beam_search, greedy_search
from .sentences_vanilla_transformer import InputError, Segmenter, Segments, check_positive, join

# The other options of a call are those of `generate`.
TRANSLATOR_OPTIONS = ("max_tokens", "max_source_length", "max_source_sentences", "max_source_lines", "too_long")
VOCABULARY = ("vocab_size", "decoder_vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id")
AT_LEAST_ONE = ("n", "max_tokens", "num_beams", "max_length", "max_new_tokens")
SCORES_PER_TOKEN = 2**16  # of the next tokens of all beams in a batch, for each of its `max_tokens`
IMPORTED_BY = os.getpid()  # the process that imported this file; in one that was forked, it is the parent


class Hypothesis(NamedTuple):
    """One of the n best translations of a text."""

    text: str
    score: float  # the log-probability of each piece, divided by its length to the power `length_penalty`; summed
    tokens: int  # without special tokens; the length of a piece that ended is one more, for the end token


class Engine:
    """A model and its search, as a [`BaseTranslator`] needs them: token ids in, token ids out.

    Args:
        config: Of the model.
        generation_config: The options of the search that are used unless a call gives others.

    Attributes:
        max_positions: Tokens of the longest source or target that the model can compute.
        default_positions: Tokens of the longest source, unless a user allows more.

    Raises InputError if a value of the generation config is out of range.
    """

    max_positions = default_positions = sys.maxsize

    def __init__(self, config: PretrainedConfig, generation_config: GenerationConfig):
        limits = ("num_beams", "max_length", "max_new_tokens", "length_penalty")
        check_options(**{name: getattr(generation_config, name) for name in limits})
        self.config, self.generation_config = config, generation_config
        self.process = os.getpid()

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

    def most_sentences(self, rows: int, max_tokens: int) -> int:
        """How many sentences, with so many beams or samples each, may be in a batch of `max_tokens`, if all are short.

        Each beam has a score for each token of the vocabulary, and these take the memory.
        """
        vocabulary = getattr(self.config, "decoder_vocab_size", None) or getattr(self.config, "vocab_size", 1)
        return max(1, SCORES_PER_TOKEN * max_tokens // (rows * vocabulary))

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


class TorchEngine(Engine):
    """One model, or an ensemble of vanilla_transformer models, in evaluation mode.

    Vanilla_transformer models are decoded by our searches, where these support the options. Any other
    sequence-to-sequence model of transformers is decoded by its own `generate`.

    Args:
        models: At each step, an ensemble averages their probabilities of the next token. The generation config is that
            of the first.

    Raises InputError if a model of an ensemble is of another type, or if the models differ in size or special tokens
    of their vocabularies.
    """

    def __init__(self, models: Sequence[PreTrainedModel]):
        super().__init__(models[0].config, models[0].generation_config)
        self.model, *self.others = models
        for model in models if self.others else ():
            if not is_vanilla(model.config):
                kind = model.config.model_type
                raise InputError(
                    f"An ensemble is of vanilla_transformer models, and one is of type {kind}; convert it first."
                )
            for name in VOCABULARY:
                if getattr(model.config, name, None) != getattr(self.config, name, None):
                    raise InputError(f"The models differ in `{name}`; train an ensemble with one tokenizer.")
        configs = [model.config for model in models]
        positions = [getattr(config, "max_position_embeddings", None) or sys.maxsize for config in configs]  # T5: none
        self.default_positions = min(positions)
        # Computed positions have no limit of their own; `longest_sequence` of our config says how far they go.
        self.max_positions = min(
            getattr(config, "longest_sequence", most) for config, most in zip(configs, positions, strict=True)
        )

    def enter_process(self):
        """As in [`Engine`]. OpenMP's threads are not forked, and torch would wait for them for ever."""
        if os.getpid() not in (self.process, IMPORTED_BY):  # a spawned process imports this file again
            torch.set_num_threads(1)
        self.process = os.getpid()

    def translate(self, batches, options):
        options = {**options, "num_return_sequences": 1, "return_dict_in_generate": False}
        return (self.generate(sources, options).tolist() for sources in batches)

    def n_best(self, batches, options, n, streamer=None):
        """As in [`Engine`]; the scores of transformers' greedy search and of its samples are computed here."""
        options = {**options, "num_return_sequences": n, "return_dict_in_generate": True}
        for sources in batches:
            output = self.generate(sources, options | {"streamer": streamer})
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
        """The output of `generate` for a batch, with our search, or transformers' own if ours does not support it."""
        inputs = pad_batch(sources, self.config.pad_token_id, self.model.device)
        models, unsupported = [self.model, *self.others], "wrapped models and streamers"
        if is_vanilla(self.config) and "generation_config" not in options:
            options = options | self.stopping_options(max(map(len, sources)), options)
        # Our searches call the layers one by one, which wrapped and sharded models do not allow.
        is_ours = all(type(model).__name__ == "VanillaTransformerForConditionalGeneration" for model in models)
        if is_ours and options.get("streamer") is None:
            search = beam_search if self.num_beams(options) > 1 else greedy_search
            others = [(model, model.get_encoder()(**inputs)) for model in self.others]
            try:
                return self.model.generate(**inputs, **options, custom_generate=search, others=others)
            except Unsupported as error:
                unsupported = error.options
        if self.others:
            raise InputError(f"An ensemble does not support {unsupported}; leave it out, or translate with one model.")
        options = options | {"output_scores": options.get("return_dict_in_generate")}
        return self.model.generate(**inputs, **options)


def is_vanilla(config: PretrainedConfig) -> bool:
    """Whether it is a config of vanilla_transformer, or derived from it, as that of a changed model may be."""
    return any(getattr(kind, "model_type", None) == "vanilla_transformer" for kind in type(config).__mro__)


class BaseTranslator:
    """Translates texts with an engine, which has the model, and its tokenizer. The package's [`Translator`] adds
    `from_pretrained`.

    Each text is cut into pieces by a [`Segmenter`]; the spaces and line breaks between them are kept. All pieces are
    translated in batches of similar length. Translations end at the `max_length` of the model's generation config, as
    in `generate`. If that is None, they end 50 tokens after the length of the longest source in the batch (section
    6.1). Beam search stops with as many finished hypotheses as beams (`early_stopping=True`, as in CTranslate2),
    unless the call or the generation config sets `early_stopping`.

    Args:
        engine: An [`Engine`]. A model, or a list of vanilla_transformer models for an ensemble, becomes a
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

    Raises InputError, a ValueError, if an argument is out of range or the models of an ensemble do not go together.
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
        if not isinstance(engine, Engine):
            engine = TorchEngine(engine if isinstance(engine, Sequence) else [engine])
        self.engine = engine
        self.tokenizer = tokenizer
        check_positive(max_tokens=max_tokens)
        self.max_tokens = max_tokens
        self.segmenter = Segmenter(
            tokenizer,
            engine.max_positions,
            engine.default_positions,
            max_source_length=max_source_length,
            max_source_sentences=max_source_sentences,
            max_source_lines=max_source_lines,
            too_long=too_long,
        )

    @property
    def model(self) -> PreTrainedModel:
        """The model of a [`TorchEngine`], the first of an ensemble; its generation config is the one that is used."""
        return self.engine.model

    def __call__(self, texts: Iterable[str], progress: str | None = None, **generation) -> list[str]:
        """Translates `texts`; `generation` goes to `generate` (`num_beams`, `length_penalty`, `max_new_tokens`, ...).

        Args:
            progress: The label of a progress bar on stderr; None: no bar.

        Raises:
            TypeError: `texts` is a single string, a mapping or a table, or an item is not a string.
            TextTooLong: A sentence is too long and `too_long` is "refuse". Nothing is translated.
            InputError: A text has a lone surrogate, or an option is out of range or changes what `generate` returns.
        """
        if isinstance(texts, str):
            raise TypeError("Give a list of texts; one text alone would be translated letter by letter.")
        generation = check_options(**generation)
        segments = self.split(texts)
        translate = partial(self.engine.translate, options=generation)
        found = self.run(translate, segments.sources, self.max_tokens, self.engine.num_beams(generation), progress)
        return segments.join(self.tokenizer.batch_decode(found, skip_special_tokens=True))

    def n_best(
        self, texts: str | Iterable[str], n: int = 5, streamer=None, progress: str | None = None, **generation
    ) -> list[list[Hypothesis]] | list[Hypothesis]:
        """The `n` best translations of each text, the best first; none of an empty text. With `do_sample=True`, `n`
        samples of each text instead. Beams may write one text in different tokens; it is returned once, with the best
        score, so there may be fewer than `n`.

        Args:
            texts: A list of texts, or one text, for which its hypotheses alone are returned.
            streamer: As in `generate`: with one beam and one text, of one piece, it gets each token as it is written.
            progress: As in a call.
            generation: As in a call; beam search has at least `n` beams unless `num_beams` is given.

        Raises:
            TypeError, TextTooLong: As in a call.
            InputError: As in a call, or there are fewer beams than `n`.
        """
        if isinstance(texts, str):
            return self.n_best([texts], n, streamer, progress, **generation)[0]
        segments = self.split(texts)
        found = self.n_best_of_pieces(segments.sources, n, streamer, progress, **generation)
        samples = self.draws_samples(generation)
        for index, best in enumerate(found):
            found[index] = best = [one._replace(text=segments.as_typed(index, one.text)) for one in best]
            if not samples:  # of two that are the same in capitals, the better one; `combine` sorts them
                found[index] = list({one.text: one for one in reversed(best)}.values())
        return [combine(*parts, n, samples) for parts in zip(segments.of_texts(found), segments.gaps, strict=True)]

    def n_best_of_pieces(
        self, sources: list[list[int]], n: int, streamer=None, progress: str | None = None, **generation
    ) -> list[list[Hypothesis]]:
        """The `n` best translations of each of `sources`, the token ids of pieces; as in [`n_best`]."""
        generation = check_options(n=n, **generation)
        del generation["n"]
        if streamer is not None and len(sources) != 1:
            if sources:
                raise InputError("A streamer takes one text of one piece; leave it out, or give a shorter text.")
            streamer.end()
        saved = generation.get("generation_config", self.engine.generation_config)
        samples = self.draws_samples(generation)
        generation = {"num_beams": 1 if samples else max(n, saved.num_beams or 1), **generation}
        if n > generation["num_beams"] and not samples:
            raise InputError(f"`n` is {n}; there are only {generation['num_beams']} beams to choose from.")
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

    def draws_samples(self, generation: dict) -> bool:
        """Whether a search with these options draws samples."""
        saved = generation.get("generation_config", self.engine.generation_config)
        return bool(generation.get("do_sample", saved.do_sample))

    def run(
        self, translate: Callable, sources: list[list[int]], max_tokens: int, rows: int, progress: str | None
    ) -> list:
        """Runs `translate` on batches by length, of at most `max_tokens`; one result per source, in their order.

        `rows` are the beams or samples of a source, which limit the size of a batch too.
        """
        self.engine.enter_process()
        found = [None] * len(sources)
        most = self.engine.most_sentences(rows, self.max_tokens)
        batches = list(batches_by_length(list(map(len, sources)), max_tokens, most))
        inputs = ([sources[index] for index in batch] for batch in batches)
        with tqdm(total=len(sources), desc=progress, unit="sentence", disable=progress is None, leave=False) as bar:
            for batch, results in zip(batches, translate(inputs), strict=True):
                for index, result in zip(batch, results, strict=True):
                    found[index] = result
                bar.update(len(batch))
        return found

    def split(self, texts: Iterable[str]) -> Segments:
        """The texts in pieces. Warns of characters that the tokenizer does not know.

        Raises TypeError, TextTooLong and InputError as in a call, and InputError for a token that the model lacks.
        """
        texts = list_texts(texts)
        segments = self.segmenter.split(texts)
        size = getattr(self.engine.config, "vocab_size", sys.maxsize)
        unknown, with_unknown = self.tokenizer.unk_token_id, set()
        for index, source in zip(segments.text_indices, segments.sources, strict=True):
            if (largest := max(source, default=0)) >= size:
                token = self.tokenizer.convert_ids_to_tokens(largest)
                raise InputError(
                    f"Text {index + 1} has the token {token!r}, number {largest:,}, but the model has only {size:,} "
                    "tokens; resize its embeddings."
                )
            if unknown in source[:-1]:
                with_unknown.add(index)
        if with_unknown:
            warnings.warn(
                f"{len(with_unknown):,} of {len(texts):,} texts have characters that the tokenizer does not know; "
                "they are not translated. Remove them, or use a model that knows them.",
                stacklevel=3,
            )
        return segments


def combine(pieces: list[list[Hypothesis]], gaps: list[str], n: int, samples: bool) -> list[Hypothesis]:
    """The `n` best translations of a text from the `n` best of each of its pieces, or samples from samples."""
    chosen = list(zip(*pieces, strict=True)) if samples and pieces else [()]
    for hypotheses in () if samples else pieces:
        longer = [(*before, one) for before in chosen for one in hypotheses]
        chosen = sorted(longer, key=lambda parts: -sum(one.score for one in parts))[:n]
    best = [
        Hypothesis(
            join([one.text for one in parts], gaps), sum(one.score for one in parts), sum(one.tokens for one in parts)
        )
        for parts in chosen
    ]
    return best if pieces or best[0].text else []


def list_texts(texts: Iterable[str]) -> list[str]:
    """The texts as a list.

    Raises TypeError for a mapping or a table, of which the keys or columns would be translated, or for an item that is
    not a string, and InputError for a lone surrogate.
    """
    if isinstance(texts, Mapping) or getattr(texts, "ndim", 1) != 1:  # a DataFrame has 2 dimensions, a Series has 1
        raise TypeError(f"Give a list of texts, such as one column, not a {type(texts).__name__}.")
    texts = list(texts)
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise TypeError(f"Text {number} is {text!r}, of type {type(text).__name__}; give texts only.")
        if re.search("[\ud800-\udfff]", text):
            raise InputError(f"Text {number} contains a lone surrogate, which is not a character; remove it.")
    return texts


def pad_batch(sources: list[list[int]], pad_token_id: int | None, device: torch.device) -> dict[str, torch.Tensor]:
    """`input_ids` (B,S), padded on the right, and `attention_mask` (B,S), which is 0 at padding."""
    ids = [torch.tensor(source) for source in sources]
    mask = pad_sequence([torch.ones_like(source) for source in ids], batch_first=True)
    ids = pad_sequence(ids, batch_first=True, padding_value=pad_token_id or 0)  # the mask hides whatever it is
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def check_options(**options) -> dict:
    """The options that are not None.

    Raises InputError if one is out of range, or makes `generate` return anything but one translation of each text.
    """
    options = {name: value for name, value in options.items() if value is not None}
    check_positive(**{name: value for name, value in options.items() if name in AT_LEAST_ONE})
    penalty = options.get("length_penalty", 1.0)
    if not isinstance(penalty, Real) or not -10 <= penalty < 10:  # not for NaN either
        raise InputError(f"`length_penalty` is {penalty!r}; it must be at least -10 and below 10.")
    for name, expected in [("num_return_sequences", 1), ("return_dict_in_generate", False)]:
        if options.get(name, expected) != expected:
            raise InputError(f"A Translator does not take `{name}`; call its `n_best`, or `generate` of the model.")
    return options


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


class VanillaTranslationPipeline(Pipeline):
    """`pipeline("vanilla-translation", model=..., trust_remote_code=True)`: a translator as a transformers pipeline.

    Takes a text or a list of them and returns `[{"translation_text": ...}, ...]`. Options of [`BaseTranslator`] and of
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
        # One input for all texts, which are put in batches by length.
        return super().__call__({"texts": [texts] if isinstance(texts, str) else list_texts(texts)}, **kwargs)

    def preprocess(self, inputs):
        return inputs

    def _forward(self, inputs, **options):
        own = {name: options.pop(name) for name in TRANSLATOR_OPTIONS if name in options}
        translator = BaseTranslator(self.model, self.tokenizer, **own)
        translator.engine.process = self.process  # which made the model
        return translator(inputs["texts"], **options)

    def postprocess(self, translations):
        return [{"translation_text": text} for text in translations]
