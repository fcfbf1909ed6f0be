"""The notebooks of docs/walkthrough run, and are what their sources say. Run: pytest tests/test_walkthrough.py"""

import ast
import json
import re
import runpy
import warnings
from pathlib import Path

import matplotlib
import pytest
import torch
from matplotlib import pyplot as plt

FOLDER = Path(__file__).parents[2] / "docs" / "walkthrough"
SOURCES = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
TRAIN_LONG = ("03_positions", "06_training_and_decoding", "07_looking_inside")

every_source = pytest.mark.parametrize("source", SOURCES, ids=[source.stem for source in SOURCES])


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder to run in that is not the repository; what a notebook sets for its process is set back."""
    monkeypatch.chdir(tmp_path)
    backend, threads = matplotlib.get_backend(), torch.get_num_threads()
    matplotlib.use("Agg")
    with warnings.catch_warnings():
        yield tmp_path
    plt.close("all")
    matplotlib.use(backend)
    torch.set_num_threads(threads)


def test_there_are_seven():
    assert [source.stem[:2] for source in SOURCES] == [f"{number:02}" for number in range(1, 8)]


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(source, id=source.stem, marks=[pytest.mark.slow] if source.stem in TRAIN_LONG else [])
        for source in SOURCES
    ],
)
def test_every_notebook_runs_from_top_to_bottom(source, elsewhere, capfd):
    """All that it asserts holds, and it leaves nothing behind."""
    runpy.run_path(str(source), run_name="__main__")
    assert capfd.readouterr().out.strip()
    assert list(elsewhere.iterdir()) == []


MISTAKES = [  # in a notebook, and what is wrong then
    ("01_attention", "np.swapaxes(keys, -2, -1) * scaling", "np.swapaxes(keys, -2, -1)", None),
    ("02_heads_and_masks", "x.transpose(0, 2, 1, 3).reshape(B, T, h * k)", "x.reshape(B, T, h * k)", None),
    ("05_layers_and_stacks", "tokens * math.sqrt(d)", "tokens", "model.encoder.dropout"),
    ("05_layers_and_stacks", "/ math.sqrt(k)", "/ math.sqrt(d)", "encoder.layers.0.self_attn.weights"),
    ("05_layers_and_stacks", '.T + P[f"{name}.bias"]', ".T", "encoder.layers.0.self_attn.q_proj"),
    ("05_layers_and_stacks", "ids.shape[1]), dtype=bool))", "ids.shape[1]), dtype=bool), k=1)", "0.self_attn.weights"),
    ("05_layers_and_stacks", '.encoder_attn", x, encoded, mask)', '.encoder_attn", x, x, mask)', "k_proj"),
    ("05_layers_and_stacks", "2 * attention + feed_forward", "attention + feed_forward", None),
    ("06_training_and_decoding", "labels[:, :-1]", "labels[:, 1:]", None),
    ("06_training_and_decoding", "- epsilon * z.mean", "- 2 * epsilon * z.mean", None),
    ("06_training_and_decoding", "steps * warmup**-1.5)", "steps * warmup**-1.4)", None),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "right", "wrong", "message"), MISTAKES, ids=[f"{m[0][:2]} {m[2]}" for m in MISTAKES])
def test_a_mistake_in_a_notebook_fails(name, right, wrong, message, elsewhere):
    source = FOLDER / f"{name}.py"
    code = source.read_text(encoding="utf-8")
    assert code.count(right) == 1
    with pytest.raises(AssertionError, match=message and re.escape(message)):
        exec(compile(code.replace(right, wrong), source.name, "exec"), {"__name__": "x", "__file__": str(source)})


BEAM_MISTAKES = [
    ("topk(2 * n)", "topk(n)", ", reverse=True)[: 2 * n]", ", reverse=True)[:n]"),
    ("in candidates[:n] if", "in candidates if"),
    ("len(candidates[0][1]) - 1", "len(candidates[0][1])"),
    ('if early_stopping == "never" and', "if"),
    ("if early_stopping is True or hope", "if hope"),
    ("length = len(candidates", "length_penalty, length = 1.0, len(candidates"),
]


@pytest.mark.slow
def test_a_mistake_in_the_beam_search_fails(elsewhere):
    """Each of them in a search that is otherwise right, after one and the same training."""
    source = FOLDER / "06_training_and_decoding.py"
    before, title, search = source.read_text(encoding="utf-8").partition("# ## Beam search")
    trained = {"__name__": "x", "__file__": str(source)}
    exec(compile(before, source.name, "exec"), trained)
    exec(compile(search, source.name, "exec"), dict(trained))
    for mistake in BEAM_MISTAKES:
        code = search
        for right, wrong in zip(mistake[::2], mistake[1::2], strict=True):
            assert code.count(right) == 1, right
            code = code.replace(right, wrong)
        with pytest.raises(AssertionError):
            exec(compile(code, source.name, "exec"), dict(trained))
            pytest.fail(f"{mistake} was not noticed")


def test_the_table_names_every_notebook_by_its_title():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    titles = [re.search(r"(?m)^# # (.*)$", source.read_text(encoding="utf-8"))[1] for source in SOURCES]
    assert re.findall(r"(?m)^\| \[(.*?)\]\((.*?)\) \(\[source\]\((.*?)\)\)", text) == [
        (title, f"{source.stem}.ipynb", source.name) for title, source in zip(titles, SOURCES, strict=True)
    ]


# -------------------------------------------------------------------------------------------------- as notebooks


@pytest.fixture(scope="module")
def build():
    """docs/walkthrough/build.py as a module."""
    for name in ("jupytext", "nbclient", "ipykernel"):
        pytest.importorskip(name)
    from types import SimpleNamespace

    return SimpleNamespace(**runpy.run_path(str(FOLDER / "build.py")))


@every_source
def test_every_source_is_a_notebook(source, build):
    cells = build.read_source(source).cells
    assert cells[0].cell_type == "markdown" and cells[0].source.startswith(f"# {int(source.stem[:2])}. ")
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    assert len(code) >= 5
    for text in code:
        ast.parse(text)
    assert "# %%" not in "".join(cell.source for cell in cells)


def test_every_notebook_that_was_built_has_the_cells_of_its_source(build):
    built = list(FOLDER.glob("*.ipynb"))
    assert {path.stem for path in built} == {source.stem for source in SOURCES}
    for path in built:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        assert any(cell.get("outputs") for cell in cells), path.name  # it was executed
    found = {path.name: build.find_difference(path.with_suffix(".py"), path) for path in built}
    assert {name: difference for name, difference in found.items() if difference} == {}


def test_the_check_names_what_differs(build, tmp_path, capsys):
    import nbformat

    def check(*names) -> tuple[int, list[str]]:
        with pytest.raises(SystemExit) as ending:
            build.main([*names, "--check", "--output_dir", str(tmp_path)])
        return ending.value.code, capsys.readouterr().out.splitlines()

    def change(number: int, edit):
        path = tmp_path / f"{SOURCES[number].stem}.ipynb"
        notebook = nbformat.read(path, as_version=4)
        edit(notebook.cells)
        nbformat.write(notebook, path)

    names = [f"{source.stem}.ipynb" for source in SOURCES]
    assert check() == (1, [f"{name} is not there" for name in names])
    for source, name in zip(SOURCES, names, strict=True):
        nbformat.write(build.read_source(source), tmp_path / name)
    assert check() == (0, [])

    change(4, lambda cells: cells[1].update(source=cells[1].source.replace("import torch", "import torch ")))
    change(5, lambda cells: cells.pop())
    change(6, lambda cells: cells[0].update(cell_type="raw"))
    code, said = check()
    assert code == 1 and len(said) == 3
    assert said[0] == f"{names[4]} differs from {SOURCES[4].name} in cell 2"
    assert re.fullmatch(rf"{names[5]} has \d+ cells, and {SOURCES[5].name} has \d+", said[1])
    assert said[2] == f"{names[6]} differs from {SOURCES[6].name} in cell 1"
    assert check(SOURCES[4].stem)[1] == said[:1]
    assert check(SOURCES[0].stem) == (0, [])
    with pytest.raises(SystemExit, match="2"):
        build.main(["05", "--check"])
    assert "there is no 05; there are 01_attention" in capsys.readouterr().err


def test_a_notebook_is_executed_in_the_folder_of_its_source(build, tmp_path, elsewhere):
    """And written with what it printed; where a cell fails, nothing is written."""
    import nbformat
    from nbclient.exceptions import CellExecutionError

    (tmp_path / "source").mkdir()
    source = tmp_path / "source" / "01_small.py"
    code = "# %%\nimport os, sys\nprint()\nprint(os.getcwd())\nprint()\n# %%\nprint('said', file=sys.stderr)\n6 * 7\n"
    source.write_text(code, encoding="utf-8")
    path = build.build(source, tmp_path)
    assert path == tmp_path / "01_small.ipynb" and build.find_difference(source, path) is None
    first, second = (cell.outputs for cell in nbformat.read(path, as_version=4).cells)
    assert [output.text for output in first] == [f"{source.parent}\n"]
    assert [output.data["text/plain"] for output in second] == ["42"]

    path.unlink()
    source.write_text(code + "# %%\nassert 6 * 7 == 41\n", encoding="utf-8")
    with pytest.raises(CellExecutionError, match="AssertionError"):
        build.build(source, tmp_path)
    assert not path.exists()
