"""Mutation testing: changes one place of a file at a time, and reports the changes that the fast tests do not notice.

    python tests/mutants.py --number 50 --files decoding_vanilla_transformer.py training/state.py

All runs use a copy of the repository, in forks of a Python that has imported the libraries. The first run for a file
leaves it unchanged, and records which lines each test executes. A mutant is then run against the tests that execute
its line only, the fastest first; against all if none does, as for a line that runs at import. In these runs, pytest
loads this file as a plugin.
"""

import argparse
import ast
import contextlib
import difflib
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path

import pytest
from forked_python import programs
from tqdm import tqdm

ROOT = Path(__file__).parents[1]
PACKAGE = "vanilla_transformer"
TESTS = {
    "modeling_vanilla_transformer.py": "inspection/test_checks.py model/test_modeling.py model/test_decoding.py "
    "model/test_backends.py",
    "loss_vanilla_transformer.py": "model/test_modeling.py training/test_optimization.py",
    "decoding_vanilla_transformer.py": "model/test_decoding.py",
    "data/batches.py": "data/test_batches.py",
    "data/stream.py": "data/test_stream.py data/test_batches.py",
    "data/tokenizer.py": "data/test_tokenizer.py",
    "training/model.py": "training/test_model.py",
    "training/dropout.py": "training/test_dropout.py",
    "training/checkpoint.py": "training/test_checkpoint.py",
    "training/final_weights.py": "training/test_checkpoint.py",
    "training/resume.py": "training/test_resuming.py training/test_checkpoint.py",
    "training/run_folder.py": "training/test_run_folder.py",
    "training/processes.py": "training/test_processes.py training/test_weights.py",
    "training/hardware.py": "training/test_hardware.py",
    "training/optimization.py": "training/test_optimization.py",
    "training/state.py": "training/test_state.py",
    "training/weights.py": "training/test_weights.py",
}

# ------------------------------------------------------------------------------------------------------------- mutants

SWAPS = {
    **{ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt)},
    **{ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,)},
    **{ast.In: (ast.NotIn,), ast.NotIn: (ast.In,), ast.And: (ast.Or,), ast.Or: (ast.And,)},
    **{ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.Div,), ast.Div: (ast.Mult,), ast.Pow: (ast.Mult,)},
    **{ast.FloorDiv: (ast.Mult,), ast.Mod: (ast.FloorDiv,), ast.BitAnd: (ast.BitOr,), ast.BitOr: (ast.BitAnd,)},
    **{ast.LShift: (ast.RShift,), ast.RShift: (ast.LShift,), ast.Break: (ast.Continue,), ast.Continue: (ast.Break,)},
}
OPPOSITES = {"min": "max", "max": "min", "amin": "amax", "amax": "amin", "any": "all", "all": "any"}
SYMMETRIC = {*OPPOSITES, "promote_types", "paper_learning_rate"}  # functions that ignore the order of their arguments


def nodes(node: ast.AST, line: int = 0) -> Iterator[tuple[ast.AST, int]]:
    """The nodes that affect what the code does, with their lines.

    Not annotations, messages, `strict` of zip, or the constants of a module, which are sizes that someone chose.
    """
    line = getattr(node, "lineno", line)
    is_repr = isinstance(node, ast.FunctionDef) and node.name == "__repr__"
    if is_repr or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
        return
    yield node, line
    for name, value in ast.iter_fields(node):
        if isinstance(node, ast.Raise) or name in ("annotation", "returns"):
            continue
        if isinstance(node, ast.keyword) and node.arg == "strict" or is_constant(node):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from nodes(child, line)


def is_constant(node: ast.AST) -> bool:
    """Whether a statement gives values to names in capitals, as `EPOCHS = 8`."""
    names = (
        [name.id for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name)]
        if isinstance(node, ast.Assign)
        else []
    )
    return bool(names) and all(name.isupper() for name in names)


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """The mutations of a node."""

    def changed(**fields) -> ast.AST:
        return type(node)(**dict(ast.iter_fields(node)) | fields)

    swaps = SWAPS.get(type(getattr(node, "op", node)), ())
    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                yield from (changed(ops=[*ops[:i], other(), *ops[i + 1 :]]) for other in SWAPS[type(op)])
        case ast.BinOp() | ast.BoolOp():
            yield from (changed(op=other()) for other in swaps)
        case ast.UnaryOp():
            yield node.operand
        case ast.Constant(value=bool()):
            yield changed(value=not node.value)
        case ast.Constant(value=int() | float()):
            yield from (changed(value=node.value + 1), changed(value=node.value - 1))
        case ast.If() | ast.While() | ast.IfExp():
            yield changed(test=ast.UnaryOp(ast.Not(), node.test))
        case ast.comprehension():
            for i, test in enumerate(node.ifs):
                yield changed(ifs=[*node.ifs[:i], ast.UnaryOp(ast.Not(), test), *node.ifs[i + 1 :]])
        case ast.Return(value=ast.AST()) if not (isinstance(node.value, ast.Constant) and node.value.value is None):
            yield changed(value=None)
        case ast.Raise() | ast.Delete() | ast.Expr(value=ast.Call()):
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()
        case ast.AugAssign():
            yield ast.Pass()
            yield from (changed(op=other()) for other in swaps)
        case ast.Break() | ast.Continue():
            yield from (other() for other in swaps)
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), args=args) if name not in SYMMETRIC:
            for i in range(len(args) - 1):
                yield changed(args=[*args[:i], args[i + 1], args[i], *args[i + 2 :]])
        case ast.Name() if node.id in OPPOSITES:
            yield changed(id=OPPOSITES[node.id])
        case ast.Attribute() if node.attr in OPPOSITES:
            yield changed(attr=OPPOSITES[node.attr])
        case ast.Slice():
            yield from (changed(**{end: None}) for end in ("lower", "upper") if getattr(node, end) is not None)


def draw(every: list[tuple[str, int, ast.AST, ast.AST]], number: int, seed: int) -> list[tuple]:
    """So many random mutants, in their order; mostly the same ones after other code has changed."""
    seen, numbers = Counter(), []
    for file, _, old, new in every:
        what = f"{seed} {file} {ast.unparse(old)} -> {ast.unparse(new)}"
        seen[what] += 1
        numbers.append(blake2b(f"{what} {seen[what]}".encode()).digest())
    return [every[i] for i in sorted(sorted(range(len(every)), key=numbers.__getitem__)[:number])]


class Replace(ast.NodeTransformer):
    """Replaces one node by another."""

    def __init__(self, old: ast.AST, new: ast.AST):
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


def mutated(tree: ast.AST, old: ast.AST, new: ast.AST) -> str:
    """The source of a module with one node replaced; without comments, and each statement on one line."""
    Replace(old, new).visit(tree)
    text = ast.unparse(tree)
    Replace(new, old).visit(tree)
    return text


def first_difference(before: str, after: str) -> int:
    """The number of the line at which two texts begin to differ."""
    lines = itertools.zip_longest(before.splitlines(), after.splitlines())
    return next(number for number, (a, b) in enumerate(lines, 1) if a != b)


# ------------------------------------------------------------------------------------------------------------ the runs


def copy_repository(folder: Path):
    """Copies the files that git tracks, and those that it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())


def passes(folder: Path, python: Path, number: int, file: str, text: str, **plan) -> bool:
    """Whether the tests of a file pass in the copy of the repository if the file has this text."""
    path = folder / PACKAGE / file
    original = path.read_bytes()
    path.write_text(text, encoding="utf-8")
    os.utime(path, (number, number))  # a time of its own, so that Python does not reuse its bytecode
    (folder / "plan.json").write_text(json.dumps({"file": str(path), **plan}))
    tests = [f"tests/{one}" for one in TESTS[file].split()]
    command = [python, "-m", "pytest", "-p", "mutants", "-p", "no:cacheprovider", "-n", "0", "-xq", *tests]
    with open(folder / "log", "w") as log:
        done = subprocess.run(command, cwd=folder, stdout=log, stderr=log)
    path.write_bytes(original)
    return done.returncode == 0


class Plugin:
    """Runs the tests of the plan in its order; if it has none, records the lines that each test executes."""

    def __init__(self):
        self.plan = json.loads(Path("plan.json").read_text())
        self.test, self.status, self.times, self.reached = "", 1, defaultdict(float), defaultdict(set)
        resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))

    def pytest_collection_modifyitems(self, items: list):
        if "tests" in self.plan:
            order = {test: number for number, test in enumerate(self.plan["tests"])}
            items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])
        else:
            sys.settrace(self.enter)

    def pytest_runtest_logstart(self, nodeid: str):
        if "tests" not in self.plan:
            sys.settrace(self.enter)  # again, since an exception in the trace function ends it, as too deep recursion
        signal.alarm(self.plan["seconds"])  # ends the process if the test takes longer
        self.test = nodeid.partition("::")[0]  # what is set up counts for the whole file, whose tests may share it

    def pytest_runtest_call(self, item):
        self.test = item.nodeid

    def pytest_runtest_logreport(self, report):
        self.times[report.nodeid] += report.duration
        self.test = report.nodeid.partition("::")[0]

    def enter(self, frame, event, argument):
        return self.reach if frame.f_code.co_filename == self.plan["file"] else None

    def reach(self, frame, event, argument):
        self.reached[self.test].add(frame.f_lineno)
        return self.reach

    def pytest_sessionfinish(self, exitstatus: int):
        sys.settrace(None)
        self.status = exitstatus
        found = {"times": self.times, "reached": {test: sorted(lines) for test, lines in self.reached.items()}}
        Path("found.json").write_text(json.dumps(found))

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self):
        sys.stdout.flush()
        os._exit(self.status)  # unloading all libraries takes longer than most tests


def pytest_configure(config):
    config.pluginmanager.register(Plugin())


def tests_at(line: int, times: dict[str, float], reached: dict[str, list[int]]) -> list[str]:
    """The tests that execute a line, themselves or in what is set up for them, or else all; the fastest first."""
    found = [test for test in times if {line} & {*reached.get(test, ()), *reached.get(test.partition("::")[0], ())}]
    files = list(dict.fromkeys(test.partition("::")[0] for test in times))
    return sorted(found or times, key=lambda test: (files.index(test.partition("::")[0]), times[test]))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="seed for choosing the mutants (default: 0)")
    parser.add_argument("--number", type=int, default=150, help="number of mutants, over all files (default: 150)")
    parser.add_argument(
        "--files", nargs="+", choices=TESTS, default=list(TESTS), metavar="FILE", help=", ".join(TESTS)
    )
    parser.add_argument("--show", action="store_true", help="also print the mutants that are killed")
    arguments = parser.parse_args()
    if arguments.number < 1:
        parser.error("--number must be at least 1")
    return arguments


def main():
    arguments = parse_arguments()
    trees = {file: ast.parse((ROOT / PACKAGE / file).read_text(encoding="utf-8")) for file in arguments.files}
    every = [
        (file, line, old, new)
        for file in trees
        for old, line in nodes(trees[file])
        for new in variants(old)
        if ast.unparse(new) != ast.unparse(old)  # as after swapping equal arguments
    ]
    number = min(arguments.number, len(every))
    chosen = draw(every, number, arguments.seed)
    scores = []
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = place / "copy"
        copy_repository(folder)
        environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{folder / 'tests'}"}
        commands = stack.enter_context(programs(place, environment, python=""))
        bar = stack.enter_context(tqdm(total=number, desc="Mutants"))
        run = partial(passes, folder, commands / "python")
        for file, group in itertools.groupby(chosen, key=lambda mutant: mutant[0]):
            plain = ast.unparse(trees[file])
            if not run(bar.n, file, plain, seconds=600):
                sys.exit(f"mutants.py: the tests fail on the unchanged {file}:\n{(folder / 'log').read_text()}")
            found = json.loads((folder / "found.json").read_text())
            seconds = 10 + int(3 * max(found["times"].values()))  # for one test
            killed = total = 0
            for _, line, old, new in group:
                text = mutated(trees[file], old, new)
                tests = tests_at(first_difference(plain, text), **found)
                survives = run(bar.n + 1, file, text, seconds=seconds, tests=tests)
                killed, total = killed + (not survives), total + 1
                if survives or arguments.show:
                    changes = difflib.unified_diff(plain.splitlines(), text.splitlines(), n=0, lineterm="")
                    what = ["survived" if survives else "killed", *list(changes)[3:]]
                    bar.write(f"{PACKAGE}/{file}:{line} " + "\n    ".join(what))
                bar.update()
            scores.append((killed, total))
            bar.write(f"{file}: {killed} of {total} killed, {killed / total:.1%}")
    killed, total = map(sum, zip(*scores, strict=True))
    print(
        f"all: {killed} of {total} killed, {killed / total:.1%} (seed {arguments.seed}, {len(every):,} to choose from)"
    )


if __name__ == "__main__":
    main()
