"""What this cluster's links and backends give: times fitted per primitive, inside a host and between hosts."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import quantiles

import torch

from fivefold.collectives.bench import Bench, Case
from fivefold.collectives.fit import Point, fit, median_error
from fivefold.ledger.hardware import Measured

PRIMITIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
MESSAGE = "send"
PASSES, TURNS = 10, 3
SIZE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes a collective is timed at to fit it, and others, between these, that tell how good the fit is."""

    fitted: tuple[int, ...]
    held_out: tuple[int, ...]

    @classmethod
    def between(cls, smallest: int, largest: int) -> "Sizes":
        """Every fourfold from the smallest to the largest; held out: the doubles between."""
        fitted = [smallest]
        while fitted[-1] * 4 <= largest:
            fitted.append(fitted[-1] * 4)
        return cls(tuple(fitted), tuple(2 * size for size in fitted[:-1]))


@dataclass(frozen=True, slots=True)
class Calibrated:
    """One primitive on one shape of group, its fit and the points behind it."""

    measured: Measured
    fitted: tuple[Point, ...]
    held_out: tuple[Point, ...]


def calibrate(
    bench: Bench, backend: str, local: int, hosts: int, sizes: Sizes, tell: Callable[[str], None]
) -> list[Calibrated]:
    """Times every primitive of `backend` over the bench's ranks (`local` on each of `hosts` hosts). Collective.

    Sizes are rounded up to whole float32 elements a rank. All sizes of a primitive are timed in many passes, up and
    down, few turns at a time, so that a machine's drift does not look like a law; of all turns the lower quartile
    counts, which what else the machine does in the meantime can hardly move. Of sizes that take long, passes end when
    SIZE_SECONDS have been measured, but for the first two. Results are checked in the first.
    """
    return [
        _one(bench, primitive, backend, local, hosts, sizes, tell) for primitive in (*PRIMITIVES, MESSAGE)
    ]


def _one(
    bench: Bench,
    primitive: str,
    backend: str,
    local: int,
    hosts: int,
    sizes: Sizes,
    tell: Callable[[str], None],
) -> Calibrated:
    tell(f"{backend} {primitive} over {hosts} × {local} ranks")
    every = sorted((*sizes.fitted, *sizes.held_out))
    times: dict[int, list[float]] = {size: [] for size in every}
    true_size: dict[int, int] = {}
    for size in PASSES // 2 * (*every, *reversed(every)):
        if len(times[size]) >= 2 * TURNS and sum(times[size]) > SIZE_SECONDS:
            continue
        if primitive == MESSAGE:
            true_size[size], turns = size, bench.shift(size, TURNS)
        else:
            elements = -(-size // (4 * bench.ranks)) * bench.ranks
            case = Case(primitive, backend, backend, elements, torch.float32)
            [result] = bench.measure([case], TURNS, check=not times[size])
            true_size[size], turns = result.case.size, result.turns
            if result.wrong:
                raise RuntimeError(
                    f"{backend} {primitive} of {result.case.size} bytes: {result.wrong} elements wrong"
                )
        times[size] += turns
    points = {size: Point(true_size[size], quantiles(times[size], n=4)[0]) for size in every}
    fitted = tuple(points[size] for size in sizes.fitted)
    held_out = tuple(points[size] for size in sizes.held_out)
    link = fit(fitted)
    error = median_error(link, held_out or fitted)
    found = Measured(
        primitive,
        backend,
        local,
        hosts,
        link.latency,
        link.bandwidth,
        fitted[0].size,
        fitted[-1].size,
        error,
        link.knee,
        link.far_bandwidth,
    )
    return Calibrated(found, fitted, held_out)
