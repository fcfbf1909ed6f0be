"""A Space: the page of `vanilla-transformer demo`, served by the Hub for a model that is there."""

import sys
from importlib.metadata import version
from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi, SpaceCardData

from .upload import hub_errors

PACKAGE = Path(__file__).parents[1]
# The page with all that it imports; a Space does not install this package.
PARTS = "__init__.py errors.py files.py languages.py loading.py versions.py *_vanilla_transformer.py demo/*.py "
PARTS += "engines/__init__.py inspection/__init__.py inspection/a*.py inspection/checks.py"
LIBRARIES = ["torch", "transformers", "tokenizers", "safetensors", "matplotlib", "langcodes"]
GRADIO = "6.31.0"  # installed by the Space itself
APP = """from vanilla_transformer import Translator
from vanilla_transformer.demo.app import launch, make_app

translator = Translator.from_pretrained("{model}", revision="{revision}", too_long="refuse")
launch(make_app("{model}", translator, translator.model, "{revision}")).block_thread()
"""
README = """---
{data}
---

Translations by [{model}](https://huggingface.co/{model}), with the n best, word alignment and attention.
"""


def space_files(model_id: str, revision: str | None = None) -> dict[str, bytes]:
    """The files of a Space that serves a model of the Hub: `app.py`, its requirements, README and the package."""
    data = SpaceCardData(
        title=model_id.split("/")[-1],
        emoji="🌍",
        colorFrom="indigo",
        colorTo="blue",
        sdk="gradio",
        sdk_version=GRADIO,
        python_version=f"{sys.version_info.major}.{sys.version_info.minor}",
        app_file="app.py",
        models=[model_id],
        tags=["translation", "vanilla-transformer"],
        pinned=False,
    )
    torch, *others = (f"{name}=={version(name).split('+')[0]}" for name in LIBRARIES)
    files = {
        "README.md": README.format(data=data.to_yaml(), model=model_id),
        "app.py": APP.format(model=model_id, revision=revision or "main"),
        # Installed first, with what it needs, from torch's own index, which has a build for the CPU.
        "pre-requirements.txt": f"--index-url https://download.pytorch.org/whl/cpu\n{torch}\n",
        "requirements.txt": "\n".join([torch, *others]) + "\n",
    }
    package = {path for part in PARTS.split() for path in PACKAGE.glob(part)}
    sources = {f"{PACKAGE.name}/{path.relative_to(PACKAGE).as_posix()}": path.read_bytes() for path in package}
    return {name: text.encode() for name, text in files.items()} | dict(sorted(sources.items()))


def push_space(space_id: str, model_id: str, revision: str | None = None, private: bool = False) -> CommitInfo:
    """Uploads [`space_files`] in one commit; creates the Space if needed.

    Raises UserError if the Hub refuses it or cannot be reached.
    """
    api = HfApi()
    operations = [
        CommitOperationAdd(path_in_repo=path, path_or_fileobj=content)
        for path, content in space_files(model_id, revision).items()
    ]
    with hub_errors(space_id):
        api.create_repo(space_id, repo_type="space", space_sdk="gradio", private=private or None, exist_ok=True)
        return api.create_commit(space_id, operations, commit_message=f"Show {model_id}", repo_type="space")
