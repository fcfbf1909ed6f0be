"""How the initial weights change the first few million tokens of training: validation loss and BLEU, by seed.

python benchmarks/initial_weights.py --data ../multi30k_tok --output outputs/initial_weights --size tiny
python benchmarks/initial_weights.py --data ../multi30k_tok --output outputs/initial_weights --size quick \\
    --matrices ours --variants "" "--max_grad_norm 25" "--warmup_steps 75"

Each run is one of train.py, in a process of its own, whose weights are drawn again before the first step; everything
else, the batches and the dropout included, is the same. A run that has its results is not repeated, so the script can
be stopped and started again, and several calls can share an output directory. `--results` also writes a page with a
table and a picture of all runs that were asked for.
"""

import argparse
import itertools
import json
import os
import re
import statistics
import sys
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path

import report
import torch
from contest import PROCESSES
from matplotlib.figure import Figure
from quality import mean_and_deviation
from torch import nn

REPOSITORY = Path(__file__).parents[1]
TINY = (
    "--size paper "
    "--vocab_size 10000 --d_model 128 --encoder_layers 4 --decoder_layers 4 --encoder_attention_heads 4 "
    "--decoder_attention_heads 4 --encoder_ffn_dim 256 --decoder_ffn_dim 256 --bleu_tokenize none "
)
# Options of train.py. Tiny and small are evaluated after about 5 and 10 million target tokens of Multi30k.
SIZES = {
    "quick": TINY + "--dropout 0.1 --per_device_train_max_tokens 2048 --learning_rate 3e-3 --warmup_steps 150 "
    "--max_steps 200 --max_eval_samples 100",
    "tiny": TINY + "--dropout 0.3 --gradient_accumulation_steps 2 --learning_rate 5e-3 --warmup_steps 800 "
    "--max_steps 1310 --eval_steps 655",
    "small": "--size paper --vocab_size 10000 --d_model 256 --encoder_layers 3 --decoder_layers 3 "
    "--encoder_attention_heads 4 --decoder_attention_heads 4 --encoder_ffn_dim 1024 --decoder_ffn_dim 1024 "
    "--bleu_tokenize none --dropout 0.2 --learning_rate 2e-3 --warmup_steps 600 --max_steps 2620 --eval_steps 1310",
    "sample": "--config recipes/sample.yaml",
}

# ------------------------------------------------------------------------------------------------- initial weights


def xavier(model: nn.Module, qk=1.0, v=1.0, out=1.0, ffn=1.0, scale: Callable[[int], float] = lambda layer: 1.0):
    """Xavier-uniform matrices (Glorot and Bengio, 2010), times `scale` of the layer's number, counted from 1."""
    gains = {"q_proj": qk, "k_proj": qk, "v_proj": v, "out_proj": out, "fc1": ffn, "fc2": ffn}
    for name, module in linears(model):
        nn.init.xavier_uniform_(module.weight, gain=gains[name.rpartition(".")[2]] * scale(layer_of(name)))


def normal(model: nn.Module, std: float = 0.02):
    """N(0, std), as in BERT, BART and Marian."""
    for _, module in linears(model):
        nn.init.normal_(module.weight, std=std)


def torch_default(model: nn.Module, has_bias: bool = True):
    """What `nn.Linear` draws: uniform, with variance 1 / (3 x inputs), for the biases too."""
    for _, module in linears(model):
        module.reset_parameters()
        if not has_bias:
            nn.init.zeros_(module.bias)


def deepnorm(model: nn.Module):
    """Xavier with DeepNorm's gain for values and what writes to the residual (Wang et al., 2022, Table 2)."""
    n, m = len(model.model.encoder.layers), len(model.model.decoder.layers)
    gains = {"encoder": 0.87 * (n**4 * m) ** (-1 / 16), "decoder": (12 * m) ** -0.25}
    for name, module in linears(model):
        gain = 1.0 if name.endswith(("q_proj", "k_proj")) else gains[name.split(".")[1]]
        nn.init.xavier_uniform_(module.weight, gain=gain)


def exact_dropout(model: nn.Module):
    """Our matrices, and dropout at its exact probability, where ours on a CPU is the nearest multiple of 1/256."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.forward = partial(nn.Dropout.forward, module)


def linears(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """The linear modules of all layers; the output projection is the embedding matrix."""
    return [(name, one) for name, one in model.named_modules() if isinstance(one, nn.Linear) and ".layers." in name]


def layer_of(name: str) -> int:
    return 1 + int(name.split(".layers.")[1].split(".")[0])


MATRICES = {
    "ours": lambda model: None,  # as `_init_weights` drew them: Xavier by 1/sqrt(layers)
    "ours, exact dropout": exact_dropout,
    "xavier": xavier,
    "xavier, q k v by 1/sqrt(2)": partial(xavier, qk=2**-0.5, v=2**-0.5),  # fairseq
    "xavier, q k by 0.5": partial(xavier, qk=0.5),
    "xavier, v by 0.5": partial(xavier, v=0.5),
    "xavier, out by 0.5": partial(xavier, out=0.5),
    "xavier, v out by 0.5": partial(xavier, v=0.5, out=0.5),
    "xavier, ffn by 0.5": partial(xavier, ffn=0.5),
    "xavier, all but q k by 0.5": partial(xavier, v=0.5, out=0.5, ffn=0.5),
    "xavier by 0.7": partial(xavier, scale=lambda layer: 0.7),
    "xavier by 0.5": partial(xavier, scale=lambda layer: 0.5),
    "xavier by 0.35": partial(xavier, scale=lambda layer: 0.35),
    "xavier by 0.25": partial(xavier, scale=lambda layer: 0.25),
    "torch": torch_default,
    "torch, biases 0": partial(torch_default, has_bias=False),
    "normal 0.02": normal,
    "xavier by 1/sqrt(layer)": partial(xavier, scale=lambda layer: layer**-0.5),  # DS-Init, Zhang et al., 2019
    "deepnorm": deepnorm,
}


def initialize(model: nn.Module, matrices: str, embeddings: float):
    """Draws all weights again: `matrices` is a key of MATRICES, `embeddings` the standard deviation of embeddings."""
    MATRICES[matrices](model)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=embeddings)


# ------------------------------------------------------------------------------------------------------- the runs


def train_one(matrices: str, embeddings: float, argv: list[str], log: Path):
    """Runs train.py in this process, with other initial weights; what it prints goes to `log`."""
    with open(log, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(REPOSITORY)
    sys.path.insert(0, str(REPOSITORY))
    import train
    from vanilla_transformer.training import processes

    make_model = train.make_model

    def make_initialized(*arguments):
        model = make_model(*arguments)
        with torch.no_grad():
            initialize(model, matrices, embeddings or model.config.d_model**-0.5)
        return model

    train.make_model = make_initialized
    sys.argv = ["train.py", *argv]
    with processes.exit_on_error():
        train.main()


def run_all(options: argparse.Namespace) -> dict[tuple[str, float, str], list[dict]]:
    """Trains with each kind of matrices, of embeddings and of further options, and each seed.

    Returns what [`read_run`] does for each seed, by the other three. Skips a run that has its results.
    """
    runs: dict[tuple[str, float, str], list[dict]] = {}
    kinds = itertools.product(options.matrices, options.embeddings, options.variants)
    for seed, kind in itertools.product(options.seeds, list(kinds)):
        matrices, embeddings, variant = kind
        name = "-".join([options.size, matrices, str(embeddings), variant, str(seed)])
        output_dir = options.output.resolve() / re.sub(r"[^\w.]+", "-", name)
        if not (output_dir / "all_results.json").exists():
            print(f"{name} ...", flush=True)
            others = f"--source_lang en --target_lang de --seed {seed} --max_predict_samples 50 --logging_steps 5 "
            others += f"--save_steps 200 --save_total_limit 1 --resume_from_checkpoint {variant}"
            argv = [*SIZES[options.size].split(), "--dataset_name", str(Path(options.data).resolve())]
            argv += ["--output_dir", str(output_dir), *others.split()]
            options.output.mkdir(parents=True, exist_ok=True)
            log = Path(f"{output_dir}.log")
            process = PROCESSES.Process(target=train_one, args=(matrices, embeddings, argv, log))
            process.start()
            process.join()
            if process.exitcode:
                sys.exit(log.read_text(encoding="utf-8")[-2000:])
        run = read_run(output_dir)
        print(f"{name}: validation loss {run['losses'][-1]:.3f}, BLEU {run['bleus'][-1]:.2f}", flush=True)
        runs.setdefault(kind, []).append(run)
    return runs


def read_run(output_dir: Path) -> dict:
    """The steps of the evaluations of a run, their losses and BLEU, and its training curve as (step, loss)."""
    results = json.loads((output_dir / "all_results.json").read_text(encoding="utf-8"))
    newest = max(output_dir.glob("checkpoint-*"), key=lambda path: int(path.name.removeprefix("checkpoint-")))
    history = json.loads((newest / "trainer_state.json").read_text(encoding="utf-8"))["history"]
    evaluations = [entry for entry in history if "eval_loss" in entry and entry["step"] < results["train_steps"]]
    evaluations.append(results | {"step": results["train_steps"]})
    return {
        "steps": [entry["step"] for entry in evaluations],
        "losses": [entry["eval_loss"] for entry in evaluations],
        "bleus": [entry["eval_bleu"] for entry in evaluations],
        "tokens": results["train_target_tokens"],
        "curve": [(entry["step"], entry["loss"]) for entry in history if "loss" in entry],
    }


def write_page(options: argparse.Namespace, runs: dict[tuple[str, float, str], list[dict]]):
    """A table of all runs, the lowest validation loss first, and a picture of their training losses."""
    steps = next(iter(runs.values()))[0]["steps"]
    columns = ["matrices", "embeddings", "options"]
    columns += [f"{score} after {step}" for step in steps for score in ("loss", "BLEU")]
    rows = []
    for kind, found in sorted(runs.items(), key=lambda item: statistics.mean(run["losses"][-1] for run in item[1])):
        row = [kind[0], str(kind[1] or "1/sqrt(d)"), kind[2]]
        for number in range(len(steps)):
            row.append(mean_and_deviation([run["losses"][number] for run in found], 3))
            row.append(mean_and_deviation([run["bleus"][number] for run in found]))
        rows.append(row)
    tokens = statistics.mean(run["tokens"] for found in runs.values() for run in found)
    title, picture = f"Initial weights, {options.size}", f"initial_weights-{options.size}-{date.today()}.png"
    page = report.heading(title, ["torch"])
    page += ["", f"Mean and standard deviation of the seeds {', '.join(map(str, options.seeds))}, on the validation "]
    page[-1] += f"split, greedily. A run trains on {tokens / 1e6:.1f} million target tokens with "
    page[-1] += f"`{SIZES[options.size]}`."
    page += ["", *report.table(columns, rows), "", f"![training loss]({picture})"]
    report.write(options, f"initial_weights-{options.size}", page)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axis = figure.subplots()
    for number, ((matrices, embeddings, variant), found) in enumerate(runs.items()):
        label = f"{matrices}, embeddings {embeddings or '1/sqrt(d)'} {variant}"
        for run in found:
            axis.plot(*zip(*run["curve"], strict=True), color=f"C{number}", lw=0.8, label=label)
            label = None
    axis.set(title=title, xlabel="step", ylabel="training loss (nats per target token)")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(options.results / picture, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", required=True, help="English and German, a dataset directory")
    add("--output", required=True, type=Path, help="where the runs are kept")
    add("--size", choices=SIZES, default="tiny")
    add("--matrices", nargs="+", choices=MATRICES, default=["ours", "xavier", "torch"], metavar="NAME")
    add("--embeddings", nargs="+", type=float, default=[0.0], help="standard deviation; 0: 1 / sqrt(d_model)")
    add("--variants", nargs="+", default=[""], metavar="OPTIONS", help="options of train.py, several in one string")
    add("--seeds", nargs="+", type=int, default=[1, 2, 3])
    add("--results", type=Path, help="where the page is written (default: no page)")
    options = parser.parse_args()
    runs = run_all(options)
    if options.results:
        write_page(options, runs)


if __name__ == "__main__":
    main()
