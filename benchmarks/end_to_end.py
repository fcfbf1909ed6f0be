"""One epoch from text to weights: ours against the loop of transformers' run_translation_no_trainer.py.

python benchmarks/end_to_end.py --data ../multi30k
python benchmarks/end_to_end.py --data sample_dataset --size tiny

Both tokenize the pairs with the same BPE, train a model of the same size for one epoch and save it. The loop of that
script is reimplemented here: MarianMTModel, DataCollatorForSeq2Seq, AdamW, and random batches of as many sentences as
ours have on average. Each trains in its faster precision, the script also with the allocator configured as in
train.py. Writes a page to benchmarks/results.
"""

import statistics
import tempfile
from pathlib import Path

import datasets
import report
import torch
from contest import Contestant, median_ratio
from peers import SIZES, OurTraining, fields, make_accelerator, read_pairs, vanilla
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, MarianConfig, MarianMTModel, get_scheduler

from vanilla_transformer.commands.parser import positive
from vanilla_transformer.data.batches import training_batches
from vanilla_transformer.data.encoding import tokenize_pairs
from vanilla_transformer.data.options import DataOptions
from vanilla_transformer.data.tokenizer import train_tokenizer
from vanilla_transformer.training.optimization import learning_rate_schedule

MAX_TOKENS = 4096  # in our batches
TRIAL = 2000  # pairs to find the faster precision with


def read(data: str, count: int | None):
    datasets.disable_caching()  # each epoch starts from text
    datasets.disable_progress_bars()
    files = str(Path(data) / "train.jsonl")
    dataset = datasets.load_dataset("json", data_files=files, split="train", download_mode="force_redownload")
    dataset = dataset.select_columns(["en", "de"]).rename_columns({"en": "source", "de": "target"})
    return dataset.take(count) if count else dataset


class FromText:
    """What both contestants start from."""

    def __init__(self, data: str, tokenizer: str, size: str, precision: str, device: str, folder: str):
        self.accelerator = make_accelerator(precision, device)
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        self.data, self.size, self.folder = data, size, folder


class Ours(FromText):
    """What train.py does from text to weights."""

    def __call__(self, count: int | None) -> tuple[int, int, float]:
        train, _ = tokenize_pairs(read(self.data, count), self.tokenizer, 128, 128)
        torch.manual_seed(0)
        attention = "eager" if self.accelerator.device.type == "cpu" else "sdpa"
        model = vanilla(self.size, len(self.tokenizer), attention)
        training = OurTraining(model, self.accelerator)
        batches = training_batches(train, self.tokenizer, DataOptions(), MAX_TOKENS, seed=42)
        steps = len(batches.epoch())
        schedule = learning_rate_schedule("linear", 5e-4, 0, steps)
        target_tokens = 0
        for step, batch in zip(range(1, steps + 1), batches, strict=False):
            loss, tokens = training.step(batch, step, schedule(step))
            target_tokens += tokens
        model.save_pretrained(self.folder)
        return int(target_tokens), steps, loss.item()


class NoTrainer(FromText):
    """The loop of run_translation_no_trainer.py."""

    def __call__(self, count: int | None, sentences: int) -> tuple[int, int, float]:
        def tokenize(batch):
            sides = {"text_target": batch["target"], "max_length": 128, "truncation": True}
            return self.tokenizer(batch["source"], **sides)

        dataset = read(self.data, count)
        dataset = dataset.map(tokenize, batched=True, remove_columns=dataset.column_names)
        torch.manual_seed(0)
        size = len(self.tokenizer)
        config = MarianConfig(**fields(self.size, size), decoder_vocab_size=size, scale_embedding=True)
        model = MarianMTModel(config)
        collate = DataCollatorForSeq2Seq(self.tokenizer, model=model, label_pad_token_id=-100)
        loader = DataLoader(dataset, shuffle=True, collate_fn=collate, batch_size=sentences)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
        model, optimizer, loader = self.accelerator.prepare(model, optimizer, loader)
        scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=len(loader))
        tokens = 0
        for batch in loader:
            tokens += int((batch["labels"] != -100).sum())
            loss = model(**batch).loss
            self.accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        self.accelerator.unwrap_model(model).save_pretrained(self.folder)
        return tokens, len(loader), loss.item()


COLUMNS = ["who", "seconds", "steps", "target tokens", "tokens/s", "peak MiB", "last loss", "ours is faster by"]


def in_its_faster_precision(name: str, make, folder: str, options, *sentences: int, **settings) -> Contestant:
    """The contestant in its faster precision, found by a trial on some pairs, which also warms it up."""
    found = {}
    for precision in report.precisions(options.device):
        setting = (options.data, f"{folder}/tokenizer", options.size, precision, options.device, f"{folder}/model")
        one = found[precision] = Contestant(f"{name}, {precision}", make, *setting, **settings)
        one.turn(100, *sentences)
        one.turn(min(TRIAL, options.pairs or TRIAL), *sentences)
    *slower, faster = sorted(found.values(), key=lambda one: -one.seconds[-1])
    for one in slower:
        one.end()
    faster.forget()
    return faster


def rows_of(contestants: list[Contestant], rounds: int) -> list[list[str]]:
    ours = contestants[0]
    rows = []
    for one in contestants:
        tokens, steps, loss = one.answers[-1]
        seconds = statistics.median(one.seconds)
        row = [one.name, f"{seconds:,.1f}", f"{steps:,}", f"{tokens:,}", f"{tokens / seconds:,.0f}"]
        rows.append([*row, f"{one.memory / 2**20:,.0f}", f"{loss:.2f}", f"{median_ratio(ours, one, rounds):.2f}"])
    return rows


def main():
    parser = report.make_contest_parser(__doc__)
    parser.add_argument("--data", required=True, metavar="DIR", help="a folder with en and de in train.jsonl")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--pairs", type=positive, help="use only so many pairs (default: all)")
    options = parser.parse_args()
    if options.quick:
        options.size, options.pairs, options.rounds = "quick", 200, 1
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer(options.data, f"{folder}/tokenizer")
        ours = in_its_faster_precision("ours", Ours, folder, options, keeps_memory=True)
        name = "run_translation_no_trainer"
        script = in_its_faster_precision(name, NoTrainer, folder, options, 80)
        other = in_its_faster_precision(f"{name}, allocator set", NoTrainer, folder, options, 80, keeps_memory=True)
        contestants = [ours, script, other]
        for number in range(options.rounds):
            ours.turn(options.pairs)
            sentences = round(number_of_pairs(options) / ours.answers[-1][1])  # in each batch, on average
            for one in contestants[1:]:
                one.turn(options.pairs, sentences)
            seconds = ", ".join(f"{one.seconds[-1]:.0f}" for one in contestants)
            print(f"round {number + 1}: {seconds} s", flush=True)
        rows = rows_of(contestants, options.rounds)
        for one in contestants:
            one.end()
    page = report.heading("From text to weights", ["torch", "transformers", "accelerate", "datasets"])
    d_model, ffn_dim, heads, layers = SIZES[options.size]
    page += [
        "",
        f"One epoch of {number_of_pairs(options):,} pairs, tokenized, trained on and the model saved; d_model "
        f"{d_model}, feed-forward {ffn_dim}, {heads} heads, {layers}+{layers} layers; {sentences} sentences in each "
        f"batch of the script, {MAX_TOKENS:,} tokens in each of ours; on {options.device}. Medians of "
        f"{options.rounds} rounds, in which all take turns. The script has no label smoothing, which makes its losses "
        "smaller. *Allocator set*: glibc keeps freed memory, as train.py configures it; ours always has it.",
        "",
        *report.table(COLUMNS, rows),
    ]
    print("\n".join(page[4:]))
    report.write(options, "end_to_end", page)


def number_of_pairs(options) -> int:
    with open(Path(options.data) / "train.jsonl", encoding="utf-8") as lines:
        found = sum(1 for _ in lines)
    return min(found, options.pairs or found)


def make_tokenizer(data: str, folder: str):
    """Trains a BPE tokenizer with a vocabulary of 10,000."""
    train_tokenizer([text for pair in read_pairs(data) for text in pair], 10_000).save_pretrained(folder)


if __name__ == "__main__":
    main()
