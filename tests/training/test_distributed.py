"""The launch, and what the processes of a run share."""

from types import SimpleNamespace

import pytest
from helpers import small_model

from vanilla_transformer.errors import UserError
from vanilla_transformer.training import distributed

ARGS = SimpleNamespace(report_to="none", output_dir="x")


@pytest.mark.parametrize(
    "environment, remedy",
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "use FSDP2"),
        ({"ACCELERATE_USE_FSDP": "true"}, "fsdp_version: 2"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "fsdp_version: 2"),
    ],
)
def test_unsupported_launch_is_rejected(environment, remedy, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=remedy):
        distributed.make_accelerator(ARGS)


def test_error_on_main_is_raised_everywhere(accelerator):
    with pytest.raises(ZeroDivisionError):
        distributed.run_on_main(accelerator, lambda: 1 // 0)
    assert distributed.run_on_main(accelerator, max, 2, 3) == 3


def test_copied_weights_are_equal():
    source, target = small_model(), small_model()
    distributed.copy_weights(source, target)
    assert all((a == b).all() for a, b in zip(source.parameters(), target.parameters(), strict=True))
