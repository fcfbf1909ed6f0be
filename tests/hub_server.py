"""A Hub on loopback, for the real client: `with LoopbackHub() as hub` and then HF_ENDPOINT=hub.url in a child process.

It knows models and datasets: making one, branches, commits with regular and LFS files, pull requests, listings and
downloads, whole or in part. What it was asked and given is in `requests` and `repos`. Xet must be off,
HF_HUB_DISABLE_XET=1, unless `lfs_suffixes` is empty.
"""

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from threading import Event, Thread
from urllib.parse import parse_qs, unquote

TOKENS = {"hf_write": "write", "hf_read": "read", "hf_fine": "fineGrained"}  # of the user "me", in the team "team"
OWNERS = ("me", "team")
# In the place of a status: reads half of what is sent, and closes the connection, at once or when told to go on.
HANG_UP, HOLD = 0, 1


def sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def git_sha1(content: bytes) -> str:
    return sha1(b"blob %d\0" % len(content) + content)


@dataclass
class Commit:
    oid: str
    message: str
    files: dict[str, bytes]  # all that is there after it
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
        self.repos: dict[str, Repo] = {}  # by their id, which of a dataset begins with `datasets/`
        self.uploads: dict[str, bytes] = {}  # LFS objects
        self.lfs_suffixes = (".safetensors",)
        self.requests: list[str] = []
        # Part of "METHOD /path": the status to answer with, or those to answer with in turn, of which the last stays
        # and 200 lets pass.
        self.refuse: dict[str, int | list[int]] = {}
        self.holds, self.go_on = Event(), Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def create(self, repo_id: str, private: bool = False, files: dict[str, bytes] | None = None, gated: bool = False):
        files = {".gitattributes": b"", **(files or {})}
        commit = Commit(sha1(repo_id.encode()), "initial commit", files)
        self.repos[repo_id] = Repo(private, {"main": [commit]}, gated)

    def refusal(self, request: str) -> int:
        for part, status in self.refuse.items():
            if part in request:
                return status if isinstance(status, int) else status.pop(0) if len(status) > 1 else status[0]
        return 200


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

    def handle_request(self):
        path, _, query = self.path.partition("?")
        request = f"{self.command} {self.path}"
        # A registry that the client fetches once a day, whatever it is asked to do, tells nothing of what was asked.
        if request != "GET /api/agent-harnesses":
            self.hub.requests.append(request)
        size, status = int(self.headers.get("Content-Length", 0)), self.hub.refusal(request)
        if status in (HANG_UP, HOLD):
            self.rfile.read(size // 2)
            if status == HOLD:
                self.hub.holds.set()
                self.hub.go_on.wait(60)
            self.close_connection = True
            return
        body = self.rfile.read(size)
        if status != 200:
            return self.answer(status, {"error": "refused"}, Retry_After="0")
        if path.startswith("/lfs/"):  # what the real Hub signs, and needs no token
            return self.put_lfs(path, body)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        is_write = self.command not in ("GET", "HEAD") and "/paths-info/" not in path
        if token not in TOKENS and (token or is_write):
            return self.answer(401, {"error": "Invalid username or password."})
        if is_write and TOKENS[token] == "read":
            return self.answer(403, {"error": "You don't have the rights"})
        for pattern, method in ROUTES.items():
            found = re.fullmatch(pattern, request.partition("?")[0])
            if found:
                repo_id, *rest = [part and unquote(part) for part in found.groups()] or [None]
                repo_id = repo_id and repo_id.removeprefix("models/")
                repo = self.hub.repos.get(repo_id)
                if repo_id is not None and (repo is None or repo.private and not token):
                    return self.answer(404, X_Error_Code="RepoNotFound")
                return method(self, *([repo_id, repo] if repo_id else []), *rest, query=query, body=body)
        self.answer(404, X_Error_Code="EntryNotFound")

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def whoami(self, query, body):
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not token:
            return self.answer(401, {"error": "Invalid username or password."})
        role = TOKENS[token]
        auth = {"type": "access_token", "accessToken": {"displayName": "test", "role": role}}
        self.answer(200, {"type": "user", "name": "me", "orgs": [{"name": "team"}], "auth": auth})

    def create_repo(self, query, body):
        asked = json.loads(body)
        owner = asked["organization"] or "me"
        repo_id = ("datasets/" if asked.get("type") == "dataset" else "") + f"{owner}/{asked['name']}"
        if owner not in OWNERS:
            return self.answer(403, {"error": "You don't have the rights to create a model under this namespace"})
        if repo_id in self.hub.repos:
            return self.answer(409, {"error": "exists", "url": f"{self.hub.url}/{repo_id}"})
        self.hub.create(repo_id, asked.get("visibility") == "private")
        self.answer(200, {"url": f"{self.hub.url}/{repo_id}"})

    def validate_yaml(self, query, body):
        self.answer(200, {"errors": [], "warnings": []})

    def info(self, repo_id, repo, revision="main", query="", body=b""):
        commit = repo.at(revision)
        if commit is None:
            return self.answer(404, X_Error_Code="RevisionNotFound")
        told = {"id": repo_id.removeprefix("datasets/"), "sha": commit.oid, "private": repo.private}
        self.answer(200, told | {"siblings": [{"rfilename": path} for path in commit.files]})

    def tree(self, repo_id, repo, revision, folder=None, query="", body=b""):
        """What is in a folder, or with `recursive` also in those below."""
        commit, asked = repo.at(revision), parse_qs(query)
        if commit is None:
            return self.answer(404, X_Error_Code="RevisionNotFound")
        prefix = f"{folder}/" if folder else ""
        inside = {path: entry for path, entry in entries(commit).items() if path.startswith(prefix)}
        if folder and not inside:
            return self.answer(404, X_Error_Code="EntryNotFound")
        if not is_true(asked, "recursive"):
            inside = {path: entry for path, entry in inside.items() if path.count("/") == prefix.count("/")}
        self.answer(200, described(inside.values(), commit, is_true(asked, "expand")))

    def paths_info(self, repo_id, repo, revision, query="", body=b""):
        commit, asked = repo.at(revision), parse_qs(body.decode())
        if commit is None:
            return self.answer(404, X_Error_Code="RevisionNotFound")
        found = [entries(commit)[path] for path in asked.get("paths", []) if path in entries(commit)]
        self.answer(200, described(found, commit, is_true(asked, "expand")))

    def branch(self, repo_id, repo, name, query="", body=b""):
        if name in repo.refs:
            return self.answer(409, {"error": "exists"})
        repo.refs[name] = [repo.at("main")]
        self.answer(200, {})

    def preupload(self, repo_id, repo, revision, query="", body=b""):
        commit, modes = repo.at(revision), []
        if commit is None:
            return self.answer(404, X_Error_Code="RevisionNotFound")
        for asked in json.loads(body)["files"]:
            content, is_lfs = commit.files.get(asked["path"]), asked["path"].endswith(self.hub.lfs_suffixes)
            oid = content and (hashlib.sha256(content).hexdigest() if is_lfs else git_sha1(content))
            mode = "lfs" if is_lfs else "regular"
            modes.append({"path": asked["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.answer(200, {"files": modes})

    def lfs_batch(self, repo_id, repo, query, body):
        there = {hashlib.sha256(content).hexdigest() for content in repo.at("main").files.values()}
        objects = [
            asked | {"actions": {"upload": {"href": f"{self.hub.url}/lfs/{asked['oid']}"}}}
            if asked["oid"] not in there
            else asked
            for asked in json.loads(body)["objects"]
        ]
        self.answer(200, {"transfer": "basic", "objects": objects})

    def put_lfs(self, path, body):
        oid = path.removeprefix("/lfs/")
        if hashlib.sha256(body).hexdigest() != oid:
            return self.answer(400, {"error": "damaged"})
        self.hub.uploads[oid] = body
        self.answer(200)

    def commit(self, repo_id, repo, revision, query, body):
        if repo_id.removeprefix("datasets/").split("/")[0] not in OWNERS and "create_pr=1" not in query:
            return self.answer(403, {"error": "You don't have the rights"})
        before = repo.at(revision)
        files, lfs = dict(before.files), set()
        lines = [json.loads(line) for line in body.splitlines()]
        for line in lines[1:]:
            key, value = line["key"], line["value"]
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.hub.uploads[value["oid"]]
                lfs.add(value["path"])
            else:
                del files[value["path"]]
        commit = Commit(sha1(body), lines[0]["value"]["summary"], files, lfs)
        is_pr = "create_pr=1" in query
        ref = f"refs/pr/{sum(name.startswith('refs/pr/') for name in repo.refs) + 1}" if is_pr else revision
        repo.refs[ref] = [*repo.refs.get(revision, []), commit]
        url = f"{self.hub.url}/{repo_id}"
        pr = {"pullRequestUrl": f"{url}/discussions/1"} if is_pr else {}
        self.answer(200, {"success": True, "commitOid": commit.oid, "commitUrl": f"{url}/commit/{commit.oid}", **pr})

    def resolve(self, repo_id, repo, revision, path, query="", body=b""):
        if repo.gated:
            return self.answer(403, {"error": "Access is restricted"}, X_Error_Code="GatedRepo")
        commit = repo.at(revision)
        if commit is None or path not in commit.files:
            code = "EntryNotFound" if commit else "RevisionNotFound"
            return self.answer(404, X_Error_Code=code, X_Repo_Commit=commit.oid if commit else "")
        content = commit.files[path]
        headers = {"ETag": f'"{git_sha1(content)}"', "X-Repo-Commit": commit.oid, "Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not asked:
            return self.answer(200, content, **headers)
        first, last = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
        if first > last:
            return self.answer(416, Content_Range=f"bytes */{len(content)}")
        self.answer(206, content[first : last + 1], Content_Range=f"bytes {first}-{last}/{len(content)}", **headers)


def entries(commit: Commit) -> dict[str, dict]:
    """Files and folders by their path."""
    folders = {str(folder) for path in commit.files for folder in PurePosixPath(path).parents} - {"."}
    found = {path: {"type": "directory", "path": path, "size": 0, "oid": sha1(path.encode())} for path in folders}
    for path, content in commit.files.items():
        found[path] = {"type": "file", "path": path, "size": len(content), "oid": git_sha1(content)}
    return dict(sorted(found.items()))


def described(found, commit: Commit, is_expanded: bool) -> list[dict]:
    last = {"lastCommit": {"id": commit.oid, "title": commit.message, "date": "2026-11-20T12:00:00.000Z"}}
    return [entry | (last if is_expanded else {}) for entry in found]


def is_true(asked: dict[str, list[str]], name: str) -> bool:
    return asked.get(name, [""])[0].lower() in ("true", "1")


REPO = "((?:models|datasets)/[^/]+/[^/]+)"
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
