"""Writes the files of Marian, which reads `model.npz` or `model.bin`, and of Bergamot, the engine in Firefox.

Bergamot reads `model.bin` alone, and only Bergamot reads the 8 bits that are written here. The vocabulary is a
SentencePiece model. Sources: `common/binary.cpp` of marian-dev (layout) and `tensors/cpu/intgemm_interface.h` of
browsermt/marian-dev (8 bits).
"""

import re
import struct
import warnings
from math import ceil
from pathlib import Path

import numpy as np
import torch
import yaml
from transformers import PreTrainedTokenizerBase

from .. import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from ..data.unigram import pieces_of, sentencepiece_model
from ..errors import UserError
from ..files import write_text
from .marian_names import ACTIVATIONS, BIAS, EMBEDDINGS, FIXED, NEVER, ONLY, OPTIONS, marian_name
from .tensors import check_unchanged, interleave

FLOAT32, INT8, INTGEMM8 = 0x0404, 0x0101, 0x4101  # types in a `model.bin`
ALIGNMENT = 256  # bytes


def to_marian_files(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    output_dir: Path,
    quantization: str | None = None,
):
    """Writes `model.npz`, `model.bin`, `vocab.spm` and `config.yml` into the directory `output_dir`.

    Args:
        quantization: Of the matrices in `model.bin`: None, or "int8", which Bergamot reads and Marian does not.

    Raises UserError for a model whose code was changed, for another tokenizer than those of
    [`make_unigram_tokenizer`], and for a field of the config that has no form in Marian, which it names.
    """
    check_unchanged(model)
    config = model.config
    if quantization not in (None, "int8"):
        raise UserError(f"`quantization` is {quantization!r}; Marian's files have only 'int8'.")
    vocabulary, size = sentencepiece_model(tokenizer), len(pieces_of(tokenizer))
    tags = [token.content for token in tokenizer.added_tokens_decoder.values() if not token.special]
    for tag in filter(re.compile(r">>\S+<<").fullmatch, tags):  # with which each source must begin
        raise UserError(f"The tokenizer has the tag {tag}, which Marian cannot read; convert a bilingual model.")
    if tags:
        warnings.warn(f"Marian cannot read the tags {' '.join(tags)}; texts must not need them.", stacklevel=2)
    check_fields(config, FIXED | {"decoder_attention_heads": config.encoder_attention_heads, "eos_token_id": 0})
    if quantization and config.d_model % 64:
        raise UserError(f"`d_model` is {config.d_model}; for 8 bits it must be a multiple of 64.")
    if config.activation_function not in ACTIVATIONS:
        raise UserError(f"Marian has no activation function {config.activation_function!r}, only relu and swish.")
    arrays = marian_arrays(model, size)
    output_dir.mkdir(parents=True, exist_ok=True)
    np.savez(output_dir / "model.npz", **arrays)
    (output_dir / "model.bin").write_bytes(binary(arrays, quantization))
    (output_dir / "vocab.spm").write_bytes(vocabulary)
    write_text(output_dir / "config.yml", yaml.safe_dump(decoder_options(model, quantization), sort_keys=False))


def check_fields(config: VanillaTransformerConfig, wanted: dict[str, object] = FIXED):
    """Raises UserError, naming the field, if the config has other values than those `wanted`."""
    for field, value in wanted.items():
        if getattr(config, field) != value:
            raise UserError(f"`{field}={getattr(config, field)!r}` has no form for Marian, which has only {value!r}.")


def marian_arrays(model: VanillaTransformerForConditionalGeneration, size: int) -> dict[str, np.ndarray]:
    """The weights under Marian's names, and its options, for a vocabulary of `size` pieces."""
    config = model.config
    weights = interleave({name: tensor.float().cpu() for name, tensor in model.state_dict().items()}, undo=True)
    start_from_zero(weights, config)
    arrays = {}
    width = inner_width(config)
    for name, tensor in weights.items():
        if ".layers." in name:
            array = tensor.T.numpy() if tensor.ndim == 2 else tensor[None].numpy()
            rows, columns = array.shape
            if ".fc1." in name:
                array = np.pad(array, ((0, 0), (0, width - columns)))
            elif name.endswith("fc2.weight"):
                array = np.pad(array, ((0, width - rows), (0, 0)))
            arrays[marian_name(name)] = np.ascontiguousarray(array)
    # Marian neither reads nor writes the tokens after the pieces (padding, start, tags), so they are dropped. Rows
    # of zeros, which are never written either, make their number a multiple of 8, as 8-bit products require.
    more = -size % 8
    arrays[EMBEDDINGS] = np.pad(weights["model.encoder.embed_tokens.weight"][:size].numpy(), ((0, more), (0, 0)))
    bias = weights.get("lm_head.bias", torch.zeros(config.vocab_size))[:size]
    arrays[BIAS] = np.pad(bias.numpy(), (0, more), constant_values=NEVER)[None]
    text = yaml.safe_dump(architecture(config, size + more)).encode() + b"\0"
    arrays[OPTIONS] = np.frombuffer(text, dtype=np.int8)
    return arrays


def start_from_zero(weights: dict[str, torch.Tensor], config: VanillaTransformerConfig):
    """Changes the weights so that the start token has the embedding zero, as in Marian; the model computes the same.

    Its embedding is subtracted from all embeddings. That changes all logits of the tied head by the same number. The
    biases of attention in the first layer of each side make up for it: those of queries, keys and values for what the
    projections read, that of the output for the residual connection.
    """
    embeddings = weights["model.encoder.embed_tokens.weight"]
    start = embeddings[config.decoder_start_token_id].clone()
    weights["model.encoder.embed_tokens.weight"] = embeddings - start
    shift = start * config.d_model**0.5
    for side in ("encoder", "decoder"):
        attention = f"model.{side}.layers.0.self_attn."
        for part in ("q_proj", "k_proj", "v_proj"):
            weights[f"{attention}{part}.bias"] = (
                weights[f"{attention}{part}.bias"] + weights[f"{attention}{part}.weight"] @ shift
            )
        weights[f"{attention}out_proj.bias"] = weights[f"{attention}out_proj.bias"] + shift


def architecture(config: VanillaTransformerConfig, size: int) -> dict:
    """Marian's options of the model, for a vocabulary of `size` pieces."""
    return {
        "version": "v1.12.0",
        **ONLY,
        "dim-vocabs": [size, size],
        "dim-emb": config.d_model,
        "enc-depth": config.encoder_layers,
        "dec-depth": config.decoder_layers,
        "transformer-heads": config.encoder_attention_heads,
        "transformer-dim-ffn": inner_width(config),
        "transformer-ffn-activation": ACTIVATIONS[config.activation_function],
        "transformer-postprocess-emb": "d",
    }


def inner_width(config: VanillaTransformerConfig) -> int:
    """The width of all feed-forward networks: Bergamot has one for both sides, a multiple of 64 in 8 bits."""
    return 64 * ceil(max(config.encoder_ffn_dim, config.decoder_ffn_dim) / 64)


def decoder_options(model: VanillaTransformerForConditionalGeneration, quantization: str | None) -> dict:
    """The options of the search: Marian's or, with 8 bits, Bergamot's, as each refuses some that the other needs."""
    search = model.generation_config
    options = {
        "relative-paths": True,
        "models": ["model.bin" if quantization else "model.npz"],
        "vocabs": ["vocab.spm", "vocab.spm"],
        "beam-size": search.num_beams or 1,
        "normalize": 1.0 if search.length_penalty is None else search.length_penalty,
        "word-penalty": 0,
        "max-length-factor": 3,
        "mini-batch-words": 1024,
        "workspace": 128,
        "cpu-threads": 1,
        "quiet": True,
    }
    of_bergamot = {"max-length-break": 128, "alignment": "soft", "gemm-precision": "int8shiftAll"}
    return options | of_bergamot if quantization else options


def binary(arrays: dict[str, np.ndarray], quantization: str | None) -> bytes:
    """The content of a `model.bin`: a header, the names, the shapes, and the values, each padded to 256 bytes.

    With 8 bits, a matrix is transposed, except for the embeddings, and its multiplier follows it as a float32.
    """
    heads, names, shapes, values = [], [], [], []
    options = np.pad(arrays[OPTIONS], (0, -len(arrays[OPTIONS]) % ALIGNMENT))
    for name in [*sorted(arrays.keys() - {OPTIONS}), OPTIONS]:
        array = options if name == OPTIONS else arrays[name]
        kind, value = INT8 if name == OPTIONS else FLOAT32, array.tobytes()
        if quantization and array.ndim == 2 and len(array) > 1:  # a matrix; biases and norms have one row
            multiplier = np.float32(127) / np.abs(array).max()
            rounded = np.rint(array * multiplier).astype(np.int8)
            kind = INTGEMM8
            value = (rounded if name == EMBEDDINGS else rounded.T).tobytes() + multiplier.tobytes()
        value += bytes(-len(value) % ALIGNMENT)
        heads.append(struct.pack("<4Q", len(name) + 1, kind, array.ndim, len(value)))
        names.append(name.encode() + b"\0")
        shapes.append(struct.pack(f"<{array.ndim}i", *array.shape))
        values.append(value)
    head = b"".join([struct.pack("<QQ", 1, len(arrays)), *heads, *names, *shapes])
    gap = ALIGNMENT - (len(head) + 8) % ALIGNMENT
    return b"".join([head, struct.pack("<Q", gap), bytes(gap), *values])
