"""docs/walkthrough: the notebooks run, notice planted mistakes, and match their sources."""

import json
import re
import runpy
import warnings
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import pytest
import torch
from matplotlib import pyplot as plt

FOLDER = Path(__file__).parents[2] / "docs" / "walkthrough"
SOURCES = sorted(FOLDER.glob("[0-9][0-9]_*.py"))


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Runs a notebook outside the repository, and restores the process-wide settings that it changes."""
    monkeypatch.chdir(tmp_path)
    backend, threads = matplotlib.get_backend(), torch.get_num_threads()
    matplotlib.use("Agg")
    with warnings.catch_warnings():
        yield tmp_path
    plt.close("all")
    matplotlib.use(backend)
    torch.set_num_threads(threads)


def execute(code: str, source: Path, names: dict | None = None) -> dict:
    names = {"__name__": "x", "__file__": str(source)} | (names or {})
    exec(compile(code, source.name, "exec"), names)
    return names


@pytest.mark.parametrize(
    "source",
    [pytest.param(s, id=s.stem, marks=[pytest.mark.slow] if s.stem[:2] not in ("01", "05") else []) for s in SOURCES],
)
def test_notebook_runs_from_top_to_bottom(source, elsewhere, capfd):
    """All its assertions hold, and it leaves no files behind."""
    runpy.run_path(str(source), run_name="__main__")
    assert capfd.readouterr().out.strip() and list(elsewhere.iterdir()) == []


MISTAKES = [  # notebook, correct code, mistake, what the assertion names
    ("01_attention", "np.swapaxes(keys, -2, -1) * scaling", "np.swapaxes(keys, -2, -1)", ""),
    ("02_heads_and_masks", "x.transpose(0, 2, 1, 3).reshape(B, T, h * k)", "x.reshape(B, T, h * k)", ""),
    ("05_layers_and_stacks", "tokens * math.sqrt(d)", "tokens", "model.encoder.dropout"),
    ("05_layers_and_stacks", "/ math.sqrt(k)", "/ math.sqrt(d)", "encoder.layers.0.self_attn.weights"),
    ("05_layers_and_stacks", '.T + P[f"{name}.bias"]', ".T", "encoder.layers.0.self_attn.q_proj"),
    ("05_layers_and_stacks", "ids.shape[1]), dtype=bool))", "ids.shape[1]), dtype=bool), k=1)", "0.self_attn.weights"),
    ("05_layers_and_stacks", '.encoder_attn", x, encoded, mask)', '.encoder_attn", x, x, mask)', "k_proj"),
    ("05_layers_and_stacks", "2 * attention + feed_forward", "attention + feed_forward", ""),
    ("06_training_and_decoding", "labels[:, :-1]", "labels[:, 1:]", ""),
    ("06_training_and_decoding", "- epsilon * z.mean", "- 2 * epsilon * z.mean", ""),
    ("06_training_and_decoding", "steps * warmup**-1.5)", "steps * warmup**-1.4)", ""),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "right", "wrong", "message"), MISTAKES, ids=[f"{m[0][:2]} {m[2]}" for m in MISTAKES])
def test_notebook_notices_a_mistake(name, right, wrong, message, elsewhere):
    source = FOLDER / f"{name}.py"
    code = source.read_text(encoding="utf-8")
    assert code.count(right) == 1
    with pytest.raises(AssertionError, match=re.escape(message)):
        execute(code.replace(right, wrong), source)


# -------------------------------------------------------------------------------------------------- as notebooks


@pytest.fixture(scope="module")
def build():
    """docs/walkthrough/build.py as a module."""
    for name in ("jupytext", "nbclient", "ipykernel"):
        pytest.importorskip(name)
    return SimpleNamespace(**runpy.run_path(str(FOLDER / "build.py")))


def test_notebooks_match_their_sources_and_were_executed(build):
    assert [source.stem[:2] for source in SOURCES] == [f"{number:02}" for number in range(1, 8)]
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    for source in SOURCES:
        path = source.with_suffix(".ipynb")
        assert build.find_difference(source, path) is None, path.name
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        assert any(cell.get("outputs") for cell in cells), path.name
        number, title = re.search(r"(?m)^# # (\d)\. (.*)$", source.read_text(encoding="utf-8")).groups()
        assert f"{number}. **{title}** ([notebook]({path.name}), [source]({source.name}))" in readme.replace(
            "\n   ", " "
        )
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == {source.stem for source in SOURCES}


def test_build_executes_a_source_and_finds_what_differs(build, tmp_path, elsewhere):
    from nbclient.exceptions import CellExecutionError

    source = tmp_path / "01_small.py"
    code = "# %%\nimport os, sys\nprint(os.getcwd())\n# %%\nprint('said', file=sys.stderr)\n6 * 7\n"
    source.write_text(code, encoding="utf-8")
    path = build.build(source, tmp_path)
    assert build.find_difference(source, path) is None
    first, second = (cell["outputs"] for cell in json.loads(path.read_text(encoding="utf-8"))["cells"])
    assert "".join(first[0]["text"]) == f"{tmp_path}\n"  # runs in the folder of its source
    assert [output["data"]["text/plain"] for output in second] == [["42"]]
    source.write_text(code.replace("6 * 7", "6 * 8"), encoding="utf-8")
    assert build.find_difference(source, path) == "differs from 01_small.py in cell 2"
    source.write_text(code + "# %%\nassert 6 * 7 == 41\n", encoding="utf-8")
    assert build.find_difference(source, path) == "has 2 cells, and 01_small.py has 3"
    path.unlink()
    with pytest.raises(CellExecutionError, match="AssertionError"):
        build.build(source, tmp_path)
    assert not path.exists()  # nothing is written where a cell fails
