"""A global batch that grows at the beginning of a run: a function of the samples consumed, and of nothing else."""

from collections.abc import Iterator
from dataclasses import dataclass

from fivefold.config.errors import ConfigError, nearest, nearest_multiples
from fivefold.config.tree import BatchRamp
from fivefold.spec.batch import BatchPlan

MOST_GROWTHS = 4096
"""Of a ramp: a plan lists the steps of every batch, and a run's cost needs a step's time of each."""


@dataclass(frozen=True, slots=True)
class BatchCourse:
    """The batch of every step of a run.

    Attributes:
        last: the batch after the ramp.
        increment: sequences by which the batch grows.
        growths: how often it grows; 0 = it is the same in every step.
        tokens: consumed at the end of the ramp; the batch grows whenever another tokens / growths are.
    """

    last: BatchPlan
    increment: int = 0
    growths: int = 0
    tokens: int = 0

    def at(self, samples: int) -> BatchPlan:
        """The batch of the step that begins after `samples` consumed samples."""
        return self._grown(self._growths(samples))

    def plans(self) -> Iterator[BatchPlan]:
        """Every batch of the course, smallest first."""
        return (self._grown(count) for count in range(self.growths + 1))

    def samples_after(self, steps: int) -> int:
        """Samples that the first `steps` steps consume."""
        samples = 0
        for plan, count in self.stages():
            taken = steps if count is None else min(count, steps)
            samples += taken * plan.global_batch
            steps -= taken
        return samples

    def stages(self) -> Iterator[tuple[BatchPlan, int | None]]:
        """The batches that steps really have, with the number of those steps; None = all that are left."""
        samples = 0
        while (now := self._growths(samples)) < self.growths:
            plan = self._grown(now)
            # The first sample count at which tokens · growths reach the next multiple of the ramp's tokens.
            grows_at = -(-(now + 1) * self.tokens // (self.growths * plan.sequence_length))
            steps = -(-(grows_at - samples) // plan.global_batch)
            samples += steps * plan.global_batch
            yield plan, steps
        yield self.last, None

    def carries(self, unit: int) -> bool:
        """Whether micro-batches of `unit` sequences over all replicas make up every batch."""
        return self.last.global_batch % unit == 0 and (not self.growths or self.increment % unit == 0)

    @property
    def summary(self) -> str:
        """The ramp in words; empty without one."""
        if not self.growths:
            return ""
        steps = sum(count for _, count in self.stages() if count is not None)
        tokens = self.samples_after(steps) * self.last.sequence_length
        return (
            f"ramp from {self._grown(0).global_batch} sequences, {self.increment} more every "
            f"{self.tokens / self.growths:,.0f} tokens: {steps:,} steps, {tokens:,} tokens"
        )

    @property
    def reason(self) -> str:
        """The same, with what carries it."""
        first = self._grown(0)
        return f"{self.summary}; accumulation {first.accumulation} → {self.last.accumulation}"

    def _growths(self, samples: int) -> int:
        if not self.growths:
            return 0
        return min(self.growths, samples * self.last.sequence_length * self.growths // self.tokens)

    def _grown(self, count: int) -> BatchPlan:
        return self.last.resized(self.last.global_batch - (self.growths - count) * self.increment)


def plan_course(ramp: BatchRamp, last: BatchPlan) -> BatchCourse:
    """The course up to the batch `last`.

    Raises:
        ConfigError: keys that belong together are not all given, a batch on the way cannot be carried, or the batch
            grows too often.
    """
    given = {"start": ramp.start, "increment": ramp.increment, "tokens": ramp.tokens}
    if not any(given.values()):
        return BatchCourse(last)
    if missing := [key for key, value in given.items() if not value]:
        raise ConfigError(
            f"batch.ramp.{missing[0]} = 0: a ramp needs start, increment and tokens; "
            f"set {missing[0]} ≥ 1, or all of them 0"
        )
    unit = last.micro_batch * last.data_parallel
    for key in ("start", "increment"):
        if given[key] % unit:
            raise ConfigError(
                f"batch.ramp.{key} = {given[key]}: not a multiple of micro_batch {last.micro_batch} × data-parallel "
                f"{last.data_parallel} = {unit}; nearest legal: {nearest_multiples(given[key], unit)}"
            )
    rise = last.global_batch - ramp.start
    if rise <= 0:
        raise ConfigError(
            f"batch.ramp.start = {ramp.start}: expected less than the global batch {last.global_batch} it grows to"
        )
    if rise % ramp.increment or rise // ramp.increment > MOST_GROWTHS:
        wrong = f"does not lead from start {ramp.start} to the global batch {last.global_batch}"
        if rise % ramp.increment == 0:
            wrong = (
                f"the batch would grow {rise // ramp.increment} times from start {ramp.start} to the global batch "
                f"{last.global_batch}; expected at most {MOST_GROWTHS} times"
            )
        counts = range(1, min(rise // unit, MOST_GROWTHS) + 1)
        legal = [rise // count for count in counts if rise // unit % count == 0]
        raise ConfigError(
            f"batch.ramp.increment = {ramp.increment}: {wrong}; nearest legal: {nearest(ramp.increment, legal)}"
        )
    return BatchCourse(last, ramp.increment, rise // ramp.increment, ramp.tokens)
