"""The one place that removes and replaces files: only what this program made, or what the user named.

Symbolic links are not followed: writing a file replaces a link to one, and a link to a folder is never removed.
So nothing that a stranger put into a directory leads out of it.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from .errors import UserError

CONVERTED = "vanilla_transformer.json"  # our config in a directory for CTranslate2, which has a config.json itself
PACKED = Path(__file__).parent / "project"  # train.py, recipes and the sample in a wheel, by hatch_build.py
PROJECT = PACKED if PACKED.exists() else PACKED.parents[1]  # or in the checkout
PREFIX = ".unfinished-"  # of the name of what is being written or removed


def temporary_folder(parent: Path) -> TemporaryDirectory:
    return TemporaryDirectory(dir=parent, prefix=PREFIX, ignore_cleanup_errors=True)


@contextmanager
def replacing_files(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder, whose files move to `folder` at the end and replace those of the same names.

    If the program is killed, each file is whole, old or new. After an error within the context, `folder` is as it was.
    Raises OSError if one of the names belongs to a directory or a device.
    """
    with temporary_folder(folder) as temporary:
        yield Path(temporary)
        files = sorted(Path(temporary).iterdir())
        for file in files:
            check_replaceable(folder / file.name)
        for file in files:
            file.replace(folder / file.name)


@contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """Yields a path with the same name, whose file replaces `path` at the end; as [`replacing_files`]."""
    check_replaceable(path)  # before any work
    with replacing_files(path.parent) as folder:
        yield folder / path.name


def write_text(path: Path, text: str):
    """Writes a file in UTF-8, as [`write_bytes`]."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes):
    """Writes a file with the access rights of the one that it replaces; as [`replacing_files`]."""
    with replacing_file(path) as temporary:
        temporary.write_bytes(content)
        if path.is_file() and not path.is_symlink():
            shutil.copymode(path, temporary)


def check_replaceable(path: Path):
    """Raises OSError for the path of a directory, a device and the like, or for a link to one."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not a file; choose another name.")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yields the path of a folder to make, which becomes `folder` at the end: all of it or, after an error, nothing.

    Raises UserError if there is something of that name, and OSError if it cannot be made.
    """
    check_missing(folder)  # before any work
    try:
        beside = temporary_folder(folder.parent)
    except OSError as error:  # names the temporary folder
        raise OSError(error.errno, error.strerror, str(folder)) from error
    with beside as temporary:
        made = Path(temporary) / folder.name
        yield made
        check_missing(folder)
        made.rename(folder)


def check_missing(folder: Path):
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder} already exists; move it away, or choose another directory.")


def remove_file(path: Path):
    """Removes a file, or a link to one, if it exists."""
    path.unlink(missing_ok=True)


def remove_folder(folder: Path, marker: str):
    """Removes a folder, unless it is a link or lacks the file `marker`, which only this program writes.

    If the program is killed, `folder` is complete or gone.
    """
    if not folder.is_symlink() and (folder / marker).is_file():
        with temporary_folder(folder.parent) as temporary:
            folder.rename(Path(temporary) / folder.name)


def remove_unfinished(folder: Path):
    """Removes what a killed program left in `folder`, which no other program may be writing to."""
    for remains in folder.glob(f"{PREFIX}*"):
        shutil.rmtree(remains, ignore_errors=True)  # not a link


def last_part(path_or_url: str) -> str:
    """The name of a file, without the way there and the query of a URL, which may hold a password."""
    return Path(urlsplit(path_or_url).path if "://" in path_or_url else path_or_url).name


def public_file(path_or_url: str) -> str:
    """A file of the Hub as it is, of any other the name alone: the way there may be private, or hold a password."""
    return path_or_url if path_or_url.startswith("hf://") else last_part(path_or_url)


def public_name(name_or_path: str) -> str:
    """A Hub id unchanged; the last part of a local path, since the rest describes its owner's disk."""
    try:
        validate_repo_id(name_or_path)
    except HFValidationError:
        return last_part(name_or_path)
    return Path(name_or_path).name if Path(name_or_path).exists() else name_or_path


def copy_permissions(folder: Path):
    """Gives the weights of a saved model the access rights of its config; safetensors 0.8 lets only the owner read."""
    for weights in folder.glob("*.safetensors"):
        with suppress(OSError):  # a file system without such rights
            shutil.copymode(folder / "config.json", weights)


def link_files(folder: Path, links: Path, rename: Callable[[str], str] = str):
    """Makes `links` a copy of a directory, with symbolic links in place of files. Those that exist are left."""
    for path in filter(Path.is_file, folder.rglob("*")):
        link = links / path.relative_to(folder).with_name(rename(path.name))
        link.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            link.symlink_to(path)
