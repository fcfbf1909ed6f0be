"""docs/walkthrough: the notebooks run, notice planted mistakes, and match their sources."""

import ast
import base64
import importlib
import json
import linecache
import math
import re
import runpy
import sys
import traceback
import warnings
from collections import Counter
from types import SimpleNamespace

import matplotlib
import pytest
import torch
from helpers import ROOT
from matplotlib import pyplot as plt
from transformers.utils import logging

FOLDER = ROOT / "docs" / "walkthrough"
SOURCES = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
TABLE_3 = SOURCES[-1]  # trains 16 models; it is run whole whenever build.py makes its notebook
sys.path.append(str(FOLDER))  # as for a script in that folder


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Runs a notebook outside the repository, and restores the process-wide settings that it changes."""
    monkeypatch.chdir(tmp_path)
    backend, threads = matplotlib.get_backend(), torch.get_num_threads()
    has_bars = logging.is_progress_bar_enabled()
    matplotlib.use("Agg")
    with warnings.catch_warnings():
        yield tmp_path
    plt.close("all")
    matplotlib.use(backend)
    torch.set_num_threads(threads)
    if has_bars:
        logging.enable_progress_bar()


@pytest.mark.parametrize(
    "source",
    [pytest.param(s, id=s.stem, marks=[] if s.stem[:2] in ("01", "02") else [pytest.mark.slow]) for s in SOURCES[:-1]],
)
def test_notebook_runs_from_top_to_bottom(source, elsewhere, capfd):
    """All its assertions hold, and it leaves no files behind."""
    runpy.run_path(str(source), run_name="__main__")
    assert capfd.readouterr().out.strip() and list(elsewhere.iterdir()) == []


@pytest.mark.slow
def test_table_3_in_two_steps_a_model_fails_at_its_last_assertions_only(elsewhere):
    code = TABLE_3.read_text(encoding="utf-8").replace("STEPS = 300", "STEPS = 2")
    with pytest.raises(AssertionError) as error:
        exec(compile(code, TABLE_3, "exec"), {"__name__": "x", "__file__": str(TABLE_3)})
    before, last = code[: code.rindex("# %% [markdown]")].rsplit("# %%\n", 1)
    assert last.startswith("for name in") and error.traceback[1].lineno > before.count("\n")


def texts_and_folders() -> dict:
    """The Markdown of each notebook, by its path."""
    notebooks = {path: json.loads(path.read_text(encoding="utf-8"))["cells"] for path in FOLDER.rglob("*.ipynb")}
    return {
        path: "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        for path, cells in notebooks.items()
    }


def test_notebooks_hold_their_pictures_and_link_to_what_exists():
    for path, text in texts_and_folders().items():
        shown = re.findall(r"!\[[^\]]+\](.[^\])]+.)", text)
        assert len(shown) >= 1 and all(one.startswith("[") for one in shown), path
        for name in shown:
            (data,) = re.findall(rf"(?m)^{re.escape(name)}: data:image/png;base64,(\S+)$", text)
            assert base64.b64decode(data).startswith(b"\x89PNG"), (path, name)
        for link in re.findall(r"\]\(([^)\s#]+)", text):
            assert "://" in link or (path.parent / link).exists(), (path, link)


def test_buttons_open_the_notebook_itself_from_the_one_named_repository():
    (repository,) = re.findall(r'repo_url: .*"https://github.com/(.+)"', (ROOT / "mkdocs.yml").read_text("utf-8"))
    base = f"https://colab.research.google.com/github/{repository}/blob/main/docs/walkthrough"
    texts = texts_and_folders()
    for path, text in texts.items():
        where = path.relative_to(FOLDER).as_posix()
        assert re.findall(r"\]\((https://colab\S+)\)", text) == [f"{base}/{where}"]
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    linked = {FOLDER / link for link in re.findall(rf"(?m)^\[\d+\]: {base}/(\S+)$", readme)}
    assert linked <= set(texts) and len(linked) == len(SOURCES)


def test_notebook_alone_in_an_empty_folder_gets_what_it_needs(elsewhere, monkeypatch):
    """Its first cell clones the repository; without a network, this one."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    if not (ROOT / ".git").exists():
        pytest.skip("this copy of the repository cannot be cloned")
    monkeypatch.setenv("REPOSITORY_URL", ROOT.as_uri())
    notebook = nbformat.read(FOLDER / "exercises" / "05_layers_and_stacks_exercise.ipynb", as_version=4)
    setup, imports = [cell for cell in notebook.cells if cell.cell_type == "code"][:2]
    asked = "import vanilla_transformer as v\nprint(v.__file__, checks.MINE, len(read_short('train')))"
    notebook.cells = [setup, imports, nbformat.v4.new_code_cell(asked)]
    for _ in range(2):  # the second time all is there
        run = nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(elsewhere)}})
        run.execute()
        clone = elsewhere / "vanilla-transformer"
        package, mine, pairs = notebook.cells[2].outputs[0].text.split()
        assert package == str(clone / "vanilla_transformer" / "__init__.py") and int(pairs) > 1000
        assert mine == str(clone / "docs" / "walkthrough" / "my_transformer.py")


PLANTED = [  # notebook, correct code, mistake, what the assertion names
    ("01_attention", "np.sqrt(16)", "np.sqrt(15)", ""),
    ("02_heads_and_masks", "x.transpose(1, 2).flatten(-2)", "x.reshape(len(x), x.shape[2], -1)", "MultiHeadAttention"),
    ("05_layers_and_stacks", "2 * attention + feed_forward", "attention + feed_forward", ""),
    ("06_training_and_decoding", "(p - q) / len(q)", "(p - q) / q.numel()", ""),
    ("06_training_and_decoding", "steps * warmup**-1.5)", "steps * warmup**-1.4)", ""),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "right", "wrong", "message"), PLANTED, ids=[f"{m[0][:2]} {m[2]}" for m in PLANTED])
def test_notebook_notices_a_mistake(name, right, wrong, message, elsewhere):
    source = FOLDER / f"{name}.py"
    code = source.read_text(encoding="utf-8")
    assert code.count(right) == 1
    with pytest.raises(AssertionError, match=re.escape(message) if message else None):
        exec(compile(code.replace(right, wrong), name, "exec"), {"__name__": "x", "__file__": str(source)})


# ---------------------------------------------------------------------------------------------- what the reader writes


@pytest.fixture
def checks(elsewhere, monkeypatch):
    """docs/walkthrough/checks.py as a module, which keeps what readers write outside the repository."""
    module = importlib.import_module("checks")
    monkeypatch.setattr(module, "MINE", elsewhere / "my_transformer.py")
    monkeypatch.syspath_prepend(elsewhere)
    yield module
    sys.modules.pop("my_transformer", None)


def test_every_part_equals_the_package_and_has_known_mistakes(checks, capsys):
    parts = checks.solved()
    defined = [name for name, value in vars(parts).items() if getattr(value, "__module__", None) == "part"]
    assert defined == list(checks.CASES) and set(checks.MISTAKES) == set(checks.CASES)
    checks.check(*(getattr(parts, name) for name in defined))
    assert len(re.findall(r"equal to the package \([1-9]", capsys.readouterr().out)) == len(defined)


MISTAKES = importlib.import_module("checks").MISTAKES
KNOWN = [(name, *mistake) for name, of_part in MISTAKES.items() for mistake in of_part]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "right", "wrong", "message"), KNOWN, ids=[f"{m[0]}: {m[3]}" for m in KNOWN])
def test_known_mistake_is_named(name, right, wrong, message, checks):
    with pytest.raises(AssertionError, match=re.escape(f": {message}.")):
        checks.check(getattr(checks.solved(name, right, wrong), name))


PROJECT = "q, k, v = self.q_proj(x), self.k_proj(attended), self.v_proj(attended)"
SPLIT_ALL = "q, k, v = (a.reshape(a.shape[0], a.shape[1], self.h, -1).transpose(1, 2) for a in (q, k, v))"
ATTEND = "out = torch.softmax(q @ k.mT / math.sqrt(k.shape[-1]), -1) @ v"
JOIN = "out = out.transpose(1, 2).reshape(x.shape)"
IN_OTHER_WORDS = {  # a part, the lines of its body, and what it is told: a mistake is known by what it computes
    "no transpose": (
        "def attention(q, k, v, mask=None):",
        ["w = torch.matmul(q, k)", "return torch.softmax(w / math.sqrt(k.size(-1)), -1) @ v, w"],
        "the keys are not transposed",
    ),
    "root of the paper's d": (
        "def attention(q, k, v, mask=None):",
        ["d = 512", "w = torch.softmax(torch.matmul(q, k.mT) * d**-0.5, -1)", "return w @ v, w"],
        "the scores are divided by the root of 512",
    ),
    "root of d": (
        "def forward(self, x, attended, mask=None):",
        [PROJECT, SPLIT_ALL, ATTEND.replace("k.shape", "x.shape"), JOIN, "return self.out_proj(out)"],
        "the scores are divided by the root of d; the width of a head is",
    ),
    "no heads": (
        "def forward(self, x, attended, mask=None):",
        [PROJECT, ATTEND, "return self.out_proj(out)"],
        "the features are not split: this is one head",
    ),
    "k_proj for v": (
        "def forward(self, x, attended, mask=None):",
        [PROJECT.replace("v_proj", "k_proj"), SPLIT_ALL, ATTEND, JOIN, "return self.out_proj(out)"],
        "the values are made with k_proj",
    ),
}


@pytest.mark.parametrize("mistake", IN_OTHER_WORDS)
def test_mistake_is_named_however_it_is_written(mistake, checks):
    head, body, message = IN_OTHER_WORDS[mistake]
    names = {"torch": torch, "math": math}
    exec("\n    ".join([head, *body]), names)
    if "self" in head:
        part = checks.solved().MultiHeadAttention
        part.forward = names["forward"]
    else:
        part = names["attention"]
    with pytest.raises(AssertionError, match=f"\n(Mistake|Probably): {message}"):
        checks.check(part)


def test_comparing_nothing_is_an_error(checks, monkeypatch):
    parts = checks.solved()
    monkeypatch.setattr(parts.Layer, "forward", lambda self, source, target: source)
    monkeypatch.setitem(checks.CASES, "embed", lambda part: iter(()))
    with pytest.raises(AssertionError, match="^embed: nothing was compared$"):
        checks.check(parts.embed)
    with pytest.raises(AssertionError, match="hardly a module has the name"):
        checks.compare_steps(parts.Layer(24, 40), checks.package_model(), *checks.token_ids(2, 1, 5))


def attention(q, k, v, mask=None):
    return v[..., 0], q @ k.transpose(-2, -1)


def padding_mask(ids):
    return ids[:, :2]


def causal_mask(length):
    raise NotImplementedError


WITHOUT_WEIGHT = type("LayerNorm", (torch.nn.Module,), {"__init__": lambda self, d: torch.nn.Module.__init__(self)})
SPLIT = ("MultiHeadAttention", "return x.unflatten(-1, (self.h, -1)).transpose(1, 2)")
EXPLAINED = {  # a part, or the name of one, correct code and a mistake in it; what it is told
    "other weights": (attention, "the weights without a mask: the largest difference is [0-9.]+[.]$"),
    "another shape": (padding_mask, r"its shape is \(2, 2\), and must be \(2, 1, 1, 7\)[.]"),
    "not written": (causal_mask, "^causal_mask is not written yet$"),
    "not written in part": (
        (*SPLIT, "raise NotImplementedError"),
        "^MultiHeadAttention.split_heads is not written yet$",
    ),
    "an error of torch": ((*SPLIT, 'raise NotImplementedError("for Half")'), "NotImplementedError: for Half"),
    "one tensor for two": (
        ("attention", "weights @ values, weights", "weights @ values"),
        r"it must return two tensors, \(output, weights\)[.]",
    ),
    "in place": (
        ("Layer", "x + self.dropout(sublayer(x))", "x.add_(sublayer(x))"),
        "^Layer, residual: it changes an argument in place.$",
    ),
    "no gradient": (
        ("EncoderLayer", "self.residual(x, ", "self.residual(x.detach(), "),
        "^EncoderLayer, the gradients of the output: no gradient reaches self_attn.* and [0-9]+ more.$",
    ),
    "no result": (
        ("train_step", "    return loss.item()", ""),
        "^train_step, .*: it is None, and must be [0-9.]+[.]$",
    ),
    "a weight less": (WITHOUT_WEIGHT, "Unexpected key.*weight"),
}
ERRORS = dict.fromkeys(("not written", "not written in part"), NotImplementedError) | {"a weight less": RuntimeError}
# An error of torch's says too little to be sure of the mistake.
for part, number, word in [
    ("greedy_search", -1, "Probably"),
    ("train_step", 5, "Probably"),
    ("attention", -1, "Mistake"),
]:
    *changed, message = MISTAKES[part][number]
    EXPLAINED[f"{word}: {message}"] = ((part, *changed), re.escape(f"\n{word}: {message}."))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPLAINED)
def test_check_explains_other_errors(name, checks):
    part, message = EXPLAINED[name]
    if isinstance(part, tuple):
        part = getattr(checks.solved(*part), part[0])
    with pytest.raises(ERRORS.get(name, AssertionError), match=message):
        checks.check(part)


@pytest.mark.parametrize(("other", "name"), [(lambda x: x, "<lambda>"), ("attention", "'attention'")])
@pytest.mark.parametrize("use", ["check", "keep"])
def test_what_is_no_part_is_named(use, other, name, checks):
    with pytest.raises(ValueError, match=f"^{name} is not the name of a part; the parts are attention, "):
        getattr(checks, use)(other)


def test_weights_load_strictly_both_ways_and_logits_are_equal(checks):
    theirs, ours = checks.package_model(), checks.solved().Transformer(50, 24, 3, 40, 2).double().eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    for module in ours.modules():
        if hasattr(module, "eps"):
            module.eps = 0.1
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        theirs.load_state_dict(ours.state_dict(), strict=True)
        source, target = checks.padded_source(), checks.token_ids(2, 9)
        expected = theirs(source, decoder_input_ids=target).logits
        torch.testing.assert_close(ours(source, target), expected, rtol=0, atol=1e-6)
        checks.compare_steps(ours, theirs, source, target)
        theirs.model.encoder.layers[1].fc2.bias += 1e-3
    with pytest.raises(AssertionError, match="^model.encoder.layers.1.fc2: the largest difference is 0.001"):
        checks.compare_steps(ours, theirs, source, target)


def run_cell(code: str, name: str, names: dict):
    """Runs a cell as a notebook does: it is no file, but linecache knows its lines."""
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    exec(compile(code, name, "exec"), names)


@pytest.mark.slow
def test_exercises_filled_with_the_solutions_give_the_model(build, checks):
    """The cells of the exercise notebooks that are filled and kept make my_transformer.py grow to the whole model."""
    blanks = 0
    for source in [source for source in SOURCES if build.has_exercise(source)]:
        path = build.exercise_path(source, FOLDER)
        assert build.find_difference(source, path, as_exercise=True) is None, path.name
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        solutions = [c for c in build.read_source(source).cells if not (build.is_answer(c) and c.cell_type == "code")]
        _, first, *_ = ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")  # after the setup
        imported = {
            one.asname or one.name for node in ast.walk(ast.parse(first)) for one in getattr(node, "names", ())
        }
        assert source.stem.startswith("08") or {"math", "np", "torch", "nn", "F"} <= imported  # as notebook 1 promises
        answers = ["".join(c["source"]) for c, s in zip(cells, solutions, strict=True) if build.is_answer(s)]
        assert answers and all(re.fullmatch(r"(?s)<details>.*\n\n.*Answers?\..*\n\n</details>", a) for a in answers)
        names = {"torch": torch, "nn": torch.nn, "math": math, "checks": checks, "PAD": 0, "START": 1, "END": 2}
        names["Counter"] = Counter
        sys.modules.pop("my_transformer", None)  # a notebook is a new process
        for name in re.findall(r'checks.part\("(\w+)"\)', source.read_text(encoding="utf-8")):
            names[name] = checks.part(name)
            assert names[name].__module__ == "my_transformer"
        for cell, solution in zip(cells, solutions, strict=True):
            code = "".join(cell["source"])
            is_part = "part" in solution.metadata.get("tags", [])
            assert ("raise NotImplementedError" in code) == is_part and not cell.get("outputs")
            if is_part:
                blanks += code.count("raise NotImplementedError")
                exec(compile(code, "blank", "exec"), dict(names))  # a blank can be run before it is filled
                filled = checks.FOLDER / f"cell {blanks}"
                run_cell(solution.source, str(filled), names)
            elif code.startswith("checks.keep("):
                exec(code, names)
    assert blanks == 26
    mine, solution = (path.read_text(encoding="utf-8") for path in (checks.MINE, checks.SOLUTION))
    for name in checks.CASES:
        assert checks.find_definition(mine, name) == checks.find_definition(solution, name)
    assert build.assemble(SOURCES) == solution


@pytest.mark.slow
def test_exercise_is_filled_and_kept_in_a_real_notebook(build, checks, elsewhere):
    """In a copy of the folder, as a reader would; Jupyter has the source of a cell, but in no file."""
    from nbclient.exceptions import CellExecutionError

    for name in ("checks.py", "transformer.py"):
        (elsewhere / name).write_text((FOLDER / name).read_text(encoding="utf-8"), encoding="utf-8")
    solution = (FOLDER / "transformer.py").read_text(encoding="utf-8")
    cells = "import math\nimport checks\nimport torch\nfrom torch import nn\nfrom transformer import *\n# %%\n"
    cells += "# %%\n".join(
        f"{checks.find_definition(solution, name)}\n# %%\nchecks.keep({name})\n"
        for name in ("LayerNorm", "greedy_search")
    )
    source = elsewhere / "01_reader.py"
    source.write_text(f"# %%\n{cells}", encoding="utf-8")
    build.build(source, elsewhere)
    text = (elsewhere / "my_transformer.py").read_text(encoding="utf-8")
    assert "class LayerNorm(nn.Module):" in text and "@torch.no_grad()\ndef greedy_search(" in text
    source.write_text(f"# %%\n{cells.replace('(x - ', '(y - ')}", encoding="utf-8")
    with pytest.raises(CellExecutionError, match="name 'y' is not defined") as caught:
        build.build(source, elsewhere)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", str(caught.value))
    assert re.search(r"-> \d+ +return \(y - x.mean", shown)  # the line of the cell
    assert shown.count("checks.py") == 1  # nearly all frames of checks.py are hidden


def test_what_is_kept_replaces_an_earlier_version_and_must_pass(checks, capsys):
    def keep(code):
        names = {"torch": torch, "PAD": 0}
        run_cell(code, "cell", names)
        checks.keep(names["padding_mask"])

    keep("def padding_mask(ids):\n    return ids.ne(PAD)[:, None, None]\n")
    keep("def padding_mask(ids):\n    return ids.gt(PAD)[:, None, None]\n")
    with pytest.raises(AssertionError, match="wrong way round"):
        keep("def padding_mask(ids):\n    return ids.eq(PAD)[:, None, None]\n")
    with pytest.raises(AssertionError, match="name 'helper' is not defined") as caught:
        keep("a = 1\n\ndef padding_mask(ids):\n    return helper(ids)\n")
    (error,) = traceback.extract_tb(caught.value.__cause__.__traceback__)  # the reader's line and no other
    assert (error.filename, error.lineno, error.line) == ("cell", 4, "return helper(ids)")
    text = checks.MINE.read_text(encoding="utf-8")
    assert text.count("def padding_mask") == 1 and "ids.gt(PAD)" in text
    capsys.readouterr()
    checks.part("padding_mask"), checks.part("attention")
    assert capsys.readouterr().out == "padding_mask: yours\nattention: the solution\n"
    checks.MINE.write_text(f"{text}\n\ndef attention(q, k, v, mask=None):\n    pass\n", encoding="utf-8")
    checks.part("attention")  # written since, from another notebook
    assert capsys.readouterr().out == "attention: yours\n"


# -------------------------------------------------------------------------------------------------- as notebooks


@pytest.fixture(scope="module")
def build():
    """docs/walkthrough/build.py as a module."""
    for name in ("jupytext", "nbclient", "ipykernel"):
        pytest.importorskip(name)
    return SimpleNamespace(**runpy.run_path(str(FOLDER / "build.py")))


def test_notebooks_match_their_sources_and_were_executed(build):
    assert [source.stem[:2] for source in SOURCES] == [f"{number:02}" for number in range(1, len(SOURCES) + 1)]
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    for source in SOURCES:
        path = source.with_suffix(".ipynb")
        assert build.find_stale(source, FOLDER) == []
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        assert any(cell.get("outputs") for cell in cells), path.name
        number, title = re.search(r"(?m)^# # (\d+)\. (.*)$", source.read_text(encoding="utf-8")).groups()
        links = f"[notebook]({path.name}), [source]({source.name})"
        if build.has_exercise(source):
            links += f", [exercise](exercises/{build.exercise_path(source, FOLDER).name})"
        assert f"{number}. **{title}** ({links})" in readme.replace("\n   ", " ")
    exercises = {build.exercise_path(source, FOLDER).stem for source in SOURCES if build.has_exercise(source)}
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == {source.stem for source in SOURCES}
    assert {path.stem for path in FOLDER.glob("exercises/*")} == exercises and len(exercises) == 7


def test_build_executes_a_source_and_finds_what_differs(build, tmp_path, elsewhere):
    if build.find_browser() is None:
        pytest.skip("there is no browser to draw the button for Colab")
    from nbclient.exceptions import CellExecutionError

    source = tmp_path / "01_small.py"
    code = "# %%\nimport os, sys\nprint(os.getcwd())\n# %%\nprint('said', file=sys.stderr)\n6 * 7\n"
    source.write_text(code, encoding="utf-8")
    path = build.build(source, tmp_path)
    assert build.find_difference(source, path) is None
    setup, first, second = (cell["outputs"] for cell in json.loads(path.read_text(encoding="utf-8"))["cells"])
    assert setup == []
    assert "".join(first[0]["text"]) == f"{tmp_path}\n"  # runs in the folder of its source
    assert [output["data"]["text/plain"] for output in second] == [["42"]]
    source.write_text(code.replace("6 * 7", "6 * 8"), encoding="utf-8")
    assert build.find_stale(source, tmp_path) == ["01_small.ipynb differs from 01_small.py in cell 3"]
    with pytest.raises(SystemExit, match="^The code of 01_small.ipynb has changed"):
        build.build(source, tmp_path, texts_only=True)
    for text in ("# %% [markdown]\n# Told.\n", ""):
        source.write_text(text + code, encoding="utf-8")
        build.build(source, tmp_path, texts_only=True)
        assert build.find_stale(source, tmp_path) == [] and '"42"' in path.read_text(encoding="utf-8")
    source.write_text(code + "# %%\nassert 6 * 7 == 41\n", encoding="utf-8")
    assert build.find_difference(source, path) == "has 3 cells, and 01_small.py has 4"
    blank = "# SOLUTION\na = 1\n# EXERCISE\n# # a hint\n# raise NotImplementedError\n# END\n"
    source.write_text(f'# %% [markdown]\n# # 1. Title\n# %% tags=["part"]\n{blank}b = 2\n', encoding="utf-8")
    assert build.find_stale(source, tmp_path)[1] == "01_small_exercise.ipynb is missing"
    build.build(source, tmp_path)
    assert build.find_stale(source, tmp_path) == []
    both = [json.loads(one.read_text("utf-8")) for one in (path, build.exercise_path(source, tmp_path))]
    solution, exercise = ("".join(one["cells"][2]["source"]) for one in both)
    assert (solution, exercise) == ("a = 1\nb = 2", "# a hint\nraise NotImplementedError\nb = 2")
    assert build.assemble([source]).endswith("-\n\n\na = 1\nb = 2\n")
    source.write_text(source.read_text(encoding="utf-8").replace("a hint", "another"), encoding="utf-8")
    assert build.find_stale(source, tmp_path) == ["01_small_exercise.ipynb differs from 01_small.py in cell 3"]
    source.write_text("# %%\nassert 6 * 7 == 41\n", encoding="utf-8")
    path.unlink()
    with pytest.raises(CellExecutionError, match="AssertionError"):
        build.build(source, tmp_path)
    assert not path.exists()  # nothing is written where a cell fails
