"""What is free, and what a model and a step take."""

from types import SimpleNamespace

import psutil
import pytest
import torch
from accelerate import Accelerator
from helpers import TINY

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.errors import UserError
from vanilla_transformer.training import memory
from vanilla_transformer.training.hardware import example_batch
from vanilla_transformer.training.model import prepare_layers
from vanilla_transformer.training.optimization import compute_loss
from vanilla_transformer.training.options import TrainingOptions

GIB = 2**30
SIZES = {"d_model": 128, "encoder_layers": 1, "decoder_layers": 3}
SIZES |= {"encoder_attention_heads": 8, "decoder_attention_heads": 4, "encoder_ffn_dim": 256, "decoder_ffn_dim": 512}


def kept_bytes(model, pairs: int, length: int) -> int:
    """What a forward pass keeps for the backward pass, beside the weights."""
    kept, weights = {}, {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = example_batch(pairs, (length, length), None, torch.device("cpu"))
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        loss = compute_loss(model.train(), batch, torch.tensor(1.0), TrainingOptions(output_dir="x"))
    del loss  # kept alive until here, so that no two tensors have the same address
    return sum(kept.values())


@pytest.mark.parametrize("pairs, length", [(8, 32), (2, 256), (1, 600)])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("sizes", [TINY | {"d_model": 64}, SIZES, SIZES | {"norm_first": True}])
def test_the_estimate_is_what_a_forward_pass_keeps(sizes, attention, pairs, length):
    config = VanillaTransformerConfig(**sizes | {"vocab_size": 500, "max_position_embeddings": 600})
    model = VanillaTransformerForConditionalGeneration._from_config(config, attn_implementation=attention)
    estimate = memory.activation_bytes(model.config, pairs, length)
    assert estimate == pytest.approx(kept_bytes(model, pairs, length), rel=0.25)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_with_checkpointing_the_estimate_covers_one_layer_and_the_inputs_of_all(attention):
    config = VanillaTransformerConfig(**SIZES | {"vocab_size": 500, "encoder_layers": 8, "decoder_layers": 8})
    model = VanillaTransformerForConditionalGeneration._from_config(config, attn_implementation=attention)
    prepare_layers(model, TrainingOptions(output_dir="x", gradient_checkpointing=True), torch.device("cpu"))
    estimate = memory.activation_bytes(model.config, 8, 32, is_checkpointing=True)
    config.encoder_layers = config.decoder_layers = 1
    one_layer = memory.activation_bytes(model.config, 8, 32)
    assert kept_bytes(model, 8, 32) < estimate < kept_bytes(model, 8, 32) + one_layer


def test_options_change_what_a_step_takes(make_model):
    model, device = make_model(), Accelerator(cpu=True)
    plain, average = TrainingOptions(output_dir="x"), TrainingOptions(output_dir="x", ema_decay=0.9)
    twice = TrainingOptions(output_dir="x", r_drop_alpha=5.0)
    needed = memory.step_bytes(model, plain, 4, 20, device)
    assert memory.step_bytes(model, average, 4, 20, device) == needed + 8 * model.num_parameters()
    assert memory.step_bytes(model, twice, 4, 20, device) == memory.step_bytes(model, plain, 8, 20, device)


@pytest.mark.parametrize("longest, fits", [(10, True), (2000, False)])
def test_a_step_that_is_too_large_is_said(longest, fits, make_model, monkeypatch, capsys):
    """One pair is always in a batch, however long it is."""
    model = make_model()
    needed = memory.activation_bytes(model.config, 1, 1000) + 12 * model.num_parameters()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=needed))
    options = TrainingOptions(output_dir="x", per_device_train_max_tokens=100)
    assert memory.step_fits(model, options, longest, Accelerator(cpu=True)) is fits
    assert ("GiB are free; lower --per_device_train_max_tokens" in capsys.readouterr().out) is not fits


def test_a_model_that_does_not_fit_into_memory_is_refused(monkeypatch):
    config = VanillaTransformerConfig(vocab_size=1000)
    free = 4 * 4 * VanillaTransformerForConditionalGeneration(config).num_parameters()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    memory.check_model_fits(config)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free - 1))
    said = r"^A model of 4\d,\d{3},\d{3} parameters takes 0\.\d GiB, more than the 0\.\d"
    with pytest.raises(UserError, match=said):
        memory.check_model_fits(config)


V1 = {"memory.limit_in_bytes": 4 * GIB, "memory.usage_in_bytes": 3 * GIB}
V1 |= {"memory.stat": f"cache 7\ntotal_inactive_file {GIB}"}
V2 = {"memory.max": 4 * GIB, "memory.current": 3 * GIB, "memory.stat": f"anon 7\ninactive_file {GIB}"}
V1_UNLIMITED, V2_UNLIMITED = V1 | {"memory.limit_in_bytes": 2**63 - 4096}, V2 | {"memory.max": "max"}
ROOT_GROUP = {"memory.stat": "anon 7"}  # has no limit


@pytest.mark.parametrize(
    "groups, files, free",
    [
        ("0::/job/step", {"job/step": V2, ".": ROOT_GROUP}, 2),
        ("0::/job/step", {"job/step": V2_UNLIMITED, "job": V2}, 2),  # each group is within those above
        ("0::/", {".": V2}, 2),  # in a container
        ("4:memory:/job\n1:cpu:/job\n0::/", {"memory/job": V1, "memory": V1_UNLIMITED}, 2),
        ("4:cpu,memory:/docker/abc", {"cpu,memory": V1}, 2),  # named as outside the container
        ("0::/job", {"job": V2 | {"memory.current": 6 * GIB}}, 0),
        ("0::/job", {"job": V2_UNLIMITED}, 8),
        ("3:cpu:/job", {"job": V2}, 8),
        (None, {}, 8),
    ],
)
def test_the_limit_of_a_container_or_job_counts_as_memory(groups, files, free, tmp_path, monkeypatch):
    """In GiB: what is left below the limit, and the cache that could be freed."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * GIB))
    for group, contents in files.items():
        (tmp_path / "cgroup" / group).mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (tmp_path / "cgroup" / group / name).write_text(f"{content}\n")
    if groups is not None:
        (tmp_path / "groups").write_text(f"{groups}\n")
    assert memory.free_memory(tmp_path / "cgroup", tmp_path / "groups") == free * GIB
