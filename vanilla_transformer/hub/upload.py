"""Share a trained model: check that it loads anywhere, push it to the Hub."""

import json
import os
import re
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import yaml
from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    get_token,
)
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id
from transformers.dynamic_module_utils import get_relative_import_files

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..errors import UserError
from ..hub.model_card import (
    SENTENCE,
    public_dataset,
    public_options,
    read,
    read_json,
    read_options,
    read_results,
    write_model_card,
)

# What goes up besides the weights and the code, which the index and `auto_map` name. All else stays: checkpoints,
# optimiser state, and whatever somebody put into the directory.
SHARED = ["config.json", "generation_config.json", "README.md", "LICENSE", "recipe.yaml", "all_results.json"]
SHARED += [
    "training_curves.png",
    "attention.png",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
]
SHARED += ["added_tokens.json", "vocab.json", "target_vocab.json", "vocab.txt", "merges.txt", "*.model", "*.spm"]
SHARED += ["chat_template.jinja", ".eval_results/*.yaml"]
PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}


# ------------------------------------------------------------------------------------------------- the model directory


def check_model_directory(output_dir: str | Path) -> str:
    """Makes sure that whoever downloads the directory can use it, and returns a translation made to see so.

    Model and tokenizer are loaded as a visitor does: in a fresh process, offline, through the code in the directory,
    without this package.

    Raises:
        UserError: A file is missing, is a pickle or is not of this model; a weight is missing or left over; or the
            directory does not load or translate.
    """
    output_dir = Path(output_dir)
    if not output_dir.is_dir():
        raise UserError(f"{output_dir} is no directory; name the --output_dir of a training run.")
    config = read_json(output_dir / "config.json")
    kind = config.get("model_type")
    if kind != VanillaTransformerConfig.model_type:
        raise UserError(
            f"{output_dir}/config.json is of a {kind or 'nameless'} model, not of a "
            f"{VanillaTransformerConfig.model_type}; name the --output_dir of a training run."
        )
    for path in sorted(output_dir.iterdir()):
        if path.suffix in PICKLES:
            raise UserError(
                f"{path} is a pickle, which can run any code where it is loaded; remove it, or load it and save the "
                "model by save_pretrained, which writes safetensors."
            )
    if not (output_dir / "tokenizer_config.json").exists():
        raise UserError(f"{output_dir} has no tokenizer; put it there by tokenizer.save_pretrained.")
    if not (output_dir / "README.md").exists() and not (output_dir / "all_results.json").exists():
        raise UserError(
            f"{output_dir} has neither a README.md nor the all_results.json that one is written from; write one, or "
            "name the --output_dir of a finished training run."
        )
    files_to_upload(output_dir)  # raises where one is missing
    return translate_in_fresh_process(output_dir)


# Runs where nothing of this package is: `None` in `sys.modules` makes every import of it fail.
FRESH_PROCESS = """
import json, sys
sys.modules["vanilla_transformer"] = None
directory, sentence = json.load(sys.stdin)
try:
    from transformers import AutoModelForSeq2SeqLM, pipeline
    AutoModelForSeq2SeqLM.from_pretrained(directory, trust_remote_code=True)  # of which the pipeline hides the error
    translate = pipeline("vanilla-translation", model=directory, trust_remote_code=True)
    answer = {"translation": translate(sentence)[0]["translation_text"]}
except Exception as error:
    answer = {"error": (str(error).strip() or type(error).__name__).splitlines()[0]}
print(json.dumps(answer))
"""


def translate_in_fresh_process(output_dir: Path) -> str:
    """Translates a sentence where only transformers is there; raises UserError with what goes wrong."""
    examples = read_results(output_dir).get("examples") or [{"source": SENTENCE}]
    task = json.dumps([str(output_dir.resolve()), examples[0]["source"]])
    with tempfile.TemporaryDirectory() as cache:
        # A cache of its own, so that no copy of the code from an earlier load stands in for a missing file.
        env = {**os.environ, "HF_MODULES_CACHE": cache, "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"}
        child = subprocess.run(
            [sys.executable, "-c", FRESH_PROCESS], input=task, env=env, cwd=cache, capture_output=True, text=True
        )
    try:
        answer = json.loads(child.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        answer = {"error": (child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1]}
    if "error" in answer:
        raise UserError(
            f"{output_dir} does not load in a fresh process: {answer['error']} Save it again by save_pretrained, "
            "model and tokenizer."
        )
    return answer["translation"]


def files_to_upload(
    output_dir: str | Path, repo_id: str | None = None, revision: str | None = None
) -> dict[str, Path | bytes]:
    """What a push sends, by its path in the repository: a file as it is, or its contents where these are changed.

    Sent are config, tokenizer, card, results and pictures by name, the weights that `from_pretrained` would load, and
    the code that `auto_map` names with what it imports. Local paths in the recipe and the results are reduced to
    their last part, and the code in the card names `repo_id` and `revision`; the files on disk stay as they are.

    Raises:
        UserError: The weights, or code that is named, are not there, or a file cannot be read.
    """
    output_dir = Path(output_dir)
    files = {p.relative_to(output_dir).as_posix(): p for name in SHARED for p in output_dir.glob(name)}
    files |= {path.name: path for path in weight_files(output_dir) + code_files(output_dir)}
    contents = {}
    if "all_results.json" in files:
        results = read_results(output_dir)
        text = json.dumps(results | public_dataset(results), indent=2, ensure_ascii=False) + "\n"
        contents["all_results.json"] = text.encode()
    if "recipe.yaml" in files:
        recipe = read_options(output_dir)
        contents["recipe.yaml"] = yaml.safe_dump(
            recipe | public_options(recipe), sort_keys=False, allow_unicode=True
        ).encode()
    if "README.md" in files and repo_id is not None:
        card = read(files["README.md"], str, str)
        card = re.sub(r'(?m)^model_id = ".*$', f'model_id = "{repo_id}"', card)
        if revision is not None:
            card = re.sub(r'(?m)^revision = ".*"', f'revision = "{revision}"', card)
        contents["README.md"] = card.encode()
    return dict(sorted((files | contents).items()))


def weight_files(output_dir: Path) -> list[Path]:
    """The safetensors that `from_pretrained` loads; raises UserError where one is missing."""
    single, index = output_dir / "model.safetensors", output_dir / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise UserError(f"{output_dir} has no weights; save them there as model.safetensors by save_pretrained.")
    names = sorted(set(read_json(index).get("weight_map", {}).values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(f"{index} names '{name}', which is no safetensors file beside it; save the model again.")
    shards = [output_dir / name for name in names]
    for path in shards:
        if not path.exists():
            raise UserError(f"{index} names the shard {path.name}, which is not there; save the model again.")
    return [index, *shards]


def code_files(output_dir: Path) -> list[Path]:
    """The Python files that the directory is loaded with: those named in its configs, and what these import."""
    config = read_json(output_dir / "config.json")
    tokenizer = output_dir / "tokenizer_config.json"
    maps = [config.get("auto_map"), read_json(tokenizer).get("auto_map") if tokenizer.exists() else None]
    named = [name for auto_map in maps for name in flatten((auto_map or {}).values())]
    named += [pipeline.get("impl") for pipeline in config.get("custom_pipelines", {}).values()]
    if not (config.get("auto_map") or {}).keys() >= {"AutoConfig", "AutoModelForSeq2SeqLM"}:
        raise UserError(
            f"{output_dir}/config.json does not name the model's code in `auto_map`, without which only who has this "
            "package could load it; save the model again by save_pretrained."
        )
    files = {output_dir / f"{name.split('.')[0]}.py" for name in named if name and "--" not in name}
    try:
        files |= {Path(found) for path in files for found in get_relative_import_files(path)}
        for path in files:
            path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{error.filename} is missing, which the model is loaded with; save the model again by save_pretrained."
        ) from error
    return sorted(files)


def flatten(values) -> list[str]:
    """The names in an `auto_map`, where a tokenizer has a pair of them."""
    return [name for value in values for name in (value if isinstance(value, (list, tuple)) else [value])]


# ------------------------------------------------------------------------------------------------------------- the Hub


def check_token(
    repo_id: str | None = None, output_dir: str | Path = ".", token: str | None = None, create_pr: bool = False
) -> str:
    """Makes sure that a push can work, before anything is computed for it.

    Args:
        repo_id: The repository, `owner/name`, or a name in the user's own namespace. None: the name of `output_dir`.
        token: A token of the Hub. None: that of `hf auth login` or of HF_TOKEN.
        create_pr: Whether the push only proposes, which needs no right to write.

    Returns:
        The full id of the repository.

    Raises:
        UserError: The id is malformed, there is no token, the Hub does not know it or cannot be reached, or it has
            no right to write there.
    """
    name = check_repo_id(repo_id or Path(output_dir).resolve().name)
    token = token or get_token()
    if token is None:
        raise UserError("There is no token to push with; log in by `hf auth login`, or set HF_TOKEN.")
    with hub_errors(name):
        user = HfApi(token=token).whoami()
    owner = name.split("/")[0] if "/" in name else user["name"]
    role = user.get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        raise UserError(
            f"The token can only read, not push to {name}; make one that can write at "
            "https://huggingface.co/settings/tokens, and log in with it by `hf auth login` or HF_TOKEN."
        )
    owners = {user["name"], *(org["name"] for org in user.get("orgs", []))}
    # What a fine-grained token may do is not told; the Hub itself says so when it is used.
    if role == "write" and not create_pr and owner.lower() not in {known.lower() for known in owners}:
        raise UserError(
            f"{user['name']} has no right to push to {name}; choose a repository of {', '.join(sorted(owners))}, or "
            "propose the model by a pull request."
        )
    return name if "/" in name else f"{owner}/{name}"


def check_repo_id(repo_id: str) -> str:
    """Raises UserError for what can be no repository's id."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(
            f"'{repo_id}' can be no repository's id; give one like you/model, of letters, digits, '-', '_' and '.'."
        ) from error
    return repo_id


@contextmanager
def hub_errors(repo_id: str):
    """Turns what the Hub or the way to it refuses into a UserError."""
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise UserError("HF_HUB_OFFLINE is set, and a push needs the Hub; unset it.") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if isinstance(error, RevisionNotFoundError):
            raise UserError(
                f"{repo_id} has no such revision; push to it without a pull request, or to main."
            ) from error
        if status == 401 and "/whoami" in str(error.response.url):
            raise UserError(
                "The Hub does not know the token; log in anew by `hf auth login`, or set HF_TOKEN, which wins, "
                "to one of https://huggingface.co/settings/tokens."
            ) from error
        if status in (401, 403, 404):
            raise UserError(
                f"The token has no right to push to {repo_id} (the Hub answered {status}); choose a repository of "
                "your own, or log in by `hf auth login` or HF_TOKEN with a token that can write there."
            ) from error
        reason = error.server_message or f"status {status}"
        raise UserError(f"The Hub refused the push to {repo_id}: {reason}") from error
    except HTTPError as error:
        raise UserError(
            f"The Hub cannot be reached ({type(error).__name__}: {error}); look after the network, then push again."
        ) from error
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"The push to {repo_id} failed, and may be tried again: {reason}") from error


def push(
    output_dir: str | Path,
    repo_id: str | None = None,
    private: bool = False,
    revision: str | None = None,
    commit_message: str | None = None,
    create_pr: bool = False,
    token: str | None = None,
) -> CommitInfo:
    """Pushes a trained model to the Hub in one commit, after [`check_token`] and [`check_model_directory`].

    The repository is made if need be; a card is written if there is none, and one that is there goes up with all
    that was added to it by hand. Weights that an earlier push left and this one does not replace are deleted, since
    they would be loaded in the place of these.

    Args:
        repo_id: The repository, `owner/name`, or a name in the user's own namespace. None: the name of `output_dir`.
        private: Make the repository private.
        revision: The branch to push to, made if need be. None: main.
        create_pr: Propose the commit as a pull request.
        token: A token of the Hub. None: that of `hf auth login` or of HF_TOKEN.

    Returns:
        The commit, with its `commit_url` and, of a pull request, its `pr_url`.

    Raises:
        UserError: The token, the directory or the repository does not allow it, or the Hub cannot be reached.
    """
    repo_id = check_token(repo_id, output_dir, token, create_pr)
    check_model_directory(output_dir)
    if not (Path(output_dir) / "README.md").exists():
        write_model_card(output_dir)
    files = files_to_upload(output_dir, repo_id, revision)
    api = HfApi(token=token)
    with hub_errors(repo_id):
        api.create_repo(repo_id, private=private or None, exist_ok=True)
        if private and not api.model_info(repo_id).private:
            raise UserError(
                f"{repo_id} is there already and is public; make it private on the Hub, or choose another."
            )
        if revision and not create_pr and not revision.startswith("refs/"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        # `upload_folder` may make several commits, between which a visitor would find half a model.
        return api.create_commit(
            repo_id,
            operations=[
                *(CommitOperationAdd(path_in_repo=path, path_or_fileobj=file) for path, file in files.items()),
                *(CommitOperationDelete(path_in_repo=path) for path in old_weights(api, repo_id, revision, files)),
            ],
            commit_message=commit_message or "Upload a trained Transformer",
            revision=revision,
            create_pr=create_pr,
        )


def old_weights(api: HfApi, repo_id: str, revision: str | None, files: dict) -> list[str]:
    """Weights in the repository that none of `files` replaces."""
    there = api.list_repo_files(repo_id, revision=revision)
    weights = re.compile(r"(model|pytorch_model)[^/]*\.(safetensors|bin)(\.index\.json)?")
    return [path for path in there if weights.fullmatch(path) and path not in files]


check_push = check_token
