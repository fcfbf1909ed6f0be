"""Muon, an optimizer for matrices, and several optimizers as one.

Muon is from Jordan et al. (2024, https://kellerjordan.github.io/posts/muon/); the size of its updates, which is that
of Adam's, from Liu et al. (2025, arXiv:2502.16982). torch.optim.Muon does the same, but one matrix after another,
which is many kernels on a GPU, and always in bfloat16, which most CPUs only emulate: with a d_model of 128, a step of
the optimizer alone took 0.9 s there, and takes 0.05 s here (docs/LOG.md).
"""

import math

import torch

from ..loading import cpu_has_bfloat16

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of the polynomial, by Jordan et al.
ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Momentum whose directions are made orthogonal, for parameters of two dimensions."""

    def __init__(self, params, lr: float, weight_decay: float = 0.0, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        """Updates all weights that have gradients; `closure` is not supported."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for weight in group["params"]:
                if weight.grad is not None:
                    by_shape.setdefault(weight.shape, []).append(weight)
            for (rows, columns), weights in by_shape.items():
                directions = orthogonalize(torch.stack([self.momentum(w, group["momentum"]) for w in weights]))
                size = group["lr"] * 0.2 * math.sqrt(max(rows, columns))
                torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(weights, list(directions.to(weights[0].dtype).unbind()), alpha=-size)

    def momentum(self, weight: torch.nn.Parameter, decay: float) -> torch.Tensor:
        """Updates the mean of the gradients of a weight, and returns Nesterov's look ahead of it (rows,columns)."""
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight.grad)
        mean = state["momentum_buffer"]
        mean.lerp_(weight.grad, 1 - decay)
        return weight.grad.lerp(mean, decay)


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """For each matrix U S V^T (n,rows,columns), nearly U V^T: its singular values end between 0.7 and 1.2.

    A Newton-Schulz iteration, in bfloat16 where the device computes in it, as its result need not be exact.
    """
    a, b, c = COEFFICIENTS
    is_fast = matrices.device.type != "cpu" or cpu_has_bfloat16()
    x = matrices.to(torch.bfloat16 if is_fast else torch.float32)
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        squared = x @ x.mT
        polynomial = torch.baddbmm(squared, squared, squared, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if is_tall else x


class Several(torch.optim.Optimizer):
    """Several optimizers as one, each with weights of its own; their groups and their state are those of this one."""

    def __init__(self, *optimizers: torch.optim.Optimizer):
        self.optimizers = optimizers
        super().__init__([group for one in optimizers for group in one.param_groups], {})
        self.share()

    def share(self):
        """Gives the optimizers the groups and the state that this one has."""
        groups = iter(self.param_groups)
        for one in self.optimizers:
            one.param_groups, one.state = [next(groups) for _ in one.param_groups], self.state

    def load_state_dict(self, state_dict: dict):
        super().load_state_dict(state_dict)
        self.share()

    def step(self, closure=None):
        """A step of each; `closure` is not supported."""
        for one in self.optimizers:
            one.step()
