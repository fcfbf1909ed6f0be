"""Converts `transformer` checkpoints of fairseq, and its WMT19 models, which transformers holds as FSMT.

Their modules are named like ours. Source: fairseq 0.12.2 (Ott et al., 2019, arXiv 1904.01038), `models/transformer`
and `modules/sinusoidal_positional_embedding.py`; transformers 5.23, `models/fsmt/modeling_fsmt.py`.
"""

import argparse
import copy
import re
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import FSMTForConditionalGeneration, GenerationConfig, PreTrainedTokenizerFast
from transformers.models.fsmt.modeling_fsmt import SinusoidalPositionalEmbedding

from .. import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from ..data.tokenizer import wrap
from ..errors import UserError, explaining
from .tensors import build, check_modules, check_unquantized, on_meta, rename

SPECIAL_TOKENS = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}  # ids 0 to 3
TOKENS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
# The search of fairseq-generate: it never generates padding or an empty translation, and stops after 200 tokens.
SEARCH = {"num_beams": 5, "early_stopping": True, "suppress_tokens": [1], "min_new_tokens": 2}
SEARCH |= {"max_new_tokens": 201, "forced_eos_token_id": 2}
FIRST_ROW = 2  # of the position tables; rows 0 and 1 are never read

# What ours does not have, by the option of fairseq-train.
UNSUPPORTED = """adaptive_input adaptive_softmax_cutoff layernorm_embedding no_token_positional_embeddings
no_cross_attention cross_self_attention"""
# Tensors that are not weights, or are copies of weights for a faster kernel.
IGNORED = r"\w+\.version|\w+\.embed_positions\._float_tensor|.*\.\d+\.(in_proj|out_proj|fc[12])_(weight|bias)"
# Names of modules, and ours; those of the layer norms are from checkpoints of before 2019.
RENAMED = {
    r"^decoder\.output_projection\.": "lm_head.",
    r"^decoder\.embed_out$": "lm_head.weight",
    r"\.layer_norms\.0\.": ".self_attn_layer_norm.",
    r"^(encoder.*)\.layer_norms\.1\.": r"\1.final_layer_norm.",
    r"\.layer_norms\.1\.": ".encoder_attn_layer_norm.",
    r"\.layer_norms\.2\.": ".final_layer_norm.",
    r"^(encoder|decoder)\.": r"model.\1.",
}


def from_fairseq(
    path: str | Path, dictionary_size: int | None = None, unknown_pieces: int = 0
) -> VanillaTransformerForConditionalGeneration:
    """Converts a checkpoint (.pt) of fairseq's `transformer`, post-norm or pre-norm; logits stay equal.

    The file is a pickle. It is read with `weights_only=True`, which runs no code in it and allows tensors, Python's
    containers and `argparse.Namespace` only.

    fairseq's sinusoids are not the paper's: their frequencies differ a little. They become learned positions, which
    begin with exactly its values; a sequence then ends at its `max_source_positions` and `max_target_positions`.

    Args:
        dictionary_size: The number of tokens of its dictionary, if it is known, to be compared with the embeddings.
        unknown_pieces: Rows to append to both vocabularies, for [`fairseq_tokenizer`]: they are read as `<unk>`, and
            their logits are 30 lower.

    Raises:
        UserError: There is no such file, it is not such a checkpoint, or its architecture has an option that this
            model lacks; the message names it.
        RuntimeError: The weights do not fit, as when only one side is pre-norm.
    """
    weights, options = read_checkpoint(Path(path))
    for name in UNSUPPORTED.split():
        if options.get(name):
            raise UserError(f"{path} was trained with `--{name.replace('_', '-')}`, which this package lacks.")
    if dictionary_size is not None:
        for side in ("encoder", "decoder"):
            found = len(weights[f"model.{side}.embed_tokens.weight"])
            if found != dictionary_size:
                raise UserError(
                    f"the dictionary has {dictionary_size} tokens, but the {side} has {found} embeddings; give the "
                    "joined dictionary of this model, or none if it has two: it is converted without a tokenizer then."
                )
    weights.setdefault("lm_head.weight", weights["model.decoder.embed_tokens.weight"])  # if it is tied
    if unknown_pieces:
        append_unknown(weights, unknown_pieces)
    same = "encoder_layers decoder_layers encoder_attention_heads decoder_attention_heads dropout"
    return convert(
        weights,
        rows=min(options.get(f"max_{side}_positions") or 1024 for side in ("source", "target")),
        norm_first=bool(options["encoder_normalize_before"]),
        **{name: options[name] for name in same.split()},
        encoder_ffn_dim=options["encoder_ffn_embed_dim"],
        decoder_ffn_dim=options["decoder_ffn_embed_dim"],
        attention_dropout=options.get("attention_dropout") or 0.0,
        activation_dropout=options.get("activation_dropout") or options.get("relu_dropout") or 0.0,
        activation_function=options.get("activation_fn") or "relu",
        scale_embedding=not options.get("no_scale_embedding"),
    )


def from_fsmt(model: FSMTForConditionalGeneration) -> VanillaTransformerForConditionalGeneration:
    """Converts a model of transformers that was published by fairseq, such as facebook/wmt19-en-de; logits stay equal.

    Positions become learned ones, as in [`from_fairseq`]. The weights are copies in float32. Raises as
    [`from_native`].
    """
    names = """encoder_layers decoder_layers encoder_attention_heads decoder_attention_heads encoder_ffn_dim
    decoder_ffn_dim dropout attention_dropout activation_dropout activation_function scale_embedding"""
    check_unquantized(model)
    check_modules(model, on_meta(FSMTForConditionalGeneration, model))
    theirs = model.state_dict().items()
    weights = {name.replace("model.decoder.output_projection", "lm_head"): x.float() for name, x in theirs}
    rows = model.config.max_position_embeddings
    ours = convert(weights, rows, norm_first=False, **{name: getattr(model.config, name) for name in names.split()})
    ours.generation_config = copy.deepcopy(model.generation_config)
    return ours


def convert(weights: dict[str, torch.Tensor], rows: int, **config) -> VanillaTransformerForConditionalGeneration:
    """Builds a model from `weights` under our names. Of each position table, `rows` rows are used."""
    source, target = (weights[f"model.{side}.embed_tokens.weight"] for side in ("encoder", "decoder"))
    for side in ("encoder", "decoder"):
        name = f"model.{side}.embed_positions.weight"
        table = weights.pop(f"{name}s", weights.get(name))  # `weights` in old checkpoints, nothing in new ones
        if table is None:
            table = SinusoidalPositionalEmbedding.get_embedding(FIRST_ROW + rows, source.shape[1], None)
        weights[name] = table[FIRST_ROW : FIRST_ROW + rows]
    config = VanillaTransformerConfig(
        vocab_size=source.shape[0],
        decoder_vocab_size=target.shape[0],
        d_model=source.shape[1],
        position_embedding_type="learned",
        max_position_embeddings=rows,
        share_encoder_decoder_embeddings=torch.equal(source, target),
        tie_word_embeddings=torch.equal(target, weights["lm_head.weight"]),
        lm_head_bias="lm_head.bias" in weights,
        **TOKENS,
        **config,
    )
    model = build(config, weights, torch.float32, torch.device("cpu"))
    model.generation_config = GenerationConfig(**TOKENS, **SEARCH)
    return model


def read_checkpoint(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The weights under our names, and the options of fairseq-train."""
    if not path.is_file():
        raise UserError(f"{path} is not a file.")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            saved = torch.load(path, map_location="cpu", weights_only=True)
        options = vars(saved.get("args") or saved["cfg"]["model"])
        theirs = dict(saved["model"])
        options["encoder_layers"], options["encoder_normalize_before"]  # a language model has no encoder
    except Exception as error:  # a truncated or foreign pickle can make torch raise anything
        raise UserError(f"{path} is not a checkpoint of fairseq's `transformer`, or it is damaged.") from error
    weights = {name: tensor for name, tensor in theirs.items() if not re.fullmatch(IGNORED, name)}
    return rename(weights, RENAMED), options


# ---------------------------------------------------------------------------------------------------------- tokenizer


def fairseq_tokenizer(dictionary: str | Path, codes: str | Path | None = None) -> tuple[PreTrainedTokenizerFast, int]:
    """Returns the tokenizer of fairseq's `dict.*.txt` and the codes of subword-nmt, and the size of the dictionary.

    It expects Moses-tokenized text if the model was trained on such text.

    Without codes, the tokens are the words. Codes also build pieces that the dictionary lacks, on the way to longer
    ones. A word that ends up as such a piece is unknown to fairseq; here the piece is a token of its own after those
    of the dictionary, to be read as `<unk>`: see `unknown_pieces` of [`from_fairseq`].

    Raises:
        UserError: A file cannot be read, or is not of this format.
    """
    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS.values())}
    for number, line in enumerate(lines_of(dictionary), 1):
        token, _, count = line.rpartition(" ")
        if not token or not count.isdecimal():
            raise UserError(f"Line {number} of {dictionary} is not a token and its count; give fairseq's dict.*.txt.")
        if token in vocabulary:
            raise UserError(f"Line {number} of {dictionary} repeats the token {token!r}; give fairseq's dict.*.txt.")
        vocabulary[token] = len(vocabulary)
    if codes is None:
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    else:
        tokenizer = Tokenizer(read_codes(codes, vocabulary))
        tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    options = {"clean_up_tokenization_spaces": False, "split_special_tokens": True}
    return wrap(tokenizer, **options, **SPECIAL_TOKENS), len(vocabulary)


def read_codes(codes: Path, vocabulary: dict[str, int]) -> models.BPE:
    """A BPE model with the merges of a subword-nmt codes file. Pieces that occur only in merges get new ids."""
    # `wor@@ d` of subword-nmt is `wor d</w>` in the codes and here.
    specials = SPECIAL_TOKENS.values()
    pieces = {t if t in specials else t[:-2] if t.endswith("@@") else f"{t}</w>": i for t, i in vocabulary.items()}
    merges = []
    version, *lines = lines_of(codes)
    if version != "#version: 0.2":  # others have ends of words that are pieces of their own
        raise UserError(f"{codes} does not begin with `#version: 0.2`; give codes of subword-nmt 0.2 or later.")
    for number, line in enumerate(lines, 2):
        pair = line.split(" ")
        if len(pair) != 2:
            raise UserError(f"Line {number} of {codes} is not a pair of pieces; give the codes of subword-nmt.")
        merges.append(tuple(pair))
        for piece in (*pair, "".join(pair)):
            pieces.setdefault(piece, len(pieces))
    return models.BPE(pieces, merges, unk_token="<unk>", end_of_word_suffix="</w>")


def lines_of(file: str | Path) -> list[str]:
    with explaining(f"{file} cannot be read as a text in UTF-8", OSError, UnicodeDecodeError):
        return Path(file).read_text(encoding="utf-8").rstrip("\n").split("\n")


def append_unknown(weights: dict[str, torch.Tensor], count: int):
    """Appends `count` copies of row 3, that of `<unk>`, to the embeddings; their logits are 30 lower than its own."""
    for name in ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.cat([weights[name], weights[name][3:4].expand(count, -1)])
    bias = torch.zeros(len(weights["lm_head.weight"]))
    bias[-count:] = -30.0  # far enough that the probabilities of all others stay the same in float32
    weights["lm_head.bias"] = bias
