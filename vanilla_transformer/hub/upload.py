"""Share a trained model: stage what is published, check that it loads anywhere, and push it to the Hub."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HFValidationError, HTTPError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id

from .. import Translator, VanillaTransformerConfig
from ..configuration_vanilla_transformer import AUTO_MAP, PIPELINE
from ..conversion.marian import save_tokenizer, to_native
from ..errors import UserError, explaining, one_line
from ..loading import load_tokenizer
from .model_card import SENTENCE, public_recipe, read_file, write_model_card

PACKAGE = Path(__file__).parents[1]
# What is published, file by file. Whatever else is in the directory stays on disk.
RUN_FILES = ["README.md", "LICENSE", "recipe.yaml", "all_results.json", "training_curves.png", "attention.png"]
WEIGHTS_AND_CONFIGS = ["model.safetensors", "config.json", "generation_config.json"]
CODE_FILES = sorted(path.name for path in PACKAGE.glob("*_vanilla_transformer.py"))
# Of every tokenizer; its class names the files of the vocabulary.
TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"]
TOKENIZER_FILES += ["chat_template.jinja"]
# What an earlier push may have sent and a later one may lack, also by earlier versions: weights, whole or in parts,
# code, results and pictures.
STALE = r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?|[a-z]+_vanilla_transformer\.py"
STALE = re.compile(rf"{STALE}|recipe\.yaml|all_results\.json|training_curves\.png|attention\.png")

# ------------------------------------------------------------------------------------------------ what is published


@contextmanager
def staged(
    output_dir: str | Path,
    repo_id: str | None = None,
    revision: str | None = None,
    native: bool = False,
    trust_remote_code: bool = False,
) -> Iterator[Path]:
    """A temporary folder with exactly the files that a push publishes.

    Config, weights, tokenizer, code, card, results and pictures, each known by its name. Local paths in the recipe are
    reduced to their last part, and the code in the card names `repo_id` and `revision`. The files in `output_dir` do
    not change; a missing card is written there first.

    Args:
        native: Stage the Marian, Pegasus or Blenderbot model that [`to_native`] makes, without code. If train.py
            trained it, its card is written again.
        trust_remote_code: Stage the code of the directory. Else the code is this package's, and a warning names the
            files whose code differs, or which name other code.

    Raises:
        UserError: A file is missing or unreadable, or the model is of another kind or has no native form.
    """
    output_dir = Path(output_dir)
    kind, ours = read_file(output_dir / "config.json").get("model_type"), VanillaTransformerConfig.model_type
    if kind != ours:
        raise UserError(f"{output_dir} holds a model of type {kind}, not {ours}; give one that train.py wrote.")
    if not (output_dir / "README.md").exists():
        write_model_card(output_dir)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / output_dir.resolve().name
        folder.mkdir()
        stage_files(output_dir, folder, RUN_FILES)
        if native:
            translator = Translator.from_pretrained(output_dir, device="cpu")
            to_native(translator.model).save_pretrained(folder)
            save_tokenizer(translator.tokenizer, folder)
        else:
            stage_files(output_dir, folder, [*WEIGHTS_AND_CONFIGS, *CODE_FILES, *tokenizer_files(output_dir)])
        if not trust_remote_code:
            replace_code(folder, native)
        recipe = folder / "recipe.yaml"
        if recipe.exists():
            content = public_recipe(read_file(recipe))
            recipe.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
            if native:
                write_model_card(folder)
        with explaining(f"{output_dir}/README.md cannot be read", OSError, UnicodeDecodeError):
            card = (folder / "README.md").read_text(encoding="utf-8")
        if repo_id is not None:
            card = re.sub(r'(?m)^model_id = ".*?"', f'model_id = "{repo_id}"', card)
            card = re.sub(r'(?m)^revision = ".*?"', f'revision = "{revision or "main"}"', card)
        (folder / "README.md").write_text(card, encoding="utf-8")
        yield folder


def replace_code(folder: Path, native: bool):
    """Makes the code in a staged folder, and the code that its configs name, this package's; warns if it was not."""
    replaced = []
    for path in () if native else map(folder.joinpath, CODE_FILES):
        ours = (PACKAGE / path.name).read_bytes()
        replaced += [path.name] if path.is_file() and path.read_bytes() != ours else []
        path.write_bytes(ours)
    ours = {"auto_map": AUTO_MAP, "custom_pipelines": {"vanilla-translation": PIPELINE}}
    for name, named in [("config.json", {} if native else ours), ("tokenizer_config.json", {})]:
        path = folder / name
        content = read_file(path) if path.is_file() else {}
        expected = {key: value for key, value in content.items() if key not in ours} | named
        if path.is_file() and content != expected:
            path.write_text(json.dumps(expected, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            replaced.append(name)
    if replaced:
        warnings.warn(
            f"{folder.name}: {', '.join(replaced)} had or named other code than this package's, which is published "
            "instead; add --trust_remote_code to run and publish the other.",
            stacklevel=4,
        )


def tokenizer_files(output_dir: Path) -> list[str]:
    """All names that files of the tokenizer in a directory may have. Raises UserError if it cannot be loaded."""
    tokenizer = load_tokenizer(output_dir)
    return sorted({*TOKENIZER_FILES, *tokenizer.vocab_files_names.values()})


def stage_files(output_dir: Path, folder: Path, names: Iterable[str]):
    """Copies the files with these names, where they exist, into a folder; weights are linked if that is allowed.

    A link to a file counts as the file: snapshots in the cache of the Hub consist of links.
    """
    for path in filter(Path.is_file, map(output_dir.joinpath, names)):
        source, target = path.resolve(), folder / path.name
        if path.suffix == ".safetensors":
            with suppress(OSError):  # links are not allowed, as to most users of Windows
                os.symlink(source, target)
                continue
        shutil.copyfile(source, target)


# ----------------------------------------------------------------------------------------------- does it load anywhere

# `None` in `sys.modules` makes every import of this package fail.
FRESH_PROCESS = """
import json, sys
sys.modules["vanilla_transformer"] = None
directory, sentence, remote, trusted = json.load(sys.stdin)
try:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
    options = {"trust_remote_code": remote, "output_loading_info": True}
    model, info = AutoModelForSeq2SeqLM.from_pretrained(directory, **options)
    wrong = {kind: sorted(map(str, keys))[:3] for kind, keys in info.items() if keys and "keys" in kind}
    if wrong:
        raise ValueError(f"the weights do not fit the config, such as {wrong}.")
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trusted)
    inputs = tokenizer(sentence, return_tensors="pt")
    outputs = model.generate(inputs.input_ids, attention_mask=inputs.attention_mask)
    translation = tokenizer.decode(outputs[0], skip_special_tokens=True)
except Exception as error:
    sys.exit((str(error).strip() or type(error).__name__).splitlines()[0])
sys.stdout.buffer.write(translation.encode())
"""


def translate_in_fresh_process(folder: Path, trust_remote_code: bool = False) -> str:
    """Translates a sentence as a visitor of the Hub does: offline, without this package, with the code in the folder.

    A native model gets no remote code, and a tokenizer only with `trust_remote_code`. The process has no token and no
    cache of the Hub. Raises UserError if it fails.
    """
    results = folder / "all_results.json"
    examples = read_file(results).get("examples") if results.exists() else None
    with explaining(f"The examples in {results} cannot be read", LookupError, TypeError):
        sentence = examples[0]["source"] + "" if examples else SENTENCE
    remote = read_file(folder / "config.json").get("model_type") == VanillaTransformerConfig.model_type
    task = json.dumps([str(folder.resolve()), sentence, remote, trust_remote_code])
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING_FACE_"))}
    env |= {"HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"}
    with tempfile.TemporaryDirectory() as home:
        env |= {"HF_HOME": home}  # without a token, or cached copies of missing code files
        pipes = {"capture_output": True, "encoding": "utf-8"}
        child = subprocess.run([sys.executable, "-c", FRESH_PROCESS], input=task, env=env, cwd=home, **pipes)
    if child.returncode:
        if child.returncode < 0:
            cause = f"signal {-child.returncode} ended the process, as for lack of memory"
            raise UserError(f"{folder.name} could not be tried in a fresh process: {cause}.")
        reason = child.stderr.strip().rpartition("\n")[2].replace(f"{folder.resolve()}/", "")
        remedy = "To repair it, save model and tokenizer again with save_pretrained, the model in one file."
        raise UserError(f"{folder.name} does not load in a fresh process: {reason} {remedy}")
    return child.stdout


# ------------------------------------------------------------------------------------------------------------- the Hub


@contextmanager
def hub_errors(repo_id: str, output_dir: str | Path | None = None, **options: bool | str | None):
    """Turns an error of huggingface_hub into a UserError that says how to push the model in `output_dir` later.

    `options` are those of push_to_hub.py.
    """
    try:
        yield
    except UserError:
        raise
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        causes = [error, error.__cause__] if error.__cause__ else [error]  # a failed upload hides its cause
        message = f"Cannot push to {repo_id}: {' '.join(map(one_line, causes))}"
        status = {getattr(getattr(cause, "response", None), "status_code", None) for cause in causes}
        if status & {401, 403} or isinstance(error, LocalTokenNotFoundError):
            message += " Log in with `hf auth login`, or set HF_TOKEN, with a token that can write there."
        if output_dir and (Path(output_dir) / "config.json").exists() and not isinstance(error, HFValidationError):
            message += f" The model is complete in {output_dir}; push it later with "
            words = ["python", "push_to_hub.py", str(output_dir), "--repo_id", repo_id]
            for option, value in options.items():
                words += [f"--{option}", *([] if value is True else [value])] if value else []
            message += f"`{shlex.join(words)}`."
        raise UserError(message) from error


def check_push(
    repo_id: str | None = None,
    output_dir: str | Path = ".",
    private: bool = False,
    repo_type: str = "model",
    **options: bool | str | None,
) -> str:
    """Checks, before any work starts, that the Hub accepts the user's token; returns the full id of the repository.

    Args:
        repo_id: The repository, `owner/name`, or a name in the user's namespace. None: the name of `output_dir`.
        private: Whether the repository must be private, if it exists.
        options: Others of [`push`]; only the message of an error depends on them.

    Raises:
        UserError: The id is malformed, there is no valid token, the repository is public although it must be private,
            or the Hub cannot be reached.
    """
    name = repo_id or Path(output_dir).resolve().name
    with hub_errors(name, output_dir if repo_type == "model" else None, private=private, **options):
        validate_repo_id(name)
        api = HfApi()
        user = api.whoami()["name"]
        full_name = name if "/" in name else f"{user}/{name}"
        kind = {"repo_type": repo_type}
        if private and api.repo_exists(full_name, **kind) and not api.repo_info(full_name, **kind).private:
            raise UserError(f"{full_name} is public; make it private on the Hub, or choose another name.")
    return full_name


def push(
    output_dir: str | Path,
    repo_id: str | None = None,
    private: bool = False,
    revision: str | None = None,
    commit_message: str | None = None,
    create_pr: bool = False,
    native: bool = False,
    trust_remote_code: bool = False,
) -> CommitInfo:
    """Pushes a trained model to the Hub in one commit, after [`check_push`] and [`translate_in_fresh_process`].

    Creates the repository if needed, and the card if there is none. Weights, code, results and pictures of an earlier
    push that this one does not replace are deleted: they could be loaded instead, or show other sentences.

    Args:
        repo_id: As in [`check_push`].
        private: Create a private repository; a public one is then refused.
        revision: The branch to push to, created if needed. None: main.
        create_pr: Open a pull request.
        native: Push the native form; see [`staged`].
        trust_remote_code: Run and push the code of the directory, not this package's; see [`staged`].

    Returns:
        The commit, with its `commit_url` and, for a pull request, its `pr_url`.

    Raises:
        UserError: The model does not load or has no native form, or the Hub refuses the push or cannot be reached.
    """
    options = {"private": private, "revision": revision, "commit_message": commit_message, "create_pr": create_pr}
    options |= {"native": native, "trust_remote_code": trust_remote_code}
    repo_id, api = check_push(repo_id, output_dir, **options), HfApi()
    with staged(output_dir, repo_id, revision, native, trust_remote_code) as folder:
        translate_in_fresh_process(folder, trust_remote_code)
        files = {path.name: path for path in sorted(folder.iterdir())}
        with hub_errors(repo_id, output_dir, **options):
            api.create_repo(repo_id, private=private or None, exist_ok=True)
            if revision and not create_pr and not revision.startswith("refs/"):
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            old = filter(STALE.fullmatch, api.list_repo_files(repo_id, revision=revision))
            changes = [CommitOperationAdd(path_in_repo=path, path_or_fileobj=file) for path, file in files.items()]
            changes += [CommitOperationDelete(path_in_repo=path) for path in old if path not in files]
            # One commit, so that nobody downloads half a model; `upload_folder` may make several.
            message = commit_message or "Upload a trained Transformer"
            return api.create_commit(repo_id, changes, commit_message=message, revision=revision, create_pr=create_pr)
