"""Does a layout compute what one process computes, and did it cost what was predicted?"""

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf
from typing import Any, Self

import msgspec
from msgspec.structs import asdict, replace

from fivefold.config.tree import Config, Parallel, Precision
from fivefold.planner.jobs import job_of
from fivefold.proof.account import MemoryLine, memory_lines, traffic_lines
from fivefold.proof.compare import BOUNDS, Comparison, compare, updates_apart
from fivefold.proof.measure import Fault, Measured, measure
from fivefold.proof.ranks import RankError, Ranks
from fivefold.proof.reference import Reference, reference
from fivefold.proof.routing import Choices, Flips
from fivefold.proof.twin import twin
from fivefold.spec.mesh import AXES, resolve

PERMUTATIONS = (1, 2, 3)
ORDERS = range(6)  # of rows; 0: as they are
ROUNDING_FACTOR = 3.0
"""bf16 and fp16 may be this much further off than what one process shows when its rows change places."""
MOST_ROUNDING = 1e-4
"""Of updates in float32."""
BF16_STEP = 2.0**-8
"""Between neighbouring numbers, as a part of them."""
CASE_SECONDS = 180.0


@dataclass(slots=True)
class Case:
    """One layout's verdict.

    Attributes:
        dtypes: what was computed in, float64 first.
        comparisons: by dtype.
        traffic: (measured, predicted) bytes by "axis primitive phase" where they differ, on some rank.
        memory: measured beside predicted, on the fullest rank.
        axis: the axis that owns what is wrong.
        problem: why nothing could be compared.
        flips: where the reference's routing was replayed, what would have been chosen.
    """

    parallel: Parallel
    accumulation: int
    dtypes: tuple[str, ...]
    comparisons: dict[str, Comparison] = field(default_factory=dict)
    traffic: dict[str, tuple[int, int]] = field(default_factory=dict)
    memory: list[MemoryLine] = field(default_factory=list)
    axis: str | None = None
    problem: str | None = None
    flips: Flips | None = None

    @property
    def passed(self) -> bool:
        return self.problem is None and not self.traffic and all(c.passed for c in self.comparisons.values())

    @property
    def failed(self) -> Comparison | None:
        """The comparison that failed, float64's first."""
        return next((c for c in self.comparisons.values() if not c.passed), None)

    @property
    def kind(self) -> str | None:
        """What kind of wrong it is: rounding, where float64 makes it go away."""
        failed, exact = self.failed, self.comparisons.get("float64")
        if failed is None or failed is exact:
            return failed.kind if failed else None
        if exact is None or not failed.is_inexact or not failed.errors.worst < inf:
            return failed.kind
        return f"rounding: float64 shrinks it from {failed.errors.worst:.1e} to {exact.errors.worst:.1e}"

    def document(self) -> dict[str, Any]:
        """As `fivefold verify --json` prints it."""
        failed = self.failed
        shown = failed or next(iter(self.comparisons.values()), None)
        return {
            "parallel": asdict(self.parallel),
            "accumulation": self.accumulation,
            "passed": self.passed,
            "dtypes": list(self.dtypes),
            "loss_error": shown.errors.loss if shown else None,
            "gradient_error": shown.errors.gradient if shown else None,
            "parameter_error": shown.errors.parameter if shown else None,
            "errors": {
                dtype: {"loss": c.errors.loss, "gradient": c.errors.gradient, "parameter": c.errors.parameter}
                for dtype, c in self.comparisons.items()
            },
            "first_divergence": failed.first if failed else None,
            "axis": self.axis,
            "kind": self.kind,
            "wrong": list(failed.wrong) if failed else [],
            "traffic_matches": not self.traffic,
            "traffic": {name: list(pair) for name, pair in self.traffic.items()},
            "memory": {line.category: [line.measured, line.predicted] for line in self.memory},
            "memory_notes": {line.category: line.note for line in self.memory if line.note},
            "problem": self.problem,
            "routing": str(self.flips) if self.flips else None,
        }


class Verifier:
    """Runs cases on one pool of ranks; a context manager."""

    def __init__(self, ranks: int, fault: Fault = nullcontext) -> None:
        """`fault` makes the context in which every rank runs a case, with something broken: it must be found."""
        self._count = ranks
        self.fault = fault
        self._ranks: Ranks | None = None
        self._references: dict[bytes, Reference] = {}
        self._rounding: dict[bytes, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._ranks is not None:
            with suppress(RankError):  # they have no more to tell
                self._ranks.close()

    def case(self, config: Config, dtypes: Sequence[str]) -> Case:
        """Verifies the twin of `config`, in its layout, computing in each of `dtypes`."""
        ranks = resolve(config.parallel, config.run.ranks).world_size
        twins = [twin(config, dtype, ranks) for dtype in dtypes]
        first = twins[0]
        mesh = resolve(first.parallel, ranks)
        accumulation = first.batch.global_batch // (first.batch.micro_batch * mesh.data_parallel)
        try:
            found = self._measure(twins, ranks)
        except RankError as error:
            axis = self._owner(config, dtypes[0])
            return Case(first.parallel, accumulation, tuple(dtypes), axis=axis, problem=_line(error))
        case = Case(first.parallel, accumulation, tuple(dtypes))
        for of_twin, measured in zip(twins, found, strict=True):
            expected, bounds = self._reference(of_twin), self._bounds(of_twin)
            case.comparisons[of_twin.precision.dtype] = compare(measured, expected, *bounds)
        case.flips = _flips(found[-1])
        last = twins[-1]
        job = job_of(replace(last, run=replace(last.run, ranks=ranks)))
        lines = traffic_lines(job, found[-1])
        case.traffic.update({line.name: (line.measured, line.predicted) for line in lines if not line.equal})
        case.memory = memory_lines(job, found[-1])
        if case.failed is not None:
            failing = next(dtype for dtype, c in case.comparisons.items() if not c.passed)
            case.axis = self._owner(config, failing)
        return case

    def _measure(self, twins: Sequence[Config], ranks: int) -> list[list[Measured]]:
        """By twin, then by rank."""
        routing = [self._routing(of_twin) for of_twin in twins]
        of_ranks = self._on_ranks(ranks, list(twins), 0, self.fault, routing)
        return [list(of_twin) for of_twin in zip(*of_ranks, strict=True)]

    def _on_ranks(self, ranks: int, *arguments: Any) -> list[list[Measured]]:
        """What `measure` gives on each of so many ranks of the pool."""
        if self._ranks is None:
            self._ranks = Ranks(self._count, backend=None)
        try:
            return self._ranks.run(measure, *arguments, world_size=ranks, timeout=CASE_SECONDS)
        except RankError:
            self._ranks = None  # an error ends them
            raise

    def _reference(self, config: Config) -> Reference:
        """Computed once for all layouts of the same twin."""
        key = _reference_key(config)
        if key not in self._references:
            self._references[key] = reference(config, self._skipped(config))
        return self._references[key]

    def _skipped(self, config: Config) -> tuple[bool, ...]:
        """The steps that one process skips in fp16, whose range overflows."""
        if config.precision.dtype != "fp16":
            return (False,) * config.run.steps
        ((alone,),) = self._on_ranks(
            1, [replace(config, parallel=Parallel())], 0, nullcontext, [None]
        )  # with its own routing: the reference's is not there yet
        return tuple(why is not None for why in alone.skipped)

    def _routing(self, config: Config) -> Choices | None:
        """To be replayed: below float64 a rounding may turn a choice over, and everything after it."""
        if config.precision.dtype == "float64" or not config.model.experts.count:
            return None
        return self._reference(config).routing

    def _bounds(self, config: Config) -> tuple[float, float, float]:
        """Of gradients, of what updates have changed, and of the losses after them.

        AdamW divides each element by its own size, so those that are all rounding move by as much as any; in a small
        twin in float32 that shows. There an update may be three times as far off as that of one process is from
        float64's.

        Muon rounds what it orthogonalises to bf16, whatever the run computes in. Gradients that are 1e-15 apart all
        but never come to lie on two sides of such a rounding (of 1e4 elements one in 1e8 times), and what is the same
        in bf16 is orthogonalised by the same products: in float64 the bound is that of everything else. In float32
        some elements do; each is then off by one bf16 step. There an update may be as far off as with all of them so.
        """
        dtype = config.precision.dtype
        if dtype == "float64":
            return BOUNDS[dtype], BOUNDS[dtype], BOUNDS[dtype]
        key = _reference_key(config)
        is_muon = config.optimizer.name == "muon" and dtype == "float32"
        if key not in self._rounding:
            measure_it = self._update_rounding if dtype == "float32" else self._shuffled
            self._rounding[key] = self._tipped(config) if is_muon else ROUNDING_FACTOR * measure_it(config)
        if is_muon:
            updated = max(BOUNDS[dtype], self._rounding[key])
            return BOUNDS[dtype], updated, updated
        if dtype == "float32":
            return BOUNDS[dtype], min(max(BOUNDS[dtype], self._rounding[key]), MOST_ROUNDING), BOUNDS[dtype]
        return self._rounding[key], self._rounding[key], self._rounding[key]

    def _shuffled(self, config: Config) -> float:
        """The worst error that one process shows when its rows change places."""
        expected = self._reference(config)
        shuffled = [self._alone(config, seed) for seed in PERMUTATIONS]
        return max(compare([found], expected, 0.0).errors.worst for found in shuffled)

    def _update_rounding(self, config: Config) -> float:
        """How far one process's parameters and moments are from those in float64: the farthest of several orders of its
        rows, for a single element whose gradient is all rounding decides."""
        exact = self._reference(replace(config, precision=Precision(dtype="float64")))
        found = [compare([self._alone(config, seed)], exact, 0.0).errors for seed in ORDERS]
        return max(max(errors.parameter, errors.moment) for errors in found)

    def _tipped(self, config: Config) -> float:
        """How far one process's parameters move when every element of its gradients does by a bf16 step."""
        expected = self._reference(config)
        tipped = reference(config, expected.skipped, noise=BF16_STEP, replayed=self._routing(config))
        return updates_apart(tipped, expected)

    def _alone(self, config: Config, permutation: int) -> Measured:
        """The twin on one rank."""
        alone = replace(config, parallel=Parallel())
        ((found,),) = self._on_ranks(1, [alone], permutation, nullcontext, [self._routing(config)])
        return found

    def _owner(self, config: Config, dtype: str) -> str:
        """The axis that is wrong by itself; where none is, those of the layout together."""
        used = _used(config.parallel)
        for axis in used if len(used) > 1 else []:
            alone = replace(config, parallel=_only(config.parallel, axis))
            ranks = resolve(alone.parallel).world_size
            of_twin = twin(alone, dtype, ranks)
            try:
                (found,) = self._measure([of_twin], ranks)
            except RankError:
                return axis
            if not compare(found, self._reference(of_twin), *self._bounds(of_twin)).passed:
                return axis
        return " with ".join(used) or "none"


def _reference_key(config: Config) -> bytes:
    """What one process's numbers depend on."""
    return msgspec.json.encode(
        replace(config, parallel=Parallel(), batch=replace(config.batch, micro_batch=1))
    )


def _used(parallel: Parallel) -> list[str]:
    """The axes of a layout, those that ep rests on before it."""
    mesh = resolve(parallel)
    used = [axis for axis in AXES if getattr(mesh, axis) > 1]
    return used + (["ep"] if parallel.ep > 1 else [])


KEPT = {
    "pp": ("pp", "schedule", "chunks", "recompute"),
    "dp_replicate": ("dp_replicate", "algorithm"),
    "dp_shard": ("dp_shard", "zero", "algorithm"),
    "cp": ("cp", "context"),
    "tp": ("tp", "sequence_parallel"),
    "ep": ("dp_shard", "cp", "context", "zero", "ep"),
}
"""What of a layout belongs to an axis."""


def _only(parallel: Parallel, axis: str) -> Parallel:
    """The layout with nothing but an axis."""
    kept = {name: getattr(parallel, name) for name in (*KEPT[axis], "backend")}
    return Parallel(**({"dp_shard": 1} | kept))


def _flips(found: Sequence[Measured]) -> Flips | None:
    """Of all ranks together; None where nothing was replayed."""
    total = Flips()
    for of_rank in found:
        if of_rank.flips is not None:
            total.add(of_rank.flips)
    return total if total.choices else None


def _line(error: RankError) -> str:
    """What the first rank that failed said last."""
    first, *more = [line for line in str(error).splitlines() if line.strip()] or ["a rank failed"]
    said = takewhile(lambda line: not line.startswith(("rank ", "ranks ")), more)
    return " ".join([first, *list(said)[-1:]])
