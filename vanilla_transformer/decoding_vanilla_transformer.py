# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""Greedy and beam search behind `generate` (section 6.1), which do no work for sentences that are finished.

    what                                          shapes
    SentencesInPlay                               what the model needs to go on with A of the B sentences
    best_continuations                            (A n,V) (A,n) -> the best of n beams, (A,c)
    Hypotheses                                    the n best of each sentence that have ended, (A,n)
    VanillaTransformerGenerationMixin._sample     greedy: (B,T) -> (B,T')
    VanillaTransformerGenerationMixin._beam_search    n beams: (B n,T) -> (B,T')

The outputs are those of transformers' own loops, which take over for all that these do not know.
"""

from collections.abc import Iterator

import torch
from torch.nn.functional import pad
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers import generation as processors
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutput

BLOCK = 32  # types, of which the most likely one is found at once
NEVER = -1e9  # the score of what must not be chosen
# Of the logits, on a CPU, as many at a time, 8 MiB in float32, but at least so many rows: each time all weights of the
# output projection are read.
LOGITS_AT_A_TIME, ROWS_AT_A_TIME = 2**21, 64
BROADCASTING = ("eager", "sdpa")  # backends of attention that let one source stand for several beams

# Processors that look at each row by itself, so that it does not matter which others are in the batch.
OF_A_ROW = (
    processors.ForcedBOSTokenLogitsProcessor,
    processors.ForcedEOSTokenLogitsProcessor,
    processors.LogitNormalization,
    processors.MinLengthLogitsProcessor,
    processors.MinNewTokensLengthLogitsProcessor,
    processors.NoBadWordsLogitsProcessor,
    processors.NoRepeatNGramLogitsProcessor,
    processors.RepetitionPenaltyLogitsProcessor,
    processors.SuppressTokensLogitsProcessor,
)


class LongestOutput(StoppingCriteria):
    """Ends each output of a batch at a length of its own, `longest` (B)."""

    def __init__(self, longest: torch.Tensor):
        self.longest = longest

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs) -> torch.Tensor:
        beams = input_ids.shape[0] // self.longest.shape[0]
        return input_ids.shape[1] >= self.longest.to(input_ids.device).repeat_interleave(beams)

    def select(self, sentences: torch.Tensor) -> "LongestOutput":
        """The same for some sentences of the batch."""
        return LongestOutput(self.longest.to(sentences.device)[sentences])


class SentencesInPlay:
    """The sentences of a batch that are not finished, with all that the model needs to go on with them.

    A of them are left, each with `beams` rows; the source of a sentence stands there once, or once for each row. Where
    the layers are called directly, the cache holds L keys and values of each sentence, those of all its beams one
    behind the other, and beams that go on from others move none of them, but get the `ancestors` of those.
    """

    def __init__(
        self,
        model: GenerationMixin,
        input_ids: torch.Tensor,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        model_kwargs: dict,
    ):
        self.model = model
        self.beams = generation_config.num_beams
        self.numbers = torch.arange(input_ids.shape[0] // self.beams, device=input_ids.device)  # in the batch: (A)
        self.criteria = stopping_criteria
        self.kwargs = model_kwargs
        self.begin = lambda ids: model._prefill(ids, generation_config, self.kwargs)
        self.is_direct = is_direct(model, model_kwargs)
        # (A,n,L), added to the scores of attention: 0 where a beam stems from what was put there, or very negative.
        self.ancestors = None
        self.remembered = 0  # L, when last some were forgotten
        self.ahead = 0  # keys in the cache before the first token, such as those of a prefix that PEFT trains

    def next_logits(self, input_ids: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """(A m,T) -> (A m,V) for m beams each, in float32: on a CPU some rows after others, with their slice."""
        if self.begin is None and self.is_direct:
            yield from self.logits_of(self.step(input_ids))
            return
        if self.begin is not None:
            outputs, self.begin = self.begin(input_ids), None
        else:
            inputs = self.model.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **self.kwargs)
            outputs = self.model(**inputs, return_dict=True)
        self.kwargs = self.model._update_model_kwargs_for_generation(outputs, self.kwargs, is_encoder_decoder=True)
        if self.is_direct:
            source = self.kwargs["encoder_outputs"].last_hidden_state
            self.kwargs["source_mask"] = create_bidirectional_mask(
                self.model.config, source[:, :1], self.kwargs.get("attention_mask"), encoder_hidden_states=source
            )
            self.ahead = self.kwargs["past_key_values"].get_seq_length() - input_ids.shape[1]
            if self.beams > 1:
                self.join_beams(len(input_ids) // len(self.numbers))
        yield slice(0, len(input_ids)), outputs.logits[:, -1].float()

    def logits_of(self, hidden: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """(A n,d) -> (A n,V), whole sentences at a time."""
        rows, num_types = hidden.shape[0], self.model.config.decoder_vocab_size
        if hidden.device.type == "cpu":
            rows = max(ROWS_AT_A_TIME, LOGITS_AT_A_TIME // num_types) // self.beams * self.beams or self.beams
        for start in range(0, hidden.shape[0], rows):
            some = slice(start, start + rows)
            yield some, self.model.lm_head(hidden[some]).float()

    def join_beams(self, m: int):
        """Puts keys and values of the m beams of a sentence one behind the other: (A m,h,T,k) -> (A,h,m T,k)."""
        for layer in self.kwargs["past_key_values"].self_attention_cache.layers:
            layer.keys = layer.keys.unflatten(0, (-1, m)).transpose(1, 2).flatten(2, 3)
            layer.values = layer.values.unflatten(0, (-1, m)).transpose(1, 2).flatten(2, 3)
        own = only_itself(m, layer.keys).repeat_interleave(layer.keys.shape[2] // m, dim=1)  # (m,m T)
        self.ancestors = own.expand(len(self.numbers), -1, -1)

    def forget(self, sentences: torch.Tensor):
        """Keeps, of the keys and values of these `sentences` (A') of the A, what the beams that are left stem from.

        Beams soon have most of their past in common. Keys hold their positions, so that their order does not matter.
        """
        is_ancestor = (self.ancestors == 0).any(dim=1)  # (A',L)
        self.remembered = max(is_ancestor.sum(dim=1).tolist(), default=0)
        chosen = is_ancestor.byte().argsort(dim=1, descending=True)[:, : self.remembered]
        self.ancestors = self.ancestors.take_along_dim(chosen[:, None], dim=2)
        for layer in self.kwargs["past_key_values"].self_attention_cache.layers:
            heads, length = layer.keys.shape[1:3]
            first = (sentences[:, None] * heads + torch.arange(heads, device=chosen.device)) * length  # (A',h)
            rows = (first[..., None] + chosen[:, None]).flatten()
            shape = (len(sentences), heads, self.remembered)
            layer.keys = layer.keys.flatten(0, 2).index_select(0, rows).unflatten(0, shape)
            layer.values = layer.values.flatten(0, 2).index_select(0, rows).unflatten(0, shape)

    def step(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The decoder over the last token of each row: (A n,T) -> (A n,d).

        The same as a call of the model, which would make masks, positions and outputs anew for each token. Beams of
        one sentence stand in one row, like target positions, that look at their ancestors only.
        """
        decoder, cache = self.model.get_decoder(), self.kwargs["past_key_values"]
        length, tokens = input_ids.shape[1] + self.ahead, input_ids[:, -1].unflatten(0, (-1, self.beams))  # (A,n)
        positions = torch.full_like(tokens[:1], length - 1)
        x, rotary = decoder.add_positions(decoder.embed_tokens(tokens), positions, length)
        mask = None
        if self.beams > 1:
            own = only_itself(self.beams, self.ancestors).expand(len(x), -1, -1)
            self.ancestors = torch.cat([self.ancestors, own], dim=2)
            mask = self.ancestors[:, None]
        source, source_mask = self.kwargs["encoder_outputs"].last_hidden_state, self.kwargs["source_mask"]
        for layer in decoder.layers:
            x = layer(x, mask, source, source_mask, rotary, past_key_values=cache)
        return decoder.layer_norm(x).flatten(0, 1)

    def keep(self, sentences: torch.Tensor, beams: torch.Tensor):
        """Goes on with `sentences` (A') of the A, and in each with beams that stem from these `beams` (A',n)."""
        count, are_fewer = len(self.numbers), len(sentences) < len(self.numbers)
        caches, rows = self.kwargs["past_key_values"], (sentences[:, None] * self.beams + beams).flatten()
        if self.ancestors is not None:
            self.ancestors = gather_beams(self.ancestors[sentences], beams)
            if are_fewer or self.ancestors.shape[2] > 2 * self.remembered + 8 * self.beams:
                self.forget(sentences)
        elif self.beams > 1 or are_fewer:
            caches.self_attention_cache.reorder_cache(rows)
        source = caches.cross_attention_cache
        is_shared = source.layers[0].keys.shape[0] == count
        if are_fewer or not is_shared:
            source.reorder_cache(sentences if is_shared else rows)
        if not are_fewer:
            return

        def pick(value):
            if isinstance(value, BaseModelOutput):
                return BaseModelOutput(last_hidden_state=pick(value.last_hidden_state))
            if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] in (count, count * self.beams):
                return value[sentences if value.shape[0] == count else rows]
            return value

        self.kwargs = {name: pick(value) for name, value in self.kwargs.items()}
        self.criteria = StoppingCriteriaList(
            one.select(sentences) if hasattr(one, "select") else one for one in self.criteria
        )
        self.numbers = self.numbers[sentences]


def is_direct(model: GenerationMixin, model_kwargs: dict) -> bool:
    """Whether the layers of the decoder may be called without the model around them.

    Not where a mask of the target, a backend of attention or a hook wants to be asked at each token.
    """
    given = {name for name, value in model_kwargs.items() if value is not None}
    mask = model_kwargs.get("attention_mask")
    around = (model, model.base_model, model.get_decoder(), model.lm_head)
    return (
        given <= {"encoder_outputs", "attention_mask", "past_key_values", "use_cache"}
        and (mask is None or mask.ndim == 2)
        and model.config._attn_implementation in BROADCASTING
        and not any(one._forward_hooks or one._forward_pre_hooks or "forward" in vars(one) for one in around)
        and all(one._compiled_call_impl is None for one in around)
    )


def is_plain(
    model: GenerationMixin,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool,
    model_kwargs: dict,
) -> bool:
    """Whether nothing is asked for but the outputs, and nothing depends on which sentences are in the batch."""
    asks_for_more = generation_config.return_dict_in_generate or generation_config.do_sample or synced_gpus
    cache = model_kwargs.get("past_key_values")
    return (
        not asks_for_more
        and model.config._attn_implementation != "flex_attention"  # it would be compiled for each number of sentences
        and isinstance(cache, EncoderDecoderCache)
        and type(cache.self_attention_cache) is DynamicCache
        and type(cache.cross_attention_cache) is DynamicCache
        and not cache.self_attention_cache.offloading
        and not getattr(cache, "_is_user_defined", False)
        and all(type(one) in OF_A_ROW for one in logits_processor)
        and all(
            type(one) in (MaxLengthCriteria, EosTokenCriteria) or hasattr(one, "select") for one in stopping_criteria
        )
        and generation_config._pad_token_tensor is not None
    )


class VanillaTransformerGenerationMixin(GenerationMixin):
    """`generate` as in transformers; beams share their source, and what is finished leaves the batch."""

    def _expand_inputs_for_generation(self, expand_size: int = 1, input_ids: torch.Tensor | None = None, **kwargs):
        """Copies what the decoder reads for each beam; the source of a sentence, which its beams share, stays one."""
        shared = {}
        if self.config._attn_implementation in BROADCASTING:
            shared = {name: kwargs.pop(name) for name in ("encoder_outputs", "attention_mask") if name in kwargs}
            kwargs["is_encoder_decoder"] = False
        input_ids, kwargs = super()._expand_inputs_for_generation(expand_size, input_ids=input_ids, **kwargs)
        return input_ids, kwargs | shared

    def _reorder_cache(self, past_key_values: EncoderDecoderCache, beam_idx: torch.Tensor) -> EncoderDecoderCache:
        """Lets the self-attention of each beam go on from the one it stems from; beams share their source."""
        past_key_values.self_attention_cache.reorder_cache(beam_idx)
        if self.config._attn_implementation not in BROADCASTING:
            past_key_values.cross_attention_cache.reorder_cache(beam_idx)
        return past_key_values

    def _sample(
        self,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer=None,
        **model_kwargs,
    ):
        """Greedy search: of each sentence the most likely token at each step, (B,T) -> (B,T')."""
        options = (logits_processor, stopping_criteria, generation_config, synced_gpus)
        if streamer is not None or not is_plain(self, *options, model_kwargs):
            return super()._sample(input_ids, *options, streamer=streamer, **model_kwargs)
        play = SentencesInPlay(self, input_ids, stopping_criteria, generation_config, model_kwargs)
        length = input_ids.shape[1]
        output = pad(input_ids, (0, generation_config.max_length - length), value=generation_config._pad_token_tensor)
        while len(play.numbers):
            best = [
                logits_processor(input_ids[some], logits).argmax(dim=-1)
                for some, logits in play.next_logits(input_ids)
            ]
            tokens = torch.cat(best)
            output[play.numbers, length] = tokens
            length += 1
            input_ids = torch.cat([input_ids, tokens[:, None]], dim=1)
            goes_on = ~play.criteria(input_ids, None)
            if not goes_on.all():
                sentences = goes_on.nonzero()[:, 0]
                input_ids = input_ids[sentences]
                play.keep(sentences, torch.zeros_like(sentences[:, None]))
        return output[:, :length]

    def _beam_search(
        self,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        **model_kwargs,
    ):
        """Beam search (section 6.1): (B n,T) -> (B `num_return_sequences`,T').

        A hypothesis scores the sum of its log-probabilities divided by its length to the power `length_penalty`. A
        sentence is finished when no running beam can become better than its n finished ones, by the same estimate as
        in transformers, as if it were alone in its batch.
        """
        options = (logits_processor, stopping_criteria, generation_config, synced_gpus)
        if not is_plain(self, *options, model_kwargs):
            return super()._beam_search(input_ids, *options, **model_kwargs)
        n, max_length, ends = (
            generation_config.num_beams,
            generation_config.max_length,
            generation_config._eos_token_tensor,
        )
        # Were the best n all to end, so many would have n beside them that go on.
        candidates = max(2, 1 + (0 if ends is None else len(ends))) * n
        fill = generation_config._pad_token_tensor or ends[0] if ends is not None else -1  # as transformers fills
        play = SentencesInPlay(self, input_ids, stopping_criteria, generation_config, model_kwargs)
        prompt = length = input_ids.shape[1]
        running = input_ids.unflatten(0, (-1, n))  # (A,n,T)
        finished = Hypotheses(pad(running, (0, max_length - prompt), value=fill), prompt, generation_config)
        if play.is_direct and not logits_processor and self.config.decoder_vocab_size >= candidates:
            running = running[:, :1]  # since beams begin alike, and as many go different ways
        scores = torch.zeros(running.shape[:2], device=input_ids.device)  # (A,n) or (A,1)
        scores[:, 1:] = NEVER  # so that beams that begin alike go different ways
        output, lengths = finished.tokens.clone(), finished.lengths.clone()

        while len(play.numbers):
            rows = running.flatten(0, 1)
            m = scores.shape[1]  # 1 in the first step, then n
            found = []
            for some, logits in play.next_logits(rows):
                scores_of_some = scores.flatten()[some].unflatten(0, (-1, m))
                found.append(best_continuations(logits, scores_of_some, candidates, logits_processor, rows[some]))
            best, beams, tokens = map(torch.cat, zip(*found, strict=True))
            extended = torch.cat([gather_beams(running, beams), tokens[..., None]], dim=-1)  # (A,c,T+1)
            ends_here = play.criteria(extended.flatten(0, 1), None).unflatten(0, (-1, beams.shape[1]))  # (A,c)
            length += 1
            finished.add(pad(extended, (0, max_length - length), value=fill), best, ends_here, length)
            output[play.numbers], lengths[play.numbers] = finished.tokens, finished.lengths

            scores, chosen = (best + NEVER * ends_here).topk(n)
            running, beams = gather_beams(extended, chosen), beams.gather(1, chosen)
            is_over = finished.cannot_improve(scores, length) | ends_here.all(dim=1)
            sentences = (~is_over).nonzero()[:, 0]
            play.keep(sentences, beams[sentences])
            if is_over.any():
                running, scores = running[sentences], scores[sentences]
                finished.keep(sentences)
        returned = generation_config.num_return_sequences
        return output[:, :returned, : int(lengths[:, :returned].max())].flatten(0, 1)


class Hypotheses:
    """The n best translations of each sentence that have ended, with their scores: tokens (A,n,longest) and (A,n)."""

    def __init__(self, tokens: torch.Tensor, prompt: int, generation_config: GenerationConfig):
        self.tokens = tokens
        self.prompt = prompt  # its length
        self.config = generation_config
        self.scores = torch.full(tokens.shape[:2], NEVER, device=tokens.device)
        self.are_there = torch.zeros_like(self.scores, dtype=torch.bool)
        self.lengths = torch.full_like(self.scores, prompt, dtype=torch.long)

    def add(self, tokens: torch.Tensor, log_probs: torch.Tensor, ends_here: torch.Tensor, length: int):
        """Lets candidates (A,c) of this length compete, the best first: those of the first n that have ended."""
        n = self.tokens.shape[1]
        competes = ends_here.clone()
        competes[:, n:] = False
        scores = log_probs / (length - self.prompt) ** self.config.length_penalty + NEVER * ~competes
        self.scores, chosen = torch.cat([self.scores, scores], dim=1).topk(n)
        self.tokens = gather_beams(torch.cat([self.tokens, tokens], dim=1), chosen)
        self.are_there = torch.cat([self.are_there, competes], dim=1).gather(1, chosen)
        self.lengths = torch.cat([self.lengths, torch.full_like(scores, length, dtype=torch.long)], 1).gather(
            1, chosen
        )

    def cannot_improve(self, running_scores: torch.Tensor, length: int) -> torch.Tensor:
        """Of which sentences no running beam (A,n), the best first, can become better than the worst here: (A)."""
        early, penalty = self.config.early_stopping, self.config.length_penalty
        longest = self.config.max_length if early == "never" and penalty > 0 else length
        hope = running_scores[:, :1] / (longest - self.prompt) ** penalty
        worst = self.scores.amin(dim=1, keepdim=True).where(self.are_there, NEVER)
        is_over = (hope <= worst).all(dim=1)
        return is_over | self.are_there.all(dim=1) if early is True else is_over

    def keep(self, sentences: torch.Tensor):
        """Goes on with these sentences (A') of the A."""
        self.tokens, self.lengths = self.tokens[sentences], self.lengths[sentences]
        self.scores, self.are_there = self.scores[sentences], self.are_there[sentences]


def best_continuations(
    logits: torch.Tensor,
    scores: torch.Tensor,
    count: int,
    logits_processor: LogitsProcessorList,
    rows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `count` most likely next tokens over the n beams of each sentence, the best first.

    `logits` (A n,V) of the `rows` (A n,T), whose log-probabilities so far are `scores` (A,n). Returns (A,count) each:
    the log-probabilities with them, the beams that they go on from, and the tokens. They are looked for in as many
    blocks of types, those with the most likely ones, which are found faster.
    """
    n, num_types = scores.shape[1], logits.shape[-1]
    log_probs = logits_processor(rows, logits.log_softmax(dim=-1))
    if num_types % BLOCK:
        log_probs = pad(log_probs, (0, -num_types % BLOCK), value=-torch.inf)
    blocks = log_probs.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, n))  # (A,n,w,BLOCK)
    w = blocks.shape[2]
    highest = (blocks.amax(dim=-1) + scores[..., None]).flatten(1)  # (A,n w)
    chosen = highest.topk(min(count, n * w), sorted=False).indices
    found = blocks.flatten(1, 2).take_along_dim(chosen[..., None], dim=1) + scores.gather(1, chosen // w)[..., None]
    best, index = found.flatten(1).topk(min(count, n * num_types))
    block = chosen.gather(1, index // BLOCK)
    return best, block // w, (block % w * BLOCK + index % BLOCK).clamp(max=num_types - 1)


def only_itself(count: int, like: torch.Tensor) -> torch.Tensor:
    """What lets each of so many look at itself alone, where it is added to scores: (count,count)."""
    others = torch.full((count, count), torch.finfo(like.dtype).min, dtype=like.dtype, device=like.device)
    return others.fill_diagonal_(0)


def gather_beams(of_beams: torch.Tensor, beams: torch.Tensor) -> torch.Tensor:
    """(A,n,T), (A,m) -> (A,m,T)."""
    return of_beams.take_along_dim(beams[..., None], dim=1)
