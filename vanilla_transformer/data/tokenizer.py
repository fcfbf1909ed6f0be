"""Tokenizers: train one for both languages, or prepare an existing one for sequence-to-sequence training."""

import contextlib
import copy
import re
import sys
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sized
from functools import partial
from pathlib import Path
from typing import Literal

import datasets
import tokenizers
from accelerate import PartialState
from datasets.fingerprint import Hasher
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..errors import UserError, explaining, noting, shortened
from ..files import write_text
from ..loading import load_tokenizer
from ..sentences_vanilla_transformer import LONGEST_TEXT, SOURCE_KINDS
from . import encoding
from .encoding import digest_texts, iter_texts, sample_texts
from .options import DataOptions
from .texts import INVISIBLE, SPACES, normalize, to_form
from .unigram import BYTES, read_sentencepiece_model, train_pieces

# Notes of train.py in a tokenizer, for the Translator.
NOTES = ("verbatim", "letters", "split_digits", "max_source_sentences", "max_source_lines")
NOTES += ("source_tags", *SOURCE_KINDS)
SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    length: int | None = None,
    tags: Iterable[str] = (),
    verbatim: bool = False,
    letters: bool = False,
    decomposed: bool = False,
    split_digits: bool = False,
) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer (section 5.1: byte-pair encoding with a shared vocabulary).

    The alphabet is the 256 bytes, so no character is unknown, and decoding returns every text as [`normalize`] makes
    it or, with `verbatim`, as it is. `</s>` typed in a sentence stays text, see [`protect_special_tokens`]; special
    tokens that are added later are matched, as in every tokenizer.

    Args:
        texts: Sentences of both languages. Those of more than 10,000 characters are skipped: one of many megabytes
            would take gigabytes.
        vocab_size: The maximum; a small corpus yields fewer tokens.
        length: The number of texts, for the progress bar.
        tags: Words such as `<bt>` that become one token each, wherever they occur.
        verbatim: Keep spaces of all kinds, line breaks, invisible characters and decomposed letters.
        letters: Make each character a token: bytes are merged within characters only.
        decomposed: Decompose letters, such as Korean syllables, instead of composing them; not with `verbatim`.
        split_digits: Make each digit a token.

    Raises:
        UserError: `vocab_size` is too small for the special tokens and the 256 bytes.
    """
    tags = list(dict.fromkeys(tags))
    check_vocab_size(vocab_size, tags)
    tokenizer = Tokenizer(models.BPE())
    form = normalizers.NFD() if decomposed else normalizers.NFC()
    tokenizer.normalizer = normalizers.Prepend(" ") if verbatim else make_normalizer(form)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if letters:
        each = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([each, tokenizer.pre_tokenizer])
    if split_digits:
        each = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([each, tokenizer.pre_tokenizer])
    specials = protect_special_tokens(tokenizer, verbatim)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(content=" ", left=1, right=0)])
    trainer = BpeTrainer(
        vocab_size=vocab_size - len(tags),
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),  # in a notebook or a file, its bars are blank lines
    )
    tokenizer.train_from_iterator((text for text in texts if len(text) <= LONGEST_TEXT), trainer, length=length)
    add_tags(tokenizer, tags)
    return wrap_trained(tokenizer, verbatim=verbatim, letters=letters, split_digits=split_digits)


def train_unigram_tokenizer(
    texts: Iterable[str], vocab_size: int, tags: Iterable[str] = (), split_digits: bool = False
) -> PreTrainedTokenizerFast:
    """Trains a tokenizer with SentencePiece's unigram model, as engines of Marian need it.

    It treats texts as [`train_tokenizer`] does. The pieces of [`train_pieces`] come first, then `<pad>`, `<s>` and the
    tags. Raises UserError if `vocab_size` is too small, and if sentencepiece is not installed.
    """
    tags = list(dict.fromkeys(tags))
    check_vocab_size(vocab_size, tags)
    size = vocab_size - len(tags) - 2  # without `<pad>` and `<s>`
    pieces = train_pieces((text for text in texts if len(text) <= LONGEST_TEXT), size, split_digits)
    return make_unigram_tokenizer(pieces, make_normalizer(normalizers.NFC()), tags, split_digits=split_digits)


def make_unigram_tokenizer(
    pieces: list[tuple[str, float]],
    normalizer: normalizers.Normalizer,
    tags: list[str] | None = None,
    byte_fallback: bool = True,
    split_digits: bool = False,
) -> PreTrainedTokenizerFast:
    """A tokenizer with these pieces, the first `</s>` and `<unk>`. The normalizer prepends a space."""
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=1, byte_fallback=byte_fallback))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    tokenizer.add_special_tokens(protect_special_tokens(tokenizer))
    add_tags(tokenizer, tags or [])
    return wrap_trained(tokenizer, split_digits=split_digits)


def sentencepiece_tokenizer(file: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of an `.spm` file as Marian trains it. Raises UserError if it is another one."""
    pieces, charsmap, byte_fallback = read_sentencepiece_model(file)
    cleaning = [normalizers.Precompiled(charsmap)] if charsmap else []
    spaces = [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip(), normalizers.Prepend(" ")]
    return make_unigram_tokenizer(pieces, normalizers.Sequence([*cleaning, *spaces]), byte_fallback=byte_fallback)


def check_vocab_size(vocab_size: int, tags: list[str]):
    """Raises UserError if it is too small for the special tokens, the tags and the bytes."""
    special = len(SPECIAL_TOKENS) + len(tags)
    if vocab_size < special + BYTES:
        raise UserError(
            f"--vocab_size is {vocab_size}; it must be at least {special + BYTES}, for {BYTES} bytes and {special} "
            "special tokens."
        )


def make_normalizer(form: normalizers.Normalizer) -> normalizers.Normalizer:
    """What [`normalize`] does, with letters in this form, and a leading space.

    The space makes the first word the same token as inside a sentence; decoding strips it.
    """
    spaces = [normalizers.Replace(Regex(SPACES), " "), normalizers.Strip()]
    cleaning = [normalizers.Replace(Regex(INVISIBLE), ""), form, *spaces]
    return normalizers.Sequence([*cleaning, normalizers.Prepend(" ")])


def add_tags(tokenizer: Tokenizer, tags: list[str]):
    # Without the space after a tag, since the text after it begins with one of its own.
    tokenizer.add_tokens([AddedToken(tag, rstrip=True, normalized=False) for tag in tags])


def wrap_trained(tokenizer: Tokenizer, **how: bool) -> PreTrainedTokenizerFast:
    """What [`train_tokenizer`] returns for a tokenizer that it has trained, with a note of `how`."""
    options = {"clean_up_tokenization_spaces": False, "split_special_tokens": False}
    notes = {name: True for name, is_so in how.items() if is_so}
    return wrap(tokenizer, **options, **notes, **SPECIAL_TOKENS)


def protect_special_tokens(tokenizer: Tokenizer, verbatim: bool = False) -> list[AddedToken]:
    """Changes `tokenizer` so that it does not find the special tokens in a sentence, and returns them.

    `split_special_tokens=True` would do that too, but also to the special tokens that a user adds. Instead, ours are
    looked for in the normalized text, where the normalizer has put a mark before the `>` of each `</s>`. After NFC the
    mark, an ohm sign, occurs nowhere else, and the pre-tokenizer removes it at a place where it splits anyway. With
    `verbatim`, any character may occur: the mark is one that Unicode reserves, and is also put between itself and a
    `>`, so that removing one is always right. One exception: a special token is still found if it is the whole text,
    or all that follows an added token.
    """
    mark = "\ufdd0" if verbatim else "\u2126"
    names = list(SPECIAL_TOKENS.values())
    alone = Regex(rf"(?<![\s\S]) (?=(?:{'|'.join(names)})(?![\s\S]))")
    places = [rf"(?<=[\s\S]{name.removesuffix('>')})>" for name in names] + [rf"(?<={mark})>"] * verbatim
    inside = Regex("|".join(places))
    steps = [tokenizer.normalizer, normalizers.Replace(alone, ""), normalizers.Replace(inside, f"{mark}>")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    removed = pre_tokenizers.Split(
        Regex(f"{mark}(?=>)" if verbatim else mark), "removed"
    )  # given a plain string, transformers.js keeps it
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([removed, tokenizer.pre_tokenizer])
    return [AddedToken(name, normalized=True, special=True) for name in names]


def wrap(tokenizer: Tokenizer, **kwargs) -> PreTrainedTokenizerFast:
    """Wraps `tokenizer` so that encoding a text gives its tokens and the end-of-sentence token, nothing else."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_input_names=["input_ids", "attention_mask"], **kwargs
    )
    eos = wrapped.eos_token
    wrapped.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {eos}", pair=f"$A {eos} $B:1 {eos}:1", special_tokens=[(eos, wrapped.eos_token_id)]
    )
    return wrapped


def tokenizer_for_training(name_or_path: str, option: str = "--tokenizer_name") -> PreTrainedTokenizerBase:
    """Loads a tokenizer from the Hub or a directory and makes it end every sentence with its end-of-sentence token.

    A missing end-of-sentence token is replaced by the separator (BERT), a missing padding token by the
    end-of-sentence token (GPT-2). The tokenizer is saved with the model in this form, and so encodes as in training. A
    slow tokenizer, such as Marian's, is returned unchanged if it already ends every sentence this way, and refused
    otherwise.

    `option` is the command-line option that gave `name_or_path`. Raises UserError if there is no such tokenizer, it
    needs remote code or a package that is not installed, or it has no token to end a sentence with.
    """
    with noting(f"{option} {name_or_path}"):
        tokenizer = load_tokenizer(name_or_path)
    if tokenizer.eos_token is None:
        if tokenizer.sep_token is None:
            raise UserError(
                f"The tokenizer {name_or_path} has no end-of-sentence token, so translations would never end; choose "
                "another, or set its `eos_token`."
            )
        tokenizer.eos_token = tokenizer.sep_token
        tokenizer.bos_token = tokenizer.bos_token or tokenizer.cls_token
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.is_fast:  # model-specific classes may rebuild the template or return token_type_ids; ours never does
        kept = ("clean_up_tokenization_spaces", "split_special_tokens", "model_max_length")
        kwargs = {name: getattr(tokenizer, name) for name in kept}
        kwargs |= {name: tokenizer.init_kwargs[name] for name in NOTES if name in tokenizer.init_kwargs}
        return wrap(tokenizer.backend_tokenizer, **kwargs, **tokenizer.special_tokens_map)
    if tokenizer("x").input_ids[-1] != tokenizer.eos_token_id:
        raise UserError(
            f"The tokenizer {name_or_path} does not end sentences with its end-of-sentence token; choose a fast "
            "tokenizer, whose template can be changed."
        )
    return tokenizer


def check_coverage(tokenizer: PreTrainedTokenizerBase, texts: list[str], side: str, origin: str) -> str | None:
    """A warning if encoding and decoding changes `texts`, which are of one side of the pairs, or else None.

    Spaces and what [`normalize`] changes do not count as changes, and texts of more than 10,000 characters are not
    tried. `origin` is the command-line option that gave the tokenizer, with its value, for messages.

    Raises UserError if at least four fifths of the characters are lost, as when the tokenizer lacks the script.
    """
    texts, inputs = inputs_of(texts, side)
    if not texts:
        return None
    rows = [ids[:-1] for ids in tokenizer(**inputs, verbose=False).input_ids]  # GPT-2's end of sentence is its <unk>
    pairs = list(zip(texts, tokenizer.batch_decode(rows, skip_special_tokens=True), strict=True))
    changed = [pair for pair in pairs if len({"".join(normalize(t).split()) for t in pair}) > 1]
    if not changed:
        return None
    lost = sum(lost_characters(*pair) for pair in changed) / sum(lost_characters(text, "") for text in texts)
    worst = max(changed, key=lambda pair: lost_characters(*pair) / len(pair[0]))
    example = "'{}' becomes '{}'".format(*(shortened(text) for text in worst))
    if lost >= 0.8:
        raise UserError(
            f"{origin} has a tokenizer that does not know the {side} texts: {lost:.0%} of their characters are lost "
            f"({example}); choose another one, or leave the option out, and one is trained on your pairs."
        )
    unknown, total = sum(ids.count(tokenizer.unk_token_id) for ids in rows), sum(map(len, rows))
    return (
        f"warning: the tokenizer changes {len(changed):,} of {len(texts):,} {side} texts ({example}); {unknown:,} of "
        f"{total:,} tokens are unknown, and {lost:.1%} of the characters are lost, case aside."
    )


def inputs_of(texts: list[str], side: str) -> tuple[list[str], dict[str, list[str]]]:
    """The texts that are not too long to try, and the arguments for a tokenizer to encode them as a side of pairs."""
    texts = [text for text in texts if len(text) <= LONGEST_TEXT]
    return texts, {"text_target" if side == "target" else "text": texts}


# For each kind of loss, a function that finds what a text has of it.
LOSSES = {
    "line breaks": partial(re.findall, r"[\n\r\u2028\u2029]"),
    "tabs": partial(re.findall, "\t"),
    "double, leading or trailing spaces": partial(re.findall, r"(?<![^ ]) | (?![^ ])"),
    "other kinds of spaces": partial(re.findall, r"(?![\t\n\r \u2028\u2029])\s"),
    "invisible characters": partial(re.findall, INVISIBLE),
    "decomposed letters": lambda text: "" if unicodedata.is_normalized("NFC", text) else text,
}


def describe_losses(tokenizer: PreTrainedTokenizerBase, texts: list[str], side: str) -> str | None:
    """A sentence on spaces, line breaks and forms of letters that the tokenizer changes in at least one in a hundred
    of `texts`, which are of one side of the pairs; None if there are none."""
    texts, inputs = inputs_of(texts, side)
    odd = [any(map(has, texts)) for has in LOSSES.values()]
    if not any(odd):  # nothing to lose
        return None
    ids = tokenizer(**inputs, add_special_tokens=False, verbose=False).input_ids
    decoded = tokenizer.batch_decode(ids)
    lost = {
        kind: sum(len(has(text)) > len(has(written)) for text, written in zip(texts, decoded, strict=True))
        for kind, has in LOSSES.items()
    }
    said = [f"{kind} ({count / len(texts):.0%})" for kind, count in lost.items() if count >= 0.01 * len(texts)]
    if not said:
        return None
    return f"the tokenizer does not keep, in {side} texts: {', '.join(said)}"


def lost_characters(text: str, decoded: str) -> int:
    """How many characters of `text` are not in `decoded`; neither spaces nor upper and lower case matter."""
    before, after = (Counter(unicodedata.normalize("NFKC", side).casefold()) for side in (text, decoded))
    return sum(count for char, count in (before - after).items() if not char.isspace())


def with_bpe_dropout(tokenizer: PreTrainedTokenizerBase, dropout: float) -> PreTrainedTokenizerFast:
    """A copy of the tokenizer that drops each merge with probability `dropout` (Provilkov et al., 2020, BPE-Dropout).

    The random numbers are those of the tokenizers library, which cannot be seeded: a run with BPE-dropout is not
    repeatable bit for bit. The tokenizer itself, which is saved with the model, is left without dropout.

    Raises:
        UserError: The tokenizer is not a fast one, or its model is not BPE.
    """
    kind = type(tokenizer.backend_tokenizer.model if tokenizer.is_fast else tokenizer).__name__
    if kind != "BPE":
        raise UserError(
            f"--bpe_dropout needs a fast tokenizer with a BPE model, not {kind}; choose another tokenizer, or drop "
            "--bpe_dropout."
        )
    varied = copy.deepcopy(tokenizer)
    varied.backend_tokenizer.model.dropout = dropout
    return varied


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    """The special token ids of the config; the decoder starts with bos, or with eos if there is no bos."""
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    names = ("pad_token_id", "bos_token_id", "eos_token_id")
    return {name: getattr(tokenizer, name) for name in names} | {"decoder_start_token_id": start}


# ------------------------------------------------------------------------------------------------- the one of a run


def named_tokenizer(
    checkpoint: Path | None, model: str | None, tokenizer_name: str | None, teachers: list[str] | None
) -> tuple[str, str] | None:
    """The option that names the tokenizer to load, and its value; None: a new one is trained.

    The first of these that is given: the checkpoint, the model to fine-tune, `--tokenizer_name`, a teacher.
    """
    named = {"--resume_from_checkpoint": checkpoint and str(checkpoint)}
    named |= {"--model_name_or_path": model, "--tokenizer_name": tokenizer_name, "--teacher": teachers and teachers[0]}
    return next(((option, name) for option, name in named.items() if name is not None), None)


def make_tokenizer(
    existing: tuple[str, str] | None,
    train_pairs,
    vocab_size: int | None = None,
    tags: Iterable[str] | None = None,
    verbatim: bool = False,
    letters: bool = False,
    kind: Literal["bpe", "unigram"] = "bpe",
    split_digits: bool = False,
):
    """The tokenizer that [`named_tokenizer`] found, or else a new one, trained on the training pairs.

    Prints what it loses of the training texts. Raises UserError if that is nearly all, if one of the `tags` is not one
    token of it, or is a special token, or if an existing tokenizer was not trained with the `verbatim`, `letters` or
    `split_digits` that is asked for.
    """
    tags = [tag for tag in tags or [] if tag]
    samples = sample_texts(train_pairs, tags=tags)
    if existing is None:
        decomposed = letters and not verbatim and has_composed_sources_only(samples)
        if decomposed:
            print("letters such as Korean syllables are decomposed, since only sources have composed ones")
        how = {"verbatim": verbatim, "letters": letters, "decomposed": decomposed, "split_digits": split_digits}
        tokenizer = cached_or_trained_tokenizer(
            train_pairs, vocab_size or VanillaTransformerConfig().vocab_size, tags, kind, **how
        )
    else:
        option, name = existing
        is_resumed = option == "--resume_from_checkpoint"
        remedy = "delete this checkpoint to resume from an older one"
        if is_resumed and not Path(name, "tokenizer_config.json").is_file():
            raise UserError(f"{name} has no tokenizer; {remedy}.")
        damaged = explaining(f"{name} cannot be read: its tokenizer", Exception, remedy=remedy)
        with damaged if is_resumed else contextlib.nullcontext():
            tokenizer = tokenizer_for_training(name, option)
        for side, texts in samples.items():
            if not is_resumed and (warning := check_coverage(tokenizer, texts, side, f"{option} {name}")):
                print(warning)
        for way, is_asked in {"verbatim": verbatim, "letters": letters, "split_digits": split_digits}.items():
            if is_asked and not tokenizer.init_kwargs.get(way):
                raise UserError(f"--{way} trains a tokenizer, but {option} {name} brings one; leave one of them out.")
        if option == "--model_name_or_path" and vocab_size not in (None, len(tokenizer)):
            print(
                f"warning: --vocab_size {vocab_size} has no effect: {name} keeps its tokenizer with "
                f"{len(tokenizer)} tokens, to which none can be added."
            )
    for side, texts in samples.items():
        if note := describe_losses(tokenizer, texts, side):
            advice = "; --verbatim trains one that does." if existing is None and kind == "bpe" else "."
            print(textwrap.fill(note + advice, 80, subsequent_indent="  "))
    for tag in tags:
        if tag in (getattr(tokenizer, name) for name in SPECIAL_TOKENS):
            raise UserError(f"--train_file_tags has {tag}, a special token of the tokenizer; choose another tag.")
        if len(tokenizer.tokenize(tag)) != 1:
            raise UserError(
                f"--train_file_tags has {tag}, which is not one token of the tokenizer; choose one that is, or let "
                "a tokenizer be trained."
            )
    return tokenizer


def has_composed_sources_only(samples: dict[str, list[str]]) -> bool:
    """Whether sources have composed letters and targets have none, as in the pronunciation of Korean.

    A Korean syllable is one character, and most of the 11,172 are too rare to learn; it consists of few letters.
    """
    changed = {
        side: any(to_form("NFC", text) != to_form("NFD", text) for text in texts) for side, texts in samples.items()
    }
    return changed["source"] and not changed["target"]


def cached_or_trained_tokenizer(train_pairs, size: int, tags: list[str], kind: str, **how: bool):
    """A tokenizer trained on the pairs: by an earlier run, which left it beside the cache of `datasets`, or now.

    The name of its file is a digest of the texts, the arguments and the code of this folder. Streams have no digest,
    and their tokenizers are always trained.
    """

    def train(length: int | None):
        if kind == "unigram":
            return train_unigram_tokenizer(iter_texts(train_pairs), size, tags, how["split_digits"])
        return train_tokenizer(iter_texts(train_pairs), size, length, tags, **how)

    if not isinstance(train_pairs, Sized):
        return train(None)
    code = [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    key = Hasher.hash((digest_texts(train_pairs), size, tags, kind, how, code, tokenizers.__version__))
    file = Path(datasets.config.HF_DATASETS_CACHE) / "tokenizers" / f"{key}.json"
    with contextlib.suppress(Exception):  # missing, or damaged in any way: it is trained (again)
        trained = Tokenizer.from_str(file.read_text(encoding="utf-8"))
        tokenizer = wrap_trained(trained, **{name: is_so for name, is_so in how.items() if name != "decomposed"})
        print(f"the tokenizer was trained by an earlier run on these pairs, which left it in {file}")
        return tokenizer
    count = min(len(train_pairs), encoding.TOKENIZER_SAMPLE)
    tokenizer = train(2 * count)
    with contextlib.suppress(OSError):  # then the next run trains it again
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, tokenizer.backend_tokenizer.to_str())
    return tokenizer


def note_source_form(tokenizer, survey: dict, options: DataOptions, is_fine_tuning: bool):
    """Notes in the tokenizer how training sources look, and prints it; evaluation and the Translator cut texts alike.

    That is, how many sentences and lines they have, the tags at their beginning, and which of [`SOURCE_KINDS`] are
    among them. `survey` has what was found in the training pairs. The options win. In fine-tuning, earlier notes hold
    too: the model may have read more.
    """
    noted, notes = {}, tokenizer.init_kwargs
    tags = [*(notes.get("source_tags", ()) if is_fine_tuning else ()), *filter(None, options.train_file_tags or ())]
    notes["source_tags"] = sorted(set(tags))
    for kind in SOURCE_KINDS:
        notes[kind] = survey[kind] or (is_fine_tuning and notes.get(kind, True))
    for unit, asked in {"sentences": options.max_source_sentences, "lines": options.max_source_lines}.items():
        before = notes.get(f"max_source_{unit}", 0) if is_fine_tuning else 0
        if number := asked or max(survey[f"usual_{unit}"], before):
            notes[f"max_source_{unit}"] = noted[unit] = number
    if noted:
        limits = " and ".join(f"{number:,} {unit[: -1 if number == 1 else None]}" for unit, number in noted.items())
        PartialState().print(
            f"texts are translated in pieces of up to {limits}, as in training (--max_source_sentences, "
            "--max_source_lines)"
        )
