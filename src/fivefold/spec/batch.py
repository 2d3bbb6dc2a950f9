"""Batch and learning-rate arithmetic: exact, the same for every layout, each result with its reason."""

from dataclasses import dataclass, replace
from math import cos, pi, sqrt

from fivefold.config.errors import ConfigError, nearest
from fivefold.config.tree import Batch, Optimizer, Schedule
from fivefold.spec import schedules
from fivefold.spec.mesh import Mesh


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How one optimizer step's sequences are carried.

    global_batch = micro_batch · accumulation · data_parallel, in sequences.
    """

    global_batch: int
    micro_batch: int
    accumulation: int
    data_parallel: int
    sequence_length: int

    @property
    def global_batch_tokens(self) -> int:
        return self.global_batch * self.sequence_length

    @property
    def reason(self) -> str:
        return (
            f"accumulation {self.accumulation} = global batch {self.global_batch} / "
            f"(micro-batch {self.micro_batch} × data-parallel {self.data_parallel})"
        )

    def resized(self, global_batch: int) -> "BatchPlan":
        """Another global batch, carried by more or fewer micro-batches."""
        accumulation = global_batch // (self.micro_batch * self.data_parallel)
        return replace(self, global_batch=global_batch, accumulation=accumulation)

    def rows(self, micro_step: int, data_rank: int) -> slice:
        """Which of the step's samples one replica takes in one micro-step."""
        start = (micro_step * self.data_parallel + data_rank) * self.micro_batch
        return slice(start, start + self.micro_batch)


def plan_batch(batch: Batch, mesh: Mesh, schedule: schedules.Name = "1f1b") -> BatchPlan:
    """Derives accumulation. `schedule` is for the refusal: the batches it names are such as the schedule can run.

    Raises:
        ConfigError: both batch keys given, or a batch that does not divide, with the nearest legal values.
    """
    unit = batch.micro_batch * mesh.data_parallel
    factors = f"micro_batch {batch.micro_batch} × data-parallel {mesh.data_parallel}"
    if batch.global_batch and batch.global_batch_tokens:
        raise ConfigError("batch.global_batch and batch.global_batch_tokens: give one of the two")
    if batch.global_batch_tokens:
        factors = f"sequence_length {batch.sequence_length} × {factors}"
        tokens = unit * batch.sequence_length
        _check_multiple(
            "batch.global_batch_tokens", batch.global_batch_tokens, tokens, factors, mesh, schedule
        )
    else:
        _check_multiple("batch.global_batch", batch.global_batch, unit, factors, mesh, schedule)
    global_batch = batch.global_batch or batch.global_batch_tokens // batch.sequence_length or unit
    return BatchPlan(
        global_batch, batch.micro_batch, global_batch // unit, mesh.data_parallel, batch.sequence_length
    )


def _check_multiple(
    key: str, value: int, unit: int, factors: str, mesh: Mesh, schedule: schedules.Name
) -> None:
    if value % unit:
        counts = [value // unit, value // unit + 1]
        if mesh.pp > 1:
            near = [schedules.nearest_legal(schedule, mesh.pp, count) for count in counts if count]
            counts = [near[0][0], near[-1][-1]]
        legal = nearest(value, [count * unit for count in counts if count])
        raise ConfigError(f"{key} = {value}: not a multiple of {factors} = {unit}; nearest legal: {legal}")


def peak_learning_rate(optimizer: Optimizer, global_batch: int) -> float:
    """The learning rate after warmup, scaled from the batch it was tuned at.

    linear: lr · B/B_ref (Goyal et al. 2017); sqrt: lr · √(B/B_ref), for adaptive methods
    (Malladi et al. 2022).
    """
    ratio = global_batch / (optimizer.lr_reference_batch or global_batch)
    return optimizer.lr * {"none": 1.0, "linear": ratio, "sqrt": sqrt(ratio)}[optimizer.lr_scaling]


def warmup_tokens(schedule: Schedule, optimizer: Optimizer, plan: BatchPlan) -> int:
    """Tokens of warmup: given in tokens it is not rescaled; `warmup_steps` steps at the reference batch B_ref
    become warmup_steps · B_ref / B steps here, which is the same number of tokens.

    Raises:
        ConfigError: both keys given.
    """
    if schedule.warmup_tokens and schedule.warmup_steps:
        raise ConfigError("schedule.warmup_tokens and schedule.warmup_steps: give one of the two")
    reference = optimizer.lr_reference_batch or plan.global_batch
    return schedule.warmup_tokens or schedule.warmup_steps * reference * plan.sequence_length


@dataclass(frozen=True, slots=True)
class LearningRate:
    """Learning rate as a function of consumed tokens, so that no layout or batch size changes its meaning."""

    schedule: Schedule
    peak: float
    warmup_tokens: int
    total_tokens: int

    def at(self, consumed_tokens: int) -> float:
        """The rate of the step that ends at `consumed_tokens` (that step's own tokens included)."""
        if consumed_tokens < self.warmup_tokens:
            return self.peak * consumed_tokens / self.warmup_tokens
        return self.peak * self._shape(consumed_tokens)

    def _shape(self, consumed_tokens: int) -> float:
        kind, floor = self.schedule.kind, self.schedule.min_lr_fraction
        if kind == "constant":
            return 1.0
        start = self.warmup_tokens
        if kind == "wsd":
            start = max(start, round(self.total_tokens * (1 - self.schedule.decay_fraction)))
        progress = (consumed_tokens - start) / max(self.total_tokens - start, 1)
        progress = min(max(progress, 0.0), 1.0)
        fall = (1 + cos(pi * progress)) / 2 if kind == "cosine" else 1 - progress
        return floor + (1 - floor) * fall


def learning_rate(
    optimizer: Optimizer, schedule: Schedule, plan: BatchPlan, total_tokens: int
) -> LearningRate:
    """The learning-rate function of a run of `total_tokens`, whose batch (after a ramp) is that of `plan`.

    A warmup longer than the run is allowed: a short trial of a long run's config then ends on its way up.
    """
    return LearningRate(
        schedule,
        peak_learning_rate(optimizer, plan.global_batch),
        warmup_tokens(schedule, optimizer, plan),
        total_tokens,
    )
