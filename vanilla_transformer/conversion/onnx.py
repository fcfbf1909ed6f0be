"""Writes a model as ONNX, in the layout that transformers.js and optimum load for an encoder-decoder.

encoder_model.onnx           source ids and mask (B,S) -> the encoder's output (B,S,d)
decoder_model_merged.onnx    target ids (B,T), the encoder's output and its mask, cached keys and values -> logits
                             (B,T,V) and the longer cache; without a cache if `use_cache_branch` is false
..._quantized.onnx           the same with weights in int8, about a third of the size

The names of files, inputs and outputs are those that both libraries look for; so is the model type `marian`, from
which they read only the sizes. The extra `onnx` installs what this needs.
"""

import copy
import logging
import warnings
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from onnxruntime import InferenceSession
from onnxruntime.quantization import quantize_dynamic
from torch import Tensor, nn
from torch.export import Dim
from transformers import MarianConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from ..modeling_vanilla_transformer import SinusoidalPositions
from .marian import save_tokenizer
from .tensors import Changed, check_unquantized

BATCH = Dim("batch_size", max=2**16)
SOURCE, TARGET, PAST = (Dim(f"{name}_length", max=2**16) for name in ("encoder_sequence", "decoder_sequence", "past"))


class Decoder(nn.Module):
    """One step with the cache as plain tensors: four tensors (B,h,L,k) a layer, or none before the first step."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.decoder, self.lm_head = model.get_decoder(), model.lm_head

    def forward(
        self, encoder_attention_mask: Tensor, input_ids: Tensor, encoder_hidden_states: Tensor, past: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Target ids (B,T) -> logits (B,T,V) and the cache."""
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        for layer in range(len(past) // 4):
            keys, values, source_keys, source_values = past[4 * layer : 4 * layer + 4]
            cache.self_attention_cache.update(keys, values, layer)
            cache.cross_attention_cache.update(source_keys, source_values, layer)
            cache.is_updated[layer] = True
        output = self.decoder(
            input_ids,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            cache=cache,
            use_cache=True,
        )
        layers = zip(cache.self_attention_cache.layers, cache.cross_attention_cache.layers, strict=True)
        tensors = [tensor for caches in layers for cached in caches for tensor in (cached.keys, cached.values)]
        return self.lm_head(output.last_hidden_state), *tensors


@torch.no_grad()
def to_onnx(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, output_dir: str | Path):
    """Writes `model` in float32 and in int8, with its tokenizer and configs, into the new directory `output_dir`.

    With learned positions, sequences may have `max_position_embeddings` tokens, otherwise up to 65,536.
    A model that was changed is written as it computes. Raises ValueError if the graphs compute something else, and for
    quantized weights.
    """
    check_unquantized(model)
    model = prepare(model)
    folder = Path(output_dir) / "onnx"
    folder.mkdir(parents=True)
    save_tokenizer(tokenizer, output_dir)
    model.generation_config.save_pretrained(output_dir)
    known = MarianConfig().to_dict().keys() - {"model_type"}
    fields = {name: value for name, value in model.config.to_dict().items() if name in known}
    MarianConfig(**fields).save_pretrained(output_dir)

    # An example, of which only the number of sentences, the lengths and the values may change.
    source, target = torch.full((3, 7), 1), torch.full((3, 4), 1)
    mask = torch.ones_like(source)
    by_sentence = {0: BATCH, 1: SOURCE}
    encoder, decoder = model.get_encoder(), Decoder(model)
    hidden = encoder(source, mask).last_hidden_state
    names = ["input_ids", "attention_mask"]
    encoder_graph = export(encoder, (source, mask), names, ["last_hidden_state"], (by_sentence, by_sentence))
    cached = [
        f"{layer}.{side}.{kind}"
        for layer in range(model.config.decoder_layers)
        for side in ("decoder", "encoder")
        for kind in ("key", "value")
    ]
    inputs = ["encoder_attention_mask", "input_ids", "encoder_hidden_states"]
    outputs = ["logits", *(f"present.{name}" for name in cached)]
    sizes = (by_sentence, {0: BATCH, 1: TARGET}, by_sentence)
    first = export(decoder, (mask, target, hidden, []), inputs, outputs, (*sizes, []))
    past = list(decoder(mask, target, hidden, [])[1:])
    inputs += [f"past_key_values.{name}" for name in cached]
    cache_sizes = [{0: BATCH, 2: SOURCE if ".encoder." in name else PAST} for name in cached]
    later = export(decoder, (mask, target, hidden, past), inputs, outputs, (*sizes, cache_sizes))

    level = logging.getLogger().level
    logging.getLogger().setLevel(logging.ERROR)  # onnxruntime's advice to optimize each graph before quantizing it
    try:
        for name, graph in [("encoder_model", encoder_graph), ("decoder_model_merged", merge(first, later))]:
            onnx.checker.check_model(graph, full_check=True)
            onnx.save(graph, folder / f"{name}.onnx")
            quantized = folder / f"{name}_quantized.onnx"
            quantize_dynamic(folder / f"{name}.onnx", quantized, extra_options={"EnableSubgraph": True})
    finally:
        logging.getLogger().setLevel(level)
    check_graphs(model, folder)


def check_graphs(model: PreTrainedModel, folder: Path):
    """Raises ValueError unless the graphs give the logits of the model, for other lengths than the example's.

    What a changed model computes outside its encoder, decoder and `lm_head` is in neither graph.
    """
    config = model.config
    source, target = (torch.randint(size, (2, 5)) for size in (config.vocab_size, config.decoder_vocab_size))
    mask = torch.tensor([[1] * 5, [1] * 3 + [0] * 2])
    expected = model(source, mask, target).logits
    encoder, decoder = (
        InferenceSession(folder / f"{name}.onnx", providers=["CPUExecutionProvider"])
        for name in ("encoder_model", "decoder_model_merged")
    )
    (hidden,) = encoder.run(None, {"input_ids": source.numpy(), "attention_mask": mask.numpy()})
    feed = {"encoder_attention_mask": mask.numpy(), "encoder_hidden_states": hidden}
    for value in decoder.get_inputs():
        if value.name.startswith("past_key_values"):
            feed[value.name] = np.zeros((2, value.shape[1], 0, value.shape[3]), dtype=np.float32)
    logits = []
    for start, stop in [(0, 2), (2, 3), (3, 5)]:
        feed |= {"input_ids": target[:, start:stop].numpy(), "use_cache_branch": np.array([start > 0])}
        found, *cache = decoder.run(None, feed)
        logits.append(torch.from_numpy(found))
        names = [value.name.replace("present", "past_key_values") for value in decoder.get_outputs()[1:]]
        feed |= dict(zip(names, cache, strict=True))
    difference = (torch.cat(logits, dim=1) - expected).abs().max()
    if not difference <= 1e-3 * expected.abs().max():
        raise Changed(model, f"the logits of its ONNX graphs differ by {difference:.2g}")


class ComputedPositions(nn.Module):
    """Sinusoids from their frequencies, in float32, since engines in a browser lack float64."""

    def __init__(self, positions: SinusoidalPositions):
        super().__init__()
        dim = positions.table.shape[1]
        steps = torch.arange(0, dim, 2, dtype=torch.float64)
        self.frequencies = (10000 ** (-steps / (positions.divisor or dim))).float()

    def forward(self, position_ids: Tensor, length: int) -> Tensor:
        """(B,T) -> (B,T,dim)."""
        angles = position_ids[..., None].float() * self.frequencies
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)


def prepare(model: PreTrainedModel) -> PreTrainedModel:
    """A copy in float32 with eager attention, whose sinusoids are computed instead of stored."""
    model = copy.deepcopy(model).float().cpu().eval()
    model.set_attn_implementation("eager")
    for stack in (model.get_encoder(), model.get_decoder()):
        if type(stack.embed_positions) is SinusoidalPositions:
            stack.embed_positions = ComputedPositions(stack.embed_positions)
    return model


def export(module: nn.Module, example: tuple, inputs: list[str], outputs: list[str], sizes: tuple) -> onnx.ModelProto:
    """The graph of `module`; `sizes` names the dimensions of the inputs that may change."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of libraries that are not installed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module,
            example,
            dynamo=True,
            opset_version=20,
            input_names=inputs,
            output_names=outputs,
            dynamic_shapes=sizes,
            verbose=False,
        )
    return program.model_proto


def merge(first: onnx.ModelProto, later: onnx.ModelProto) -> onnx.ModelProto:
    """One graph that computes `later` if its input `use_cache_branch` is true, else `first`; weights are shared."""
    weights = {}
    choice = helper.make_node(
        "If",
        ["use_cache_branch"],
        [value.name for value in later.graph.output],
        then_branch=branch("later", later.graph, weights),
        else_branch=branch("first", first.graph, weights),
    )
    flag = helper.make_tensor_value_info("use_cache_branch", onnx.TensorProto.BOOL, [1])
    inputs = [*later.graph.input, flag]
    graph = helper.make_graph([choice], "decoder", inputs, later.graph.output, list(weights.values()))
    return helper.make_model(graph, opset_imports=later.opset_import, ir_version=later.ir_version)


def branch(name: str, graph: onnx.GraphProto, weights: dict) -> onnx.GraphProto:
    """`graph` as a branch of an If node; a branch has no inputs of its own.

    Moves its weights to `weights`, keyed by content, so that a weight of both branches is stored once.
    """
    names = {}
    for tensor in graph.initializer:
        array = numpy_helper.to_array(tensor)
        content = (array.dtype, array.shape, array.tobytes())
        if content not in weights:
            weights[content] = numpy_helper.from_array(array, f"weights.{len(weights)}")
        names[tensor.name] = weights[content].name
    nodes = copy.deepcopy(graph.node)
    for node in nodes:
        node.input[:] = [names.get(value, value) for value in node.input]
    return helper.make_graph(nodes, name, [], graph.output)
