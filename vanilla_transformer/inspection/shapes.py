"""The shapes of a forward pass, step by step."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tabulate import tabulate
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode

from .. import VanillaTransformerForConditionalGeneration
from ..modeling_vanilla_transformer import VanillaTransformerAttention
from .attention import eager_attention


@dataclass
class ShapeStep:
    """A tensor computed in a forward pass."""

    module: str
    description: str
    section: str  # of the paper
    letters: tuple[str, ...]  # the shape in the letters of the modeling file
    shape: tuple[int, ...]
    parameters: int = 0
    flops: int = 0  # of matrix products; a multiplication and an addition count as two


# The output of each module, by the last part of its name. L is S in the encoder and T in the decoder; A is the length
# of the keys.
STEPS = {
    "embed_tokens": ("embeddings", "3.4", "B,L,d"),
    "embed_positions": ("positions", "3.5", "B,L,d"),
    "q_proj": ("queries, in heads", "3.2.2", "B,h,L,k"),
    "k_proj": ("keys, in heads", "3.2.2", "B,h,A,k"),
    "v_proj": ("values, in heads", "3.2.2", "B,h,A,k"),
    "weights": ("attention: softmax(Q K^T / sqrt(k))", "3.2.1", "B,h,L,A"),
    "heads": ("attention times V, heads joined", "3.2.1", "B,L,d"),
    "out_proj": ("multi-head attention", "3.2.2", "B,L,d"),
    "self_attn_layer_norm": ("layer norm, around self-attention", "3.1", "B,L,d"),
    "encoder_attn_layer_norm": ("layer norm, around attention to the source", "3.1", "B,L,d"),
    "fc1": ("feed-forward, inner", "3.3", "B,L,f"),
    "activation_fn": ("its activation", "3.3", "B,L,f"),
    "fc2": ("feed-forward", "3.3", "B,L,d"),
    "final_layer_norm": ("layer norm, around the feed-forward", "3.1", "B,L,d"),
    "layer_norm": ("layer norm, at the end of the stack", "3.1", "B,L,d"),
    "lm_head": ("logits", "3.4", "B,L,V"),
}


@torch.no_grad()
def trace_shapes(
    model: VanillaTransformerForConditionalGeneration, input_ids: torch.Tensor, decoder_input_ids: torch.Tensor
) -> list[ShapeStep]:
    """The outputs of the modules in a forward pass over source (B,S) and target (B,T), in order of computation.

    For attention, also the weights and the product of weights and values.
    """
    steps: list[ShapeStep] = []

    def record(name: str, kind: str, tensor: torch.Tensor, parameters: int = 0):
        """Adds a step with the letters of its shape."""
        description, section, letters = STEPS[kind]
        in_encoder = ".encoder." in name
        keys = "S" if in_encoder or ".encoder_attn." in name else "T"
        letters = letters.replace("L", "S" if in_encoder else "T").replace("A", keys)
        if kind == "embed_positions" and model.config.position_embedding_type == "rotary":
            description, letters = "angles that rotate queries and keys", letters.replace("d", "k")
        if kind == "embed_positions" and len(tensor) == 1:
            description, letters = f"{description}, the same for all sentences", letters.replace("B", "1")
        shape = tuple(tensor.shape)
        steps.append(ShapeStep(name, description, section, tuple(letters.split(",")), shape, parameters))

    def after_forward(module: nn.Module, inputs: tuple, output):
        """Appends the outputs of a module, and the shapes inside attention, to `steps`."""
        name = names[module]
        parent, _, kind = name.rpartition(".")
        if isinstance(module, VanillaTransformerAttention):
            record(f"{name}.weights", "weights", output[1])
            steps.insert(-2, steps.pop())  # before `heads` and `out_proj`, which are recorded already
            steps[-3].flops = steps[-2].flops = 2 * output[1].numel() * module.head_dim  # Q K^T, and attention times V
        if kind not in STEPS or isinstance(module, nn.Identity):
            return
        if kind == "out_proj":
            record(f"{parent}.heads", "heads", inputs[0])
        if kind in ("q_proj", "k_proj", "v_proj"):
            output = model.get_submodule(parent).split_heads(output)
        record(name, kind, output, sum(parameter.numel() for parameter in module.parameters()))

    names = {module: name for name, module in model.named_modules()}
    hook = register_module_forward_hook(after_forward)
    with hook, eager_attention(model), FlopCounterMode(display=False) as counter:
        model(input_ids=input_ids, decoder_input_ids=decoder_input_ids, use_cache=False)
    counts = {name.partition(".")[2]: sum(by_op.values()) for name, by_op in counter.get_flop_counts().items()}
    for step in steps:
        step.flops = step.flops or counts.get(step.module, 0)
    return steps


def shape_table(steps: list[ShapeStep], all_layers: bool = False) -> Iterator[str]:
    """Lines of a table; without `all_layers`, a layer after the first of its stack gets one line, with its sums."""
    rows = [("module", "what", "section", "shape", "in numbers", "parameters", "FLOPs")]
    for layer, group in itertools.groupby(steps, lambda step: re.sub(r"(\.layers\.\d+)\..*", r"\1", step.module)):
        layer_steps = list(group)
        if re.search(r"\.layers\.[1-9]\d*$", layer) and not all_layers:
            parameters, flops = sum(step.parameters for step in layer_steps), sum(step.flops for step in layer_steps)
            rows.append((layer, f"the same {len(layer_steps)} steps", "", "", "", f"{parameters:,}", f"{flops:,}"))
            continue
        for step in layer_steps:
            letters, numbers = f"({','.join(step.letters)})", f"({', '.join(map(str, step.shape))})"
            counts = [f"{count:,}" if count else "" for count in (step.parameters, step.flops)]
            rows.append((step.module, step.description, step.section, letters, numbers, *counts))
    aligned = ["left"] * 5 + ["right"] * 2
    yield from tabulate(rows, tablefmt="plain", colalign=aligned, disable_numparse=True).splitlines()
