"""Share a trained model: check that its directory loads anywhere, and push it to the Hub."""

import json
import os
import re
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import yaml
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HFValidationError, HTTPError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..errors import UserError
from .model_card import SENTENCE, one_line, public_name, public_recipe, read_file, write_model_card

# Uploaded besides the weights. Checkpoints, optimizer state and notes stay on disk.
SHARED = """config.json generation_config.json README.md LICENSE recipe.yaml all_results.json training_curves.png
attention.png tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json
target_vocab.json vocab.txt merges.txt *.model *.spm chat_template.jinja .eval_results/*.yaml *.py"""
PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}
SAVE_AGAIN = "save the model again with save_pretrained"

# ------------------------------------------------------------------------------------------------- the model directory


def check_model_directory(output_dir: str | Path) -> str:
    """Checks that whoever downloads the directory can use it, and returns a translation made with it.

    Model and tokenizer are loaded as a visitor of the Hub loads them: in a fresh process, offline, with the code in
    the directory and without this package. That process has no Hub token.

    Raises:
        UserError: A file is missing, is a pickle or belongs to another model, or the directory does not load or
            translate.
    """
    output_dir = Path(output_dir)
    if not output_dir.is_dir():
        raise UserError(f"{output_dir} is not a directory; name the --output_dir of a training run.")
    kind, ours = read_file(output_dir / "config.json").get("model_type"), VanillaTransformerConfig.model_type
    if kind != ours:
        raise UserError(
            f"{output_dir} holds a model of type {kind}, not {ours}; name the --output_dir of a training run."
        )
    for path in sorted(output_dir.iterdir()):
        if path.suffix in PICKLES:
            raise UserError(f"{path} is a pickle, which can run any code when it is loaded; remove it.")
    if not (output_dir / "tokenizer_config.json").exists():
        raise UserError(f"{output_dir} has no tokenizer; save it there with tokenizer.save_pretrained.")
    if not any((output_dir / name).exists() for name in ("README.md", "all_results.json")):
        raise UserError(f"{output_dir} has no README.md, and no all_results.json to write it from; write a README.md.")
    files_to_upload(output_dir)  # raises if one is missing
    return translate_in_fresh_process(output_dir)


# `None` in `sys.modules` makes every import of this package fail.
FRESH_PROCESS = """
import json, sys
sys.modules["vanilla_transformer"] = None
directory, sentence = json.load(sys.stdin)
try:
    from transformers import AutoModelForSeq2SeqLM, pipeline
    options = {"trust_remote_code": True, "output_loading_info": True}
    _, info = AutoModelForSeq2SeqLM.from_pretrained(directory, **options)  # a pipeline would hide what is wrong
    wrong = {kind: sorted(map(str, keys))[:3] for kind, keys in info.items() if keys and "keys" in kind}
    if wrong:
        raise ValueError(f"the weights do not fit the config, such as {wrong}.")
    translate = pipeline("vanilla-translation", model=directory, trust_remote_code=True)
    answer = {"translation": translate(sentence)[0]["translation_text"]}
except Exception as error:
    answer = {"error": (str(error).strip() or type(error).__name__).splitlines()[0]}
print(json.dumps(answer))
"""


def translate_in_fresh_process(output_dir: Path) -> str:
    """Translates a sentence where only transformers is installed; raises UserError if that fails."""
    results = output_dir / "all_results.json"
    examples = read_file(results).get("examples") if results.exists() else None
    task = json.dumps([str(output_dir.resolve()), examples[0]["source"] if examples else SENTENCE])
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING_FACE_"))}
    env |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1", "PYTHONIOENCODING": "utf-8"}
    with tempfile.TemporaryDirectory() as home:
        env["HF_HOME"] = home  # without a token, or cached copies of missing code files
        child = subprocess.run(
            [sys.executable, "-c", FRESH_PROCESS],
            input=task,
            env=env,
            cwd=home,
            capture_output=True,
            encoding="utf-8",
        )
    try:
        answer = json.loads(child.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        answer = {"error": (child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1]}
    if "error" in answer:
        raise UserError(
            f"{output_dir} does not load in a fresh process: {answer['error']} To repair it, {SAVE_AGAIN}."
        )
    return answer["translation"]


def files_to_upload(
    output_dir: str | Path, repo_id: str | None = None, revision: str | None = None
) -> dict[str, Path | bytes]:
    """What a push uploads: path in the repository -> a file, or its contents if they change.

    Config, tokenizer, code, card, results and pictures, and the weights that `from_pretrained` would load. Local
    paths in the recipe and the results are reduced to their last part, and the code in the card names `repo_id` and
    `revision`; the files on disk do not change.

    Raises:
        UserError: A file is missing or unreadable, or is not in the directory itself.
    """
    output_dir = Path(output_dir)
    allowed = dict.fromkeys(code_files(output_dir), r"\w[\w.-]*\.py")
    allowed |= dict.fromkeys(weight_files(output_dir), r"\w[\w.-]*\.safetensors|model\.safetensors\.index\.json")
    for name, pattern in allowed.items():
        # `../code.py` and `owner/name--code.py` would be loaded from elsewhere.
        if not re.fullmatch(pattern, name) or "--" in name:
            raise UserError(f"{output_dir} refers to '{name}', not to a code or safetensors file in it; {SAVE_AGAIN}.")
    found = {output_dir / name for name in allowed}.union(*map(output_dir.glob, SHARED.split()))
    for path in found:
        if not path.is_file():
            raise UserError(f"{path} is missing; {SAVE_AGAIN}.")
        if not path.resolve().is_relative_to(output_dir.resolve()):
            raise UserError(f"{path} is a link to a file elsewhere, {path.resolve()}; copy the file to {output_dir}.")
    files = {path.relative_to(output_dir).as_posix(): path for path in sorted(found)}
    if "all_results.json" in files:
        results = read_file(files["all_results.json"])
        results |= {"dataset": public_name(results["dataset"])} if results.get("dataset") else {}
        files["all_results.json"] = (json.dumps(results, indent=2, ensure_ascii=False) + "\n").encode()
    if "recipe.yaml" in files:
        recipe = public_recipe(read_file(files["recipe.yaml"]))
        files["recipe.yaml"] = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True).encode()
    if "README.md" in files and repo_id is not None:
        card = files["README.md"].read_text(encoding="utf-8")
        card = re.sub(r'(?m)^model_id = ".*?$', f'model_id = "{repo_id}"', card)
        files["README.md"] = re.sub(r'(?m)^revision = ".*?"', f'revision = "{revision or "main"}"', card).encode()
    return files


def weight_files(output_dir: Path) -> list[str]:
    """The names of the files that `from_pretrained` loads weights from."""
    single, index = output_dir / "model.safetensors", output_dir / "model.safetensors.index.json"
    if single.exists():
        return [single.name]
    if not index.exists():
        raise UserError(f"{output_dir} has no model.safetensors; {SAVE_AGAIN}.")
    return [index.name, *set(read_file(index)["weight_map"].values())]


def code_files(output_dir: Path) -> list[str]:
    """The names of the Python files that the configs name; what these import is found by loading the model."""
    config, tokenizer = (read_file(output_dir / name) for name in ("config.json", "tokenizer_config.json"))
    named = [pipeline["impl"] for pipeline in (config.get("custom_pipelines") or {}).values()]
    classes = [value for file in (config, tokenizer) for value in (file.get("auto_map") or {}).values()]
    for value in classes:
        named += value if isinstance(value, list) else [value]  # a tokenizer may have two classes, or None and one
    return [re.sub(r"\.\w+$", ".py", name) for name in named if name]


# ------------------------------------------------------------------------------------------------------------- the Hub


@contextmanager
def hub_errors(repo_id: str, output_dir: str | Path | None = None):
    """Turns an error of huggingface_hub into a UserError that says how to push the model in `output_dir` later."""
    try:
        yield
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        causes = [error, error.__cause__] if error.__cause__ else [error]  # a failed upload hides its cause
        message = f"Cannot push to {repo_id}: {' '.join(map(one_line, causes))}"
        status = {getattr(getattr(cause, "response", None), "status_code", None) for cause in causes}
        if status & {401, 403} or isinstance(error, LocalTokenNotFoundError):
            message += " Log in with `hf auth login`, or set HF_TOKEN, with a token that can write there."
        if output_dir and (Path(output_dir) / "config.json").exists() and not isinstance(error, HFValidationError):
            message += f" The model is complete in {output_dir}; push it later with "
            message += f"`python push_to_hub.py {output_dir} --repo_id {repo_id}`."
        raise UserError(message) from error


def check_push(repo_id: str | None = None, output_dir: str | Path = ".", token: str | None = None) -> str:
    """Checks, before any work starts, that the Hub accepts the token; returns the full id of the repository.

    Args:
        repo_id: The repository, `owner/name`, or a name in the user's namespace. None: the name of `output_dir`.
        token: A Hub token. None: the one saved by `hf auth login` or set in HF_TOKEN.

    Raises:
        UserError: The id is malformed, there is no valid token, or the Hub cannot be reached.
    """
    name = repo_id or Path(output_dir).resolve().name
    with hub_errors(name, output_dir):
        validate_repo_id(name)
        user = HfApi(token=token).whoami()["name"]
    return name if "/" in name else f"{user}/{name}"


def push(
    output_dir: str | Path,
    repo_id: str | None = None,
    private: bool = False,
    revision: str | None = None,
    commit_message: str | None = None,
    create_pr: bool = False,
    token: str | None = None,
) -> CommitInfo:
    """Pushes a trained model to the Hub in one commit, after [`check_push`] and [`check_model_directory`].

    Creates the repository if needed, and the card if there is none. Weights of an earlier push that this one does not
    replace are deleted, since they could be loaded instead.

    Args:
        repo_id: As in [`check_push`], like `token`.
        private: Create a private repository; a public one is then refused.
        revision: The branch to push to, created if needed. None: main.
        create_pr: Open a pull request.

    Returns:
        The commit, with its `commit_url` and, for a pull request, its `pr_url`.

    Raises:
        UserError: The directory fails its check, or the Hub refuses the push or cannot be reached.
    """
    repo_id = check_push(repo_id, output_dir, token)
    check_model_directory(output_dir)
    if not (Path(output_dir) / "README.md").exists():
        write_model_card(output_dir)
    files = files_to_upload(output_dir, repo_id, revision)
    api = HfApi(token=token)
    with hub_errors(repo_id, output_dir):
        api.create_repo(repo_id, private=private or None, exist_ok=True)
        if private and not api.model_info(repo_id).private:
            raise UserError(f"{repo_id} exists and is public; make it private on the Hub, or choose another name.")
        if revision and not create_pr and not revision.startswith("refs/"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        weights = re.compile(r"(model|pytorch_model)[^/]*\.(safetensors|bin)(\.index\.json)?")
        old = [path for path in api.list_repo_files(repo_id, revision=revision) if weights.fullmatch(path)]
        operations = [CommitOperationAdd(path_in_repo=path, path_or_fileobj=file) for path, file in files.items()]
        operations += [CommitOperationDelete(path_in_repo=path) for path in old if path not in files]
        # One commit, unlike `upload_folder`, so that nobody downloads half a model.
        message = commit_message or "Upload a trained Transformer"
        return api.create_commit(repo_id, operations, commit_message=message, revision=revision, create_pr=create_pr)
