"""How long importing the package takes, beside the libraries that it stands on.

python benchmarks/import_time.py

Each is imported by a Python of its own, one after the other. The package alone imports nothing; its classes, and the
libraries that they stand on, are loaded when one is asked for. Prints a table and writes a page, with a picture, to
benchmarks/results.
"""

import argparse
import statistics
import subprocess
import sys
import time

import report

IMPORTS = {
    "the libraries": "import torch, transformers",
    "ours": "import vanilla_transformer",
    "ours with them": "import torch, transformers, vanilla_transformer",
    "Marian's model": "from transformers import MarianMTModel",
    "our model": "from vanilla_transformer import VanillaTransformerForConditionalGeneration",
}


def seconds_of(code: str) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=report.at_least_one, default=11)
    report.add_options(parser)
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    measured = [{name: seconds_of(code) for name, code in IMPORTS.items()} for _ in range(rounds + 1)][1:]
    rows = []
    for name, code in IMPORTS.items():
        seconds = statistics.median(one[name] for one in measured)
        ratio = statistics.median(one[name] / one["the libraries"] for one in measured)
        rows.append([f"{name}: `{code}`", f"{seconds:.3f}", f"{ratio:.3f}"])
    page = report.heading("Importing", ["torch", "transformers"])
    page += ["", f"Medians of {rounds} rounds.", ""]
    page += report.table(["what", "seconds", "of the libraries' time"], rows)
    print("\n".join(page[4:]))
    picture = {name: 1000 * statistics.median(one[name] for one in measured) for name in IMPORTS}
    report.write_with_bars(options, "import_time", page, "Importing", {"": picture}, "milliseconds")


if __name__ == "__main__":
    main()
