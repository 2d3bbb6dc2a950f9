"""The single-process training that layouts are compared with.

It shares only the decoder's forward and the initial values with the code under test: the whole batch at once, one
backward, no process group, torch's unfused optimizers on whole parameters, torch's own clipping.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from fivefold.config.tree import Config, Parallel, Precision
from fivefold.nn.dropout import step_key
from fivefold.parallel.apply import parallelize
from fivefold.parallel.mesh import Groups
from fivefold.proof.batch import uneven_batch
from fivefold.proof.routing import Choices, Routings
from fivefold.spec.legal import resolve_config
from fivefold.spec.matrices import is_matrix
from fivefold.spec.parameters import parameters
from fivefold.trainer.batches import MicroBatch

CPU = torch.device("cpu")


@dataclass(slots=True)
class Reference:
    """What one process computes. Names are those of checkpoints.

    Attributes:
        learning_rate, eps: the largest learning rate of the steps, and AdamW's eps (infinite for SGD).
        gradients: of the first step that is not skipped.
        streams: every layer's output in the first step, `[tokens of the batch, hidden]`.
        routing: the routers' choices in every step.
        skipped: the steps that were skipped.
    """

    learning_rate: float
    eps: float
    initial: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    streams: dict[str, Tensor] = field(default_factory=dict)
    routing: Choices = field(default_factory=dict)
    skipped: tuple[bool, ...] = ()


def reference(
    config: Config, skipped: tuple[bool, ...] = (), *, noise: float = 0.0, replayed: Choices | None = None
) -> Reference:
    """Trains the twin `config` in this process, ignoring its layout; bf16 and fp16 are computed in float32.

    Args:
        skipped: the steps that one process in the twin's own precision skips.
        noise: the relative change, with random sign, of every gradient element before the update.
        replayed: the routing to use; None = its own.
    """
    is_double = config.precision.dtype == "float64"
    alone = replace(
        config,
        parallel=Parallel(),
        precision=Precision(dtype="float64" if is_double else "float32"),
        machine=replace(config.machine, compile=False),
    )
    micro = replace(alone.batch, micro_batch=alone.batch.global_batch)
    resolved = resolve_config(replace(alone, batch=micro))
    module = parallelize(resolved, Groups(), 0, CPU).module
    named = dict(module.named_parameters())
    optimizer = _Optimizer(config, named)
    found = Reference(
        resolved.learning_rate.peak,
        inf if config.optimizer.name == "sgd" else config.optimizer.eps,
        initial={name: value.detach().clone() for name, value in named.items()},
        skipped=skipped or (False,) * config.run.steps,
    )
    hooks = [
        layer.register_forward_hook(_keeping(found.streams, f"layers.{index}"))
        for index, layer in module.layers.items()
    ]
    routings = Routings(module, config.batch.global_batch, config.batch.sequence_length, replayed)
    for step in range(config.run.steps):
        key, rows = step_key(config.run.seed, step), config.batch.global_batch
        batch = MicroBatch.of(uneven_batch(config, step), CPU, sequences=rows, dropout_key=key)
        count = max(batch.loss_tokens, 1)
        loss = module(batch.inputs, count / rows) / count
        loss.backward()
        is_skipped = found.skipped[step]
        if not found.gradients and not is_skipped:
            found.gradients = {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
        limit = config.optimizer.clip or float("inf")
        norm = nn.utils.clip_grad_norm_(named.values(), limit)
        if noise:
            _disturb(named, noise, step)
        counts = module.take_counts()
        if not is_skipped:
            optimizer.step(resolved.learning_rate.at((step + 1) * resolved.batch.global_batch_tokens))
            module.balance(counts)
        module.zero_grad()
        found.loss.append(loss.item())
        found.grad_norm.append(norm.item())
        routings.next_step()
    for hook in hooks:
        hook.remove()
    found.routing = routings.kept
    found.state = {f"model.{name}": value.detach() for name, value in named.items()}
    found.state |= {f"model.{name}": value for name, value in module.named_buffers()}
    found.state |= {f"optimizer.{name}": moment for name, moment in optimizer.moments().items()}
    return found


def _keeping(streams: dict[str, Tensor], name: str) -> Callable[[nn.Module, Any, tuple[Tensor, Any]], None]:
    """A hook that keeps a layer's first output."""

    def hook(_module: nn.Module, _inputs: Any, output: tuple[Tensor, Any]) -> None:
        streams.setdefault(name, output[0].detach().flatten(0, 1).clone())

    return hook


def _disturb(named: Mapping[str, nn.Parameter], noise: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for value in named.values():
        if value.grad is not None:
            signs = torch.randint(2, value.shape, generator=generator).to(value.dtype) * 2 - 1
            value.grad.mul_(1 + noise * signs)


class _Optimizer:
    """torch's optimizers: one for all parameters, or Muon for the layers' matrices and AdamW for the rest."""

    def __init__(self, config: Config, named: dict[str, nn.Parameter]) -> None:
        options = config.optimizer
        specs = {spec.name: spec for spec in parameters(config.model)}
        self._named = named
        # torch's Muon takes matrices only: each expert's is a parameter of its own that shares memory with the stack.
        self._matrices = {
            name: [
                nn.Parameter(matrix)
                for matrix in (value.detach() if value.dim() == 3 else value.detach()[None])
            ]
            for name, value in named.items()
            if options.name == "muon" and is_matrix(specs[name])
        }
        self._rest = {name: value for name, value in named.items() if name not in self._matrices}

        def groups(found: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
            pairs = list(found)
            both = (
                ([value for name, value in pairs if (specs[name].role in options.no_decay) is kept], decay)
                for kept, decay in ((False, options.weight_decay), (True, 0.0))
            )
            return [{"params": values, "weight_decay": decay} for values, decay in both if values]

        rest = groups(self._rest.items())
        if options.name == "sgd":
            one: Any = torch.optim.SGD(rest, lr=options.lr, momentum=options.momentum, foreach=False)
        else:
            one = torch.optim.AdamW(rest, lr=options.lr, betas=options.betas, eps=options.eps, foreach=False)
        self._all: list[torch.optim.Optimizer] = [one]
        if self._matrices:
            matrices = groups((name, one) for name, found in self._matrices.items() for one in found)
            self._all.append(
                torch.optim.Muon(
                    matrices,
                    lr=options.lr,
                    momentum=options.momentum,
                    nesterov=True,
                    adjust_lr_fn="match_rms_adamw",
                )
            )

    def step(self, learning_rate: float) -> None:
        """One update with the gradients of the parameters."""
        for name, found in self._matrices.items():
            gradient = self._named[name].grad
            assert gradient is not None
            for matrix, of_it in zip(found, gradient if gradient.dim() == 3 else gradient[None], strict=True):
                matrix.grad = of_it
        for optimizer in self._all:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()

    def moments(self) -> dict[str, Tensor]:
        """By the parameter's name and the moment's, whole."""
        found: dict[str, Tensor] = {}
        for name, value in self._rest.items():
            for moment, kept in self._all[0].state[value].items():
                if isinstance(kept, Tensor) and kept.shape == value.shape:
                    found[f"{name}.{moment}"] = kept
        for name, matrices in self._matrices.items():
            kept = torch.stack([self._all[1].state[matrix]["momentum_buffer"] for matrix in matrices])
            found[f"{name}.momentum_buffer"] = kept.view_as(self._named[name])
        return found
