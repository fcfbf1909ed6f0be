"""How the initial weights change the first few million tokens of training: validation loss and BLEU, by seed.

python benchmarks/initial_weights.py --data ../multi30k_tok --output outputs/initial_weights --max_steps 750

Each run is one of train.py, in a process of its own, whose weights are drawn again before the first step; everything
else, the batches and the dropout included, is the same. Options that are not listed below go to train.py. A run that
has its results is not repeated, so the script can be stopped and started again. Writes a table and a picture into the
output directory.
"""

import argparse
import itertools
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np
import report
import torch
from matplotlib.figure import Figure
from torch import nn

REPOSITORY = Path(__file__).parents[1]
TINY = (
    "--d_model 128 --encoder_layers 4 --decoder_layers 4 --encoder_attention_heads 4 --decoder_attention_heads 4 "
    "--encoder_ffn_dim 256 --decoder_ffn_dim 256 "
)
SIZES = {
    "quick": TINY + "--dropout 0.1 --per_device_train_max_tokens 2048 --learning_rate 3e-3 --warmup_steps 150",
    "tiny": TINY + "--dropout 0.3 --gradient_accumulation_steps 2 --learning_rate 5e-3 --warmup_steps 800",
    "small": "--d_model 256 --encoder_layers 3 --decoder_layers 3 --encoder_attention_heads 4 "
    "--decoder_attention_heads 4 --encoder_ffn_dim 1024 --decoder_ffn_dim 1024 --dropout 0.2 --learning_rate 2e-3 "
    "--warmup_steps 600",
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
    """Xavier by 0.5, and dropout at its exact probability, where ours on a CPU is the nearest multiple of 1/256."""
    xavier(model, scale=lambda layer: 0.5)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.forward = partial(nn.Dropout.forward, module)


def linears(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """The linear modules of all layers; the output projection is the embedding matrix."""
    return [(name, one) for name, one in model.named_modules() if isinstance(one, nn.Linear) and ".layers." in name]


def layer_of(name: str) -> int:
    return 1 + int(name.split(".layers.")[1].split(".")[0])


MATRICES = {
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
    "xavier by 0.5, exact dropout": exact_dropout,
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


def train_one(matrices: str, embeddings: float, argv: list[str]):
    """Runs train.py in this process, with other initial weights."""
    sys.path.insert(0, str(REPOSITORY))
    import train
    from vanilla_transformer.training import builders, distributed

    make_model = builders.make_model

    def make_initialized(*arguments):
        model = make_model(*arguments)
        with torch.no_grad():
            initialize(model, matrices, embeddings or model.config.d_model**-0.5)
        return model

    builders.make_model = make_initialized
    sys.argv = ["train.py", *argv]
    with distributed.exit_on_error():
        train.main()


def run_all(options: argparse.Namespace, others: list[str]) -> dict[tuple[str, float], list[dict]]:
    """Trains with each key of MATRICES, standard deviation of embeddings and seed, unless that run has its results.

    Returns what [`read_run`] does for each seed, by key and standard deviation.
    """
    runs: dict[tuple[str, float], list[dict]] = {}
    for seed, matrices, embeddings in itertools.product(options.seeds, options.matrices, options.embeddings):
        name = "-".join([options.size, matrices, str(embeddings), *others, str(seed)])
        output_dir = options.output.resolve() / re.sub(r"[^\w.]+", "-", name)
        if not (output_dir / "all_results.json").exists():
            print(f"{name} ...", flush=True)
            argv = ["--dataset_name", str(Path(options.data).resolve()), "--source_lang", "en", "--target_lang", "de"]
            argv += ["--vocab_size", "10000", *SIZES[options.size].split(), "--seed", str(seed)]
            argv += ["--max_steps", str(options.max_steps), "--eval_steps", str(options.eval_steps)]
            argv += ["--bleu_tokenize", "none", "--logging_steps", "5", "--output_dir", str(output_dir), *others]
            if any(output_dir.glob("checkpoint-*")):
                argv.append("--resume_from_checkpoint")
            command = [sys.executable, __file__, "--one", matrices, str(embeddings), *argv]
            done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
            if done.returncode:
                sys.exit(done.stderr[-2000:])
        run = read_run(output_dir)
        print(f"{name}: validation loss {run['loss']:.3f}, BLEU {run['bleu']:.2f}", flush=True)
        runs.setdefault((matrices, embeddings), []).append(run)
    return runs


def read_run(output_dir: Path) -> dict:
    """The final validation loss and BLEU of a run, its target tokens, and its training curve as (step, loss)."""
    results = json.loads((output_dir / "all_results.json").read_text(encoding="utf-8"))
    newest = max(output_dir.glob("checkpoint-*"), key=lambda path: int(path.name.removeprefix("checkpoint-")))
    history = json.loads((newest / "trainer_state.json").read_text(encoding="utf-8"))["history"]
    return {
        "loss": results["eval_loss"],
        "bleu": results["eval_bleu"],
        "tokens": results["train_target_tokens"],
        "curve": [(entry["step"], entry["loss"]) for entry in history if "loss" in entry],
    }


def write_page(options: argparse.Namespace, runs: dict[tuple[str, float], list[dict]]):
    """A table of all runs, and a picture of the mean training loss for each kind of initial weights."""
    rows = []
    for (matrices, embeddings), found in sorted(runs.items(), key=lambda item: mean(item[1], "loss")):
        cells = [", ".join(f"{run[key]:.{digits}f}" for run in found) for key, digits in [("loss", 3), ("bleu", 2)]]
        rows.append([matrices, str(embeddings or "1/sqrt(d)"), cells[0], cells[1], f"{mean(found, 'bleu'):.2f}"])
    title = f"Initial weights, {options.size}, {options.max_steps} steps"
    page = report.heading(title, ["torch"])
    tokens = mean(itertools.chain.from_iterable(runs.values()), "tokens")
    page += ["", f"Seeds {', '.join(map(str, options.seeds))}; {tokens / 1e6:.1f} million target tokens each.", ""]
    columns = ["matrices", "embeddings", "validation loss", "BLEU", "mean BLEU"]
    page += [*report.table(columns, rows), "", f"![training loss]({options.size}.png)"]
    (options.output / f"{options.size}.md").write_text("\n".join([*page, ""]), encoding="utf-8")
    figure = Figure(figsize=(8, 5), layout="constrained")
    axis = figure.subplots()
    for (matrices, embeddings), found in runs.items():
        steps = [step for step, _ in found[0]["curve"]]
        losses = np.mean([[loss for _, loss in run["curve"]] for run in found], axis=0)
        axis.plot(steps, losses, label=f"{matrices}, embeddings {embeddings or '1/sqrt(d)'}")
    axis.set(title=title, xlabel="step", ylabel="training loss (nats per target token)")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(options.output / f"{options.size}.png", dpi=110)


def mean(runs: Iterable[dict], key: str) -> float:
    return statistics.mean(run[key] for run in runs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="English and German, a dataset directory")
    parser.add_argument("--output", required=True, type=Path, help="where the runs are kept")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--matrices", nargs="+", choices=MATRICES, default=list(MATRICES), metavar="NAME")
    parser.add_argument("--embeddings", nargs="+", type=float, default=[0.0, 0.02], help="0: 1 / sqrt(d_model)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--max_steps", type=int, default=750)
    parser.add_argument("--eval_steps", type=int, default=375)
    options, others = parser.parse_known_args()  # others are options of train.py
    options.output.mkdir(parents=True, exist_ok=True)
    write_page(options, run_all(options, others))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        train_one(sys.argv[2], float(sys.argv[3]), sys.argv[4:])
    else:
        main()
