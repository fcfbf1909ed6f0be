"""Data at scale: the time and memory to prepare, plan and stream N sentence pairs.

python benchmarks/scale.py                      # 10 million pairs: two hours on two cores, 15 GB of disk under TMPDIR
python benchmarks/scale.py --pairs 2000000

The pairs are generated: words of random syllables with Zipf frequencies, in sentences as long as those of web text.
Each part of the code that train.py runs is measured in a separate process. Writes a page to benchmarks/results.
"""

import itertools
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import report
import torch
from contest import PROCESSES
from pyarrow.parquet import write_table

from vanilla_transformer.commands.parser import positive
from vanilla_transformer.data import splits
from vanilla_transformer.data.batches import lengths_of, padding_fraction, plan_batches, training_batches
from vanilla_transformer.data.encoding import fingerprint, iter_texts, tokenize_pairs
from vanilla_transformer.data.options import DataOptions
from vanilla_transformer.data.splits import load_pairs
from vanilla_transformer.data.tokenizer import tokenizer_for_training, train_tokenizer

SHARD = 100_000  # pairs in a file
WORDS = 100_000  # distinct words of each language, but at most ten for each pair
SENTENCE = 12  # words on average
EMPTY = 1000  # one pair in so many has an empty side
LIMITS = {"max_source_length": 128, "max_target_length": 128}  # tokens, as train.py has them by default
WORKERS = (1, 2)
MAX_TOKENS = 4096  # of a batch
SEED = 42  # the default of train.py
EPOCH = 10  # the epoch in which a resumed sampler starts
SOME = 200  # batches
INTERVAL = 0.05  # seconds between memory samples, at least ten times as long as a sample takes

# ----------------------------------------------------------------------------------------------------------- the pairs


def write_pairs(folder: Path, pairs: int):
    """Writes `pairs` training pairs in parquet shards and 100 validation pairs, one shard at a time."""
    generator = np.random.default_rng(0)
    languages = {name: make_words(generator, min(WORDS, 10 * pairs)) for name in ("en", "de")}
    (folder / "data").mkdir(parents=True)
    shards = -(-pairs // SHARD)
    names = [f"train-{index:05}-of-{shards:05}" for index in range(shards)] + ["validation-00000-of-00001"]
    sizes = [min(SHARD, pairs - start) for start in range(0, pairs, SHARD)] + [100]
    for name, size in zip(names, sizes, strict=True):
        lengths = generator.gamma(2.0, SENTENCE / 2, size)
        ratios = generator.normal(1.0, 0.15, size)
        columns = {
            language: make_sentences(words, np.clip(lengths * ratio, 1, 150).astype(np.int32), generator)
            for (language, words), ratio in zip(languages.items(), (1.0, ratios), strict=True)
        }
        write_table(pa.table(columns), folder / "data" / f"{name}.parquet")


def make_words(generator: np.random.Generator, count: int) -> pa.Array:
    """`count` distinct words of one to six syllables; frequent ones are short."""
    syllables = [a + b + c for a, b, c in itertools.product("bcdfghklmnprstvwz", "aeiou", ("", "n", "r", "s", "t"))]
    drawn = generator.integers(len(syllables), size=(2 * count, 6)).tolist()
    counts = 1 + np.minimum(5, generator.poisson(np.minimum(3.0, np.arange(2 * count) / 2000)))
    words = ("".join(syllables[i] for i in row[:length]) for row, length in zip(drawn, counts, strict=True))
    return pa.array(list(dict.fromkeys(words))[:count])


def make_sentences(words, lengths: np.ndarray, generator: np.random.Generator) -> pa.Array:
    """Sentences with the given numbers of words; one in [`EMPTY`] is empty."""
    lengths = np.where(generator.random(len(lengths)) < 1 / EMPTY, 0, lengths)
    chances = np.cumsum(1 / (np.arange(len(words)) + 2.7))
    drawn = np.searchsorted(chances, generator.random(lengths.sum()) * chances[-1])
    ends = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    return pc.binary_join(pa.ListArray.from_arrays(ends, words.take(pa.array(drawn))), " ")


# ------------------------------------------------------------------------------------------------------- the measuring


@dataclass
class Phase:
    """One measured phase of a process, with its time and memory."""

    name: str
    begin: float
    end: float
    processor: float  # seconds, of all its processes
    pairs: int  # that went through it, or 0
    memory: np.ndarray | None = None  # (samples, 3): time, bytes of the process, bytes of its workers

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def total(self) -> tuple[np.ndarray, np.ndarray]:
        """At each sample, the elapsed share of the phase, and the MiB of all processes."""
        return (self.memory[:, 0] - self.begin) / self.seconds, self.memory[:, 1:].sum(axis=1) / 2**20


class Reporter:
    """Sends phases and notes from the measured process to the measuring one."""

    def __init__(self, connection):
        self.connection = connection

    def phase(self, name: str, work, pairs: int = 0):
        """Runs and measures `work`, and returns its result."""
        begin, before = time.time(), sum(os.times()[:4])  # includes finished workers
        result = work()
        self.connection.send(Phase(name, begin, time.time(), sum(os.times()[:4]) - before, pairs))
        return result

    def note(self, **notes):
        self.connection.send(notes)


def measure(part, *args) -> tuple[list[Phase], dict]:
    """Runs `part(reporter, *args)` in a separate process; returns its phases and notes."""
    receiver, sender = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=run_part, args=(sender, part, *args))
    process.start()
    sender.close()
    looks, phases, notes = [], [], {}
    while True:
        begin = time.time()
        if memory := memory_of(process.pid):
            looks.append((begin, *memory))
        try:
            # Mapped files make sampling slow, and the process waits for it.
            if receiver.poll(max(INTERVAL, 10 * (time.time() - begin))):
                message = receiver.recv()
                phases.append(message) if isinstance(message, Phase) else notes.update(message)
        except EOFError:
            break
    process.join()
    if process.exitcode:
        sys.exit(f"The part '{part.__name__}' failed.")
    looks = np.array(looks)
    for phase in phases:
        first, last = np.searchsorted(looks[:, 0], [phase.begin, phase.end])
        if last - first < 20:  # a short phase also gets the samples before and after it
            first, last = max(0, first - 1), last + 1
        phase.memory = looks[first:last]
    return phases, notes


def run_part(connection, part, *args):
    """Runs a part in the measured process, without its standard output."""
    with open(os.devnull, "w", encoding="utf-8") as sys.stdout:
        part(Reporter(connection), *args)


def memory_of(pid: int) -> tuple[int, int] | None:
    """Bytes of a process, and of its workers, without mapped files, whose pages the system can drop.

    Workers are forked; only memory they do not share is counted. None if the system does not tell, as for a process
    that has just ended.
    """
    try:
        process = psutil.Process(pid)
        children = process.children(recursive=True)
    except psutil.Error:
        return None
    if main := bytes_of(process, "anonymous"):
        return main, sum(bytes_of(child, "private_dirty") for child in children)
    return None


def bytes_of(process: psutil.Process, kind: str) -> int:
    """Bytes of one kind outside mapped files on Linux; elsewhere all unshared memory.

    Mapped files are skipped because one that was just written has dirty pages, too.
    """
    try:
        if not sys.platform.startswith("linux"):
            return process.memory_full_info().uss
        mappings = process.memory_maps()
        return sum(getattr(one, kind) for one in mappings if not one.path.startswith("/"))
    except (OSError, psutil.Error):  # the process has just ended
        return 0


# ----------------------------------------------------------------------------------------------------------- the parts


def options_of(folder: Path, streaming: bool = False) -> DataOptions:
    """The generated pairs."""
    return DataOptions(str(folder), source_lang="en", target_lang="de", streaming=streaming)


def read(reporter: Reporter, folder: Path, pairs: int):
    """Reads the pairs into Arrow files, looks at them and trains a tokenizer."""
    look = splits.survey
    splits.survey = lambda *args: reporter.phase("the survey", lambda: look(*args), pairs)
    train = reporter.phase(READ, lambda: load_pairs(options_of(folder)), pairs)["train"]
    tokenizer = reporter.phase("train the tokenizer", lambda: train_tokenizer(iter_texts(train), 37_000), pairs)
    tokenizer.save_pretrained(folder / "tokenizer")


def tokenize(reporter: Reporter, folder: Path, pairs: int, workers: int):
    """Tokenizes all pairs with `workers` processes; deletes the files unless later parts need them."""
    train, tokenizer = load_pairs(options_of(folder))["train"], tokenizer_for_training(str(folder / "tokenizer"))
    tokenized, drops = reporter.phase(
        tokenizing(workers), lambda: tokenize_pairs(train, tokenizer, **LIMITS, num_proc=workers), pairs
    )
    files = {file["filename"] for file in tokenized.cache_files}
    reporter.note(pairs=len(tokenized), drops=drops, bytes=sum(map(os.path.getsize, files)))
    if workers != WORKERS[-1]:
        for file in files:
            os.remove(file)


def tokenizing(workers: int) -> str:
    return f"tokenize, --preprocessing_num_workers {workers}"


def plan(reporter: Reporter, folder: Path, pairs: int):
    """From the start of a run, with all tokens on disk, to its first batch and to one deep in the run."""
    options, tokenizer = options_of(folder), tokenizer_for_training(str(folder / "tokenizer"))

    dataset, _ = reporter.phase(
        "find the tokens again",
        lambda: tokenize_pairs(load_pairs(options)["train"], tokenizer, **LIMITS, num_proc=WORKERS[-1]),
        pairs,
    )
    count = len(dataset)
    reporter.phase("fingerprint", lambda: fingerprint(dataset), count)
    lengths = reporter.phase("lengths", lambda: lengths_of(dataset), count)
    batches = reporter.phase("plan an epoch", lambda: plan_batches(*lengths, MAX_TOKENS, SEED, 0), count)
    reporter.note(planned=len(np.unique(np.concatenate(batches))), batches=len(batches))
    reporter.note(padding=padding_fraction(*lengths, batches))
    deep = len(batches) * EPOCH + len(batches) // 2
    few = SOME * count // len(batches)
    del batches
    loader = iter(training_batches(dataset, tokenizer, options, MAX_TOKENS, SEED))
    reporter.phase("first batch", lambda: next(loader))
    reporter.phase(f"{SOME} batches", lambda: list(itertools.islice(loader, SOME)), few)
    loader = iter(training_batches(dataset, tokenizer, options, MAX_TOKENS, SEED, deep))
    reporter.phase(f"resume in the middle of epoch {EPOCH + 1}", lambda: next(loader))


def stream(reporter: Reporter, folder: Path, pairs: int):
    """Streams one epoch, alone and as one of several processes, and resumes at two positions in it."""

    options, tokenizer = options_of(folder, streaming=True), tokenizer_for_training(str(folder / "tokenizer"))
    marks, places = [0.1, 0.9], []

    def open_at(number: int = 0, state: list[dict] | None = None, processes: int = 1):
        dataset = load_pairs(options)["train"]
        given = (tokenizer, options, MAX_TOKENS, SEED, number, 0, processes)
        return training_batches(dataset, *given, stream_state=state)

    def read_epoch(processes: int) -> int:
        """Reads the first epoch of the first process; returns the number of its pairs."""
        batches, count = open_at(processes=processes), 0
        for number, batch in enumerate(batches):
            if batches.state[0]["epoch"]:
                return count
            if processes == 1 and marks and count >= marks[0] * pairs:
                state = json.loads(json.dumps(batches.state))
                places.append((f"stream, resume at {marks.pop(0):.0%}", number, state, batch))
            count += len(batch["labels"])

    reporter.phase(FIRST, lambda: next(iter(open_at())))
    reporter.note(streamed=reporter.phase(EPOCH_OF_STREAM, lambda: read_epoch(1), pairs))
    for processes in (2, 4, 8):
        reporter.phase(
            f"{EPOCH_OF_STREAM}, the share of 1 of {processes} processes",
            lambda p=processes: read_epoch(p),
            pairs // processes,
        )
    name, number, _, batch = places[0]
    places.append((f"{name} without a state", number, None, batch))
    for name, number, state, batch in places:
        again = reporter.phase(name, lambda n=number, s=state: next(iter(open_at(n, s))))
        assert all(torch.equal(batch[key], again[key]) for key in batch), f"{name}: another batch"


FIRST, EPOCH_OF_STREAM = "stream, first batch", "stream, an epoch"
READ = "read, with the survey"

# ------------------------------------------------------------------------------------------------------------ the page


def run(pairs: int, folder: Path) -> tuple[list[tuple[int, Phase]], dict]:
    """Measures with a tenth of the pairs and with all; returns (pairs, phase) rows and counts."""
    rows, counted = [], {}
    for size in (pairs // 10, pairs):
        place = folder / str(size)
        write_pairs(place, size)
        found = counted[size] = {}
        for part, *more in [(read,), *((tokenize, workers) for workers in WORKERS), (plan,), (stream,)]:
            phases, notes = measure(part, place, size, *more)
            found |= notes
            rows += [(size, phase) for phase in phases]
            print(*(" | ".join(row(size, phase)) for phase in phases), sep="\n", flush=True)
        assert found["pairs"] == found["planned"] == found["streamed"], f"Other pairs are read: {found}"
        assert found["pairs"] + sum(found["drops"].values()) == size, f"Pairs are lost: {found}"
    return rows, counted


COLUMNS = ["what", "pairs", "seconds", "CPU seconds", "pairs per CPU second"]
COLUMNS += ["MiB before", "most, main process", "most, workers"]


def row(size: int, phase: Phase) -> list[str]:
    speed = f"{phase.pairs / phase.processor:,.0f}" if phase.pairs and phase.processor else ""
    before, (main, workers) = phase.memory[0, 1], phase.memory[:, 1:].max(axis=0)
    memory = [f"{value / 2**20:,.0f}" for value in (before, main, workers)]
    return [phase.name, f"{size:,}", f"{phase.seconds:,.2f}", f"{phase.processor:,.2f}", speed, *memory]


def make_page(rows: list[tuple[int, Phase]], counted: dict) -> list[str]:
    """The table and a summary."""
    return [
        *report.heading("Data at scale", ["torch", "transformers", "tokenizers", "datasets", "pyarrow", "numpy"]),
        "Other load on the machine affects the seconds, hardly the CPU seconds. Generated pairs with "
        f"{SENTENCE} words per side on average, at most {WORDS:,} distinct words per language.",
        "",
        *report.table(COLUMNS, [row(size, phase) for size, phase in rows]),
        "",
        "Memory is in MiB, without mapped files, whose pages the system can drop; for workers it is the sum of what "
        "they do not share. Each part ran in a separate process; the libraries take about 300 MiB.",
        "",
        *itertools.chain.from_iterable(summary(size, rows, found) for size, found in counted.items()),
    ]


def summary(size: int, rows: list[tuple[int, Phase]], found: dict) -> list[str]:
    """A summary of the rows of one size, in words."""
    phases = {phase.name: phase for pairs, phase in rows if pairs == size}
    way = [READ, "train the tokenizer", tokenizing(WORKERS[-1]), "fingerprint", "lengths", "first batch"]
    whole = sum(phases[name].seconds for name in way)
    share, memory = phases[EPOCH_OF_STREAM].total()
    first, last = memory[share <= 0.1].max(), memory[share >= 0.9].max()
    drops = found["drops"]
    return [
        f"- {size:,} pairs: {found['pairs']:,} are left ({drops['empty']:,} have an empty side, "
        f"{drops['too long']:,} are too long), {found['bytes'] / 2**30:.2f} GiB with their tokens, "
        f"{found['batches']:,} batches of {MAX_TOKENS:,} tokens an epoch, {found['padding']:.1%} padding. "
        "The stream gave as many, and the same batches after resuming.",
        f"- {size:,} pairs: {whole:,.0f} s from files to the first batch, and {phases[FIRST].seconds:,.1f} s with a "
        f"stream and an existing tokenizer. Streaming took at most {first:,.0f} MiB in the first tenth of the epoch "
        f"and {last:,.0f} MiB in the last.",
    ]


def main():
    parser = report.make_parser(__doc__)
    text = "number of pairs (default: %(default)s); a tenth of them is measured too"
    parser.add_argument("--pairs", type=positive, default=10_000_000, help=text)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        os.environ |= {"HF_DATASETS_CACHE": f"{folder}/cache", "HF_HUB_OFFLINE": "1"}
        datasets.config.HF_DATASETS_CACHE = Path(folder) / "cache"  # if the parts are forks of this process
        os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
        print(" | ".join(COLUMNS))
        rows, counted = run(3000 if args.quick else args.pairs, Path(folder))
    report.write(args, "scale", make_page(rows, counted))


if __name__ == "__main__":
    main()
