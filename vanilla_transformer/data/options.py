"""The options that say which sentence pairs to read, and how."""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from ..errors import UserError
from ..option_fields import option

SPLIT_OPTIONS = {"train_split", "validation_split", "test_split"}  # of a --dataset_name
UNIGRAM_LACKS = ("letters", "verbatim", "bpe_dropout", "tokenizer_name")
FILE_LISTS = ("train_file_weights", "train_file_tags", "train_file_langs")  # one value per training file
CATALOGUES = (".po", ".pot", ".xliff", ".xlf", ".ts")  # formats that can be filled
TRANSLATION_FILES = (*CATALOGUES, ".sdlxliff", ".mo", ".gmo", ".qph", ".tbx", ".catkeys")  # these, too, have pairs
SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".txt", ".tmx", *TRANSLATION_FILES)  # of files with pairs
LANGUAGES = {".ts", ".mo"}  # also language codes (Tsonga, Moldavian), so they may be endings of parallel files
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")  # may follow them
FILE_OPTIONS = {"train_file", *FILE_LISTS, "validation_file", "test_file"}
HELD_OUT, MOST_HELD_OUT = 5, 2000  # pairs for validation by default: percent, and the largest number


@dataclass(frozen=True)
class Source:
    """A file, parallel files or a dataset split, with its source and target columns and its mixing weight.

    Attributes:
        name: The file, two or more parallel ones, or the split.
        dataset: The dataset of the split; None for files.
        source_lang, target_lang: The languages that were named, or None.
        source_columns, target_columns: The columns that were named; several are joined.
        languages: How messages refer to the named languages, with the options that named them.
        reference_columns: Columns with further references.
        tag: Put before each source, if it is not empty.
        weight: Times each pair is read per epoch.
    """

    name: str | tuple[str, ...]
    dataset: str | None = None
    source_lang: str | None = None
    target_lang: str | None = None
    source_columns: tuple[str, ...] = ()
    target_columns: tuple[str, ...] = ()
    languages: str = ""
    reference_columns: tuple[str, ...] = ()
    tag: str = ""
    weight: float = 1.0

    @property
    def label(self) -> str:
        """How messages refer to it."""
        return describe_file(self.name)

    @property
    def columns(self) -> tuple[str | None, str | None]:
        """The named source and target column; several have one name, with spaces, once they are joined."""
        return " ".join(self.source_columns) or None, " ".join(self.target_columns) or None

    @property
    def is_named(self) -> bool:
        """Whether any column or language was named."""
        return any((self.source_lang, self.target_lang, *self.columns))


@dataclass(frozen=True)
class DatasetOptions:
    """A dataset on the Hub or on disk, and which of its columns or languages are source and target."""

    dataset_name: str | None = option(None, "a Hub id, or a local directory laid out like a Hub dataset")
    dataset_config_name: str | None = option(None, "the configuration of the dataset, such as de-en")
    dataset_revision: str | None = option(None, "the commit, branch or tag of the dataset on the Hub (default: main)")
    source_lang: str | None = option(None, "the source language: a column name, or a key of `translation`")
    target_lang: str | None = option(None, "the target language: a column name, or a key of `translation`")
    source_column: list[str] | None = option(
        None,
        "the column with source texts, if it is not named after the language; several are joined by spaces; in a .csv "
        "or .tsv file without a header, its number",
        nargs="+",
    )
    target_column: list[str] | None = option(None, "the same for target texts", nargs="+")
    reference_columns: list[str] | None = option(
        None,
        "columns with further references, which validation and test are scored against too",
        nargs="+",
        action="extend",
    )

    def __post_init__(self):
        for name in ("source_column", "target_column"):  # one may be given as it is
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, [value])

    @property
    def label(self) -> str:
        """How messages refer to the pairs."""
        return self.dataset_name

    @property
    def source_language(self) -> str | None:
        """`source_lang`, or else `source_column`, which is often named after its language."""
        return self.source_lang or " ".join(self.source_column or ()) or None

    @property
    def target_language(self) -> str | None:
        """`target_lang`, or else `target_column`."""
        return self.target_lang or " ".join(self.target_column or ()) or None

    @property
    def named_languages(self) -> str:
        """The languages with the options that named them, for messages."""
        return f"--source_lang {self.source_lang} and --target_lang {self.target_lang}"

    def source_of(self, name: str | tuple[str, ...], is_file: bool, **more) -> Source:
        """The [`Source`] of this name, with the columns and languages of these options, or with `more` of its own."""
        named = {"source_lang": self.source_lang, "target_lang": self.target_lang}
        named |= {"source_columns": tuple(self.source_column or ()), "target_columns": tuple(self.target_column or ())}
        named["languages"] = self.named_languages
        named["reference_columns"] = tuple(self.reference_columns or ())
        return Source(name, None if is_file else self.dataset_name, **named | more)


@dataclass(frozen=True)
class DataOptions(DatasetOptions):
    """Where the sentence pairs of train.py come from, and which of them it reads."""

    train_file: list[str] | None = option(
        None,
        "training pairs from files, URLs such as hf://... or patterns such as 'data/*.jsonl': .json(l), .csv, "
        ".tsv, .parquet, .po, .xliff, .tmx, or .txt with source<TAB>target lines, also as .gz; or two parallel files, "
        "such as train.en train.de, whose lines are pairs; more targets may follow: train.src train.ref0 train.ref1",
    )
    train_file_weights: list[float] | None = option(
        None, "how often an epoch reads each file: 2 0.5 reads the first twice and half of the second", ge=0, lt=1000
    )
    train_file_tags: list[str] | None = option(
        None, 'a token put before the sources of a file, one per file: "" "<bt>" marks the second as back-translated'
    )
    train_file_langs: list[str] | None = option(
        None, "source and target language of each file, if they differ: en-de en-fr, or en:pt-BR for names with a -"
    )
    validation_file: list[str] | None = option(None, "validation pairs from a file, or from one per training file")
    test_file: list[str] | None = option(None, "test pairs from a file, or from one per training file")
    train_split: str | None = option(None, "the split to train on, or train[:50%], train+dev, ... (default: train)")
    validation_split: str | None = option(None, "the split to validate on (default: validation)")
    test_split: str | None = option(None, "the split to test on at the end (default: test, if there is one)")
    validation_split_percentage: int | None = option(
        None,
        "percent of the training sources to hold out for validation, if there is no validation split "
        f"(default: {HELD_OUT}, but at most about {MOST_HELD_OUT:,} pairs)",
        ge=1,
        lt=100,
    )
    test_split_percentage: int | None = option(
        None, "percent of the training sources to hold out for the test", ge=1, lt=100
    )
    deduplicate: bool = option(False, "leave out training pairs that equal an earlier one, ignoring case and spaces")
    remove_overlap: bool = option(False, "leave out training pairs whose source is in the validation or test split")
    max_source_length: int = option(128, "drop training pairs with a longer source (tokens, including </s>)", ge=1)
    max_target_length: int = option(128, "drop training pairs with a longer target (tokens, including </s>)", ge=1)
    max_train_samples: int | None = option(None, "use only the first N training pairs", ge=1)
    max_eval_samples: int | None = option(None, "use only the first N validation pairs", ge=1)
    max_predict_samples: int | None = option(None, "use only the first N test pairs", ge=1)
    streaming: bool = option(False, "read training pairs during training, for corpora larger than the disk")
    preprocessing_num_workers: int | None = option(None, "processes for tokenizing", ge=1)
    dataloader_num_workers: int | None = option(
        None, "processes for making batches (default: 1 on a GPU, 0 on a CPU: in the training process)", ge=0
    )
    tokenizer_name: str | None = option(None, "an existing tokenizer; by default a byte-level BPE is trained")
    verbatim: bool = option(
        False,
        "train a tokenizer that keeps texts as they are: line breaks, indentation, spaces of all kinds, decomposed "
        "letters; for code, forms and typography",
    )
    tokenizer_type: Literal["bpe", "unigram"] = option(
        "bpe",
        "the tokenizer to train: a byte-level BPE, or SentencePiece's unigram model, as engines of Marian need it",
    )
    letters: bool = option(
        False, "train a tokenizer with each character as a token; for pronunciation, inflection and spelling"
    )
    split_digits: bool = option(
        False, "train a tokenizer with each digit as a token, so that numbers are easier to copy and to compute"
    )
    max_source_sentences: int | None = option(
        None,
        "cut sources into pieces of at most this many sentences in evaluation and translation (default: the largest "
        "number that at least 1 % of the training sources reach)",
        ge=1,
    )
    max_source_lines: int | None = option(None, "the same for lines, if sources have several", ge=1)
    joined_pairs: float = option(
        0.0,
        "share of the training pairs that are read two to four at a time, joined in many ways, so that the model "
        "seldom drops a sentence of a text that runs several together (without a recipe: 0.2 if sources are single "
        "sentences)",
        ge=0,
        lt=1,
    )
    bpe_dropout: float = option(0.0, "probability of skipping a BPE merge in training pairs (BPE-dropout)", ge=0, lt=1)

    @property
    def label(self) -> str:
        """The name of the dataset, or that of the first training file."""
        return self.dataset_name or describe_file(self.files("train")[0])

    def files(self, split: str) -> list[str | tuple[str, ...]]:
        """The files of a split; parallel ones are one entry: source, target and any further references."""
        return group_parallel(getattr(self, f"{split}_file") or [])

    def loading_workers(self, on_gpu: bool) -> int:
        """The processes that make batches: `--dataloader_num_workers`, or else 1 on a GPU and 0 on a CPU."""
        return int(on_gpu) if self.dataloader_num_workers is None else self.dataloader_num_workers

    @property
    def directions(self) -> list[tuple[str, str]]:
        """The source and target language of each training file, if they were given."""
        return list(map(parse_direction, self.train_file_langs or []))

    @property
    def length_limit(self) -> int:
        """The largest number of tokens that a side of a training pair may have."""
        return max(self.max_source_length, self.max_target_length)

    def sources(self, split: str) -> list[Source]:
        """Where the pairs of a split come from: its files, or the split of the dataset.

        If there are several files of validation or test, they have the languages and tags of the training files; a
        single one has no tag, and the first languages of `--train_file_langs`, unless `--source_lang` names others.
        """
        names = [getattr(self, f"{split}_split") or split] if self.dataset_name else self.files(split)
        is_train, is_like_train = split == "train", split == "train" or len(names) > 1
        hint = " (on the command line or in the recipe)"
        if len(self.files("train")) > 1:
            hint = " (files with different languages need --train_file_langs)"
        sources = []
        for number, name in enumerate(names):
            more = {"languages": self.named_languages + hint}
            if self.directions and (is_like_train or not self.source_lang):
                source, target = self.directions[number]
                more = {"source_lang": source, "target_lang": target}
                more["languages"] = f"{source} and {target} of --train_file_langs"
            if self.train_file_tags and is_like_train:
                more["tag"] = self.train_file_tags[number]
            if self.train_file_weights and is_train:
                more["weight"] = self.train_file_weights[number]
            if is_train:
                more["reference_columns"] = ()
            sources.append(self.source_of(name, is_file=not self.dataset_name, **more))
        return sources

    def check_conflicts(self):
        """Raises UserError for options that contradict each other."""
        if self.tokenizer_type == "unigram" and (other := [name for name in UNIGRAM_LACKS if getattr(self, name)]):
            raise UserError(f"--tokenizer_type unigram does not go with --{other[0]}; leave one of them out.")
        if self.dataset_name and self.train_file:
            raise UserError("--dataset_name and --train_file are both given; choose one.")
        if self.train_file and (given := sorted(name for name in SPLIT_OPTIONS if getattr(self, name))):
            raise UserError(
                f"--{given[0]} is for --dataset_name; with --train_file, give --validation_file and --test_file."
            )
        files = len(self.files("train"))
        for name in FILE_LISTS:
            values = getattr(self, name)
            if values and files and len(values) != files:
                raise UserError(f"--{name} has {len(values)} values for {files} files; give one per file.")
        for split in ("validation", "test"):
            count = len(self.files(split))
            if count > 1 and count != files:
                raise UserError(
                    f"--{split}_file has {count} files for {files} training files; give one, or one for each."
                )
        if (self.test_split_percentage or 0) + (self.validation_split_percentage or HELD_OUT) >= 100:
            raise UserError("--validation_split_percentage and --test_split_percentage leave no pairs for training.")
        if self.test_split_percentage and (self.test_file or self.test_split):
            raise UserError("--test_split_percentage holds out a test split; leave out --test_file and --test_split.")
        for tag in self.train_file_tags or []:
            if tag and not re.fullmatch(r"([^\w\s]|_)\S+([^\w\s]|_)", tag):
                raise UserError(f"--train_file_tags has '{tag}', which may occur in texts; choose a tag such as <bt>.")
        if self.train_file_weights and not any(self.train_file_weights):
            raise UserError("--train_file_weights are all 0, which leaves no training pairs; raise one.")
        if self.streaming and (files > 1 or self.train_file_weights):
            raise UserError("--streaming reads one --train_file and no --train_file_weights; join several into one.")


def parse_direction(direction: str, where: str = "--train_file_langs") -> tuple[str, str]:
    """The source and target language of `en-de`, or of `en:pt-BR`. Raises UserError if they are not two."""
    languages = direction.split(":" if ":" in direction else "-")
    if len(languages) != 2 or not all(languages):
        raise UserError(f"{where} has {direction}; give source and target as en-de, or as en:pt-BR.")
    return tuple(languages)


def group_parallel(names: list[str]) -> list[str | tuple[str, ...]]:
    """Puts two names in a row together if they differ in a last part that is no format, as `train.en train.de`.

    Further references, which differ from the second in a number only, join them, as `dev.en dev.ref0 dev.ref1`.
    """
    groups = []
    for name in names:
        last = groups[-1] if groups else ""
        if isinstance(last, str) and is_parallel(last, name):
            groups[-1] = (last, name)
        elif isinstance(last, tuple) and name not in last and is_numbered_like(last[1], name):
            groups[-1] = (*last, name)
        else:
            groups.append(name)
    return groups


def is_parallel(one: str, two: str) -> bool:
    suffixes = suffix_of(one), suffix_of(two)
    if not all(suffixes) or suffixes[0] == suffixes[1] or set(suffixes) & set(SUFFIXES) - LANGUAGES:
        return False
    stems = {name.lower().rpartition(suffix)[0] for name, suffix in zip((one, two), suffixes, strict=True)}
    return len(stems) == 1


def is_numbered_like(one: str, two: str) -> bool:
    """Whether two names differ in the number of their suffix only."""
    (stem, suffix), (other_stem, other_suffix) = (
        (name.lower().rpartition(suffix_of(name))[0], suffix_of(name)) for name in (one, two)
    )
    unnumbered = {re.sub(r"\d+$", "", one) for one in (suffix, other_suffix)}
    return stem == other_stem and suffix != other_suffix and len(unnumbered) == 1 and unnumbered != {"."}


def describe_file(name: str | tuple[str, ...]) -> str:
    return name if isinstance(name, str) else " ".join(name)


def suffix_of(name: str) -> str:
    """The suffix of a file in lower case, without that of its compression: `.tsv` of `PAIRS.TSV.gz`."""
    name = name.partition("::")[0].lower()  # datasets writes gzip://pairs.tsv::pairs.tsv.gz
    path = PurePosixPath(name.partition("?")[0] if "://" in name else name)  # of a URL without its query
    return (path.with_suffix("") if path.suffix in COMPRESSED else path).suffix
