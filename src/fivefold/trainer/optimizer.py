"""The optimizer over this rank's parts of the parameters, and its state by global name."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fivefold.config.tree import Optimizer
from fivefold.parallel.local import LocalParameter, Piece
from fivefold.spec.matrices import is_matrix
from fivefold.trainer.muon import Muon


class LocalOptimizer:
    """AdamW, SGD, or Muon for the layers' matrices with AdamW for the rest, on plain local tensors.

    State names are torch's (`exp_avg`, `exp_avg_sq`, `momentum_buffer`). The number of updates is the same for all
    parameters and is kept in the run's counters.
    """

    def __init__(self, options: Optimizer, parameters: list[LocalParameter]) -> None:
        """Collective if matrices of Muon are sharded."""
        self.parameters = parameters
        self.muon = Muon(options, parameters) if options.name == "muon" else None
        self._plain = [p for p in parameters if self.muon is None or not is_matrix(p.spec)]
        self.torch: torch.optim.Optimizer
        if options.name != "sgd":
            groups = _groups(options, self._plain)
            self.torch = torch.optim.AdamW(
                groups, lr=options.lr, betas=options.betas, eps=options.eps, fused=True
            )
        else:
            own = [p for p in self._plain if not p.momentum_corrected]
            groups = [group | {"momentum": options.momentum} for group in _groups(options, own)]
            groups += _groups(options, [p for p in self._plain if p.momentum_corrected])
            self.torch = torch.optim.SGD(groups, lr=options.lr)
        self._moments = [(p, name) for p in self._plain for name in _moments(options, p)]
        for parameter, name in self._moments:
            self.torch.state[parameter.value][name] = torch.zeros_like(parameter.value)
        self._counts_updates = options.name != "sgd"
        self.set_updates(0)

    def step(self, learning_rate: float, scale: float) -> None:
        """One update with the gradients times `scale` (the clip coefficient). Collective with Muon."""
        gradients = [p.value.grad for p in self.parameters if p.value.grad is not None]
        if scale != 1.0:
            torch._foreach_mul_(gradients, scale)
        for group in self.torch.param_groups:
            group["lr"] = learning_rate
        self.torch.step()
        if self.muon is not None:
            self.muon.step(learning_rate)

    def state_tensors(self) -> list[Tensor]:
        """The moments it keeps between steps."""
        found = [self.torch.state[p.value][name] for p, name in self._moments]
        return found + (self.muon.momenta if self.muon is not None else [])

    def state(self) -> dict[str, Piece]:
        """Moments by global name, laid out like the parameters and sharing storage with the live ones."""
        found = {
            f"{parameter.spec.name}.{name}": parameter.piece(self.torch.state[parameter.value][name])
            for parameter, name in self._moments
        }
        return found | (self.muon.state() if self.muon is not None else {})

    def set_updates(self, count: int) -> None:
        """Sets how many updates the moments have seen (AdamW's bias correction)."""
        if self._counts_updates:
            for parameter in self._plain:
                step = torch.tensor(float(count), device=parameter.value.device)
                self.torch.state[parameter.value]["step"] = step


def _groups(options: Optimizer, parameters: Sequence[LocalParameter]) -> list[dict[str, Any]]:
    """torch's parameter groups: those with weight decay and those without."""
    decayed = [p.value for p in parameters if p.spec.role not in options.no_decay]
    kept = [p.value for p in parameters if p.spec.role in options.no_decay]
    groups = [
        {"params": decayed, "weight_decay": options.weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _moments(options: Optimizer, parameter: LocalParameter) -> tuple[str, ...]:
    """Names of what torch keeps of a parameter between steps."""
    if options.name != "sgd":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if options.momentum and not parameter.momentum_corrected else ()
