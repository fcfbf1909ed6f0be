# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""Greedy and beam search (section 6.1) and sampling that spend no time on finished sentences.

    model.generate(input_ids, custom_generate=greedy_search)
    model.generate(input_ids, custom_generate=greedy_search, do_sample=True)
    model.generate(input_ids, custom_generate=beam_search, num_beams=5)
    model.generate(input_ids, custom_generate=greedy_search, others=[(other, other.get_encoder()(input_ids))])

The last is an ensemble, which averages the probabilities that its models give to the next token. The others must have
the same vocabulary.

Letters: B sentences, A of them unfinished, n beams, c candidates of a sentence, S source length, T target length, L
cached keys of a sentence, V vocabulary size, d model width, h heads, k width of a head. The outputs of one model equal
those of transformers' own loops, which run without `custom_generate`. This file travels with every saved model.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList, generation
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.generation import GenerateBeamEncoderDecoderOutput, GenerationMode
from transformers.masking_utils import create_bidirectional_mask
from transformers.utils import ModelOutput

NEG_INF = -1e9  # the score of an impossible choice, which is transformers' value too
FAST_ATTENTION = ("eager", "sdpa")  # attention backends that take any additive mask and any number of sentences
# The classes of which a decoding state knows what they compute. It gives them beams in place of positions, so whatever
# depends on the place of a query or a key, such as a relative position bias, would be wrong.
KNOWN = {f"VanillaTransformer{name}" for name in ("ForConditionalGeneration", "Decoder", "DecoderLayer", "Attention")}

# Processors and criteria that treat each row on its own, so that finished sentences can leave the batch.
ROWWISE = (
    generation.ForcedBOSTokenLogitsProcessor,
    generation.ForcedEOSTokenLogitsProcessor,
    generation.LogitNormalization,
    generation.MinLengthLogitsProcessor,
    generation.MinNewTokensLengthLogitsProcessor,
    generation.NoBadWordsLogitsProcessor,
    generation.NoRepeatNGramLogitsProcessor,
    generation.RepetitionPenaltyLogitsProcessor,
    generation.SuppressTokensLogitsProcessor,
    generation.TemperatureLogitsWarper,
    generation.TopKLogitsWarper,
    generation.TopPLogitsWarper,
    generation.EpsilonLogitsWarper,
    generation.EosTokenCriteria,
    generation.MaxLengthCriteria,
    generation.MaxTimeCriteria,
)


@torch.no_grad()
def greedy_search(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    others: Sequence[tuple[PreTrainedModel, ModelOutput]] = (),
    **model_kwargs,
) -> Tensor | GenerateBeamEncoderDecoderOutput:
    """Takes the most likely token of each sentence at each step, (B,T) -> (B,T'); for `generate(custom_generate=...)`.

    With `do_sample=True`, it draws the token instead. `model` is a [`VanillaTransformerForConditionalGeneration`],
    not wrapped or sharded; `others` are the other models of an ensemble, each paired with the output of its encoder.
    The processors get logits if there is one model, and log-probabilities if there is an ensemble. With
    `return_dict_in_generate`, it returns `sequences` and `sequences_scores`, computed as in [`beam_search`].

    Raises [`Unsupported`] for options that need transformers' own loop: scores of each step, processors or criteria
    that look across rows, ...
    """
    modes = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
    check_supported(modes, logits_processor, stopping_criteria, generation_config)
    num_sentences, length = input_ids.shape
    states = make_states(model, others, num_sentences, 1, **model_kwargs)
    pad = generation_config.pad_token_id
    if pad is None:
        pad = next(iter(end_tokens(generation_config)), 0)
    output = input_ids
    totals, lengths = torch.zeros(2, num_sentences, device=output.device)
    logits = [state.prefill(input_ids) for state in states]
    while True:
        scores = logits_processor(input_ids, (mean_log_probs(logits) if others else logits[0])[:, 0])
        samples = generation_config.do_sample
        tokens = scores.softmax(dim=-1).multinomial(1).squeeze(1) if samples else scores.argmax(dim=-1)
        indices = states[0].indices
        if length == output.shape[1]:  # it grows by doubling, since `max_length` may be far away
            output = torch.nn.functional.pad(output, (0, length), value=pad)
        output[indices, length] = tokens
        if generation_config.return_dict_in_generate:
            totals[indices] += scores.log_softmax(dim=1).gather(1, tokens[:, None])[:, 0]
            lengths[indices] += 1
        length += 1
        input_ids = torch.cat([input_ids, tokens[:, None]], dim=1)
        unfinished = (~stopping_criteria(input_ids, None)).nonzero()[:, 0]
        if not len(unfinished):
            break
        if len(unfinished) < len(tokens):
            input_ids = input_ids[unfinished]
            for state in states:
                state.select(unfinished)
        logits = [state.step(input_ids[:, -1:]) for state in states]
    output = output[:, :length]
    if not generation_config.return_dict_in_generate:
        return output
    scores = totals / lengths**generation_config.length_penalty
    return GenerateBeamEncoderDecoderOutput(sequences=output, sequences_scores=scores)


@torch.no_grad()
def beam_search(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    others: Sequence[tuple[PreTrainedModel, ModelOutput]] = (),
    **model_kwargs,
) -> Tensor | GenerateBeamEncoderDecoderOutput:
    """Beam search with n beams, (B n,T) -> (B `num_return_sequences`,T'); for `generate(custom_generate=...)`.

    A hypothesis scores the sum of its log-probabilities divided by its length to the power `length_penalty`. A
    sentence is finished when no running beam can beat its n finished hypotheses, by transformers' estimate
    (`early_stopping`) applied to each sentence alone. `others`, `return_dict_in_generate` and errors are as in
    [`greedy_search`].
    """
    check_supported([GenerationMode.BEAM_SEARCH], logits_processor, stopping_criteria, generation_config)
    n, max_length = generation_config.num_beams, generation_config.max_length
    # Enough that n unfinished candidates remain even if each beam also has a candidate for every end token.
    candidates = max(2, 1 + len(set(end_tokens(generation_config)))) * n
    prompt = length = input_ids.shape[1]
    running = input_ids.unflatten(0, (-1, n))  # (A,n,T)
    states = make_states(model, others, len(running), n, **model_kwargs)
    finished = Hypotheses(running, generation_config)
    # All beams start with the same prompt, so the first step may only extend the first of them.
    scores = torch.zeros(running.shape[:2], device=input_ids.device)  # (A,n)
    scores[:, 1:] = NEG_INF
    logits = [state.prefill(running[:, 0]) for state in states]
    while True:
        log_probs = mean_log_probs(logits).expand(-1, n, -1).flatten(0, 1)  # (A,1 or n,V) -> (A n,V)
        log_probs = logits_processor(running.flatten(0, 1), log_probs)
        totals = (log_probs.unflatten(0, scores.shape) + scores[..., None]).flatten(1)  # (A,n V)
        best, index = totals.topk(min(candidates, totals.shape[1]))
        parents, tokens = index // log_probs.shape[-1], index % log_probs.shape[-1]  # (A,c)
        extended = torch.cat([gather_beams(running, parents), tokens[..., None]], dim=-1)  # (A,c,T+1)
        ends = stopping_criteria(extended.flatten(0, 1), None).unflatten(0, best.shape)  # (A,c)
        length += 1
        indices = states[0].indices
        finished.add(indices, extended, best, ends)
        scores, chosen = (best + NEG_INF * ends).topk(n)
        running, parents = gather_beams(extended, chosen), parents.gather(1, chosen)
        can_improve = finished.can_improve(indices, scores, length - prompt, max_length - prompt)
        unfinished = (can_improve & ~ends.all(dim=1)).nonzero()[:, 0]
        if not len(unfinished):
            break
        for state in states:
            state.select(unfinished, parents[unfinished])
        running, scores = running[unfinished], scores[unfinished]
        logits = [state.step(running[..., -1]) for state in states]
    returned = generation_config.num_return_sequences
    output = finished.tokens[:, :returned, : int(finished.lengths[:, :returned].max())].flatten(0, 1)
    if not generation_config.return_dict_in_generate:
        return output
    scores = finished.scores[:, :returned].flatten()
    return GenerateBeamEncoderDecoderOutput(sequences=output, sequences_scores=scores)


class Unsupported(ValueError):
    """Only transformers' own loops support these options."""

    def __init__(self, options: list[str]):
        self.options = ", ".join(options)
        remedy = "call `model.generate` without `custom_generate`"
        super().__init__(f"This search does not support {self.options}; {remedy}.")


def check_supported(
    modes: Sequence[GenerationMode],
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
):
    """Raises [`Unsupported`], which names the options that only transformers' own loops support."""
    found = generation_config.get_generation_mode()
    unknown = [type(one).__name__ for one in [*logits_processor, *stopping_criteria] if type(one) not in ROWWISE]
    if found not in modes:
        unknown.append(f"generation mode {found.value!r}")
    of_each_step = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
    unknown += [f"`{name}=True`" for name in of_each_step if getattr(generation_config, name)]
    if generation_config.cache_implementation not in (None, "dynamic"):
        unknown.append(f"`cache_implementation={generation_config.cache_implementation!r}`")
    if unknown:
        raise Unsupported(unknown)


def end_tokens(generation_config: GenerationConfig) -> list[int]:
    ends = generation_config.eos_token_id
    if ends is None:
        return []
    return ends if isinstance(ends, list) else [ends]


def make_states(
    model: PreTrainedModel,
    others: Sequence[tuple[PreTrainedModel, ModelOutput]],
    num_sentences: int,
    num_beams: int,
    encoder_outputs: ModelOutput,
    attention_mask: Tensor | None = None,
    cache: Cache | None = None,
    past_key_values: Cache | None = None,
    **kwargs,
) -> list["DecodingState"]:
    """The decoding state of each model; `encoder_outputs` and all arguments after it come from `generate`.

    Before transformers 5.24, `cache` was called `past_key_values`.
    """
    cache = past_key_values if cache is None else cache
    if attention_mask is None:  # the encoder has inferred one from the padding
        attention_mask = getattr(encoder_outputs, "attention_mask", None)
    harmless = ("use_cache", "inputs_embeds")  # embeddings of the source, which the encoder has read
    unknown = [f"`{name}`" for name, value in kwargs.items() if value is not None and name not in harmless]
    if cache is not None and cache.get_seq_length() > 0:
        unknown.append("a `cache` that is not empty")
    members = [(model, encoder_outputs), *others]
    for member, _ in members:
        attention = member.config._attn_implementation
        if attention not in FAST_ATTENTION:
            unknown.append(f"`attn_implementation={attention!r}`")
        if "prepare_inputs_for_generation" in vars(member):  # which PEFT sets to put a trained prompt first
            unknown.append("a changed `prepare_inputs_for_generation`")
        decoder = member.get_decoder()
        parts = [member, decoder, *(part for x in decoder.layers for part in (x, x.self_attn, x.encoder_attn))]
        changed = {kind.__name__ for kind in map(type, parts) if not is_known(kind)}
        unknown += [f"a changed model (`{name}`)" for name in sorted(changed)]
    if unknown:
        raise Unsupported(unknown)

    def for_each_sentence(rows: Tensor) -> Tensor:
        """One row for each sentence: `generate` repeats those of the model for each beam, not those of `others`."""
        return rows[torch.arange(num_sentences, device=rows.device) * len(rows) // num_sentences]

    mask = None if attention_mask is None else for_each_sentence(attention_mask)
    return [DecodingState(one, num_beams, for_each_sentence(outputs[0]), mask) for one, outputs in members]


def mean_log_probs(logits: list[Tensor]) -> Tensor:
    """The logarithm (A,n,V) of the mean of the models' probabilities, from the logits (A,n,V) of each model."""
    log_probs = [one.log_softmax(dim=-1) for one in logits]
    if len(log_probs) == 1:
        return log_probs.pop()
    log_probs = torch.stack(log_probs)
    highest = log_probs.amax(dim=0).clamp(min=NEG_INF)
    return highest + (log_probs - highest).exp().mean(dim=0).log()  # of equal models, exactly that of one


def is_known(kind: type) -> bool:
    """Whether a class is one of [`KNOWN`], of the package or of the files beside a saved model."""
    return kind.__name__ in KNOWN and kind.__module__.endswith("modeling_vanilla_transformer")


class DecodingState:
    """Cache and source of the unfinished sentences, from which a model computes the logits of their next tokens.

    A of the B sentences are unfinished, each with n beams. The source of a sentence is stored once, and one row of the
    self-attention cache (A,h,L,k) holds the L keys and values that all its beams have computed. Reordering beams
    therefore copies no keys: it gathers `ancestors` (A,n,L), a mask that is added to the scores of each beam, and is 0
    for the keys of its own past. The decoder layers are called directly, which saves the overhead of the whole model;
    they take the n beams for n target positions.
    """

    def __init__(self, model: PreTrainedModel, num_beams: int, source: Tensor, padding_mask: Tensor | None):
        self.lm_head = model.lm_head
        self.decoder = model.get_decoder()
        self.num_beams = num_beams
        self.source = source  # (A,S,d)
        self.padding_mask = padding_mask  # (A,S)
        self.source_mask = create_bidirectional_mask(
            model.config, self.source[:, :1], self.padding_mask, encoder_hidden_states=self.source
        )
        self.indices = torch.arange(len(self.source), device=self.source.device)  # of the A sentences in the batch
        self.cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
        self.ancestors = None
        self.pruned_length = 0  # L after the last pruning

    def prefill(self, input_ids: Tensor) -> Tensor:
        """Caches the prompt, which all beams share, and returns the logits after it: (A,T) -> (A,1,V)."""
        outputs = self.decoder(
            input_ids,
            encoder_hidden_states=self.source,
            encoder_attention_mask=self.padding_mask,
            cache=self.cache,
            use_cache=True,
        )
        self.length = input_ids.shape[1]  # tokens of a beam in the cache
        hidden = outputs.last_hidden_state[:, -1:]
        if self.num_beams > 1:
            self.ancestors = hidden.new_zeros(len(hidden), self.num_beams, self.length)
        return self.lm_head(hidden).float()

    def step(self, tokens: Tensor) -> Tensor:
        """The last token of each beam (A,n) -> the logits of its next token (A,n,V)."""
        positions = torch.full_like(tokens[:1], self.length)
        self.length += 1
        x, rotary = self.decoder.add_positions(self.decoder.embed_tokens(tokens), positions, self.length)
        mask = None
        if self.ancestors is not None:
            itself = x.new_full((self.num_beams, self.num_beams), torch.finfo(x.dtype).min).fill_diagonal_(0)
            self.ancestors = torch.cat([self.ancestors, itself.expand(len(x), -1, -1)], dim=2)
            mask = self.ancestors[:, None]  # (A,1,n,L)
        for layer in self.decoder.layers:
            x = layer(x, mask, self.source, self.source_mask, rotary, cache=self.cache)
        return self.lm_head(self.decoder.layer_norm(x)).float()

    def select(self, rows: Tensor, parents: Tensor | None = None):
        """Keeps the sentences in `rows` (A'), in which beam j then continues beam `parents[:, j]`, (A',n)."""
        are_fewer = len(rows) < len(self.indices)
        if self.ancestors is not None:
            self.ancestors = gather_beams(self.ancestors[rows], parents)
            if are_fewer or self.ancestors.shape[2] > 2 * self.pruned_length + 8 * self.num_beams:
                self.prune_cache(rows)
        elif are_fewer:
            self.cache.self_attention_cache.reorder_cache(rows)
        if are_fewer:
            self.cache.cross_attention_cache.reorder_cache(rows)
            self.source, self.indices = self.source[rows], self.indices[rows]
            self.source_mask = None if self.source_mask is None else self.source_mask[rows]

    def prune_cache(self, rows: Tensor):
        """Keeps the sentences in `rows` (A') in the cache, without keys and values that are in no running beam's past.

        Beams soon share most of their past. The order of keys does not matter, since they already contain positions.
        """
        is_ancestor = (self.ancestors == 0).any(dim=1)  # (A',L)
        self.pruned_length = int(is_ancestor.sum(dim=1).max())
        kept = is_ancestor.byte().argsort(dim=1, descending=True)[:, : self.pruned_length]
        self.ancestors = self.ancestors.take_along_dim(kept[:, None], dim=2)
        for layer in self.cache.self_attention_cache.layers:
            heads, length = layer.keys.shape[1:3]
            first = (rows[:, None] * heads + torch.arange(heads, device=kept.device)) * length  # (A',h)
            positions = (first[..., None] + kept[:, None]).flatten()
            shape = (len(rows), heads, self.pruned_length)
            layer.keys = layer.keys.flatten(0, 2).index_select(0, positions).unflatten(0, shape)
            layer.values = layer.values.flatten(0, 2).index_select(0, positions).unflatten(0, shape)


class Hypotheses:
    """The n best finished hypotheses of B sentences: tokens (B,n,T), scores, lengths (B,n).

    T grows by doubling, since `max_length` may be far away.
    """

    def __init__(self, prompts: Tensor, generation_config: GenerationConfig):
        self.config = generation_config
        self.prompt = prompts.shape[2]
        ends = end_tokens(generation_config)
        # As in transformers, a padding id of 0 counts as unset, and the end token is used.
        self.fill = (generation_config.pad_token_id or ends[0]) if ends else -1
        self.tokens = prompts
        self.scores = torch.full(prompts.shape[:2], NEG_INF, device=prompts.device)
        self.is_filled = torch.zeros_like(self.scores, dtype=torch.bool)
        self.lengths = torch.full_like(self.scores, self.prompt, dtype=torch.long)

    def pad(self, tokens: Tensor, length: int) -> Tensor:
        return torch.nn.functional.pad(tokens, (0, length - tokens.shape[2]), value=self.fill)

    def add(self, indices: Tensor, tokens: Tensor, log_probs: Tensor, ends: Tensor):
        """Adds those of the first n candidates (A,c,T), best first, that end here, and keeps the n best of all.

        `indices` (A) are the numbers of the unfinished sentences among the B.
        """
        n, length = self.tokens.shape[1], tokens.shape[2]
        if length > self.tokens.shape[2]:
            self.tokens = self.pad(self.tokens, 2 * length)
        competes = ends.clone()
        competes[:, n:] = False
        scores = log_probs / (length - self.prompt) ** self.config.length_penalty + NEG_INF * ~competes
        lengths = torch.full_like(scores, length, dtype=torch.long)
        self.scores[indices], chosen = torch.cat([self.scores[indices], scores], dim=1).topk(n)
        tokens = torch.cat([self.tokens[indices], self.pad(tokens, self.tokens.shape[2])], dim=1)
        self.tokens[indices] = gather_beams(tokens, chosen)
        self.is_filled[indices] = torch.cat([self.is_filled[indices], competes], dim=1).gather(1, chosen)
        self.lengths[indices] = torch.cat([self.lengths[indices], lengths], dim=1).gather(1, chosen)

    def can_improve(self, indices: Tensor, running_scores: Tensor, length: int, max_length: int) -> Tensor:
        """For each sentence (A), whether a running beam can still beat the worst finished hypothesis.

        `running_scores` (A,n) are sorted, best first; each beam has `length` new tokens.
        """
        early, penalty = self.config.early_stopping, self.config.length_penalty
        is_filled = self.is_filled[indices]
        best_length = max_length if early == "never" and penalty > 0 else length
        best_possible = running_scores[:, :1] / best_length**penalty
        worst = self.scores[indices].amin(dim=1, keepdim=True).where(is_filled, NEG_INF)
        can_improve = (best_possible > worst).any(dim=1)
        return can_improve & ~is_filled.all(dim=1) if early is True else can_improve


def gather_beams(of_beams: Tensor, beams: Tensor) -> Tensor:
    """Selects the beams with indices `beams` (A,m) of each sentence: (A,n,T) -> (A,m,T)."""
    return of_beams.take_along_dim(beams[..., None], dim=1)
