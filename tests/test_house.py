"""Imports run one way, and what travels with a saved model stands on its own."""

import ast
import re
import sys
from pathlib import Path

import pytest
from helpers import ROOT, python_output, small_model

PACKAGE = ROOT / "vanilla_transformer"
MODEL_FILES = ("configuration", "modeling", "loss", "decoding", "sentences", "translation")
MODEL_FILES = {f"{name}_vanilla_transformer" for name in MODEL_FILES}
# What each part may import: of the package, the model files and these.
ALLOWED = {
    "model": set(),
    "__init__": {"loading", "versions"},
    "versions": set(),
    "errors": set(),
    "files": {"errors"},
    "languages": set(),
    "option_fields": {"errors"},
    "data": {"errors", "files", "languages", "loading", "option_fields"},
    "evaluation": {"errors", "languages", "data"},
    "hub": {"errors", "files", "languages", "loading", "conversion"},
    "conversion": {"errors", "files", "data"},
    "engines": {"errors", "files", "conversion"},
    "loading": {"errors", "files", "languages", "conversion", "engines"},
    "inspection": {"errors", "files", "data"},
    "demo": {"errors", "inspection", "loading"},
    "serving": {"errors", "languages", "loading", "data"},
    "training": {"errors", "files", "option_fields", "data", "loading", "evaluation", "hub", "inspection"},
    "students": {"errors", "files", "languages", "option_fields", "data", "loading", "evaluation", "training"},
    "commands": {
        "errors",
        "files",
        "option_fields",
        "data",
        "loading",
        "evaluation",
        "hub",
        "conversion",
        "inspection",
        "demo",
    }
    | {"serving", "students", "training"},
    "__main__": {"commands", "errors"},
}
# transformers needs the last three itself.
LIBRARIES_OF_THE_MODEL = {"torch", "transformers", "huggingface_hub", "safetensors", "tqdm", "regex"}
LIBRARIES_OF_THE_MODEL |= sys.stdlib_module_names


def part_of(module: str) -> str:
    """The part of the package that a module name, such as vanilla_transformer.data.splits, belongs to."""
    name = module.removeprefix("vanilla_transformer").lstrip(".").partition(".")[0]
    return "model" if name in MODEL_FILES or not name else name


def imports(path: Path) -> set[str]:
    """Full names of the modules that a file imports, wherever in the file."""
    package = ["vanilla_transformer", *path.relative_to(PACKAGE).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1] if node.level else [])
            module = ".".join(filter(None, [base, node.module]))
            # `from .. import data` imports a part; `from .. import Translator` a name of the model.
            is_package = module == "vanilla_transformer"
            found |= {f"{module}.{alias.name}" for alias in node.names} if is_package else {module}
    return found


def wrong_arrows(path: Path) -> list[str]:
    part = part_of(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
    wrong = []
    for module in imports(path):
        if module.startswith("vanilla_transformer"):
            target = part_of(module)
            target = target if target in ALLOWED else "model"  # a public name of the package
            if target not in ALLOWED[part] | {part, "model"}:
                wrong.append(f"{path.relative_to(ROOT)} -> {module}")
        elif part == "model" and module.partition(".")[0] not in LIBRARIES_OF_THE_MODEL:
            wrong.append(f"{path.relative_to(ROOT)} -> {module}")
    return wrong


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    assert wrong_arrows(path) == []


def missing_names(path: Path) -> list[str]:
    """What a file imports from the package that is not there."""
    names = [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("vanilla_transformer")
        for alias in node.names
    ]
    return [f"{module}.{name}" for module, name in names if not hasattr(__import__(module, fromlist=[name]), name)]


@pytest.mark.parametrize("folder", ["benchmarks", "docs", "examples"])
def test_scripts_import_names_that_exist(folder):
    """Most of these scripts run in slow tests only."""
    assert {path: missing for path in (ROOT / folder).rglob("*.py") if (missing := missing_names(path))} == {}


def test_models_are_opened_in_one_place():
    """In loading.py, but for checkpoints of fairseq, and the process in which a push tries a model."""
    opened = re.compile(r"\b(?:Auto\w+|\w+Tokenizer\w*|\w*Model|\w+Generation)\.from_pretrained\(|\btorch\.load\(")
    found = {path.name for path in PACKAGE.rglob("*.py") if opened.search(path.read_text(encoding="utf-8"))}
    assert found == {"loading.py", "fairseq.py", "upload.py"}


# What removes files, and what writes them. They may be written on a temporary path that these give, and in functions
# that are only called with the path of a new folder.
REMOVES = "rmtree rmdir removedirs unlink rename renames move"
WRITES = """symlink symlink_to link hardlink_to copy copy2 copyfile copytree truncate O_TRUNC O_CREAT write_text
write_bytes save_pretrained save savez save_file savefig save_to_disk"""
TEMPORARY = {"new_folder", "replacing_file", "replacing_files", "tempfile.TemporaryDirectory"}
OF_NEW_FOLDERS = {
    "to_marian_files",
    "to_ctranslate2",
    "to_onnx",
    "save_tokenizer",
    "stage_files",
    "replace_code",
    "write_form",
}


def changes(node: ast.AST, is_new: bool = False) -> list[str]:
    """What changes files elsewhere than [`TEMPORARY`] and [`OF_NEW_FOLDERS`] allow, where `is_new`."""
    is_new |= isinstance(node, ast.FunctionDef) and node.name in OF_NEW_FOLDERS
    if isinstance(node, ast.With):
        opened = {ast.unparse(getattr(item.context_expr, "func", item.context_expr)) for item in node.items}
        is_new |= bool(opened & TEMPORARY)
    found = [change for child in ast.iter_child_nodes(node) for change in changes(child, is_new)]
    names, is_change = REMOVES.split() + (WRITES.split() if not is_new else []), False
    if isinstance(node, ast.ImportFrom) and node.module in ("os", "shutil"):  # called by their bare names
        is_change = any(alias.name in [*names, "remove", "replace"] for alias in node.names)
    elif isinstance(node, ast.Attribute):  # called, or given another name first
        name, is_ours = ast.unparse(node), ast.unparse(node) in ("copy.copy", "checkpoint.save")
        is_change = (node.attr in names and not is_ours) or name in ("os.remove", "os.replace")
    elif isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        given = [*node.args, *(one.value for one in node.keywords if one.arg == "mode")]
        modes = {letter for one in given if isinstance(one, ast.Constant) for letter in str(one.value)}
        is_change = not is_new and name in ("open", "ZipFile") and bool(set("wax+") & modes)
        if name == "replace" and isinstance(node.func, ast.Attribute):  # not of a string
            is_change = len(node.args) == 1 or any(one.arg == "target" for one in node.keywords)
    return [*found, ast.unparse(node)] if is_change else found


def test_files_are_removed_and_replaced_in_one_place():
    for path in {*PACKAGE.rglob("*.py"), *ROOT.glob("*.py")} - {PACKAGE / "files.py"}:
        assert [path.name, changes(ast.parse(path.read_text(encoding="utf-8")))] == [path.name, []]


@pytest.mark.parametrize(
    "code",
    ["shutil.rmtree(x)", "x.unlink()", "os.remove(x)", "a.replace(b)", "open(x, 'w')", "x.open('ab')"]
    + ["from shutil import rmtree", "x.write_text('')", "model.save_pretrained(x)"]
    + ["with opening(x) as y:\n    y.rename(x)", "open(x, mode='w')", "x.open(mode='w')", "f = shutil.rmtree; f(x)"]
    + ["os.removedirs(x)", "a.replace(target=b)", "x.symlink_to(y)", "x.hardlink_to(y)", "os.open(x, os.O_TRUNC)"]
    + ["np.savez(x)", "zipfile.ZipFile(x, 'w')", "with new_folder(x) as y:\n    shutil.rmtree(x)"]
    + ["with tempfile.TemporaryDirectory() as y:\n    x.unlink()", "with replacing_file(x) as y:\n    y.rename(x)"],
)
def test_another_place_is_found(code):
    assert len(changes(ast.parse(code))) == 1
    assert changes(ast.parse("a.replace('b', 'c'); copy.copy(x); open(x); replace(x, a=1); open(x, 'rb')")) == []
    assert changes(ast.parse("with new_folder(x) as y:\n    y.write_text(''); open(y, 'w'); np.savez(y)")) == []


def test_no_power_over_other_modules_and_processes():
    names = ("sys.modules", "sys.meta_path", "exec_module", "os.getppid", "os.killpg")
    for path in [*PACKAGE.rglob("*.py"), *ROOT.glob("*.py")]:
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        used = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
        assert [f"{path}: {name}" for name in names for text in used if text.endswith(name)] == []


def test_saved_model_travels_with_exactly_the_six_files(tmp_path):
    small_model().save_pretrained(tmp_path)
    saved = {path.stem: path.read_bytes() for path in tmp_path.glob("*.py")}
    assert saved == {path.stem: path.read_bytes() for path in PACKAGE.glob("*_vanilla_*.py")}
    assert saved.keys() == MODEL_FILES


@pytest.mark.slow
def test_importing_the_package_imports_no_more_than_the_model_needs():
    heavy = {"datasets", "evaluate", "matplotlib", "sacrebleu", "vanilla_transformer.training"}
    code = f"import sys, vanilla_transformer.__main__; print(*{heavy} & sys.modules.keys())"
    assert python_output("-c", code).split() == []
