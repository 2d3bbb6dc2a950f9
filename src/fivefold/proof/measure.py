"""What one rank measures in a few steps of a twin: values, gradients, traffic, memory."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from msgspec import structs
from torch import Tensor, nn

from fivefold.collectives.record import Row
from fivefold.config.tree import Config, Precision
from fivefold.nn.dropout import step_key
from fivefold.observe.clock import StepClock
from fivefold.observe.memory import MemoryByCategory
from fivefold.parallel.apply import ParallelModel, parallelize
from fivefold.parallel.mesh import groups
from fivefold.planner.jobs import hardware_of
from fivefold.proof.batch import uneven_batch
from fivefold.proof.gather import Sent, sent
from fivefold.proof.routing import Choices, Flips, Routings
from fivefold.proof.twin import OVERFLOWING_SCALE
from fivefold.spec.legal import Resolved, resolve_config
from fivefold.trainer.batches import MicroBatch, held_out_share
from fivefold.trainer.loss_scale import LossScale
from fivefold.trainer.optimizer import LocalOptimizer
from fivefold.trainer.place import place_from
from fivefold.trainer.profile import StepProfile
from fivefold.trainer.session import Session, open_session
from fivefold.trainer.state import tensors
from fivefold.trainer.step import Stepper

Fault: TypeAlias = Callable[[], AbstractContextManager[object]]

FLAGS = (0.0, 0.0)
TIMEOUT_SECONDS = 60.0
COMPILING_SECONDS = 600.0
"""Ranks wait for one another while they compile."""


@dataclass(slots=True)
class Stream:
    """A layer's output in the first step: `values` `[tokens, hidden]` of the tokens numbered `tokens`, each its
    row in the global batch times the sequence length, plus its position."""

    tokens: Tensor
    values: Tensor


@dataclass(slots=True)
class Measured:
    """What one rank measured.

    Attributes:
        coordinates: of the rank on the mesh.
        initial, gradients, state: this rank's parts of the initial parameters, of the gradients of the first step that
            was not skipped (without the loss scale), and of the state after the last step.
        streams: outputs of this rank's layers in the first step.
        traffic: of the last step.
        memory, traffic_of_memory: of the first step.
        flips: choices that this rank would have made differently, if a reference's routing was replayed.
    """

    coordinates: dict[str, int]
    initial: dict[str, Sent] = field(default_factory=dict)
    gradients: dict[str, Sent] = field(default_factory=dict)
    state: dict[str, Sent] = field(default_factory=dict)
    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    skipped: list[str | None] = field(default_factory=list)
    streams: dict[str, list[Stream]] = field(default_factory=dict)
    traffic: list[Row] = field(default_factory=list)
    memory: MemoryByCategory | None = None
    traffic_of_memory: list[Row] = field(default_factory=list)
    flips: Flips | None = None


def measure(
    _rank: int,
    world_size: int,
    twins: Sequence[Config],
    permutation: int = 0,
    fault: Fault = nullcontext,
    replayed: Sequence[Choices | None] = (),
) -> list[Measured]:
    """Trains each of `twins`, which share a layout, on this rank. Collective.

    Args:
        permutation: seed of a permutation of the rows of each global batch; 0 = the original order.
        fault: makes the context in which everything runs; tests inject faults by it.
        replayed: for each twin the routing to use; None = its own.
    """
    place = place_from(os.environ) if world_size > 1 else None
    timeout = COMPILING_SECONDS if twins[0].machine.compile else TIMEOUT_SECONDS
    with fault(), open_session(place, twins[0].parallel.backend, timeout) as session:
        return [
            _measure(session, resolve_config(config, world_size), permutation, choices)
            for config, choices in zip(twins, replayed or [None] * len(twins), strict=True)
        ]


def _measure(session: Session, resolved: Resolved, permutation: int, replayed: Choices | None) -> Measured:
    config, mesh, rank = resolved.config, resolved.mesh, session.rank
    stepper = _stepper(session, resolved)
    model = stepper.model
    found = Measured(mesh.coordinates(rank))
    found.initial = sent({p.spec.name: p.piece(p.value) for p in model.parameters})
    routings = _replaying(resolved, model, permutation, replayed)
    profile = StepProfile(model, stepper.optimizer)

    def inspect(model: ParallelModel) -> None:
        profile.inspect(model)
        found.gradients = _gradients(model, stepper.loss_scale.value)

    for step in range(config.run.steps):
        share = _share(resolved, step, permutation, session)
        tokens = (step + 1) * resolved.batch.global_batch_tokens
        learning_rate = resolved.learning_rate.at(tokens)
        session.recorder.clear()
        if step == 0:
            with profile, _watched(resolved, model, share, rank, found):
                result = stepper.step(share, learning_rate, FLAGS, inspect)
            found.memory, found.traffic_of_memory = profile.memory, session.recorder.rows()
        else:
            result = stepper.step(share, learning_rate, FLAGS, None if found.gradients else inspect)
        if result.skipped is not None and not any(skipped is None for skipped in found.skipped):
            found.gradients = {}
        found.loss.append(result.loss)
        found.grad_norm.append(result.grad_norm)
        found.skipped.append(result.skipped)
        if routings is not None:
            routings.next_step()
    found.traffic = session.recorder.rows()
    found.state = sent(tensors(model, stepper.optimizer))
    if routings is not None and found.coordinates["tp"] == 0:  # the others make the same choices
        found.flips = routings.flips
    return found


def _replaying(
    resolved: Resolved, model: ParallelModel, permutation: int, replayed: Choices | None
) -> Routings | None:
    if replayed is None:
        return None
    plan = resolved.batch
    if permutation:
        order = _order(plan.global_batch, permutation)
        replayed = {key: choices[order] for key, choices in replayed.items()}
    return Routings(model.module, plan.global_batch, plan.sequence_length, replayed)


def _order(rows: int, permutation: int) -> Tensor:
    return torch.randperm(rows, generator=torch.Generator().manual_seed(permutation))


def _stepper(session: Session, resolved: Resolved) -> Stepper:
    config, world_size = resolved.config, session.world_size
    # The ledger's hosts, not the real ones: with cluster.preset = "2x2 cpu", two ranks on each.
    on = hardware_of(structs.replace(config, run=structs.replace(config.run, ranks=world_size)))
    on_axes = groups(resolved, session.rank, on.fast_domain)
    model = parallelize(resolved, on_axes, session.rank, session.device)
    return Stepper(
        model,
        LocalOptimizer(config.optimizer, model.parameters),
        session.agreement,
        session.recorder,
        StepClock(),
        _loss_scale(config.precision),
        config.optimizer.clip,
    )


def _loss_scale(precision: Precision) -> LossScale:
    """In fp16 a scale that overflows in the first step; the backoff then restores that of the run."""
    scale = LossScale.of(precision)
    if precision.dtype == "fp16":
        scale.value, scale.backoff = OVERFLOWING_SCALE, scale.value / OVERFLOWING_SCALE
    return scale


def _share(resolved: Resolved, step: int, permutation: int, session: Session) -> list[MicroBatch]:
    batch = uneven_batch(resolved.config, step)
    if permutation:
        order = _order(len(batch.tokens), permutation)
        batch = type(batch)(batch.tokens[order], batch.labels[order], batch.documents[order])
    data_rank, key = resolved.mesh.data_rank(session.rank), step_key(resolved.config.run.seed, step)
    spans = resolved.spans(session.rank)
    share = held_out_share(batch, resolved.batch, data_rank, session.device, spans, key)
    # As in training each micro-batch owns its ids: a view would keep the whole batch alive in autograd.
    return [replace(each, inputs=replace(each.inputs, tokens=each.inputs.tokens.clone())) for each in share]


def _gradients(model: ParallelModel, loss_scale: float) -> dict[str, Sent]:
    """This rank's parts of the reduced gradients, without the loss scale."""
    gradients = {p: p.value.grad for p in model.parameters if p.value.grad is not None}
    return sent({p.spec.name: p.piece(gradient / loss_scale) for p, gradient in gradients.items()})


@contextmanager
def _watched(
    resolved: Resolved, model: ParallelModel, share: Sequence[MicroBatch], rank: int, found: Measured
) -> Iterator[None]:
    """Records every layer's output."""
    plan, at = resolved.batch, found.coordinates
    data_rank = resolved.mesh.data_rank(rank)
    numbers = [
        torch.arange(plan.global_batch)[plan.rows(index, data_rank)].unsqueeze(1) * plan.sequence_length
        + batch.inputs.row_positions().cpu()
        for index, batch in enumerate(share)
    ]

    def keep(name: str) -> Callable[[nn.Module, object, tuple[Tensor, object]], None]:
        kept = found.streams.setdefault(name, [])

        def hook(_module: nn.Module, _inputs: object, output: tuple[Tensor, object]) -> None:
            if len(kept) == len(
                numbers
            ):  # a step that is skipped goes forward again, to say what was not finite
                return
            values, tokens = output[0].detach().cpu(), numbers[len(kept)].flatten()
            if values.dim() == 2:  # sequence parallel: this rank's run of the tokens, filled up at the end
                tokens = tokens[at["tp"] * len(values) :][: len(values)]
            kept.append(Stream(tokens, values.flatten(0, -2)[: len(tokens)].clone()))

        return hook

    hooks = [
        layer.register_forward_hook(keep(f"layers.{index}")) for index, layer in model.module.layers.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
