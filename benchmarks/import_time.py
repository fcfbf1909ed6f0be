"""How long importing the package takes, compared with the libraries it depends on.

python benchmarks/import_time.py

Each import runs in a new Python process, in turn. Prints a table and writes a page with a picture to
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
    "Marian": "from transformers import MarianMTModel",
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
