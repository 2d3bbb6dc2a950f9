"""The training of one process that layouts are held against.

It shares the decoder's forward and the initial values with what is tested, and nothing else: the whole batch at once,
one backward, no process group, torch's unfused optimizer, torch's own clipping.
"""

from collections.abc import Callable
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
from fivefold.spec.parameters import parameters
from fivefold.trainer.batches import MicroBatch

CPU = torch.device("cpu")


@dataclass(slots=True)
class Reference:
    """What one process computes. Names as in checkpoints.

    Attributes:
        learning_rate, eps: the largest rate of the steps, and AdamW's eps (of SGD infinite: it divides by nothing).
        gradients: of the first step that is not skipped.
        streams: every layer's output in the first step, `[tokens of the batch, hidden]`.
        routing: the routers' choices in every step.
        skipped: which steps leave everything as it was.
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


def reference(config: Config, skipped: tuple[bool, ...] = ()) -> Reference:
    """Trains the twin `config` in this process, whatever its layout; below float32, in float32.

    Args:
        skipped: the steps that one process in the twin's own precision skips.
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
    optimizer = _optimizer(config, named)
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
    routings = Routings(module, config.batch.global_batch, config.batch.sequence_length)
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
        for group in optimizer.param_groups:
            group["lr"] = resolved.learning_rate.at((step + 1) * resolved.batch.global_batch_tokens)
        counts = module.take_counts()
        if not is_skipped:
            optimizer.step()
            module.balance(counts)
        optimizer.zero_grad()
        found.loss.append(loss.item())
        found.grad_norm.append(norm.item())
        routings.next_step()
    for hook in hooks:
        hook.remove()
    found.routing = routings.kept
    found.state = {f"model.{name}": value.detach() for name, value in named.items()}
    found.state |= {f"model.{name}": value for name, value in module.named_buffers()}
    for name, value in named.items():
        for moment, kept in optimizer.state[value].items():
            if isinstance(kept, Tensor) and kept.shape == value.shape:
                found.state[f"optimizer.{name}.{moment}"] = kept
    return found


def _keeping(streams: dict[str, Tensor], name: str) -> Callable[[nn.Module, Any, tuple[Tensor, Any]], None]:
    """A hook that keeps a layer's first output."""

    def hook(_module: nn.Module, _inputs: Any, output: tuple[Tensor, Any]) -> None:
        streams.setdefault(name, output[0].detach().flatten(0, 1).clone())

    return hook


def _optimizer(config: Config, named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    options = config.optimizer
    roles = {spec.name: spec.role for spec in parameters(config.model)}
    groups = [
        {
            "params": [value for name, value in named.items() if (roles[name] in options.no_decay) is kept],
            "weight_decay": decay,
        }
        for kept, decay in ((False, options.weight_decay), (True, 0.0))
    ]
    if options.name == "sgd":
        return torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum, foreach=False)
    return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps, foreach=False)
