"""A Hub on loopback, for the real client: `with LoopbackHub() as hub` and then HF_ENDPOINT=hub.url in a child process.

It knows models: making one, branches, commits with regular and LFS files, pull requests, and downloads. What it was
asked and given is in `requests` and `repos`. Xet must be off, HF_HUB_DISABLE_XET=1.
"""

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote

TOKENS = {"hf_write": "write", "hf_read": "read", "hf_fine": "fineGrained"}  # of the user "me", in the team "team"
OWNERS = ("me", "team")


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

    def at(self, revision: str) -> Commit | None:
        if revision in self.refs:
            return self.refs[revision][-1]
        return next((c for commits in self.refs.values() for c in commits if c.oid == revision), None)


class LoopbackHub:
    def __init__(self):
        self.repos: dict[str, Repo] = {}
        self.uploads: dict[str, bytes] = {}  # LFS objects
        self.requests: list[str] = []
        self.refuse: dict[str, int] = {}  # part of "METHOD /path": status to answer with
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def create(self, repo_id: str, private: bool = False, files: dict[str, bytes] | None = None):
        files = {".gitattributes": b"", **(files or {})}
        self.repos[repo_id] = Repo(private, {"main": [Commit(sha1(repo_id.encode()), "initial commit", files)]})


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
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path, _, query = self.path.partition("?")
        request = f"{self.command} {self.path}"
        # A registry that the client fetches once a day, whatever it is asked to do, tells nothing of what was asked.
        if request != "GET /api/agent-harnesses":
            self.hub.requests.append(request)
        for part, status in self.hub.refuse.items():
            if part in request:
                return self.answer(status, {"error": "refused"})
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if path.startswith("/lfs/"):  # what the real Hub signs, and needs no token
            return self.put_lfs(path, body)
        if token not in TOKENS and (token or self.command not in ("GET", "HEAD")):
            return self.answer(401, {"error": "Invalid username or password."})
        if self.command in ("POST", "PUT") and TOKENS[token] == "read":
            return self.answer(403, {"error": "You don't have the rights"})
        for pattern, method in ROUTES.items():
            found = re.fullmatch(pattern, request.partition("?")[0])
            if found:
                repo_id, *rest = [unquote(part) for part in found.groups()] or [None]
                repo = self.hub.repos.get(repo_id)
                if repo_id is not None and (repo is None or repo.private and token not in TOKENS):
                    return self.answer(404, X_Error_Code="RepoNotFound")
                return method(self, *([repo_id, repo] if repo_id else []), *rest, query=query, body=body)
        self.answer(404, X_Error_Code="EntryNotFound")

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def whoami(self, query, body):
        role = TOKENS[self.headers["Authorization"].removeprefix("Bearer ")]
        auth = {"type": "access_token", "accessToken": {"displayName": "test", "role": role}}
        self.answer(200, {"type": "user", "name": "me", "orgs": [{"name": "team"}], "auth": auth})

    def create_repo(self, query, body):
        asked = json.loads(body)
        repo_id = f"{asked['organization'] or 'me'}/{asked['name']}"
        if repo_id.split("/")[0] not in OWNERS:
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
        siblings = [{"rfilename": path} for path in commit.files]
        self.answer(200, {"id": repo_id, "sha": commit.oid, "private": repo.private, "siblings": siblings})

    def tree(self, repo_id, repo, revision, query="", body=b""):
        commit = repo.at(revision)
        if commit is None:
            return self.answer(404, X_Error_Code="RevisionNotFound")
        files = [("file", path, content) for path, content in commit.files.items()]
        self.answer(200, [{"type": t, "path": p, "size": len(c), "oid": git_sha1(c)} for t, p, c in files])

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
            content, is_lfs = commit.files.get(asked["path"]), asked["path"].endswith(".safetensors")
            oid = content and (hashlib.sha256(content).hexdigest() if is_lfs else git_sha1(content))
            mode = "lfs" if is_lfs else "regular"
            modes.append({"path": asked["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.answer(200, {"files": modes})

    def lfs_batch(self, repo_id, repo, query, body):
        objects = [
            {**asked, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{asked['oid']}"}}}
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
        if repo_id.split("/")[0] not in OWNERS and "create_pr=1" not in query:
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
        commit = repo.at(revision)
        if commit is None or path not in commit.files:
            code = "EntryNotFound" if commit else "RevisionNotFound"
            return self.answer(404, X_Error_Code=code, X_Repo_Commit=commit.oid if commit else "")
        content = commit.files[path]
        self.answer(200, content, ETag=f'"{git_sha1(content)}"', X_Repo_Commit=commit.oid)


ROUTES = {
    "GET /api/whoami-v2": Handler.whoami,
    "POST /api/repos/create": Handler.create_repo,
    "POST /api/validate-yaml": Handler.validate_yaml,
    "GET /api/models/([^/]+/[^/]+)": Handler.info,
    "GET /api/models/([^/]+/[^/]+)/revision/([^/]+)": Handler.info,
    "GET /api/models/([^/]+/[^/]+)/tree/([^/]+)": Handler.tree,
    "POST /api/models/([^/]+/[^/]+)/branch/([^/]+)": Handler.branch,
    "POST /api/models/([^/]+/[^/]+)/preupload/([^/]+)": Handler.preupload,
    "POST /api/models/([^/]+/[^/]+)/commit/([^/]+)": Handler.commit,
    r"POST /([^/]+/[^/]+)\.git/info/lfs/objects/batch": Handler.lfs_batch,
    "(?:GET|HEAD) /([^/]+/[^/]+)/resolve/([^/]+)/(.+)": Handler.resolve,
}
