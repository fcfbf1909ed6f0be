"""docs/walkthrough/grade.py: what students hand in is graded part by part."""

import re
import subprocess
import sys

import pytest
from helpers import ROOT

FOLDER = ROOT / "docs" / "walkthrough"
SUBMITTED = """
from transformer import *


def helper(x):
    print("noise")
    return x


def attention(q, k, v, mask=None):
    scores = helper(q) @ k.mT / math.sqrt(512)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores.softmax(-1) @ v, scores.softmax(-1)


def padding_mask(ids):
    return helper(ids != PAD)[:, None, None]


def causal_mask(length):
    while True:
        pass


class MultiHeadAttention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x, attended, mask=None):
        q, k, v = self.q_proj(x), self.k_proj(attended), self.v_proj(attended)
        q, k, v = (one.unflatten(-1, (self.h, -1)).transpose(1, 2) for one in (q, k, v))
        return self.out_proj(attention(q, k, v, mask)[0].transpose(1, 2).flatten(-2))


def sinusoids(length, d):
    raise NotImplementedError
"""


def run_grade(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, FOLDER / "grade.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8")


def test_parts_are_right_wrong_with_the_mistake_or_not_done(tmp_path):
    """Each beside the solutions of the others: attention is wrong, and multi-head attention that calls it is right."""
    path = tmp_path / "my_transformer.py"
    path.write_text(SUBMITTED, encoding="utf-8")
    ended = run_grade(path, "--seconds", "8")
    assert ended.returncode == 1, ended.stderr
    rows = dict(re.findall(r"(?m)^(\w+) +((?:right|wrong|not done).*?) *$", ended.stdout))
    assert rows["attention"].startswith("wrong     Mistake: the scores are divided by the root of 512")
    assert rows["causal_mask"] == "wrong     it ended the program or took over 8 s"
    assert rows["padding_mask"] == rows["MultiHeadAttention"] == "right"
    assert rows["sinusoids"].startswith("not done") and rows["greedy_search"] == "not done"
    assert "2 of 23 parts are right" in ended.stdout
    ended = run_grade(tmp_path, "--parts", "MultiHeadAttention", "padding_mask")  # of the files in a folder
    assert ended.returncode == 0 and "2 of 2 parts are right" in ended.stdout
    (tmp_path / "empty").mkdir()
    assert "there is no .py file in" in run_grade(tmp_path / "empty").stderr
    ended = run_grade(tmp_path, "--parts", "attentoin")
    assert ended.returncode == 2 and "there is no part attentoin; the parts are attention, " in ended.stderr


@pytest.mark.slow
def test_several_files_make_a_table(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("def attention(:", encoding="utf-8")
    ended = run_grade(FOLDER / "transformer.py", broken)
    assert ended.returncode == 2 and f"{broken}: invalid syntax" in ended.stdout
    *_, first, second = ended.stdout.splitlines()
    assert re.search(r"transformer.py +\| 23 of 23 +\| +\| +0 \|$", first) and "cannot be read" in second
    assert run_grade(FOLDER / "transformer.py").returncode == 0
