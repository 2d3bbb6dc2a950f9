"""Compares the measurements of a layout with the single-process reference: errors, where first, which kind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.proof.error import errors, parameter_errors
from fivefold.proof.gather import Sent, Wholes, assemble
from fivefold.proof.measure import Measured
from fivefold.proof.reference import Reference
from fivefold.spec.parts import Part

BOUNDS = {"float64": 1e-12, "float32": 1e-5}


@dataclass(frozen=True, slots=True)
class Errors:
    """The largest error of each kind, by the design's metric; `inf` where something is missing or not finite."""

    loss: float
    gradient: float
    grad_norm: float
    parameter: float
    moment: float

    @property
    def worst(self) -> float:
        return max(self.loss, self.gradient, self.grad_norm, self.parameter, self.moment)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a comparison.

    Attributes:
        wrong: everything that exceeds its bound, or differs between replicas, in one line each.
        first: the first module, in forward or backward order, whose output or gradient exceeds its bound.
        kind: the kind of error, if it is recognised.
        is_inexact: errors beyond the bound are all that is wrong: initial values are equal and ranks agree.
    """

    errors: Errors
    wrong: tuple[str, ...]
    first: str | None = None
    kind: str | None = None
    is_inexact: bool = False

    @property
    def passed(self) -> bool:
        return not self.wrong


def compare(
    found: Sequence[Measured],
    expected: Reference,
    bound: float,
    updated: float | None = None,
    later: float | None = None,
) -> Comparison:
    """Compares what every rank measured with the reference.

    Args:
        bound: the largest error allowed.
        updated: the same for parameters and moments after the updates; None = `bound`.
        later: the same for loss and gradient norm in the steps after the first update; None = `bound`.
    """
    updated = bound if updated is None else updated
    later = bound if later is None else later
    gradients, state = (
        assemble(of_rank.gradients for of_rank in found),
        assemble(of_rank.state for of_rank in found),
    )
    initial = assemble(of_rank.initial for of_rank in found)
    wrong = [f"initial {name} differs" for name in _unequal(initial.tensors, expected.initial)]
    wrong += [
        f"replicas of {what}{name} differ"
        for what, whole in (("initial ", initial), ("gradient of ", gradients), ("", state))
        for name in whole.disagreeing
    ]
    wrong += _decisions(found, expected.skipped)
    is_inexact = not wrong
    of_gradients = _errors(gradients.tensors, expected.gradients)
    of_parameters = _parameter_errors(_family(state, "model."), expected)
    of_moments = {
        name: error
        for moment in (".exp_avg", ".exp_avg_sq", ".momentum_buffer")
        for name, error in _errors(_family(state, end=moment), _family(expected.state, end=moment)).items()
    }
    measured = Errors(
        _relative(found[0].loss, expected.loss, expected.skipped),
        max(of_gradients.values()),
        _relative(found[0].grad_norm, expected.grad_norm, expected.skipped),
        max(of_parameters.values()),
        max(of_moments.values(), default=0.0),
    )
    started = expected.skipped.index(False) + 1 if False in expected.skipped else len(expected.skipped)
    for what, of_found, of_expected in (
        ("loss", found[0].loss, expected.loss),
        ("gradient norm", found[0].grad_norm, expected.grad_norm),
    ):
        for steps, limit in ((slice(started), bound), (slice(started, None), later)):
            error = _relative(of_found[steps], of_expected[steps], expected.skipped[steps])
            wrong += [f"{what}: error {error:.1e}"] if not error <= limit else []
    after = of_parameters | of_moments
    wrong += [f"{name}: error {error:.1e}" for name, error in of_gradients.items() if not error <= bound]
    wrong += [f"{name}: error {error:.1e}" for name, error in after.items() if not error <= updated]
    if not wrong:
        return Comparison(measured, ())
    first, kind = _first(found, gradients, of_gradients, expected, bound)
    if first is None and False in expected.skipped:
        step = expected.skipped.index(False)
        factor = found[0].grad_norm[step] / expected.grad_norm[step]
        if not abs(factor - 1) <= bound:
            first, kind = "gradient norm", f"{factor:.6g} times what it is"
    if first is None and (late := [name for name, error in after.items() if not error <= updated]):
        first, kind = f"{late[0]} (update)", kind_of(state.tensors[late[0]], expected.state[late[0]])
    if first is None and state.disagreeing:
        first = f"{state.disagreeing[0]} (replicas)"
    return Comparison(measured, tuple(wrong), first, kind, is_inexact)


def updates_apart(found: Reference, expected: Reference) -> float:
    """The largest error between the parameters of two references."""
    return max(_parameter_errors(_family(found.state, "model."), expected).values())


def _errors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    missing = dict.fromkeys(found.keys() ^ expected.keys(), float("inf"))
    common = [name for name in expected if name in found]
    known = errors({n: found[n] for n in common}, {n: expected[n] for n in common})
    return missing | {name: error if error == error else float("inf") for name, error in known.items()}


def _parameter_errors(found: Mapping[str, Tensor], expected: Reference) -> dict[str, float]:
    """As `_errors`, by `error.parameter_errors`."""
    ours = {name.removeprefix("model."): tensor for name, tensor in found.items()}
    theirs = {n.removeprefix("model."): t for n, t in _family(expected.state, "model.").items()}
    missing = dict.fromkeys(ours.keys() ^ theirs.keys(), float("inf"))
    common = [name for name in theirs if name in ours]
    known = parameter_errors(
        {n: ours[n] for n in common},
        {n: theirs[n] for n in common},
        initial=expected.initial,
        gradients=expected.gradients,
        learning_rate=expected.learning_rate,
        eps=expected.eps,
    )
    found_errors = missing | {
        name: error if error == error else float("inf") for name, error in known.items()
    }
    return {f"model.{name}": error for name, error in found_errors.items()}


def _family(state: Wholes | Mapping[str, Tensor], start: str = "", end: str = "") -> dict[str, Tensor]:
    tensors = state.tensors if isinstance(state, Wholes) else state
    return {n: tensor for n, tensor in tensors.items() if n.startswith(start) and n.endswith(end)}


def _unequal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    return [n for n, tensor in expected.items() if n not in found or not torch.equal(found[n], tensor)]


def _relative(found: Sequence[float], expected: Sequence[float], skipped: Sequence[bool]) -> float:
    """The largest relative error over the steps that are not skipped."""
    steps = zip(found, expected, skipped, strict=True)
    apart = [abs(f - e) / max(abs(e), 1e-300) for f, e, is_skipped in steps if not is_skipped]
    return max((error if error == error else float("inf") for error in apart), default=0.0)


def _decisions(found: Sequence[Measured], skipped: Sequence[bool]) -> list[str]:
    """Decisions (loss, norm, skips) in which ranks disagree with each other or with the reference."""
    wrong = []
    for what in ("loss", "grad_norm"):
        told = [_numbers(getattr(of_rank, what)) for of_rank in found]
        if any(numbers != told[0] for numbers in told):
            wrong.append(f"ranks disagree on {what}")
    decided = [tuple(why is not None for why in of_rank.skipped) for of_rank in found]
    if any(of_rank != decided[0] for of_rank in decided):
        wrong.append("ranks disagree on skipped")
    elif decided[0] != tuple(skipped):
        wrong.append(f"steps skipped: {_steps(decided[0])}; one process skips {_steps(skipped)}")
    return wrong


def _numbers(values: Sequence[float]) -> list[float | None]:
    """The values, comparable by ==: NaN becomes None."""
    return [value if value == value else None for value in values]


def _steps(skipped: Sequence[bool]) -> str:
    return ", ".join(str(step + 1) for step, is_skipped in enumerate(skipped) if is_skipped) or "none"


def _first(
    found: Sequence[Measured],
    gradients: Wholes,
    of_gradients: Mapping[str, float],
    expected: Reference,
    bound: float,
) -> tuple[str | None, str | None]:
    """The first module in forward order whose output is wrong; else the first in backward order whose gradient is."""
    for name, whole in expected.streams.items():
        kept = [stream for of_rank in found for stream in of_rank.streams.get(name, [])]
        out = torch.full_like(whole, float("nan"))
        for stream in kept:
            out[stream.tokens] = stream.values.to(out.dtype)
        seen = {token for stream in kept for token in stream.tokens.tolist()}
        if len(seen) < len(whole):
            return f"{name} (forward)", f"{len(whole) - len(seen)} of {len(whole)} tokens are on no rank"
        error = _errors({name: out}, {name: whole})[name]
        if not error <= bound:
            return f"{name} (forward)", kind_of(out, whole)
    for name in reversed(list(expected.gradients)):
        if not of_gradients[name] <= bound:
            pieces = [of_rank.gradients[name] for of_rank in found if name in of_rank.gradients]
            if name not in gradients.tensors:
                return f"{name} (gradient)", "missing"
            return f"{name} (gradient)", kind_of(gradients.tensors[name], expected.gradients[name], pieces)
    return None, None


def kind_of(found: Tensor, expected: Tensor, pieces: Sequence[Sent] = ()) -> str | None:
    """The kind of error of `found`: zero, a constant factor, some shards only, shards in another order.

    Args:
        pieces: the parts that ranks hold.
    """
    found, expected = found.double(), expected.double()
    size = expected.norm()
    if not bool(found.isfinite().all()):
        return "not finite"
    if float(found.norm()) <= 1e-9 * float(size):
        return "zero: it never arrives"
    factor = float((found * expected).sum() / size.square())
    # One element is always some multiple.
    told = found.numel() > 1 or "." not in _number(factor)
    remains = float((found - factor * expected).norm())
    if told and remains <= 1e-6 * float(size) < abs(factor - 1) * float(size):
        return f"a constant factor, {_number(factor)}"
    parts = list(dict.fromkeys(piece.part for piece in pieces if piece.part.numel))
    bad = [part for part in parts if not _close(found[_box(part)], expected[_box(part)])]
    if 0 < len(bad) < len(parts):
        return f"{len(bad)} of {len(parts)} shards only, from {list(bad[0].starts)}"
    if len(parts) > 1 and all(
        any(_close(found[_box(part)], expected[_box(other)]) for other in parts if other.shape == part.shape)
        for part in parts
    ):
        return "its shards in another order"
    return None


def _number(factor: float) -> str:
    """A factor as n or 1/n if it is one, else in six digits."""
    for whole, text in ((factor, "{}"), (1 / factor if factor else 0.0, "1/{}")):
        if round(whole) and abs(whole - round(whole)) <= 1e-6 * abs(whole):
            return text.format(round(whole))
    return f"{factor:.6g}"


def _close(found: Tensor, expected: Tensor) -> bool:
    return float((found - expected).norm()) <= 1e-6 * max(float(expected.norm()), 1e-300)


def _box(part: Part) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(*part, strict=True))
