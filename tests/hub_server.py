"""A Hub on 127.0.0.1 for the real client: `with LoopbackHub() as hub`, then `run_python(..., hub.url)`.

Models, datasets and Spaces, branches, commits, pull requests, listings, downloads; no LFS, since the Hub decides what
is in it. `requests` lists the requests, `repos` holds what was pushed. The client must set HF_HUB_DISABLE_XET=1.
"""

import atexit
import base64
import contextlib
import functools
import hashlib
import json
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from threading import Thread
from urllib.parse import parse_qs, unquote

from forked_python import WITHOUT_HUB, programs

TOKENS = ("hf_write", "hf_read")  # of the user "me"; that the second only reads is not checked


def sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def git_sha1(content: bytes) -> str:
    return sha1(b"blob %d\0" % len(content) + content)


@dataclass
class Commit:
    oid: str
    message: str
    files: dict[str, bytes]  # all files after it


@dataclass
class Repo:
    private: bool
    refs: dict[str, list[Commit]]  # branches and pull requests
    gated: bool = False

    def at(self, revision: str) -> Commit | None:
        if revision in self.refs:
            return self.refs[revision][-1]
        return next((c for commits in self.refs.values() for c in commits if c.oid == revision), None)


class LoopbackHub:
    def __init__(self):
        self.repos: dict[str, Repo] = {}  # by id; `datasets/` and `spaces/` come first
        self.requests: list[str] = []
        self.refuse: dict[str, int] = {}  # part of "METHOD /path" -> the status to answer with
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def create(self, repo_id: str, private: bool = False, files: dict[str, bytes] | None = None, gated: bool = False):
        commit = Commit(sha1(repo_id.encode()), "initial commit", {".gitattributes": b"", **(files or {})})
        self.repos[repo_id] = Repo(private, {"main": [commit]}, gated)


class Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status: int, content=b"", **headers):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def not_found(self, what: str, **headers):
        self.answer(404, X_Error_Code=f"{what}NotFound", **headers)

    def handle_request(self):
        path, _, self.query = self.path.partition("?")
        request = f"{self.command} {self.path}"
        if request != "GET /api/agent-harnesses":  # which the client fetches once a day
            self.hub.requests.append(request)
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        for part, status in self.hub.refuse.items():
            if part in request:
                return self.answer(status, {"error": "refused"}, Retry_After="0")
        self.token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.token not in TOKENS and (self.token or self.command == "POST" or "whoami" in path):
            return self.answer(401, {"error": "Invalid username or password."})
        for pattern, method in ROUTES.items():
            if found := re.fullmatch(pattern, f"{self.command} {path}"):
                repo_id, *rest = [part and unquote(part) for part in found.groups()] or [None]
                if repo_id is None:
                    return method(self)
                self.repo_id = repo_id.removeprefix("models/")
                self.repo = self.hub.repos.get(self.repo_id)
                if self.repo is None or self.repo.private and not self.token:
                    return self.not_found("Repo")
                self.revision = rest[0] if rest else "main"
                self.at = self.repo.at(self.revision)
                if self.at is None and method is not Handler.branch:
                    return self.not_found("Revision")
                return method(self, *rest[1:])
        self.not_found("Entry")

    do_GET = do_HEAD = do_POST = handle_request

    def whoami(self):
        self.answer(200, {"name": "me"})

    def create_repo(self):
        asked = json.loads(self.body)
        kind = "spaces/" if asked.get("type") == "space" else ""
        repo_id = f"{kind}{asked['organization'] or 'me'}/{asked['name']}"
        url = {"url": f"{self.hub.url}/{repo_id}"}
        if repo_id in self.hub.repos:
            return self.answer(409, {"error": "exists", **url})
        self.hub.create(repo_id, asked.get("visibility") == "private")
        self.answer(200, url)

    def validate_yaml(self):
        self.answer(200, {"errors": [], "warnings": []})

    def info(self):
        told = {"id": "/".join(self.repo_id.split("/")[-2:]), "sha": self.at.oid, "private": self.repo.private}
        self.answer(200, told | {"siblings": [{"rfilename": path} for path in self.at.files]})

    def tree(self, folder=None):
        """The contents of a folder; with `recursive`, also of those below."""
        prefix = f"{folder}/" if folder else ""
        inside = {path: entry for path, entry in entries(self.at).items() if path.startswith(prefix)}
        if parse_qs(self.query).get("recursive", [""])[0].lower() not in ("true", "1"):
            inside = {path: entry for path, entry in inside.items() if path.count("/") == prefix.count("/")}
        self.answer(200, list(inside.values()))

    def branch(self):
        if self.revision in self.repo.refs:
            return self.answer(409, {"error": "exists"})
        self.repo.refs[self.revision] = [self.repo.at("main")]
        self.answer(200, {})

    def preupload(self):
        modes, same = [], {"uploadMode": "regular", "shouldIgnore": False}
        for path in (asked["path"] for asked in json.loads(self.body)["files"]):
            content = self.at.files.get(path)
            modes.append({"path": path, "oid": content and git_sha1(content), **same})
        self.answer(200, {"files": modes})

    def commit(self):
        is_pr, files = "create_pr=1" in self.query, dict(self.at.files)
        header, *lines = map(json.loads, self.body.splitlines())
        for line in lines:
            kind, value = line["key"], line["value"]
            if kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                del files[value["path"]]
        commit = Commit(sha1(self.body), header["value"]["summary"], files)
        ref = "refs/pr/1" if is_pr else self.revision
        self.repo.refs[ref] = [*self.repo.refs.get(self.revision, []), commit]
        url = f"{self.hub.url}/{self.repo_id}"
        pr = {"pullRequestUrl": f"{url}/discussions/1"} if is_pr else {}
        self.answer(200, {"success": True, "commitOid": commit.oid, "commitUrl": f"{url}/commit/{commit.oid}", **pr})

    def resolve(self, path):
        if self.repo.gated:
            return self.answer(403, {"error": "Access is restricted"}, X_Error_Code="GatedRepo")
        if path not in self.at.files:
            return self.not_found("Entry", X_Repo_Commit=self.at.oid)
        content = self.at.files[path]
        # The files are small; a client that asks for a part gets the whole.
        self.answer(200, content, ETag=f'"{git_sha1(content)}"', X_Repo_Commit=self.at.oid)


def entries(commit: Commit) -> dict[str, dict]:
    """Folders and files by path."""
    folders = {str(folder) for path in commit.files for folder in PurePosixPath(path).parents} - {"."}
    found = {path: {"type": "directory", "path": path, "size": 0, "oid": sha1(path.encode())} for path in folders}
    for path, content in commit.files.items():
        found[path] = {"type": "file", "path": path, "size": len(content), "oid": git_sha1(content)}
    return found


@functools.cache
def python() -> str:
    """A program like Python that has imported what takes longest, and nothing of Hugging Face."""
    folder = Path(context.enter_context(tempfile.TemporaryDirectory()))
    # As many threads as here: the order of sums, and so the bits of logits, depends on it.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return str(context.enter_context(programs(folder, environment, WITHOUT_HUB, python="")) / "python")


context = contextlib.ExitStack()
atexit.register(context.close)


def run_python(arguments, folder: Path, endpoint: str, token: str | None = None) -> subprocess.CompletedProcess:
    """Runs Python in a new process with no token, cache or login but what it is given here.

    Its user answers yes to every question.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING_FACE"))}
    env |= {"HF_ENDPOINT": endpoint, "HF_HOME": tempfile.mkdtemp(dir=folder), "HF_HUB_DISABLE_XET": "1"}
    env |= {"HF_TOKEN": token} if token else {}
    env |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONIOENCODING": "utf-8"}
    options = {"cwd": folder, "env": env, "input": "yes\n" * 9, "capture_output": True, "encoding": "utf-8"}
    return subprocess.run([python(), *map(str, arguments)], timeout=400, **options)


REPO = "((?:models|datasets|spaces)/[^/]+/[^/]+)"
ROUTES = {
    "GET /api/whoami-v2": Handler.whoami,
    "POST /api/repos/create": Handler.create_repo,
    "POST /api/validate-yaml": Handler.validate_yaml,
    f"GET /api/{REPO}": Handler.info,
    f"GET /api/{REPO}/revision/([^/]+)": Handler.info,
    f"GET /api/{REPO}/tree/([^/]+)(?:/(.+))?": Handler.tree,
    f"POST /api/{REPO}/branch/([^/]+)": Handler.branch,
    f"POST /api/{REPO}/preupload/([^/]+)": Handler.preupload,
    f"POST /api/{REPO}/commit/([^/]+)": Handler.commit,
    "(?:GET|HEAD) /((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)": Handler.resolve,
}
