"""SentencePiece's unigram model (Kudo, 2018, Subword Regularization): trained, written and read, also for Marian."""

import io
import json
import re
import tempfile
import unicodedata
from base64 import b64decode
from collections.abc import Iterable, Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..errors import UserError, explaining
from .texts import INVISIBLE, SPACES, normalize

NEEDED = "the unigram tokenizer needs `pip install sentencepiece protobuf`"
# As Marian numbers them. Padding and the token that the decoder starts with are not among a model's pieces.
SPECIAL_IDS = {"eos_id": 0, "unk_id": 1, "bos_id": -1, "pad_id": -1}
BYTES = 256  # pieces, as which characters without a piece are written


def train_pieces(texts: Iterable[str], size: int, split_digits: bool = False) -> list[tuple[str, float]]:
    """At most `size` pieces with their log-probabilities: `</s>`, `<unk>`, the 256 bytes, and those of the texts.

    Raises UserError if `size` is too small for the characters of the texts.
    """
    with explaining(NEEDED, ModuleNotFoundError):
        import sentencepiece
    proto = io.BytesIO()
    with explaining(f"the tokenizer cannot be trained with --vocab_size {size}", RuntimeError):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=map(normalize, texts),
            model_writer=proto,
            model_type="unigram",
            vocab_size=size,
            hard_vocab_limit=False,
            byte_fallback=True,
            split_digits=split_digits,
            normalization_rule_name="identity",
            max_sentence_length=100_000,  # bytes
            num_threads=1,  # with several, the result depends on their number
            minloglevel=2,
            **SPECIAL_IDS,
        )
    trained = sentencepiece.SentencePieceProcessor(model_proto=proto.getvalue())
    return [(trained.id_to_piece(index), trained.get_score(index)) for index in range(len(trained))]


def sentencepiece_model(tokenizer: PreTrainedTokenizerBase) -> bytes:
    """The `.spm` file of a tokenizer of [`make_unigram_tokenizer`], which makes the same tokens of a text.

    Raises UserError for another tokenizer.
    """
    with explaining(NEEDED, ModuleNotFoundError):
        from sentencepiece.sentencepiece_model_pb2 import ModelProto
    state, model, kinds = unigram_of(tokenizer), ModelProto(), ModelProto.SentencePiece
    for index, (piece, score) in enumerate(state["model"]["vocab"]):
        kind = kinds.BYTE if re.fullmatch("<0x[0-9A-F]{2}>", piece) else kinds.NORMAL
        model.pieces.add(piece=piece, score=score, type=(kinds.CONTROL, kinds.UNKNOWN, kind)[min(index, 2)])
    for name, value in SPECIAL_IDS.items():
        setattr(model.trainer_spec, name, value)
    model.trainer_spec.vocab_size = len(model.pieces)
    model.trainer_spec.byte_fallback = state["model"]["byte_fallback"]
    model.normalizer_spec.precompiled_charsmap = charsmap_of(state)
    for name in ("add_dummy_prefix", "remove_extra_whitespaces", "escape_whitespaces"):
        setattr(model.normalizer_spec, name, True)
    return model.SerializeToString()


def charsmap_of(state: dict) -> bytes:
    """SentencePiece's table of characters to replace: that of the file that was read, or else our rules."""
    steps = {step["type"]: step for step in state["normalizer"]["normalizers"]}
    if "NFC" not in steps:
        return b64decode(steps.get("Precompiled", {}).get("precompiled_charsmap", ""))
    from sentencepiece import SentencePieceNormalizer, set_min_log_level
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    with tempfile.NamedTemporaryFile("w", suffix=".tsv", encoding="utf-8") as file:
        for rule in normalization_rules():
            print(*(" ".join(f"{ord(letter):X}" for letter in side) for side in rule), sep="\t", file=file)
        file.flush()
        set_min_log_level(2)  # errors
        made = SentencePieceNormalizer(rule_tsv=file.name).serialized_model_proto()
    return ModelProto.FromString(made).normalizer_spec.precompiled_charsmap


def read_sentencepiece_model(file: Path) -> tuple[list[tuple[str, float]], bytes, bool]:
    """The pieces of an `.spm` file, how it normalizes texts, and whether unknown characters become bytes.

    Raises UserError if it cannot be read, is not a unigram model, or has other special tokens than Marian's.
    """
    with explaining(NEEDED, ModuleNotFoundError):
        from sentencepiece.sentencepiece_model_pb2 import ModelProto
    with explaining(f"{file} is not a SentencePiece model", Exception):  # protobuf has an error of its own
        model = ModelProto.FromString(file.read_bytes())
    spec = model.trainer_spec
    if spec.model_type != spec.UNIGRAM or [piece.piece for piece in model.pieces[:2]] != ["</s>", "<unk>"]:
        raise UserError(f"{file} is not a unigram model whose first pieces are </s> and <unk>, as Marian trains it.")
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    return pieces, model.normalizer_spec.precompiled_charsmap, spec.byte_fallback


def pieces_of(tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, float]]:
    """The pieces of a tokenizer of [`make_unigram_tokenizer`]. Raises UserError if it is another one."""
    return unigram_of(tokenizer)["model"]["vocab"]


def unigram_of(tokenizer: PreTrainedTokenizerBase) -> dict:
    """What tokenizers saves of a tokenizer of [`make_unigram_tokenizer`]. Raises UserError if it is another one."""
    state = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {}
    model, steps = state.get("model", {}), (state.get("normalizer") or {}).get("normalizers", [])
    first = [piece for piece, _ in model["vocab"][:2]] if model.get("type") == "Unigram" else []
    if first != ["</s>", "<unk>"] or not any(step["type"] == "Prepend" for step in steps):
        raise UserError("The tokenizer has no form for Marian; train the model with `--tokenizer_type unigram`.")
    return state


def normalization_rules() -> Iterator[tuple[str, str]]:
    """What [`normalize`] replaces, and by what: all that does not depend on the characters around it."""
    for letter in map(chr, range(1, 0x30000)):  # later ones are neither composed nor decomposed
        composed, decomposed = (unicodedata.normalize(form, letter) for form in ("NFC", "NFD"))
        if re.match(INVISIBLE, letter):
            yield letter, ""
        elif re.match(SPACES, letter) and letter != " ":
            yield letter, " "
        elif composed != letter:
            yield letter, composed
        elif decomposed != letter:
            yield decomposed, letter
