"""Trackers: their project, the name of the run, and those that cannot start."""

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from vanilla_transformer.errors import UserError
from vanilla_transformer.training.trackers import PROJECT_VARIABLES, RUN_NAMES, start_trackers


class Tracker(GeneralTracker):
    """Keeps what it was made with."""

    name, requires_logging_directory, tracker, made, error = "", False, property(lambda self: self), {}, None

    def __init__(self, project: str, **options):
        super().__init__()
        self.made[self.name] = [project, options]

    def start(self):
        if self.error is not None:
            raise self.error

    def set_name(self, name: str):
        self.made[self.name].append(name)


@pytest.fixture
def start(accelerator, monkeypatch):
    """start(names, run_name, error) -> what each tracker was made with; each raises the error, if there is one."""
    for name in PROJECT_VARIABLES.values():
        monkeypatch.delenv(name, raising=False)

    def start(names: list[str], run_name: str | None = None, error: Exception | None = None) -> dict:
        made = {}
        for name in names:
            kind = type("Named", (Tracker,), {"name": name, "made": made, "error": error})
            monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, kind)
        monkeypatch.setattr(accelerator, "log_with", names)
        monkeypatch.setattr(accelerator, "trackers", [])
        start_trackers(accelerator, run_name, {"seed": 1})
        return made

    return start


def test_no_tracker_is_said_nothing_about(start, capsys):
    assert start([]) == {} and capsys.readouterr().out == ""


def test_started_trackers_are_named(start, capsys):
    assert start(["wandb", "mlflow"]) == dict.fromkeys(["wandb", "mlflow"], ["vanilla-transformer", {}])
    assert capsys.readouterr().out == "reporting to wandb, mlflow\n"


def test_project_is_that_of_the_environment(start, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    assert start(["tensorboard", "wandb"])["wandb"][0] == "mine"
    assert start(["tensorboard"])["tensorboard"][0] == "vanilla-transformer"
    monkeypatch.setenv("COMET_PROJECT_NAME", "other")
    with pytest.raises(UserError, match="one project, but .* names several: mine, other"):
        start(["wandb", "comet_ml"])


def test_run_name_reaches_each_tracker_that_takes_one(start):
    made = start([*RUN_NAMES, "comet_ml", "tensorboard"], "first")
    assert {name: options for name, (_, options, *_) in made.items() if options} == {
        name: {key: "first"} for name, key in RUN_NAMES.items()
    }
    assert made["comet_ml"][2] == "first"
    with pytest.raises(UserError, match="--run_name has no effect with --report_to tensorboard"):
        start(["tensorboard"], "first")


class CommError(Exception):
    """Of a tracker."""


@pytest.mark.parametrize("error", [ValueError("no API\nkey"), CommError("no API key"), OSError("no API key")])
def test_tracker_that_cannot_start_is_named(error, start):
    with pytest.raises(UserError, match="^--report_to wandb,comet_ml cannot start: no API key"):
        start(["wandb", "comet_ml"], error=error)


def test_programming_error_keeps_its_traceback(start):
    with pytest.raises(TypeError):
        start(["wandb"], error=TypeError("init() got an unexpected keyword argument"))
