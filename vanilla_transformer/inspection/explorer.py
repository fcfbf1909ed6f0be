"""A self-contained web page to play with a trained model: decoding, beam search, shapes, and what breaks it.

The page computes nothing with the model. All that it shows is recorded here: next-token probabilities and attention
along the greedy translation and along the branches that a reader can force, every candidate of beam searches with 1 to
8 beams, and translations of models with a part switched off.
"""

import base64
import gzip
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutput

from .. import VanillaTransformerForConditionalGeneration
from ..decoding_vanilla_transformer import greedy_search
from ..errors import UserError
from ..files import write_text
from ..modeling_vanilla_transformer import VanillaTransformerAttention, eager_attention_forward
from .alignment import align_words
from .attention import AttentionMaps, attention_maps, eager_attention, encode, readable_tokens
from .shapes import trace_shapes

MOST_BEAMS = 8
SHOWN = 5  # candidates of a next token
PADS = 10
ROOM = 10  # tokens by which a translation may be longer than its source
BRANCH_BYTES = 3_000_000  # for all branches of a page: those of early steps come first


def explore(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Iterable[tuple[str, str | None, str | None]],
) -> dict:
    """All that the page shows: `sentences`, `variants` with a part off, the `shapes` of a forward pass, the `sizes` of
    the model, its `start` and its `end` token.

    Args:
        pairs: Sources with a reference (None: the model's own translation) and its word alignment, such as "0-0 1-2"
            (None: unknown).

    Raises UserError if a text, or what the model writes, is empty, or longer than `max_position_embeddings` or 4,096
    tokens.
    """
    pairs, sentences, references = list(pairs), [], []
    for number, (source, reference, _) in enumerate(pairs, start=1):
        try:  # known before minutes of recording
            encode(model, tokenizer, source)
            if reference is not None:
                encode(model, tokenizer, reference, "reference", is_target=True)
        except UserError as error:
            raise UserError(f"Pair {number} cannot be recorded: {error}") from error
    with eager_attention(model), torch.no_grad():
        for source, reference, alignment in tqdm(pairs, "Recording", disable=None, leave=False):
            ids = encode(model, tokenizer, source)
            recorder = Recorder(model, tokenizer, ids, source)
            sentence = {"text": source, "reference": reference, "alignment": alignment or "", "limit": recorder.limit}
            sentence |= {"source": [t.text for t in recorder.source], "words": [t.word for t in recorder.source]}
            sentence |= recorder.decoding(BRANCH_BYTES // len(pairs))
            sentence["beams"] = [recorder.beams(n) for n in range(1, MOST_BEAMS + 1)]
            sentences.append(sentence)
            references.append((source, reference or sentence["main"]["translation"]))
            if not references[-1][1].strip():
                raise UserError(f"The model's translation of {source!r} is empty; give a pair with a reference.")
        maps = [attention_maps(model, tokenizer, *pair) for pair in references]
        variants = list(broken(model, tokenizer, references, maps))
    config = model.config
    sizes = {"d": config.d_model, "h": config.encoder_attention_heads, "f": config.encoder_ffn_dim}
    sizes |= {"V": config.decoder_vocab_size, "heads": config.decoder_attention_heads}
    sizes |= {"encoder_layers": config.encoder_layers, "decoder_layers": config.decoder_layers}
    sizes |= {"positions": 0 if config.longest_sequence == sys.maxsize else config.longest_sequence}
    sizes |= {"bias": config.decoder_vocab_size if config.lm_head_bias else 0}
    recorded = {"sentences": sentences, "variants": variants, "shapes": shapes(model), "sizes": sizes}
    start = tokenizer.convert_ids_to_tokens(config.decoder_start_token_id)
    return recorded | {"start": start, "end": tokenizer.eos_token}


class Recorder:
    """Runs the decoder on prefixes of the translation of one source and keeps what the page shows of it."""

    def __init__(self, model, tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor, text: str):
        self.model, self.tokenizer = model, tokenizer
        self.start, self.end = model.config.decoder_start_token_id, tokenizer.eos_token_id
        self.limit = min(model.config.max_position_embeddings - 1, ids.shape[1] + ROOM)  # tokens written at most
        self.source = readable_tokens(tokenizer, ids[0].tolist(), text)
        self.mask = torch.ones_like(ids)
        self.encoded = model.get_encoder()(ids, attention_mask=self.mask, output_attentions=True)

    def forward(self, prefixes: list[list[int]]):
        """The decoder's outputs for prefixes of equal length, each with the start token in front."""
        rows = torch.tensor([[self.start, *prefix] for prefix in prefixes], device=self.mask.device)
        states = self.encoded.last_hidden_state.expand(len(rows), -1, -1)
        return self.model(
            encoder_outputs=BaseModelOutput(states),
            attention_mask=self.mask.expand(len(rows), -1),
            decoder_input_ids=rows,
            use_cache=False,
            output_attentions=True,
        )

    def complete(self, prefix: list[int]) -> list[int]:
        """The greedy translation that begins with `prefix`."""
        while len(prefix) < self.limit and (not prefix or prefix[-1] != self.end):
            prefix = [*prefix, int(self.forward([prefix]).logits[0, -1].argmax())]
        return prefix

    def path(self, tokens: list[int]) -> tuple[dict, torch.Tensor, torch.Tensor]:
        """Tokens, their candidates with probabilities, and the attention (layers,h,T,S) and (layers,h,T,T)."""
        outputs = self.forward([tokens[:-1]])
        probabilities, best = (found.tolist() for found in outputs.logits[0].softmax(dim=-1).topk(SHOWN))  # (T,5)
        spelled = [[self.spell(number) for number in row] for row in best]
        readable = [token.text for token in readable_tokens(self.tokenizer, tokens)]
        rounded = [[round(p, 4) for p in row] for row in probabilities]
        chosen = [row.index(token) if token in row else -1 for row, token in zip(best, tokens, strict=True)]
        step = {"tokens": readable, "candidates": spelled, "p": rounded, "chosen": chosen, "best": best}
        return step, torch.cat(outputs.cross_attentions), torch.cat(outputs.decoder_attentions)

    def decoding(self, most_bytes: int) -> dict:
        """The greedy path with all its attention, and a branch for each other candidate of each of its steps.

        A branch holds what follows from its step on, and only the mean attention of the last layer to the source.
        Steps after the one at which the branches exceed `most_bytes` have none.
        """
        tokens = self.complete([])
        main, cross, decoder = self.path(tokens)
        branches = {}
        for step, candidates in enumerate(main.pop("best")):
            if len(json.dumps(branches)) > most_bytes:
                break
            for rank, candidate in enumerate(candidates):
                if candidate != tokens[step]:
                    branch, attention, _ = self.path(self.complete([*tokens[:step], candidate]))
                    branch = {key: branch[key][step:] for key in ("tokens", "candidates", "p", "chosen")}
                    branches[f"{step}.{rank}"] = branch | {"cross": packed(attention[-1].mean(dim=0)[step:])}
        translation = self.tokenizer.decode(tokens, skip_special_tokens=True)
        words = [token.word for token in readable_tokens(self.tokenizer, tokens, translation)]
        main |= {"translation": translation, "words": words, "cross": packed(cross), "decoder": packed(decoder)}
        return {"main": main, "branches": branches, "encoder": packed(torch.cat(self.encoded.attentions))}

    def beams(self, n: int) -> list[list[list]]:
        """Each step of a search with n beams: its best 2n candidates as [parent beam, token, score, whether it ends].

        The score is the log-probability of the whole hypothesis. The search goes on to the limit, and neither
        length penalty nor early stopping decides which beams continue: the page applies both to the record.
        """
        running, scores, steps = [[]], torch.zeros(1), []
        for length in range(1, self.limit + 1):
            log_probs = self.forward(running).logits[:, -1].float().log_softmax(dim=-1).cpu() + scores[:, None]
            best, index = log_probs.flatten().topk(2 * n)
            step = []
            for total, place in zip(best.tolist(), index.tolist(), strict=True):
                parent, token = divmod(place, log_probs.shape[-1])
                ends = token == self.end or length == self.limit
                step.append([parent, token, total, ends])
            steps.append([[parent, self.spell(token), round(total, 5), ends] for parent, token, total, ends in step])
            going_on = [candidate for candidate in step if not candidate[3]][:n]
            if not going_on:
                break
            running = [[*running[parent], token] for parent, token, _, _ in going_on]
            scores = torch.tensor([total for _, _, total, _ in going_on])
        return steps

    def spell(self, token: int) -> str:
        """A token alone, with its space as `▁`."""
        if token in self.tokenizer.all_special_ids:
            return self.tokenizer.convert_ids_to_tokens(token)
        once, twice = (self.tokenizer.decode([token] * count) for count in (1, 2))
        return twice[len(once) :].replace(" ", "▁")  # the first token of a text loses its space


def packed(weights: torch.Tensor) -> str:
    """Weights from 0 to 1 as a byte each, in base64."""
    return base64.b64encode((255 * weights).round().byte().cpu().numpy().tobytes()).decode()


# ------------------------------------------------------------------------------------------------------ what breaks it


def broken(
    model, tokenizer: PreTrainedTokenizerBase, pairs: list[tuple[str, str]], maps: list[AttentionMaps]
) -> Iterator[dict]:
    """The translations, losses and alignments of the model as it is, and with each of its parts off in turn.

    `maps` are those of the pairs with all parts on.
    """
    measure = partial(variant, model=model, tokenizer=tokenizer, pairs=pairs, maps=maps)
    yield measure("the model as it is")
    with without_positions(model):
        yield measure("no positions")
    with without_encoder(model):
        yield measure("no encoder")
    longest = max(encode(model, tokenizer, source).shape[1] for source, _ in pairs)
    if pads := min(PADS, model.config.max_position_embeddings - longest):
        yield measure(f"no padding mask, {pads} pads at the end", pads=pads)
    kinds = {"self_attn": "self-attention", "encoder_attn": "attention to the source"}
    for name, module in model.named_modules():
        if isinstance(module, VanillaTransformerAttention):
            _, stack, _, layer, kind = name.split(".")  # model.encoder.layers.0.self_attn
            for head in range(model.config.d_model // module.head_dim):
                with without_head(module, head):
                    yield measure(f"no head {head} in {stack} layer {layer}, {kinds[kind]}")


def variant(
    name: str,
    model,
    tokenizer: PreTrainedTokenizerBase,
    pairs: list[tuple[str, str]],
    maps: list[AttentionMaps],
    pads: int = 0,
) -> dict:
    """For each pair: translation, mean loss of the reference, word alignment. `pads` follow the source, unmasked."""
    translations, losses, links = [], [], []
    for (source, reference), known in zip(pairs, maps, strict=True):
        ids = encode(model, tokenizer, source)
        labels = encode(model, tokenizer, reference, "reference", is_target=True)
        padded = nn.functional.pad(ids, (0, pads), value=model.config.pad_token_id)
        inputs = {"input_ids": padded, "attention_mask": torch.ones_like(padded)}
        limit = {"max_length": min(model.config.max_position_embeddings, ids.shape[1] + ROOM + 1)}
        written = model.generate(**inputs, custom_generate=greedy_search, num_beams=1, **limit)
        translations.append(tokenizer.decode(written[0], skip_special_tokens=True))
        outputs = model(**inputs, labels=labels, output_attentions=True)
        losses.append(round(float(outputs.loss), 3))
        cross = torch.cat(outputs.cross_attentions)[..., : ids.shape[1]]  # without the pads
        links.append(" ".join(f"{i}-{j}" for i, j in align_words(replace(known, cross=cross))))
    return {"name": name, "translations": translations, "losses": losses, "links": links}


def without_head(attention: nn.Module, head: int) -> RemovableHandle:
    """Nothing of this head reaches the output projection, until the handle is closed."""

    def blank(module, inputs):
        joined = inputs[0].unflatten(-1, (-1, attention.head_dim)).clone()  # (B,T,h,k)
        joined[..., head, :] = 0
        return joined.flatten(-2)

    return attention.out_proj.register_forward_pre_hook(blank)


def without_positions(model: nn.Module) -> ExitStack:
    """Adds no positions to embeddings; if they are rotary, all tokens are at position 0. Until the stack closes."""

    def blank(module, inputs, output):
        return module.forward(torch.zeros_like(inputs[0]), *inputs[1:]) if is_rotary else torch.zeros_like(output)

    is_rotary, hooks = model.config.position_embedding_type == "rotary", ExitStack()
    for stack in (model.model.encoder, model.model.decoder):
        hooks.enter_context(stack.embed_positions.register_forward_hook(blank))
    return hooks


def without_encoder(model: nn.Module) -> RemovableHandle:
    """The decoder sees zeros where the encoder's output was."""

    def blank(module, inputs, output):
        output.last_hidden_state = torch.zeros_like(output.last_hidden_state)
        return output

    return model.model.encoder.register_forward_hook(blank)


# ------------------------------------------------------------------------------------------------------------ the page


def shapes(model) -> list[dict]:
    """The steps of a forward pass through the first layer of each stack, with shapes in letters."""
    source, target = (torch.ones(1, length, dtype=torch.long, device=model.device) for length in (3, 2))
    shown = []
    for step in trace_shapes(model, source, target):
        if not re.search(r"\.layers\.[1-9]", step.module):
            named = {"module": step.module, "what": step.description, "section": step.section}
            shown.append(named | {"letters": step.letters, "code": code_of(model, step.module)})
    return shown


def code_of(model, name: str) -> str:
    """The lines of the modeling file that compute a step, after the name of their function."""
    owner, _, kind = name.rpartition(".")
    wanted = {"weights": r"= query @|= scores\.softmax", "heads": " @ value"}.get(kind, rf"self\.{kind}\b")
    members = [member for base in type(model.get_submodule(owner)).__mro__ for member in vars(base).values()]
    methods = [member for member in members if inspect.isfunction(member) and member.__name__ != "__init__"]
    for function in [eager_attention_forward] if kind in ("weights", "heads") else methods:
        found = [line.strip() for line in inspect.getsource(function).splitlines() if re.search(wanted, line)]
        if found:
            return "\n".join([function.__qualname__, *found])
    return ""


def write_explorer(recorded: dict, path: str | Path, title: str):
    """Writes what [`explore`] recorded as a self-contained web page."""
    page = Path(__file__).with_name("explorer.html").read_text(encoding="utf-8")
    data = gzip.compress(json.dumps(recorded, ensure_ascii=False, separators=(",", ":")).encode(), mtime=0)
    fields = {"{{title}}": escape(title), "{{data}}": base64.b64encode(data).decode()}
    write_text(Path(path), re.sub(r"{{\w+}}", lambda field: fields[field[0]], page))
