"""Does a layout compute what one process computes, and did it cost what was predicted?"""

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf
from types import TracebackType
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
"""Seeds of the orders of rows by which the rounding error of bf16 and fp16 is measured."""
UPDATE_PERMUTATIONS = range(6)
"""The same for parameters updated in float32; 0 = the original order."""
ROUNDING_FACTOR = 3.0
"""A layout's error may be this many times what one process shows when its rows are permuted."""
MOST_ROUNDING = 1e-4
"""The largest bound of parameters updated in float32."""
BF16_STEP = 2.0**-8
"""The relative distance of neighbouring bf16 numbers, at least."""
CASE_SECONDS = 180.0
COMPILED_CASE_SECONDS = 900.0


@dataclass(slots=True)
class Case:
    """The verdict on one layout.

    Attributes:
        dtypes: the precisions computed in, float64 first.
        comparisons: by dtype.
        traffic: (measured, predicted) bytes by "axis primitive phase" where they differ on some rank.
        memory: measured beside predicted, on the rank where a category is largest.
        axis: the axis that causes the failure.
        problem: why nothing could be compared; None if it could.
        flips: routing choices that would have differed, if the reference's routing was replayed.
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
        """The kind of error; "rounding" if it disappears in float64."""
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
        """`fault`: makes the context in which every rank runs a case; tests inject faults by it."""
        self._count = ranks
        self.fault = fault
        self._ranks: Ranks | None = None
        self._references: dict[bytes, Reference] = {}
        self._rounding: dict[bytes, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ranks is not None:
            with suppress(RankError):  # their cases have been reported
                self._ranks.__exit__(kind, error, trace)

    def case(self, config: Config, dtypes: Sequence[str]) -> Case:
        """Verifies the twin of `config` in its layout, in each of `dtypes`."""
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
        """What each rank measured, by twin, then by rank."""
        routing = [self._routing(of_twin) for of_twin in twins]
        of_ranks = self._on_ranks(ranks, list(twins), 0, self.fault, routing)
        return [list(of_twin) for of_twin in zip(*of_ranks, strict=True)]

    def _on_ranks(self, ranks: int, twins: Sequence[Config], *arguments: Any) -> list[list[Measured]]:
        """The results of `measure` on the first `ranks` ranks of the pool."""
        seconds = COMPILED_CASE_SECONDS if twins[0].machine.compile else CASE_SECONDS
        if self._ranks is None:
            self._ranks = Ranks(self._count, backend=None)
        try:
            return self._ranks.run(measure, twins, *arguments, world_size=ranks, timeout=seconds)
        except RankError:
            self._ranks = None  # the processes have ended
            raise

    def _reference(self, config: Config) -> Reference:
        """The reference, computed once for all layouts of the same twin."""
        key = _reference_key(config)
        if key not in self._references:
            self._references[key] = reference(config, self._skipped(config))
        return self._references[key]

    def _skipped(self, config: Config) -> tuple[bool, ...]:
        """The steps that one process skips in fp16, because of an overflow."""
        if config.precision.dtype != "fp16":
            return (False,) * config.run.steps
        # With its own routing: the reference's is not there yet.
        twin = replace(config, parallel=Parallel())
        ((alone,),) = self._on_ranks(1, [twin], 0, nullcontext, [None])
        return tuple(why is not None for why in alone.skipped)

    def _routing(self, config: Config) -> Choices | None:
        """The reference's routing, to be replayed below float64, where rounding may change a choice and all that
        follows; None otherwise."""
        if config.precision.dtype == "float64" or not config.model.experts.count:
            return None
        return self._reference(config).routing

    def _bounds(self, config: Config) -> tuple[float, float, float]:
        """Bounds of the errors of gradients, of updated parameters and moments, and of losses after the first update.

        AdamW divides each gradient element by its own magnitude, so elements that consist of rounding only move as
        far as all others, which is visible in a small twin in float32. There the bound of updates is three times the
        distance of one process from float64.

        Muon rounds its matrices to bf16 in every precision. Gradients 1e-15 apart almost never round to different
        bf16 numbers (for 1e4 elements once in 1e8 times), so in float64 the bound is that of everything else. In
        float32 some elements do, by one bf16 step; there the bound is the change that such a step in every element
        causes.
        """
        dtype = config.precision.dtype
        if dtype == "float64":
            return BOUNDS[dtype], BOUNDS[dtype], BOUNDS[dtype]
        key = _reference_key(config)
        is_muon = config.optimizer.name == "muon" and dtype == "float32"
        if key not in self._rounding:
            measure_it = self._update_error if dtype == "float32" else self._permutation_error
            self._rounding[key] = (
                self._bf16_step_error(config) if is_muon else ROUNDING_FACTOR * measure_it(config)
            )
        if is_muon:
            updated = max(BOUNDS[dtype], self._rounding[key])
            return BOUNDS[dtype], updated, updated
        if dtype == "float32":
            return BOUNDS[dtype], min(max(BOUNDS[dtype], self._rounding[key]), MOST_ROUNDING), BOUNDS[dtype]
        return self._rounding[key], self._rounding[key], self._rounding[key]

    def _permutation_error(self, config: Config) -> float:
        """The largest error that one process shows when its rows are permuted."""
        expected = self._reference(config)
        shuffled = [self._alone(config, seed) for seed in PERMUTATIONS]
        return max(compare([found], expected, 0.0).errors.worst for found in shuffled)

    def _update_error(self, config: Config) -> float:
        """The distance of one process's parameters and moments from those in float64: the largest over several orders
        of its rows, compiled and eager, because a single element whose gradient is only rounding determines it."""
        exact = self._reference(replace(config, precision=Precision(dtype="float64")))
        eager = replace(config, machine=replace(config.machine, compile=False))
        found = [
            compare([self._alone(alone, seed)], exact, 0.0).errors
            for alone in ([config, eager] if config.machine.compile else [config])
            for seed in UPDATE_PERMUTATIONS
        ]
        return max(max(errors.parameter, errors.moment) for errors in found)

    def _bf16_step_error(self, config: Config) -> float:
        """The change of one process's parameters if every element of its gradients changes by one bf16 step."""
        expected = self._reference(config)
        tipped = reference(config, expected.skipped, noise=BF16_STEP, replayed=self._routing(config))
        return updates_apart(tipped, expected)

    def _alone(self, config: Config, permutation: int) -> Measured:
        """The twin on one rank."""
        alone = replace(config, parallel=Parallel())
        ((found,),) = self._on_ranks(1, [alone], permutation, nullcontext, [self._routing(config)])
        return found

    def _owner(self, config: Config, dtype: str) -> str:
        """The axis that fails by itself; if none does, all axes of the layout."""
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
    """What the reference depends on: everything but the layout and the micro-batch size."""
    return msgspec.json.encode(
        replace(config, parallel=Parallel(), batch=replace(config.batch, micro_batch=1))
    )


def _used(parallel: Parallel) -> list[str]:
    """The axes of a layout with more than one rank; ep last, since it reuses others."""
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
"""The keys of [parallel] that belong to each axis."""


def _only(parallel: Parallel, axis: str) -> Parallel:
    """The layout reduced to one axis."""
    kept = {name: getattr(parallel, name) for name in (*KEPT[axis], "backend")}
    return Parallel(**({"dp_shard": 1} | kept))


def _flips(found: Sequence[Measured]) -> Flips | None:
    """The flips of all ranks together; None if no routing was replayed."""
    total = Flips()
    for of_rank in found:
        if of_rank.flips is not None:
            total.add(of_rank.flips)
    return total if total.choices else None


def _line(error: RankError) -> str:
    """The last line of the first rank's traceback, with its rank."""
    first, *more = [line for line in str(error).splitlines() if line.strip()] or ["a rank failed"]
    said = takewhile(lambda line: not line.startswith(("rank ", "ranks ")), more)
    return " ".join([first, *list(said)[-1:]])
