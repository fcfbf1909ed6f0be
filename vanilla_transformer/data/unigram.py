"""SentencePiece's unigram model (Kudo, 2018, Subword Regularization), which Marian and the engine in Firefox read."""

import io
import json
import re
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator

from transformers import PreTrainedTokenizerBase

from ..errors import UserError, explaining
from .texts import INVISIBLE, SPACES, normalize

NEEDED = "the unigram tokenizer needs `pip install sentencepiece protobuf`"
# As Marian numbers them. Padding and the token that the decoder starts with are not among a model's pieces.
SPECIAL_IDS = {"eos_id": 0, "unk_id": 1, "bos_id": -1, "pad_id": -1}
BYTES = 256  # of which unknown characters consist


def train_pieces(texts: Iterable[str], size: int) -> list[tuple[str, float]]:
    """At most `size` pieces with their log-probabilities: `</s>`, `<unk>`, the 256 bytes, and those of the texts.

    Raises UserError if the characters of the texts alone are more.
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
            normalization_rule_name="identity",
            max_sentence_length=100_000,  # bytes
            num_threads=1,  # with several, the result depends on their number
            minloglevel=2,
            **SPECIAL_IDS,
        )
    trained = sentencepiece.SentencePieceProcessor(model_proto=proto.getvalue())
    return [(trained.id_to_piece(index), trained.get_score(index)) for index in range(len(trained))]


def sentencepiece_model(tokenizer: PreTrainedTokenizerBase) -> bytes:
    """The `.spm` file of a tokenizer with pieces of [`train_pieces`], which normalizes texts as [`normalize`] does.

    Raises UserError if it is another tokenizer.
    """
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"] if tokenizer.is_fast else {"type": None}
    pieces = model["vocab"] if model["type"] == "Unigram" else []
    if [piece for piece, _ in pieces[:3]] != ["</s>", "<unk>", "<0x00>"]:
        raise UserError("The tokenizer has no form for Marian; train the model with `--tokenizer_type unigram`.")
    with explaining(NEEDED, ModuleNotFoundError):
        from sentencepiece import SentencePieceNormalizer
        from sentencepiece.sentencepiece_model_pb2 import ModelProto
    with tempfile.NamedTemporaryFile("w", suffix=".tsv", encoding="utf-8") as file:
        for rule in normalization_rules():
            print(*(" ".join(f"{ord(letter):X}" for letter in side) for side in rule), sep="\t", file=file)
        file.flush()
        model = ModelProto.FromString(SentencePieceNormalizer(rule_tsv=file.name).serialized_model_proto())
    kinds = ModelProto.SentencePiece
    for index, (piece, score) in enumerate(pieces):
        kind = kinds.CONTROL if index == 0 else kinds.UNKNOWN if index == 1 else kinds.BYTE
        model.pieces.add(piece=piece, score=score, type=kind if index < 2 + BYTES else kinds.NORMAL)
    for name, value in SPECIAL_IDS.items():
        setattr(model.trainer_spec, name, value)
    model.trainer_spec.vocab_size = len(pieces)
    model.trainer_spec.byte_fallback = True
    model.normalizer_spec.name = "nfc"
    return model.SerializeToString()


def normalization_rules() -> Iterator[tuple[str, str]]:
    """What [`normalize`] replaces, as far as rules without context can: pairs of old and new texts."""
    for letter in map(chr, range(1, 0x30000)):  # no later one has a composed form, or is composed
        composed, decomposed = (unicodedata.normalize(form, letter) for form in ("NFC", "NFD"))
        if re.match(INVISIBLE, letter):
            yield letter, ""
        elif re.match(SPACES, letter) and letter != " ":
            yield letter, " "
        elif composed != letter:
            yield letter, composed
        elif decomposed != letter:
            yield decomposed, letter
