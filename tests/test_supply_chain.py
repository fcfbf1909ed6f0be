"""What runs in CI, on a Space and in the browser comes from where it is said to, in a version that is named."""

import re
import shlex

import pytest
import yaml
from helpers import ROOT

from vanilla_transformer.hub.space import space_files

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.y*ml"))
PINNED = set(re.findall(r"(?m)^([\w.-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8")))
NOT_PACKAGES = ("-c", "constraints.txt", "-e", "--system")

every_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)


@every_workflow
def test_only_a_job_that_installs_nothing_may_write(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        rights = job.get("permissions", workflow["permissions"])
        assert isinstance(rights, dict) and rights.get("contents", "read") == "read", name
        if "write" in rights.values():
            assert not any("run" in step for step in job["steps"]), name


@every_workflow
def test_every_action_is_pinned_by_commit(path):
    """With its version in a comment, so that a person can read it."""
    uses = re.findall(r"(?m)^.*\buses:.*$", path.read_text(encoding="utf-8"))
    assert uses
    for line in uses:
        assert re.fullmatch(r" +- uses: [\w-]+/[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", line), line


@every_workflow
def test_every_package_of_a_workflow_has_a_version(path):
    """In the command, or in constraints.txt; what is built here has those of constraints.txt."""
    commands = re.findall(r"\bpip install ([^&\n]*)", path.read_text(encoding="utf-8"))
    assert commands
    for command in commands:
        words = shlex.split(command)
        assert words[words.index("-c") + 1] == "constraints.txt", command
        packages = [word for word in words if word not in NOT_PACKAGES]
        loose = [name for name in packages if "==" not in name and name not in PINNED]
        assert all(name.startswith((".", "$wheel")) for name in loose), command


def test_no_package_can_come_from_a_second_index():
    """Where two indexes are searched, the highest version wins, whoever put it there."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in WORKFLOWS}
    files = space_files("me/toy")
    texts |= {name: files[name].decode() for name in ("pre-requirements.txt", "requirements.txt")}
    assert len(texts) == len(WORKFLOWS) + 2
    for name, text in texts.items():
        words = text.lower().replace("_", "-")
        assert "extra-index" not in words and "find-links" not in words, name
        indexes = re.findall(r"(?:--|uv-|pip-)(?:default-)?index(?:-url)?[ =:]+(\S+)", words)
        assert set(indexes) <= {"https://download.pytorch.org/whl/cpu"}, name


def test_npm_installs_the_tested_versions():
    tested = {
        package
        for engines in ("deployment", "marian_engines")
        for package in re.findall(r'"(@[\w/-]+@\d+\.\d+\.\d+)"', read(f"tests/end_to_end/test_{engines}.py"))
    }
    pages = ("docs/deployment.md", "examples/README.md")
    named = [re.findall(r"npm install --ignore-scripts ([^\s`]+)", read(page)) for page in pages]
    assert {package for packages in named for package in packages} == tested and len(tested) == 2


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")
