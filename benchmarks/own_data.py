"""Models of your own data, in equal time: as train.py chooses, as set by hand, and MarianMTModel.

python benchmarks/own_data.py --data DIR --languages en fr --hours 0.25

DIR has train.jsonl, validation.jsonl and test.jsonl, whose lines have a text for each language. The systems train one
after another, with as many steps as fit into the time by the speed of a few, and translate the test set greedily.
MarianMTModel is trained as transformers' run_translation.py does it, by Seq2SeqTrainer, but from new weights. Writes a
page to benchmarks/results.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import datasets
import report
import sacrebleu
from peers import SIZES, SMOOTHING, fields, read_pairs
from transformers import DataCollatorForSeq2Seq, MarianConfig, MarianMTModel, Seq2SeqTrainer, Seq2SeqTrainingArguments

from vanilla_transformer.data.tokenizer import train_tokenizer
from vanilla_transformer.training.rule import TRAINING_SHARE

TRAIN = Path(__file__).parents[1] / "train.py"
ADAM = "--optimizer adamw --lr_scheduler_type linear --joined_pairs 0 --dropout 0.1"
BY_HAND = {
    "d_model 128, 3+3 layers, 4,000 tokens, Muon": "--size small --vocab_size 4000",
    "d_model 128, 3+3 layers, 8,000 tokens, Adam": f"{ADAM} --size small --vocab_size 8000 --learning_rate 2.8e-3",
    "d_model 256, 3+3 layers, 8,000 tokens, Adam": f"{ADAM} --size medium --encoder_layers 3 --decoder_layers 3 "
    "--vocab_size 8000 --learning_rate 1e-3",
}
MARIAN = {"tiny": (8000, (5e-4, 1e-3))}  # size: vocabulary, learning rates
SENTENCES = 32  # in a batch of Marian
COLUMNS = ["who", "test BLEU", "test chrF", "minutes", "steps", "parameters"]


def ours(options: argparse.Namespace, folder: str, further: str) -> tuple[int, int, float, float]:
    """Runs train.py, which chooses what `further` options leave open; returns parameters, steps, BLEU and chrF."""
    source, target = options.languages
    command = [sys.executable, TRAIN, "--dataset_name", options.data, "--source_lang", source, "--target_lang", target]
    command += ["--hours", str(options.hours), "--output_dir", folder, "--num_examples", "0", *further.split()]
    subprocess.run(command, check=True)
    results = json.loads(Path(folder, "all_results.json").read_text(encoding="utf-8"))
    return tuple(results[name] for name in ("num_parameters", "train_steps", "test_bleu", "test_chrf"))


def marian(options: argparse.Namespace, folder: str, size: str, learning_rate: float) -> tuple[int, int, float, float]:
    """Trains MarianMTModel, and returns the same."""
    end = time.perf_counter() + options.hours * 3600 * TRAINING_SHARE
    vocab_size, _ = MARIAN[size]
    pairs = {split: read_pairs(options.data, split, options.languages) for split in ("train", "test")}
    tokenizer = train_tokenizer([text for pair in pairs["train"] for text in pair], vocab_size)

    def encode(split: str) -> datasets.Dataset:
        sources, targets = map(list, zip(*pairs[split], strict=True))
        return datasets.Dataset.from_dict(
            dict(tokenizer(sources, text_target=targets, max_length=128, truncation=True))
        )

    train = encode("train")

    def trained(steps: int) -> Seq2SeqTrainer:
        vocabulary = {"decoder_vocab_size": len(tokenizer), "scale_embedding": True}
        model = MarianMTModel(MarianConfig(**fields(size, len(tokenizer)), **vocabulary))
        arguments = Seq2SeqTrainingArguments(
            folder,
            per_device_train_batch_size=SENTENCES,
            train_sampling_strategy="group_by_length",
            label_smoothing_factor=SMOOTHING,
            learning_rate=learning_rate,
            max_steps=steps,
            warmup_steps=steps // 10,
            predict_with_generate=True,
            generation_num_beams=1,
            generation_max_length=128,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        collate = DataCollatorForSeq2Seq(tokenizer, model)
        trainer = Seq2SeqTrainer(model, arguments, collate, train, processing_class=tokenizer)
        trainer.train()
        return trainer

    def seconds(steps: int) -> float:
        start = time.perf_counter()
        trained(steps)
        return time.perf_counter() - start

    trained(1)  # the first one is slower
    few, many = seconds(10), seconds(50)
    step = (many - few) / 40
    trainer = trained(max(1, round((end - time.perf_counter() - few) / step) + 10))
    trainer.args.train_sampling_strategy = "sequential"  # by length, the test set would be translated in another order
    test = encode("test")
    output = trainer.predict(test)
    padding = (-100, tokenizer.pad_token_id)  # Seq2SeqTrainer pads short labels further, with the second
    labels = [[token for token in row if token not in padding] for row in output.label_ids.tolist()]
    assert labels == test["labels"], "in another order"
    translations = tokenizer.batch_decode(output.predictions.clip(min=0), skip_special_tokens=True)
    references = [[target for _, target in pairs["test"]]]
    scores = [score(translations, references).score for score in (sacrebleu.corpus_bleu, sacrebleu.corpus_chrf)]
    return trainer.model.num_parameters(), trainer.state.global_step, *scores


def main():
    parser = report.make_parser(__doc__)
    parser.add_argument("--data", required=True, metavar="DIR")
    parser.add_argument("--languages", nargs=2, default=["en", "de"], metavar=("SOURCE", "TARGET"))
    parser.add_argument("--hours", type=float, default=0.25, help="for each system (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only systems whose names contain this")
    options = parser.parse_args()
    if options.quick:
        options.hours = 0.001
        MARIAN.clear()
        MARIAN["quick"] = (500, [1e-3])
    systems = {"train.py, as it chooses": partial(ours, further="")}
    systems |= {f"train.py, {name}": partial(ours, further=further) for name, further in BY_HAND.items()}
    for size, (vocab_size, learning_rates) in MARIAN.items():
        d_model, _, _, layers = SIZES[size]
        name = f"MarianMTModel, d_model {d_model}, {layers}+{layers} layers, {vocab_size:,} tokens, Adam"
        for rate in learning_rates:
            systems[f"{name} at {rate}"] = partial(marian, size=size, learning_rate=rate)
    rows = []
    for name, train in systems.items():
        if options.only not in name:
            continue
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            parameters, steps, bleu, chrf = train(options, folder)
        minutes = (time.perf_counter() - start) / 60
        rows.append([name, f"{bleu:.1f}", f"{chrf:.1f}", f"{minutes:.1f}", f"{steps:,}", f"{parameters / 1e6:.2f} M"])
        print("; ".join(rows[-1]), flush=True)
    count = len(read_pairs(options.data, "train", options.languages))
    page = report.heading("Models of your own data", ["torch", "transformers", "datasets"])
    page += [
        "",
        f"{count:,} pairs, {'-'.join(options.languages)}; each system has {60 * options.hours:g} minutes, of which "
        f"{1 - TRAINING_SHARE:.0%} are not for training; greedy search. MarianMTModel has batches of "
        f"{SENTENCES} sentences of similar lengths, label smoothing, and a tenth of the steps as warm-up before a "
        "linear fall.",
        "",
        *report.table(COLUMNS, rows),
    ]
    report.write(options, "-".join(filter(None, ["own_data", options.only])), page)


if __name__ == "__main__":
    main()
