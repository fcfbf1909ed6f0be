"""A Hub on 127.0.0.1 for the real client: `with LoopbackHub() as hub`, then `run_python(..., hub.url)`.

Models, datasets and Spaces, branches, commits with regular and LFS files, pull requests, listings, downloads.
`requests` lists the requests, `repos` holds what was pushed. The client must set HF_HUB_DISABLE_XET=1.
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
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from threading import Thread
from urllib.parse import parse_qs, unquote

from forked_python import WITHOUT_HUB, programs

TOKENS = {"hf_write": "write", "hf_read": "read"}  # of the user "me", in the team "team"
OWNERS = ("me", "team")


def sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def git_sha1(content: bytes) -> str:
    return sha1(b"blob %d\0" % len(content) + content)


@dataclass
class Commit:
    oid: str
    message: str
    files: dict[str, bytes]  # all files after it
    lfs: set[str] = field(default_factory=set)


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
        self.uploads: dict[str, bytes] = {}  # LFS objects
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
        if path.startswith("/lfs/"):  # on the real Hub a signed URL, which needs no token
            self.hub.uploads[path.removeprefix("/lfs/")] = self.body
            return self.answer(200)
        self.token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        is_write = self.command not in ("GET", "HEAD") and "/paths-info/" not in path
        if self.token not in TOKENS and (self.token or is_write or "whoami" in path):
            return self.answer(401, {"error": "Invalid username or password."})
        if is_write and TOKENS[self.token] == "read":
            return self.answer(403, {"error": "You don't have the rights"})
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

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def whoami(self):
        auth = {"type": "access_token", "accessToken": {"displayName": "test", "role": TOKENS[self.token]}}
        self.answer(200, {"type": "user", "name": "me", "orgs": [{"name": "team"}], "auth": auth})

    def create_repo(self):
        asked = json.loads(self.body)
        owner = asked["organization"] or "me"
        kind = {"dataset": "datasets/", "space": "spaces/"}.get(asked.get("type"), "")
        repo_id = f"{kind}{owner}/{asked['name']}"
        if owner not in OWNERS:
            return self.answer(403, {"error": "You don't have the rights to create a model under this namespace"})
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
        if folder and not inside:
            return self.not_found("Entry")
        if parse_qs(self.query).get("recursive", [""])[0].lower() not in ("true", "1"):
            inside = {path: entry for path, entry in inside.items() if path.count("/") == prefix.count("/")}
        self.answer(200, list(inside.values()))

    def paths_info(self):
        found, asked = entries(self.at), parse_qs(self.body.decode()).get("paths", [])
        self.answer(200, [found[path] for path in asked if path in found])

    def branch(self):
        if self.revision in self.repo.refs:
            return self.answer(409, {"error": "exists"})
        self.repo.refs[self.revision] = [self.repo.at("main")]
        self.answer(200, {})

    def preupload(self):
        files, modes = self.at.files, []
        for asked in json.loads(self.body)["files"]:
            is_lfs, content = asked["path"].endswith(".safetensors"), files.get(asked["path"])
            oid = content and (hashlib.sha256(content).hexdigest() if is_lfs else git_sha1(content))
            mode = "lfs" if is_lfs else "regular"
            modes.append({"path": asked["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.answer(200, {"files": modes})

    def lfs_batch(self):
        objects = json.loads(self.body)["objects"]
        for asked in objects:
            asked["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{asked['oid']}"}}
        self.answer(200, {"transfer": "basic", "objects": objects})

    def commit(self):
        is_pr = "create_pr=1" in self.query
        if self.repo_id.split("/")[-2] not in OWNERS and not is_pr:
            return self.answer(403, {"error": "You don't have the rights"})
        files, lfs = dict(self.at.files), set()
        header, *lines = map(json.loads, self.body.splitlines())
        for line in lines:
            kind, value = line["key"], line["value"]
            if kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                files[value["path"]] = self.hub.uploads[value["oid"]]
                lfs.add(value["path"])
            else:
                del files[value["path"]]
        commit = Commit(sha1(self.body), header["value"]["summary"], files, lfs)
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
        headers = {"ETag": f'"{git_sha1(content)}"', "X-Repo-Commit": self.at.oid, "Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not asked:
            return self.answer(200, content, **headers)
        first, last = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
        if first > last:
            return self.answer(416, Content_Range=f"bytes */{len(content)}")
        self.answer(206, content[first : last + 1], Content_Range=f"bytes {first}-{last}/{len(content)}", **headers)


def entries(commit: Commit) -> dict[str, dict]:
    """Folders and files by path."""
    folders = {str(folder) for path in commit.files for folder in PurePosixPath(path).parents} - {"."}
    found = {path: {"type": "directory", "path": path, "size": 0, "oid": sha1(path.encode())} for path in folders}
    for path, content in commit.files.items():
        found[path] = {"type": "file", "path": path, "size": len(content), "oid": git_sha1(content)}
    last = {"lastCommit": {"id": commit.oid, "title": commit.message, "date": "2026-11-20T12:00:00.000Z"}}
    return {path: found[path] | last for path in sorted(found)}


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
    f"POST /api/{REPO}/paths-info/([^/]+)": Handler.paths_info,
    f"POST /api/{REPO}/branch/([^/]+)": Handler.branch,
    f"POST /api/{REPO}/preupload/([^/]+)": Handler.preupload,
    f"POST /api/{REPO}/commit/([^/]+)": Handler.commit,
    r"POST /((?:datasets/)?[^/]+/[^/]+)\.git/info/lfs/objects/batch": Handler.lfs_batch,
    "(?:GET|HEAD) /((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)": Handler.resolve,
}
