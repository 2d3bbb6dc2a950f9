"""Does a module that somebody parallelised by hand compute what it computes in one process?

    def model(rank: int, world_size: int) -> nn.Module: ...        # whole in one process, else what this rank has
    def batch(step: int, rank: int, world_size: int) -> tuple: ... # the global batch's rows that this rank reads

    verdict = fivefold.verify(model, Layout(ranks=2), batch)
    assert verdict.passed, verdict

Both run in float64. A rank may wrap its module in torch's own parallel classes: what DDP, FSDP and torch.compile put
into names is taken off, and a DTensor (of FSDP2, of torch's tensor parallel) is put together.
"""

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fivefold.config.errors import BadInput, did_you_mean
from fivefold.proof.compare import BOUNDS, kind_of
from fivefold.proof.error import errors
from fivefold.proof.outputs import first_divergence, kept_outputs, plain_name
from fivefold.proof.ranks import run_ranks

STEPS = 3
SECONDS = 120.0
PATIENCE_SECONDS = 15.0
"""Ranks end within this time of each other; one that does not waits for a collective that another never enters."""
Loss = Literal["whole", "mean", "sum"]
ModelFn = Callable[[int, int], nn.Module]
BatchFn = Callable[[int, int, int], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a module is laid out over ranks.

    Attributes:
        ranks: processes to start on this host.
        shards: parameters of which each rank holds a piece: name → dim; rank order is the order along it. Of all
            others every rank holds the whole (or a DTensor).
        loss: what ranks return: each the loss of the whole batch, or parts whose mean or whose sum is that.
    """

    ranks: int
    shards: Mapping[str, int] = field(default_factory=dict)
    loss: Loss = "mean"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found; errors by the metric of `error.errors`, the largest of each kind.

    Attributes:
        wrong: what is beyond the bound, or differs between ranks, in one line each.
        first: where the first loss is wrong, the first inner module, in forward order, whose output is; else the first
            parameter in backward order whose gradient is wrong; else the first that is after the steps.
        kind: what kind of wrong it is, where that can be told.
    """

    loss_error: float
    gradient_error: float
    grad_norm_error: float
    parameter_error: float
    wrong: tuple[str, ...] = ()
    first: str | None = None
    kind: str | None = None

    @property
    def passed(self) -> bool:
        return not self.wrong

    def __str__(self) -> str:
        told = f"loss {self.loss_error:.1e}, gradients {self.gradient_error:.1e}, "
        told += f"gradient norm {self.grad_norm_error:.1e}, parameters {self.parameter_error:.1e}"
        if self.passed:
            return f"holds: {told}"
        where = f"first wrong: {self.first}" + (f": {self.kind}" if self.kind else "") if self.first else ""
        return "\n  ".join(["DOES NOT HOLD: " + told, *filter(None, [where]), *self.wrong])


@dataclass(slots=True)
class _Account:
    """What a process saw: outputs and gradients of the first step, and what the steps made of the parameters."""

    initial: dict[str, Tensor]
    loss: list[float] = field(default_factory=list)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Plain, so that an update shows its gradient."""
    return torch.optim.SGD(parameters, lr=0.1)


def nothing(_module: nn.Module) -> None:
    """Gradients are whole when backward ends."""


def verify(
    model_fn: ModelFn,
    layout: Layout,
    batch_fn: BatchFn,
    *,
    finish_fn: Callable[[nn.Module], None] = nothing,
    optimizer_fn: Callable[[Iterable[nn.Parameter]], Optimizer] = sgd,
) -> Verdict:
    """Trains for a few steps in one process and on the ranks of `layout`, and compares.

    All functions are defined in a module (ranks import them). float64 is torch's default dtype while they run.

    Args:
        model_fn: (rank, world size) → a module that returns the loss, a scalar. World size 1 asks for the whole
            one, without a process group. Initial values must not depend on the rank: seed them.
        batch_fn: (step, rank, world size) → the module's arguments; world size 1 asks for the whole batch's.
        finish_fn: called between backward and update, on ranks only: reduces what hooks have not.
        optimizer_fn: of the parameters that a process holds.

    Raises:
        BadInput: a layout of fewer than two ranks, or that names what the whole module has not; functions that ranks
            cannot import, or that give something else than they should.
        RankError: a rank raised, or has waited for one that had finished; every traceback.
    """
    _check_layout(layout)
    functions = model_fn, batch_fn, finish_fn, optimizer_fn
    for name, function in zip(("model_fn", "batch_fn", "finish_fn", "optimizer_fn"), functions, strict=True):
        _check_importable(name, function)
    alone = _train(0, 1, model_fn, batch_fn, nothing, optimizer_fn)
    _check_shards(layout, alone.initial)
    of_ranks = run_ranks(_train, layout.ranks, *functions, timeout=SECONDS, patience=PATIENCE_SECONDS)
    return _compare(of_ranks, alone, layout)


def _check_layout(layout: Layout) -> None:
    if layout.ranks < 2:
        raise BadInput(f"layout.ranks = {layout.ranks}: expected at least 2, to be compared with one process")
    if layout.loss not in get_args(Loss):
        raise BadInput(f'layout.loss = "{layout.loss}": expected one of {", ".join(get_args(Loss))}')


def _check_importable(name: str, function: object) -> None:
    try:
        pickle.dumps(function)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise BadInput(
            f"{name}: ranks import it, so it must be defined at the top of a module: {error}"
        ) from None


def _check_shards(layout: Layout, whole: Mapping[str, Tensor]) -> None:
    for name, dim in layout.shards.items():
        if name not in whole:
            raise BadInput(f'layout.shards: no parameter "{name}"; {did_you_mean(name, whole)}')
        if not -whole[name].dim() <= dim < whole[name].dim():
            raise BadInput(f"layout.shards: {name} is {list(whole[name].shape)} and has no dim {dim}")


def _train(
    rank: int,
    world_size: int,
    model_fn: ModelFn,
    batch_fn: BatchFn,
    finish_fn: Callable[[nn.Module], None],
    optimizer_fn: Callable[[Iterable[nn.Parameter]], Optimizer],
) -> _Account:
    with _float64():
        module = model_fn(rank, world_size)
        if not isinstance(module, nn.Module):
            raise BadInput(f"model_fn: gave a {type(module).__name__}, expected a torch.nn.Module")
        optimizer = optimizer_fn(module.parameters())
        found = _Account(_whole(dict(module.named_parameters())))
        for step in range(STEPS):
            given = _arguments(batch_fn(step, rank, world_size))
            with kept_outputs(module) if step == 0 else nullcontext(found.outputs) as outputs:
                loss = _loss(module(*given))
            found.outputs = outputs
            loss.backward()  # type: ignore[no-untyped-call]
            finish_fn(module)
            found.loss.append(float(loss.detach()))
            if step == 0:
                found.gradients = _whole({n: p.grad for n, p in module.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
        found.parameters = _whole(dict(module.named_parameters()))
    return found


def _arguments(given: Sequence[Any]) -> Sequence[Any]:
    if not isinstance(given, tuple | list):
        raise BadInput(f"batch_fn: gave a {type(given).__name__}, expected a tuple of the module's arguments")
    return given


def _loss(given: object) -> Tensor:
    """Raises BadInput if a module has given something that is no loss."""
    if not isinstance(given, Tensor) or given.numel() != 1:
        what = f"a tensor {list(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
        raise BadInput(f"model_fn: its module gave {what}, expected its loss, a tensor of one number")
    return given


@contextmanager
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _whole(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Copies by the names that the module has without a wrapper. Collective where there are DTensors."""
    found = {}
    for name, tensor in tensors.items():
        if tensor is not None:
            complete = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found[plain_name(name)] = complete.detach().clone()
    return found


def _compare(of_ranks: Sequence[_Account], alone: _Account, layout: Layout) -> Verdict:
    wrong: list[str] = []
    kinds = ("initial", "gradients", "parameters")
    found = {kind: _assembled([getattr(a, kind) for a in of_ranks], layout, kind, wrong) for kind in kinds}
    wrong += [
        f"initial {n} differs" for n, t in alone.initial.items() if not _equal(found["initial"].get(n), t)
    ]
    of_gradients = _errors(found["gradients"], alone.gradients)
    of_parameters = _errors(found["parameters"], alone.parameters)
    losses = [_joined([account.loss[step] for account in of_ranks], layout.loss) for step in range(STEPS)]
    loss = max(abs(f - e) / max(abs(e), 1e-300) for f, e in zip(losses, alone.loss, strict=True))
    expected_norm = _norm(alone.gradients)
    norm = abs(_norm(found["gradients"]) - expected_norm) / max(expected_norm, 1e-300)
    if layout.loss == "whole" and any(account.loss != of_ranks[0].loss for account in of_ranks):
        wrong.append("ranks disagree on the loss")
    bound = BOUNDS["float64"]
    wrong += [
        f"{what}: error {e:.1e}" for what, e in (("loss", loss), ("gradient norm", norm)) if not e <= bound
    ]
    bad = [name for name in reversed(list(alone.parameters)) if not of_gradients.get(name, 0.0) <= bound]
    late = [name for name, error in of_parameters.items() if not error <= bound]
    wrong += [f"gradient of {name}: error {of_gradients[name]:.1e}" for name in bad]
    wrong += [f"{name} after {STEPS} steps: error {of_parameters[name]:.1e}" for name in late]
    worst = max(of_gradients.values(), default=0.0), max(of_parameters.values(), default=0.0)
    first = kind = None
    astray = None
    if not abs(losses[0] - alone.loss[0]) <= bound * abs(alone.loss[0]):
        astray = first_divergence([account.outputs for account in of_ranks], alone.outputs)
    if astray is not None:
        first, kind = f"{astray[0]} (forward)", astray[1]
    elif bad:
        first, kind = f"{bad[0]} (gradient)", _kind(found["gradients"], alone.gradients, bad[0])
    elif late:
        first, kind = f"{late[0]} (update)", _kind(found["parameters"], alone.parameters, late[0])
    return Verdict(loss, worst[0], norm, worst[1], tuple(wrong), first, kind)


def _assembled(
    held: Sequence[dict[str, Tensor]], layout: Layout, kind: str, wrong: list[str]
) -> dict[str, Tensor]:
    """Whole tensors; notes in `wrong` where ranks hold different copies."""
    whole: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for of_rank in held for name in of_rank):
        pieces = [of_rank[name] for of_rank in held if name in of_rank]
        if name in layout.shards:
            try:
                whole[name] = torch.cat(pieces, dim=layout.shards[name])
            except (RuntimeError, IndexError):  # of shapes that do not fit together
                whole[name] = pieces[0]
                wrong.append(f"{kind} of {name} are no pieces along dim {layout.shards[name]}")
            continue
        whole[name] = pieces[0]
        if len(pieces) < len(held) or not all(_equal(piece, pieces[0]) for piece in pieces):
            wrong.append(f"{kind} of {name} differ between ranks")
    return whole


def _errors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    common = [name for name in expected if name in found and found[name].shape == expected[name].shape]
    known = errors({n: found[n] for n in common}, {n: expected[n] for n in common})
    return {n: known.get(n, float("inf")) for n in dict.fromkeys([*expected, *found])}


def _kind(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], name: str) -> str | None:
    if name not in found or name not in expected:
        return "missing" if name not in found else "not in one process"
    if found[name].shape != expected[name].shape:
        return (
            f"shape {list(found[name].shape)}, expected {list(expected[name].shape)}; is it in layout.shards?"
        )
    return kind_of(found[name], expected[name])


def _equal(found: Tensor | None, expected: Tensor) -> bool:
    return found is not None and torch.equal(found, expected)


def _joined(losses: Sequence[float], how: str) -> float:
    if how == "whole":
        return losses[0]
    return sum(losses) / (len(losses) if how == "mean" else 1)


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return float(sum(float(tensor.square().sum()) for tensor in tensors.values()) ** 0.5)
