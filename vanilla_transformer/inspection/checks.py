"""Checks of a model that someone has changed: does it still compute what a Transformer must?"""

import copy
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd as Dropout
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from ..decoding_vanilla_transformer import Unsupported, beam_search, greedy_search
from ..modeling_vanilla_transformer import CACHE

B, MOST, LEAST = 3, 8, 4  # batch size; longest and shortest sequence in tokens
# Of the largest logit. Equal computations differ by 1e-14 in float64, and by 1e-6 where a part casts to float32. With
# weights as random as here, a fault moves logits by 1e-3 or more.
TOLERANCE = 1e-5

# The checks; what usually causes each to fail, and the remedy.
CHECKS = {
    "repeat": "In evaluation mode nothing may be random: give `training=self.training` to `nn.functional.dropout`.",
    "causality": "The future leaks. The sdpa backend applies its causal mask only where the mask is None: with "
    "whatever you add to the scores, give it a causal mask. Average or normalize nothing over target positions, and "
    "pad a convolution over them on the left alone.",
    "padding": "Combine whatever you add to the scores with the `attention_mask`, which is None, boolean (True to "
    "attend) or additive (0 to attend); give cross-attention the mask of the source; count no padding as a position.",
    "batch": "Sentences depend on each other: use LayerNorm, not BatchNorm, and never average over the batch.",
    "cache": "A step is given the new tokens alone: count positions from the cache's `get_seq_length()` on, give "
    "masks and biases a column for each key, also for the cached ones, and keep the past in the cache, nowhere else.",
    "search": "The searches of decoding_vanilla_transformer.py call the layers of the decoder themselves, with beams "
    "in place of positions. Give a changed decoder, layer or attention a class with a name of its own: they refuse "
    "it, and the Translator then searches with transformers.",
    "attention": "The backends are given different masks: eager an additive one; sdpa a boolean one, or None where "
    "nothing is padded. Treat all three alike.",
    "loss": "To save memory, the loss is computed from the decoder's output and `lm_head.weight`, not from logits: "
    "change nothing after `lm_head`, or compute the loss from your logits in `forward`.",
    "gradients": "Use each weight, and cut no gradient with `detach`, `no_grad` or `.data`. If weights are frozen on "
    "purpose, give `allow_frozen=True`.",
    "save": "Only parameters and persistent buffers are saved, no plain tensors or lists: use `nn.Parameter`, "
    "`register_buffer`, `nn.ModuleList`. `from_pretrained` calls the class with the config alone: make the change in "
    "`__init__` of a class of your own, with its sizes in the config.",
    "compiled": "torch.compile runs the Python code once for each shape: branch on no value of a tensor, and keep no "
    "state in attributes.",
}


def check_model(
    model: PreTrainedModel,
    attention: Sequence[str] = ("eager", "sdpa"),
    compiled: bool | str = False,
    saved: bool = True,
    allow_frozen: bool = False,
    seed: int = 0,
):
    """Checks a [`VanillaTransformerForConditionalGeneration`] whose class, code or modules were changed.

    With random ids, sources (3,S) and targets (3,T) of at most 8 tokens, it compares logits (3,T,V):

    - repeat: the same call twice gives the same.
    - causality: a later target token changes no earlier logit.
    - padding: a sentence that is padded, source or target, left or right, has the logits that it has alone, and the
      tokens under the mask do not matter.
    - batch: a sentence has the same logits alone and among others.
    - cache: tokens read in steps, also after beams were reordered, have the logits of all at once.
    - search: our greedy and beam search, if they take the model, find what `generate` does.
    - attention: all backends give the same.
    - loss: the loss that train.py minimizes is the cross-entropy of the logits.
    - gradients: a finite one, not all zeros, reaches each weight.
    - save: the saved and loaded model gives the same.
    - compiled: so does `torch.compile`.

    Causality, padding and batch are also checked in training mode, without dropout, unless two equal calls differ
    there all the same.

    All of this happens in a copy on the CPU: but for `save`, in float64, so that rounding is not mistaken for a fault;
    with noise on each weight, since a bias that begins at 0 would hide what it does. The model itself stays as it is.

    Args:
        model: With a config of this package; learned positions must reach 4 tokens.
        attention: The attention backends; the last of them is compiled.
        compiled: True also checks `torch.compile`, which takes up to a minute on a CPU; a string names its backend,
            such as `aot_eager`.
        saved: Whether to save and load it. `from_pretrained` cannot know of modules that were replaced in an instance.
        allow_frozen: Whether weights may have `requires_grad=False`.
        seed: Of ids and noise.

    Raises:
        AssertionError: Checks fail; the message names all of them, each with the backend, the largest difference, and
            the usual cause with its remedy. If `repeat` fails, it names that alone, since others may fail because of
            it. An exception within a check counts as a failure of it.
        ValueError: The model does not have such a backend, or its positions end too early.
    """
    if model.config.longest_sequence < LEAST:
        raise ValueError(f"`max_position_embeddings` is {model.config.longest_sequence}; the checks need {LEAST}.")
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)
        checks = Checks(noisy_copy(model), allow_frozen)
        if saved:  # in the model's own precision
            checks.run("save", model.config._attn_implementation, checks.loaded)
        checks.model.double()
        for backend in attention:
            checks.model.set_attn_implementation(backend)
            checks.run_all(backend)
        if compiled and not checks.failures:
            checks.run("compiled", attention[-1], lambda: checks.compiled(compiled))
    if checks.failures:
        only = ["repeat"] if "repeat" in checks.failures else checks.failures
        lines = [f"- {name}: {checks.findings(name)}. {CHECKS[name]}" for name in only]
        first = f"{type(model).__name__} fails {len(checks.failures)} of {len(checks.done)} checks:"
        raise AssertionError("\n".join([first, *lines])) from checks.error


@torch.no_grad()
def noisy_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy on the CPU without dropout, in evaluation mode, with noise on all weights."""
    model = copy.deepcopy(model).cpu().eval()
    model.zero_grad()
    for parameter in filter(torch.is_floating_point, model.parameters()):
        scale = 0.5 * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1
        parameter += scale * torch.randn_like(parameter)
    for module in model.modules():
        if isinstance(module, Dropout):
            module.p = 0.0
    model.config.dropout = model.config.attention_dropout = model.config.activation_dropout = 0.0
    return model


class Checks:
    """The checks of one model, which they change; `failures` has what each check that fails has found."""

    def __init__(self, model: PreTrainedModel, allow_frozen: bool):
        self.model, self.config, self.allow_frozen = model, model.config, allow_frozen
        self.failures: dict[str, dict[str, dict[str, float]]] = {}  # by check, text and backend, how large it is
        self.done: set[str] = set()  # checks that ran
        self.error: Exception | None = None  # the first one within a check
        self.of_first_backend: list[Tensor] = []
        length = min(MOST, self.config.longest_sequence)
        self.lengths = [length, length // 2 + 1, 2]  # of sentences that are padded
        ends = self.config.eos_token_id
        self.end = ends[0] if isinstance(ends, list) else ends
        self.pad = self.config.pad_token_id
        self.source, self.other_source = self.draw(self.config.vocab_size, length)  # (B,S)
        self.target, self.other_target = self.draw(self.config.decoder_vocab_size, length)  # (B,T)
        if self.config.decoder_start_token_id is not None:
            self.target[:, 0] = self.config.decoder_start_token_id

    def draw(self, vocab_size: int, length: int) -> tuple[Tensor, Tensor]:
        """Random ids (B,length), and others of which each differs; no special ones, if there are enough."""
        names = ("pad_token_id", "bos_token_id", "decoder_start_token_id")
        special = {self.end, *(getattr(self.config, name) for name in names)}
        ordinary = [number for number in range(vocab_size) if number not in special]
        ids = torch.tensor(ordinary if len(ordinary) > 1 else [i for i in range(vocab_size) if i != self.pad])
        drawn = torch.randint(len(ids), (B, length))
        return ids[drawn], ids[(drawn + 1) % len(ids)]

    # ---------------------------------------------------------------------------------------------------- running

    def run_all(self, backend: str):
        """All checks of one attention backend."""
        with torch.no_grad():
            for name in ["repeat", "causality", "padding", "batch", "cache", "search", "attention", "loss"]:
                self.run(name, backend, getattr(self, name))
        kept, self.model = self.model, copy.deepcopy(self.model).train()  # which may change buffers
        with torch.no_grad():
            for check in (self.causality, self.padding, self.batch):
                self.run(check.__name__, f"{backend} in training", partial(self.unless_random, check))
        self.run("gradients", backend, self.gradients)
        self.model = kept

    def run(self, name: str, where: str, check: Callable[[], Iterator[tuple | str]]):
        """Notes what a check finds: texts, or triples (text, found, expected) that differ."""
        found: dict[str, float] = {}
        self.done.add(name)
        try:
            for one in check():
                if isinstance(one, str):
                    found[one] = 0.0
                elif not is_close(*one[1:]):
                    difference = (one[1] - one[2]).abs().max().nan_to_num(torch.inf).item()
                    found[one[0]] = max(difference, found.get(one[0], 0.0))
        except Exception as error:  # whatever the changed model raises
            self.error = self.error or error
            found[f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0].rstrip('.')}"] = 0.0
        for text, difference in found.items():
            self.failures.setdefault(name, {}).setdefault(text, {})[where] = difference

    def findings(self, name: str) -> str:
        """What a check has found, each with how large it is and with which backends."""
        texts = []
        for text, found in self.failures[name].items():
            size = f", by up to {max(found.values()):.2g}" if any(found.values()) else ""
            texts.append(f"{text}{size} (with {', '.join(found)})")
        return "; ".join(texts[:3]) + (f"; and {len(texts) - 3} more" if len(texts) > 3 else "")

    def logits(self, source=None, target=None, mask=None, target_mask=None, **inputs) -> Tensor:
        """Logits (B,T,V) of one call, without a cache."""
        source, target = self.source if source is None else source, self.target if target is None else target
        inputs |= {"attention_mask": mask, "decoder_input_ids": target, "decoder_attention_mask": target_mask}
        return self.model(input_ids=source, use_cache=False, **inputs).logits

    # ----------------------------------------------------------------------------------------------------- inputs

    def padded(self, ids: Tensor, side: str, filler: Tensor | None = None, end: int | None = None):
        """The first tokens of each row, as long as `lengths` says, and padding: ids and mask (B,L)."""
        length = ids.shape[1]
        mask = (torch.arange(length) < torch.tensor(self.lengths)[:, None]).long()
        if end is not None:
            ids = ids.clone()
            ids[torch.arange(B), torch.tensor(self.lengths) - 1] = end
        pad = torch.full_like(ids, self.pad or 0) if filler is None else filler
        ids = torch.where(mask.bool(), ids, pad)
        if side == "left":
            shifts = [length - n for n in self.lengths]
            ids, mask = (torch.stack([*map(torch.roll, rows, shifts)]) for rows in (ids, mask))
        return ids, mask

    def calls(self) -> dict[str, dict]:
        """Calls that differ in their masks: none, that of the source, and both, with the target padded on the left."""
        source, mask = self.padded(self.source, "right", end=self.end)
        target, target_mask = self.padded(self.target, "left")
        return {
            "no padding": {},
            "a padded source": {"source": source, "mask": mask},
            "source and target padded": {"source": source, "mask": mask, "target": target, "target_mask": target_mask},
        }

    # ----------------------------------------------------------------------------------------------------- checks

    def repeat(self):
        """The same call twice."""
        yield "two equal calls differ", self.logits(), self.logits()

    def unless_random(self, check: Callable[[], Iterator[tuple]]):
        """The check, if two equal calls give the same."""
        if all(is_close(*pair) for _, *pair in self.repeat()):
            yield from check()

    def causality(self):
        """Other tokens from position t on."""
        for what, inputs in self.calls().items():
            target = inputs.get("target", self.target)
            attended = inputs.get("target_mask", torch.ones_like(target)).bool()
            before = self.logits(**inputs)
            for t in range(1, target.shape[1]):
                changed = target.clone()
                changed[:, t:] = self.other_target[:, t:]
                after = self.logits(**inputs | {"target": changed})
                kept = attended[:, :t]
                yield f"later target tokens move earlier logits, with {what}", after[:, :t][kept], before[:, :t][kept]

    def padding(self):
        """Padded sentences, and each alone."""
        sources, _ = self.padded(self.source, "right", end=self.end)
        rows = list(zip(sources, self.target, self.lengths, strict=True))
        alone = torch.cat([self.logits(source[None, :n], target[None]) for source, target, n in rows])
        for side in ("right", "left"):
            ids, mask = self.padded(self.source, side, end=self.end)
            junk, _ = self.padded(self.source, side, self.other_source, self.end)
            padding = f"source padding on the {side}"
            yield f"{padding} moves logits", self.logits(ids, mask=mask), alone
            yield f"other tokens in place of {padding} move logits", self.logits(junk, mask=mask), alone
            if self.pad is not None:
                yield f"without a mask, {padding} moves logits", self.logits(ids), alone
        alone = [self.logits(source[None, :n], target[None, :n])[0] for source, target, n in rows]
        for side in ("right", "left"):
            target, mask = self.padded(self.target, side)
            junk, _ = self.padded(self.target, side, self.other_target)
            source, source_mask = self.padded(self.source, "right", end=self.end)
            padding = f"target padding on the {side}"
            for ids, what in [(target, f"{padding} moves"), (junk, f"other tokens in place of {padding} move")]:
                found = self.logits(source, ids, source_mask, mask)[mask.bool()]
                yield f"{what} logits", found, torch.cat(alone)

    def batch(self):
        """Sentences of equal length together, and each alone."""
        alone = [
            self.logits(source[None], target[None]) for source, target in zip(self.source, self.target, strict=True)
        ]
        yield "the other sentences of a batch move logits", self.logits(), torch.cat(alone)

    def steps(self, source, mask, target, target_mask=None, parents: Tensor | None = None) -> Tensor:
        """The logits of a target that is read in steps; after the second, beam i continues beam `parents[i]`."""
        states = {"encoder_outputs": self.model.get_encoder()(source, mask), "attention_mask": mask, "use_cache": True}
        logits, cache = [], {}
        for start, stop in [(0, 1), (1, 2), (2, 4), (4, target.shape[1])]:
            if start == stop:
                break
            if target_mask is not None:
                states["decoder_attention_mask"] = target_mask[:, :stop]
            output = self.model(decoder_input_ids=target[:, start:stop], **states, **cache)
            cache = {CACHE: output[CACHE]}
            logits.append(output.logits)
            if stop == 2 and parents is not None:
                output[CACHE].reorder_cache(parents)
        return torch.cat(logits, dim=1)

    def cache(self):
        """Targets read in steps of one token and several, and at once."""
        source, mask = self.padded(self.source, "right", end=self.end)
        at_once = self.logits(source, mask=mask)
        yield "steps with the cache move logits", self.steps(source, mask, self.target), at_once
        target, target_mask = self.padded(self.target, "left")
        found, attended = self.steps(source, mask, target, target_mask), target_mask.bool()
        at_once = self.logits(source, target, mask, target_mask)
        yield "steps with the cache move logits of padded targets", found[attended], at_once[attended]
        parents = torch.tensor([1, 1, 0])
        source, mask = source[1:2].expand(B, -1), mask[1:2].expand(B, -1)  # beams of one sentence
        found = self.steps(source, mask, self.target, parents=parents)[:, 2:]
        target = torch.cat([self.target[parents, :2], self.target[:, 2:]], dim=1)
        yield "after beams were reordered, the cache moves logits", found, self.logits(source, target, mask)[:, 2:]

    def search(self):
        """Our searches and those of `generate`."""
        source, mask = self.padded(self.source, "right", end=self.end)
        steps = self.target.shape[1] - 1
        # A saved number of beams, which transformers takes where none is given, would turn greedy search into another.
        options = {"max_new_tokens": steps, "return_dict_in_generate": True, "decoder_start_token_id": 0}
        options |= {"num_beams": 1, "do_sample": False}
        ids = {name: getattr(self.config, name) for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id")}
        options |= {name: value for name, value in ids.items() if value is not None}
        options |= {"min_new_tokens": steps} if self.end is not None else {}
        for search, more in [(greedy_search, {}), (beam_search, {"num_beams": 3, "early_stopping": True})]:
            config = GenerationConfig(**options | more)
            try:
                ours = self.model.generate(source, config, attention_mask=mask, custom_generate=search)
            except Unsupported:
                continue
            config.output_scores = True
            theirs = self.model.generate(source, config, attention_mask=mask)
            if ours.sequences.tolist() != theirs.sequences.tolist():
                yield f"{search.__name__} finds other tokens"
            elif search is beam_search:
                yield "beam_search finds other scores", ours.sequences_scores, theirs.sequences_scores

    def attention(self):
        """The logits of all calls, and those of the first backend."""
        found = []
        for inputs in self.calls().values():
            attended = inputs.get("target_mask", torch.ones_like(self.target)).bool()
            found.append(self.logits(**inputs)[attended])
        self.of_first_backend = self.of_first_backend or found
        for what, ours, first in zip(self.calls(), found, self.of_first_backend, strict=True):
            yield f"logits differ from those of the first backend, with {what}", ours, first

    def compiled(self, backend: bool | str):
        """`torch.compile`, which is given the calls of `attention`."""
        plain, options = self.model, {} if backend is True else {"backend": backend}
        torch.compiler.reset()
        with torch.no_grad():
            expected = {what: self.logits(**inputs) for what, inputs in self.calls().items()}
            self.model = torch.compile(plain, **options)
            try:
                for what, inputs in self.calls().items():
                    attended = inputs.get("target_mask", torch.ones_like(self.target)).bool()
                    found = self.logits(**inputs)
                    yield f"torch.compile moves logits, with {what}", found[attended], expected[what][attended]
            finally:
                self.model = plain
                torch.compiler.reset()

    def training_inputs(self) -> dict[str, Tensor]:
        """A padded batch with labels: the target, shifted by one."""
        source, mask = self.padded(self.source, "right", end=self.end)
        _, target_mask = self.padded(self.target, "right")
        labels = torch.cat([self.target[:, 1:], self.other_target[:, :1]], dim=1)
        labels = labels.masked_fill(target_mask == 0, -100)
        return {"input_ids": source, "attention_mask": mask, "decoder_input_ids": self.target, "labels": labels}

    def loss(self):
        """With and without logits."""
        inputs = self.training_inputs()
        found = self.model(**inputs, output_logits=False).loss
        logits = self.logits(inputs["input_ids"], mask=inputs["attention_mask"])
        expected = nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())
        yield "the loss differs from the cross-entropy of the logits", found, expected

    def gradients(self):
        """As in a step of train.py."""
        self.model(**self.training_inputs(), output_logits=False).loss.backward()
        none, not_finite, frozen = [], [], []
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                frozen.append(name)
            elif parameter.grad is None or not parameter.grad.any():
                none.append(name)
            elif not parameter.grad.isfinite().all():
                not_finite.append(name)
        wrong = {"no gradient reaches": none, "the gradient is not finite of": not_finite}
        wrong |= {} if self.allow_frozen else {"`requires_grad` is False of": frozen}
        for what, names in wrong.items():
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                yield f"{what} {', '.join(names[:3])}{more}"

    def loaded(self):
        """`save_pretrained` and `from_pretrained`."""
        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            options = {"dtype": self.model.dtype, "attn_implementation": self.config._attn_implementation}
            loaded, info = type(self.model).from_pretrained(folder, output_loading_info=True, **options)
            expected, saved = self.logits(), self.model
            for kind in ("missing", "unexpected", "mismatched"):
                if keys := sorted(map(str, info[f"{kind}_keys"])):
                    yield f"the saved weights do not fit the class, {len(keys)} {kind}, such as {keys[0]}"
            self.model = loaded.eval()
            try:
                yield "saving and loading moves logits", self.logits(), expected
            finally:
                self.model = saved


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars of transformers, and no warnings, such as that it cannot save the code of a notebook."""
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are equal up to [`TOLERANCE`]; never if one is not finite."""
    largest = expected.abs().max().clamp(min=1.0)
    return bool(largest.isfinite() & ((found - expected).abs().max() <= TOLERANCE * largest))
