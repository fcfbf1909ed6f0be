"""Print the tables of docs/results.md: what several seeds of each system scored, and what their training took.

Also draws the validation BLEU of each run to EVALUATION/training.png.

python benchmarks/quality.py EVALUATION... [--references FILE]

EVALUATION is a directory that `vanilla-transformer evaluate --output` wrote for models of train.py whose directories
end in their seeds: published-1, published-2, student-1. What the tables need of their all_results.json and newest
checkpoints is kept in EVALUATION/runs.json, so that they can be printed again without the models. The translations of
a model that is no longer there may be given to evaluate as a file of its name: --hypotheses published-1.txt.

With the references, a line for each sentence, a last table compares the systems that have seeds in common, over the
seeds of all the evaluations together.
"""

import argparse
import json
import re
import statistics
from itertools import combinations
from pathlib import Path

import numpy
from matplotlib.figure import Figure
from sacrebleu.metrics import BLEU
from tabulate import tabulate

from vanilla_transformer.commands.evaluate import file_name

OF_A_RUN = ("num_parameters", "train_steps", "train_target_tokens", "train_runtime", "eval_bleu")


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("evaluations", type=Path, nargs="+", help="directories that evaluate --output wrote")
    parser.add_argument("--references", type=Path, metavar="FILE", help="compare the systems over their seeds, too")
    args = parser.parse_args(argv)
    found = {folder: json.loads((folder / "results.json").read_text(encoding="utf-8")) for folder in args.evaluations}
    for folder, results in found.items():
        results["systems"] = {name.removesuffix(".txt"): system for name, system in results["systems"].items()}
        kept = folder / "runs.json"
        runs = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
        new = [name for name in results["systems"] if name not in runs and Path(name, "all_results.json").exists()]
        runs |= {name: read_run(Path(name)) for name in new}
        kept.write_text(json.dumps(runs, indent=2), encoding="utf-8")
        draw_training(runs, folder / "training.png")
        print_table(by_system(results, runs))
        print_table(by_seed(results, runs))
    if args.references:
        references = lines_of(args.references)
        for results in found.values():
            if len(references) != results["sentences"]:
                parser.error(f"{args.references} has {len(references)} lines, not {results['sentences']}.")
        print_table(by_pair(found, references))
    for metric, signature in results["signatures"].items():
        print(f"- {metric}: `{signature}`")


def print_table(rows: list[dict]):
    print(tabulate(rows, "keys", "github", disable_numparse=True), end="\n\n")


def read_run(model: Path) -> dict:
    results = json.loads((model / "all_results.json").read_text(encoding="utf-8"))
    states = model.glob("checkpoint-*[0-9]/trainer_state.json")  # none, if they were deleted to save space
    history = max((json.loads(state.read_text(encoding="utf-8"))["history"] for state in states), key=len, default=[])
    evaluations = [(entry["step"], entry["eval_bleu"]) for entry in history if "eval_bleu" in entry]
    return {key: results[key] for key in OF_A_RUN} | {"evaluations": evaluations}


def by_system(results: dict, runs: dict) -> list[dict]:
    """One row for each system: mean and standard deviation of the scores over its seeds, size, and mean cost."""
    systems = {}
    for name in results["systems"]:
        systems.setdefault(system_of(name), []).append(name)
    rows = []
    for system, names in systems.items():
        row = {"system": system, "seeds": str(len(names))}
        for metric in results["signatures"]:
            row[metric] = mean_and_deviation([results["systems"][name][metric]["score"] for name in names])
        trained = [runs[name] for name in names if name in runs]
        if trained:
            row["parameters"] = f"{trained[0]['num_parameters']:,}"
            row["target tokens"] = f"{statistics.mean(run['train_target_tokens'] for run in trained) / 1e6:.1f} M"
            row["hours of training"] = f"{statistics.mean(run['train_runtime'] for run in trained) / 3600:.2f}"
        rows.append(row)
    return rows


def by_seed(results: dict, runs: dict) -> list[dict]:
    """One row for each model: its scores, p of BLEU against the first model, and its training."""
    rows = []
    for name, system in results["systems"].items():
        precisions = "/".join(f"{precision:.1f}" for precision in system["precisions"])
        p_value = system["BLEU"]["p_value"]
        rows.append(
            {
                "model": Path(name).name if name in runs else system_of(name),
                "BLEU": f"{system['BLEU']['score']:.2f}",
                "precisions": precisions,
                "BP": f"{system['brevity_penalty']:.3f}",
                "chrF2": f"{system['chrF2']['score']:.2f}",
                "p": "" if p_value is None else f"{p_value:.3f}",
                "steps": f"{runs[name]['train_steps']:,}" if name in runs else "",
                "validation BLEU": f"{runs[name]['eval_bleu']:.2f}" if name in runs else "",
            }
        )
    return rows


def by_pair(found: dict[Path, dict], references: list[str]) -> list[dict]:
    """One row for every two systems with seeds in common: how much higher the mean BLEU of the second is over these.

    The 95 % interval and p are those of a paired bootstrap test (Koehn, 2004) of 1,000 resamples, each of which takes
    the same sentences from all models. `found` has the results of each evaluation by its directory.
    """
    signature = dict(part.split(":") for part in next(iter(found.values()))["signatures"]["BLEU"].split("|"))
    bleu = BLEU(lowercase=signature["case"] == "lc", tokenize=signature["tok"], force=True)
    resamples = numpy.random.default_rng(12345).integers(len(references), size=(1000, len(references)))
    resamples[0] = numpy.arange(len(references))  # the test set itself
    scores: dict[str, dict[tuple[int, str], numpy.ndarray]] = {}  # by system, number of the evaluation and seed
    names = [(number, folder, name) for number, folder in enumerate(found) for name in found[folder]["systems"]]
    for number, folder, name in names:
        if "+" not in name and (seed := re.search(r"-(\d+)$", name)):
            texts = lines_of(folder / "hypotheses" / file_name(name))
            counts = numpy.array(bleu._extract_corpus_statistics(texts, [references]))
            sums = [counts[sentences].sum(0) for sentences in resamples]
            ours = numpy.array([bleu._compute_score_from_stats([*map(int, one)]).score for one in sums])
            scores.setdefault(system_of(name), {})[number, seed[1]] = ours
    rows = []
    for (name, ones), (other, others) in combinations(scores.items(), 2):
        seeds = sorted(ones.keys() & others)
        if len(seeds) > 1:
            each = numpy.array([others[seed] - ones[seed] for seed in seeds])
            observed, *resampled = each.mean(0)
            low, high = numpy.percentile(resampled, [2.5, 97.5])
            by_chance = abs(resampled - numpy.mean(resampled)) >= abs(observed)
            row = {"of": other, "over": name, "seeds": ", ".join(seed for _, seed in seeds)}
            row |= {"BLEU": f"{observed:+.2f}", "95 %": f"{low:+.2f} to {high:+.2f}"}
            row |= {"p": f"{(by_chance.sum() + 1) / len(resamples):.3f}"}
            rows.append(row | {"of each seed": ", ".join(f"{one:+.2f}" for one in each[:, 0])})
    return rows


def lines_of(file: Path) -> list[str]:
    """The lines of a file, in which only a line feed ends one."""
    return file.read_text(encoding="utf-8").removesuffix("\n").split("\n")


def draw_training(runs: dict, path: Path):
    """Validation BLEU over the steps of each run, a color for each system; the dots are the final weights."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axis = figure.subplots()
    colors: dict[str, str] = {}
    for name, run in runs.items():
        system = system_of(name)
        is_first = system not in colors
        color = colors.setdefault(system, f"C{len(colors)}")
        axis.plot(*zip(*run["evaluations"], strict=True), color=color, alpha=0.6)
        axis.plot(run["train_steps"], run["eval_bleu"], "o", color=color, label=system if is_first else None)
    lowest = min((run["eval_bleu"] for run in runs.values()), default=0)
    axis.set(xlabel="step", ylabel="validation BLEU", xlim=(0, None), ylim=(max(0, lowest - 10), None))
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=110)


def system_of(name: str) -> str:
    """outputs/published-2 -> published; outputs/student-1+outputs/student-2 -> student, ensemble of 2."""
    systems = [re.sub(r"-\d+$", "", Path(part).name) for part in name.split("+")]
    return systems[0] if len(systems) == 1 else f"{systems[0]}, ensemble of {len(systems)}"


def mean_and_deviation(scores: list[float], digits: int = 2) -> str:
    mean = f"{statistics.mean(scores):.{digits}f}"
    return f"{mean} ± {statistics.stdev(scores):.{digits}f}" if len(scores) > 1 else mean


if __name__ == "__main__":
    main()
