"""Reads a model that Marian trained: `model.npz` and its SentencePiece vocabulary."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import yaml
from transformers import PreTrainedTokenizerBase

from .. import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from ..data.tokenizer import sentencepiece_tokenizer, special_token_ids
from ..data.unigram import pieces_of
from ..errors import UserError, explaining
from .marian_names import ACTIVATIONS, BIAS, EMBEDDINGS, FIXED, NEVER, ONLY, OPTIONS, marian_name
from .tensors import build, interleave


def from_marian_files(
    file: Path, vocabulary: Path
) -> tuple[VanillaTransformerForConditionalGeneration, PreTrainedTokenizerBase]:
    """The model in a `model.npz` of Marian, and the tokenizer of its SentencePiece vocabulary.

    Raises UserError if they cannot be read, or if the model has parts that ours lacks, naming one.
    """
    tokenizer = sentencepiece_tokenizer(vocabulary)
    with explaining(f"{file} is not a model of Marian", Exception):  # a damaged one can raise anything
        arrays = dict(np.load(file, allow_pickle=False).items())
        options = yaml.safe_load(arrays.pop(OPTIONS).tobytes().partition(b"\0")[0])
        embeddings = arrays.pop(EMBEDDINGS)
    size = len(pieces_of(tokenizer))
    if not 0 <= len(embeddings) - size < 8:  # to_marian_files makes it a multiple of 8
        raise UserError(
            f"{file} has {len(embeddings)} tokens and {vocabulary} has {size}; give the vocabulary of the model."
        )
    with explaining(f"the options in {file} are incomplete or wrong", Exception):
        config = read_config(options, tokenizer)
    with torch.device("meta"):
        names = VanillaTransformerForConditionalGeneration(config).state_dict()
    with explaining(f"the arrays in {file} do not fit its options", IndexError, RuntimeError, TypeError, ValueError):
        weights = rename_arrays(arrays, names, file)
        extra = len(tokenizer) - size  # padding and the start token
        tensor = torch.tensor(np.pad(embeddings[:size], ((0, extra), (0, 0))))
        weights |= {name: tensor for name in names if name.endswith("embed_tokens.weight") or name == "lm_head.weight"}
        bias = arrays.pop(BIAS, np.zeros((1, size), dtype=np.float32))[0]
        weights["lm_head.bias"] = torch.tensor(np.pad(bias[:size], (0, extra), constant_values=NEVER))
        if arrays:
            raise UserError(f"{file} has {min(arrays)}, which this package's Transformer lacks.")
        return build(config, interleave(weights), torch.float32, torch.device("cpu")), tokenizer


def rename_arrays(arrays: dict[str, np.ndarray], names: Iterable[str], file: Path) -> dict[str, torch.Tensor]:
    """Moves the arrays of the layers out of `arrays`, under our names. Raises UserError if one is missing."""
    weights = {}
    for name in names:
        if ".layers." in name:
            found = marian_name(name)
            if found not in arrays:
                raise UserError(f"{file} has no {found}, so it is no Transformer like this package's.")
            array = arrays.pop(found)
            weights[name] = torch.tensor(array.T if name.endswith("weight") and "norm" not in name else array[0])
    return weights


def read_config(options: dict, tokenizer: PreTrainedTokenizerBase) -> VanillaTransformerConfig:
    """Our config of a model with these options. Raises UserError for one that ours cannot be."""
    for name, value in ONLY.items():
        found = options.get(name, value)
        if found != value and (name, found) != ("transformer-decoder-ffn-depth", 0):  # 0: as in the encoder
            raise UserError(f"The model has `{name}: {found}`; only {value!r} can be converted.")
    activations = {theirs: ours for ours, theirs in ACTIVATIONS.items()}
    activation = options.get("transformer-ffn-activation", "relu")
    if activation not in activations:
        raise UserError(f"The model has the activation function {activation}; only relu and swish can be converted.")
    heads, inner = options["transformer-heads"], options["transformer-dim-ffn"]
    return VanillaTransformerConfig(
        vocab_size=len(tokenizer),
        d_model=options["dim-emb"],
        encoder_layers=options["enc-depth"],
        decoder_layers=options["dec-depth"],
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=inner,
        decoder_ffn_dim=options.get("transformer-decoder-dim-ffn") or inner,
        activation_function=activations[activation],
        layer_norm_eps=1e-6,
        lm_head_bias=True,
        **FIXED,
        **special_token_ids(tokenizer),
    )
