"""Fits time against size: α + S/β, with a second rate beyond a knee where that explains the times better."""

from collections.abc import Sequence
from itertools import pairwise
from math import inf, log, sqrt
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.ledger.programs.steps import Link

ROUNDS = 30  # of reweighting; it settles within ten
GAIN = 0.8
"""A knee must leave at most this part of the error. Noise makes knees, too, but these bend a line little."""
SMALLEST_RATE = 1e-18  # seconds a byte: no link is faster


class Point(NamedTuple):
    """A measured time."""

    size: float  # bytes
    seconds: float


def fit(points: Sequence[Point]) -> Link:
    """The link whose times are nearest to the points, in the sense of the mean |log(time / measured)|. A knee is
    sought at the sizes and halfway between them, with two sizes on either side.

    Absolute deviations of logarithms: a microsecond counts at 1 KiB as a millisecond does at 64 MiB, and one
    point that a busy machine has spoilt pulls no harder than any other.
    """
    if len({point.size for point in points}) < 2:
        raise ValueError("a fit needs times at two sizes at least")
    sizes = sorted({point.size for point in points})
    straight = _line(points, inf)
    knees = [sqrt(near * far) for near, far in pairwise(sizes[1:-1])] + sizes[2:-2]
    if not knees:
        return straight
    bent = min((_line(points, knee) for knee in knees), key=lambda link: deviation(link, points))
    return bent if deviation(bent, points) < GAIN * deviation(straight, points) else straight


def deviation(link: Link, points: Sequence[Point]) -> float:
    """Mean |log(predicted / measured)|."""
    return sum(abs(log(link.seconds(p.size) / p.seconds)) for p in points) / len(points)


def median_error(link: Link, points: Sequence[Point]) -> float:
    """Median relative error of the predicted times."""
    return median(abs(link.seconds(p.size) / p.seconds - 1) for p in points)


def _line(points: Sequence[Point], knee: float) -> Link:
    """Least absolute relative deviations by iteratively reweighted least squares; no term below zero."""
    times = torch.tensor([p.seconds for p in points], dtype=torch.float64)
    sizes = torch.tensor([p.size for p in points], dtype=torch.float64)
    columns = [torch.ones_like(sizes), sizes.clamp(max=knee), (sizes - knee).clamp(min=0.0)]
    terms = torch.stack(columns[: 3 if knee < inf else 2], dim=1) / times[:, None]
    weights = torch.ones_like(times)
    found = torch.zeros(terms.shape[1], dtype=torch.float64)
    for _ in range(ROUNDS):
        found = _non_negative(terms * weights[:, None], weights)
        weights = 1 / (terms @ found - 1).abs().clamp(min=1e-3).sqrt()
    latency, near, *far = (max(float(value), SMALLEST_RATE) for value in found)
    return Link(latency, 1 / near, knee, 1 / far[0]) if far else Link(latency, 1 / near)


def _non_negative(terms: Tensor, target: Tensor) -> Tensor:
    """Least squares with coefficients ≥ 0, for the two or three terms of a line: the best of all subsets."""
    count = terms.shape[1]
    best, least = torch.zeros(count, dtype=torch.float64), inf
    for mask in range(1, 2**count):
        chosen = [index for index in range(count) if mask >> index & 1]
        part = torch.linalg.lstsq(terms[:, chosen], target[:, None]).solution[:, 0]
        if bool((part < 0).any()):
            continue
        residual = float((terms[:, chosen] @ part - target).square().sum())
        if residual < least:
            best, least = torch.zeros(count, dtype=torch.float64), residual
            best[chosen] = part
    return best
