"""Starts experiment trackers with a project and the name of the run."""

import os

from accelerate import Accelerator

from ..errors import UserError, one_line

PROJECT = "vanilla-transformer"
# The variables that name the project; Accelerate itself reads those of mlflow and clearml.
PROJECT_VARIABLES = {"wandb": "WANDB_PROJECT", "comet_ml": "COMET_PROJECT_NAME", "swanlab": "SWANLAB_PROJECT"}
# What each tracker calls the name of a run.
RUN_NAMES = {"wandb": "name", "trackio": "name", "mlflow": "run_name", "clearml": "task_name"}
RUN_NAMES |= {"swanlab": "experiment_name", "dvclive": "exp_name"}
PROGRAMMING_ERRORS = (TypeError, AttributeError, NameError, LookupError, AssertionError)


def start_trackers(accelerator: Accelerator, run_name: str | None, recipe: dict):
    """Starts the trackers that Accelerate was made with, and gives them the recipe; on the main process.

    Raises UserError if one cannot start, for example without an API key, or if their projects or names conflict.
    """
    names = [str(tracker) for tracker in accelerator.log_with]
    if not names:
        return
    projects = {os.environ.get(PROJECT_VARIABLES.get(name, ""), "") for name in names} - {""}
    if len(projects) > 1:
        named = ", ".join(sorted(projects))
        raise UserError(f"All trackers report to one project, but the environment names several: {named}.")
    if run_name and not {*RUN_NAMES, "comet_ml"} & {*names}:
        raise UserError(f"--run_name has no effect with --report_to {','.join(names)}; leave it out.")
    project = next(iter(projects), PROJECT)
    print(f"reporting to {', '.join(names)}")
    options = {name: {key: run_name} for name, key in RUN_NAMES.items()} if run_name else {}
    try:
        accelerator.init_trackers(project, for_trackers(recipe), options)
        if run_name and "comet_ml" in names:
            accelerator.get_tracker("comet_ml", unwrap=True).set_name(run_name)
    except PROGRAMMING_ERRORS:
        raise
    except Exception as error:  # each tracker has exceptions of its own
        raise UserError(f"--report_to {','.join(names)} cannot start: {one_line(error)}") from error


def for_trackers(recipe: dict) -> dict:
    """The options of a recipe that have a value, as the types that all of Accelerate's trackers take."""
    scalars = bool | int | float | str
    return {k: v if isinstance(v, scalars) else str(v) for k, v in recipe.items() if v is not None}
