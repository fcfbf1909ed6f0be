"""One epoch from text to weights: ours against the loop of transformers' run_translation_no_trainer.py.

python benchmarks/end_to_end.py --data ../multi30k
python benchmarks/end_to_end.py --data sample_dataset --size tiny

Both tokenize the pairs with the same BPE, train a model of the same size for one epoch and save it. The loop of that
script is written anew here: MarianMTModel, DataCollatorForSeq2Seq, AdamW, batches of a fixed number of sentences in
random order, as many in each as ours hold on average. Each trains in the precision in which it is faster, the script
also with the allocator set as train.py sets it. Prints a table and writes a page, with a picture, to
benchmarks/results.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import report
from contest import Contestant, median_ratio
from peers import SIZES, SMOOTHING, fields

MAX_TOKENS = 4096  # of our batches
TRIAL = 2000  # pairs that show which precision is faster


def read(data: str, count: int | None):
    import datasets

    datasets.disable_caching()  # each epoch begins with text
    datasets.disable_progress_bars()
    files = str(Path(data) / "train.jsonl")
    dataset = datasets.load_dataset("json", data_files=files, split="train", download_mode="force_redownload")
    dataset = dataset.select_columns(["en", "de"]).rename_columns({"en": "source", "de": "target"})
    return dataset.take(count) if count else dataset


class Ours:
    """What train.py does between the text and the weights."""

    def __init__(self, data: str, tokenizer: str, size: str, precision: str, device: str, folder: str):
        from accelerate import Accelerator
        from transformers import AutoTokenizer

        from vanilla_transformer.training.arguments import parse_options

        self.accelerator = Accelerator(cpu=device == "cpu", mixed_precision=precision)
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        self.data, self.size, self.folder = data, size, folder
        argv = ["--dataset_name", data, "--per_device_train_max_tokens", str(MAX_TOKENS)]
        self.args = parse_options([*argv, "--label_smoothing_factor", str(SMOOTHING)])

    def __call__(self, count: int | None) -> tuple[int, int, float]:
        import torch
        from peers import vanilla

        from vanilla_transformer.data.batches import training_batches
        from vanilla_transformer.data.pairs import tokenize_pairs
        from vanilla_transformer.training.distributed import Learner
        from vanilla_transformer.training.optimization import RunState, learning_rate_schedule

        train, _ = tokenize_pairs(read(self.data, count), self.tokenizer, 128, 128)
        torch.manual_seed(0)
        attention = "eager" if self.accelerator.device.type == "cpu" else "sdpa"
        model = vanilla(self.size, len(self.tokenizer), attention).to(self.accelerator.device)
        learner, state = Learner(model, self.args, self.accelerator), RunState()
        batches = training_batches(train, self.tokenizer, self.args)
        steps = len(batches.epoch())
        learning_rate = learning_rate_schedule("linear", 5e-4, 0, steps)
        numbered = zip(range(1, steps + 1), batches, strict=False)
        taken = [learner.step([batch], learning_rate(number), state) for number, batch in numbered]
        learner.scored().save_pretrained(self.folder)
        return int(sum(step.sums[1] for step in taken)), steps, float(taken[-1].sums[0] / taken[-1].sums[1])


class NoTrainer:
    """The loop of run_translation_no_trainer.py."""

    def __init__(self, data: str, tokenizer: str, size: str, precision: str, device: str, folder: str):
        from accelerate import Accelerator
        from transformers import AutoTokenizer

        self.accelerator = Accelerator(cpu=device == "cpu", mixed_precision=precision)
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        self.data, self.size, self.folder = data, size, folder

    def __call__(self, count: int | None, sentences: int) -> tuple[int, int, float]:
        import torch
        from torch.utils.data import DataLoader
        from transformers import DataCollatorForSeq2Seq, MarianConfig, MarianMTModel, get_scheduler

        def tokenize(batch):
            sides = {"text_target": batch["target"], "max_length": 128, "truncation": True}
            return self.tokenizer(batch["source"], **sides)

        dataset = read(self.data, count)
        dataset = dataset.map(tokenize, batched=True, remove_columns=dataset.column_names)
        torch.manual_seed(0)
        types = len(self.tokenizer)
        config = MarianConfig(**fields(self.size, types), decoder_vocab_size=types, scale_embedding=True)
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


COLUMNS = [
    "who",
    "seconds",
    "steps",
    "real target tokens",
    "tokens/s",
    "MiB at most",
    "last loss",
    "ours is faster by",
]


def in_its_faster_precision(name: str, make, folder: str, options, *sentences: int, **settings) -> Contestant:
    """The contestant, after a trial of each precision with some of the pairs; the trial also warms it up."""
    found = {}
    for precision in ("bf16", "no"):
        setting = (options.data, f"{folder}/tokenizer", options.size, precision, options.device, f"{folder}/model")
        label = f"{name}, {'fp32' if precision == 'no' else precision}"
        one = found[precision] = Contestant(label, make, *setting, **settings)
        one.turn(100, *sentences)
        one.turn(min(TRIAL, options.pairs or TRIAL), *sentences)
    slower, faster = sorted(found.values(), key=lambda one: -one.seconds[-1])
    slower.end()
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, metavar="DIR", help="a directory with train.jsonl, of en and de")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--pairs", type=report.at_least_one, help="only so many of them")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=report.at_least_one, default=5, help="epochs of each")
    report.add_options(parser)
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
        f"{options.rounds} rounds, in which all do the same, one after another. The script has no label smoothing, "
        "which makes its losses smaller. Ours has the allocator set too, as train.py sets it.",
        "",
        *report.table(COLUMNS, rows),
    ]
    print("\n".join(page[4:]))
    speeds = {row[0]: float(row[4].replace(",", "")) for row in rows}
    title = "From text to weights"
    report.write_with_bars(options, "end_to_end", page, title, {options.size: speeds}, "real target tokens/s")


def number_of_pairs(options) -> int:
    with open(Path(options.data) / "train.jsonl", encoding="utf-8") as lines:
        found = sum(1 for _ in lines)
    return min(found, options.pairs or found)


def make_tokenizer(data: str, folder: str):
    """A BPE of 10,000 types."""
    from peers import read_pairs

    from vanilla_transformer.data.tokenizer import train_tokenizer

    train_tokenizer([text for pair in read_pairs(data) for text in pair], 10_000).save_pretrained(folder)


if __name__ == "__main__":
    main()
