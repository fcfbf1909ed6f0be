"""Fixtures of runs: a dataset, a finished run, forked runs with faults."""

from pathlib import Path

import datasets
import pytest
from helpers import served
from runs import ROOT, Fork, options, random_pairs, ranks, train

from vanilla_transformer.training import run_folder


@pytest.fixture(scope="module", autouse=True)
def environment(tmp_path_factory):
    """A cache of datasets for these tests alone, no Hub, no GPU, one thread."""
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache")
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        variables = {"HF_DATASETS_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
        for name, value in (variables | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}).items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    """A dataset of 100 training, 6 validation and 7 test pairs."""
    return random_pairs(tmp_path_factory.mktemp("pairs"), train=100, validation=6, test=7)


@pytest.fixture(scope="module")
def finished(pairs, tmp_path_factory) -> tuple[Path, str]:
    """The output directory of 8 steps with two evaluations, and what was printed."""
    folder = tmp_path_factory.mktemp("finished") / "model"
    return folder, train(options(pairs, folder, "--max_steps 8 --eval_steps 4"))


@pytest.fixture(autouse=True)
def histories(monkeypatch) -> list[list[dict]]:
    """The history of each run, instead of its pictures, which take half the time of a small run."""
    drawn = []
    monkeypatch.setattr(run_folder, "plot_training_curves", lambda history, path, bound: drawn.append(history))
    monkeypatch.setattr(run_folder, "draw_attention", lambda *_: None)
    return drawn


@pytest.fixture
def address(site) -> str:
    """Where the `site` of a test is served."""
    with served(site) as address:
        yield address


@pytest.fixture
def fork(tmp_path):
    """fork(argv, fault) -> a [`Fork`]."""
    started = []

    def start(argv: list[str], fault=None, **more) -> Fork:
        started.append(Fork(argv, tmp_path / f"{len(started)}.log", fault, **more))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()


@pytest.fixture
def fork_two(fork):
    """fork_two(argv, fault, of) -> both processes of a run; those with the ranks `of` get the fault.

    Without a launcher, which would end one when the other ends.
    """

    def start(argv, fault=None, of=(0, 1), machines=1, caches=(None, None), folders=(ROOT, ROOT), **env) -> list[Fork]:
        return [
            fork(argv, fault if rank in of else None, cwd=folders[rank], cache=caches[rank], **env, **variables)
            for rank, variables in enumerate(ranks(machines))
        ]

    return start
