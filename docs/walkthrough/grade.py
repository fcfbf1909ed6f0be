"""Grade what students hand in: a my_transformer.py, as checks.py writes it from the exercises.

python docs/walkthrough/grade.py my_transformer.py
python docs/walkthrough/grade.py submissions --parts attention padding_mask causal_mask

Each part is compared with the package, beside the provided solutions of all other parts: one mistake costs one part.
A part that is not in the file is not done. Of a folder, each .py file is graded; with several files, a table follows.
Exits with 1 if a part is not right.

The code runs in a process of its own, with a time limit for each part. That stops endless loops; it is no protection
from malicious code.
"""

import argparse
import contextlib
import io
import json
import subprocess
import sys
import threading
from pathlib import Path

from tabulate import tabulate

RIGHT, WRONG, MISSING = "right", "wrong", "not done"


def grade_part(name: str, text: str) -> tuple[str, str]:
    """The verdict on a part of a submission, and why."""
    import checks

    if checks.find_definition(text, name) is None:
        return MISSING, ""
    for other in set(checks.CASES) - {name}:
        while definition := checks.find_definition(text, other):
            text = text.replace(definition, "")
    names = vars(checks.solved()) | {"__name__": "submission"}
    try:
        exec(compile(text, "submission", "exec"), names)
        checks.check(names[name])
    except NotImplementedError as error:
        return MISSING, str(error)
    except Exception as error:
        *_, last = str(error).splitlines() or [type(error).__name__]  # the mistake, if it has a name
        return WRONG, last.removeprefix(f"{name}, ")
    return RIGHT, ""


def grade_here(path: Path, parts: list[str] | None, skip: int):
    """Prints as JSON the names of the parts, then for each but the first `skip` a line [verdict, why]."""
    from checks import CASES

    out, text = sys.stdout, path.read_text(encoding="utf-8")
    names = [name for name in CASES if parts is None or name in parts]
    print(json.dumps(names), flush=True)
    for name in names[skip:]:
        with contextlib.redirect_stdout(io.StringIO()):
            found = grade_part(name, text)
        print(json.dumps(found), file=out, flush=True)


def grade(path: Path, parts: list[str] | None, seconds: float) -> dict[str, tuple[str, str]]:
    """The verdict on each of the parts, or on all, and why; raises SyntaxError or OSError if the file cannot be read."""
    compile(path.read_text(encoding="utf-8"), str(path), "exec")
    found, names = {}, None
    while names is None or len(found) < len(names):
        command = [sys.executable, __file__, str(path), "--skip", str(len(found))]
        command += ["--parts", *parts] if parts else []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8") as child:
            names, line = json.loads(child.stdout.readline()), "first"
            while line and len(found) < len(names):
                timer = threading.Timer(seconds, child.kill)
                timer.start()
                line = child.stdout.readline()
                timer.cancel()
                ended = WRONG, f"it ended the program or took over {seconds:g} s"
                found[names[len(found)]] = json.loads(line) if line else ended
    return found


def main(argv: list[str] | None = None):
    """Prints the verdicts; exits with 1 if a part is not right, with 2 if a file cannot be read."""
    parser = argparse.ArgumentParser(description="Grade files as the exercises write them: my_transformer.py.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="files, or folders with such files")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="only these, such as attention (default: all)")
    parser.add_argument("--seconds", type=float, default=60, help="time for each part (default: 60)")
    parser.add_argument("--skip", type=int, help=argparse.SUPPRESS)  # for the process that runs the code
    options = parser.parse_args(argv)
    if options.skip is not None:
        return grade_here(options.files[0], options.parts, options.skip)
    if options.parts:
        from checks import CASES

        if unknown := set(options.parts) - CASES.keys():
            parser.error(f"there is no part {min(unknown)}; the parts are {', '.join(CASES)}.")
    rows, files = [], []
    for given in options.files:
        files += sorted(given.glob("*.py")) if given.is_dir() else [given]
    if not files:
        parser.error(f"there is no .py file in {options.files[0]}.")
    for path in files:
        try:
            found = grade(path, options.parts, options.seconds)
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            print(f"{path}: {error}")
            rows.append([path, "cannot be read"])
            continue
        count = [verdict for verdict, _ in found.values()].count(RIGHT)
        print(f"{path}\n{tabulate([[name, *of] for name, of in found.items()], tablefmt='plain')}")
        print(f"{count} of {len(found)} parts are right\n", flush=True)
        names = {verdict: [name for name, of in found.items() if of[0] == verdict] for verdict in (WRONG, MISSING)}
        rows.append([path, f"{count} of {len(found)}", ", ".join(names[WRONG]), len(names[MISSING])])
    if len(rows) > 1:
        print(tabulate(rows, headers=["file", RIGHT, WRONG, MISSING], tablefmt="github"))
    sys.exit(2 if any(len(row) == 2 for row in rows) else int(any(row[2] or row[3] for row in rows)))


if __name__ == "__main__":
    main()
