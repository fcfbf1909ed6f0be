import copy

import pytest
import torch
from helpers import parts, training_options

from vanilla_transformer.training import muon
from vanilla_transformer.training import optimization as optim


def test_muon_is_torchs_for_the_matrices_of_the_layers_and_adam_for_the_rest(make_model, monkeypatch):
    monkeypatch.setattr(muon, "cpu_has_bfloat16", lambda: True)
    ours = make_model(tie_word_embeddings=False)
    theirs = copy.deepcopy(ours)
    optimizer = optim.make_optimizer(ours, training_options("--optimizer=muon", "--weight_decay=5"))
    named = dict(theirs.named_parameters())
    matrices = [name for name in named if ".layers." in name and named[name].ndim == 2]
    assert len(matrices) > 20 and {"model.shared.weight", "lm_head.weight"} <= named.keys() - set(matrices)
    how = {"weight_decay": 5.0, "adjust_lr_fn": "match_rms_adamw"}
    torchs = torch.optim.Muon([named[name] for name in matrices], 0.01, **how)
    rest = [parameter for name, parameter in named.items() if name not in matrices]
    groups = [{"params": [one], "weight_decay": 5.0 * (one.ndim > 1)} for one in rest]
    adam = torch.optim.AdamW(groups, 0.01, betas=(0.9, 0.98), eps=1e-9, fused=True)
    optim.set_learning_rate(optimizer, 0.01)
    for _ in range(3):
        optim.compute_loss(ours.eval(), parts(1)[0], 1, training_options()).backward()
        for name, parameter in ours.named_parameters():
            named[name].grad = parameter.grad.clone()
        for one in (optimizer, torchs, adam):
            one.step()
            one.zero_grad()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, named[name], rtol=0, atol=1e-3, msg=name)  # rounded to bfloat16


@pytest.mark.parametrize(("has_bfloat16", "tolerance"), [(True, 0.02), (False, 1e-5)])
@pytest.mark.parametrize("shape", [(3, 40, 100), (2, 100, 40), (1, 64, 96)])
def test_muon_makes_directions_orthogonal_in_bfloat16_or_float32(shape, has_bfloat16, tolerance, monkeypatch):
    """The singular vectors stay, and each singular value becomes that of five polynomials in float64."""
    monkeypatch.setattr(muon, "cpu_has_bfloat16", lambda: has_bfloat16)
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, values, v = torch.linalg.svd(matrices.double(), full_matrices=False)
    values = values / values.norm(dim=1, keepdim=True)
    for _ in range(muon.ITERATIONS):
        values = sum(c * values**power for c, power in zip(muon.COEFFICIENTS, (1, 3, 5), strict=True))
    assert ((values > 0.6) & (values < 1.2)).all()
    found = muon.orthogonalize(matrices).double()
    torch.testing.assert_close(found, u @ torch.diag_embed(values) @ v, rtol=0, atol=tolerance)
