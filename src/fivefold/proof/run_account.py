"""`fivefold train --account`: the first steps of a run, and what they cost beside the prediction."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import torch.distributed as dist

from fivefold.collectives.record import Row, Timeline
from fivefold.config.tree import Config
from fivefold.ledger.job import Job
from fivefold.ledger.total import estimate
from fivefold.observe.memory import MemoryByCategory
from fivefold.observe.metrics import StepMetrics
from fivefold.observe.observer import Observer
from fivefold.planner.jobs import job_of
from fivefold.proof.account import memory_lines, traffic_lines, transient_line
from fivefold.trainer.loop import Loop

UNTIMED_STEPS = 2
"""The first step is profiled, which costs time; the second still warms up."""
TIMED_STEPS = 4


@dataclass(slots=True)
class RankAccount:
    """What one rank measured.

    Attributes:
        traffic: of the last step.
        memory, traffic_of_memory: of the first.
        step_seconds, computing_seconds: means of the timed steps; computing excludes waiting and data loading.
        under_way, exposed: mean seconds by axis in which a collective was running, and in which the rank waited for it.
    """

    coordinates: dict[str, int]
    traffic: list[Row] = field(default_factory=list)
    memory: MemoryByCategory | None = None
    traffic_of_memory: list[Row] = field(default_factory=list)
    step_seconds: float = 0.0
    computing_seconds: float = 0.0
    under_way: dict[str, float] = field(default_factory=dict)
    exposed: dict[str, float] = field(default_factory=dict)


class _Watch(Observer):
    """Collects the metrics that a loop reports."""

    def __init__(self, loop: Loop, found: RankAccount) -> None:
        super().__init__()
        self._recorder = loop.session.recorder
        self._found = found
        self.metrics: list[StepMetrics] = []

    def step(self, metrics: StepMetrics) -> None:
        self.metrics.append(metrics)
        self._found.traffic = self._recorder.rows()
        if len(self.metrics) == 1:
            self._found.traffic_of_memory = self._found.traffic

    def memory(self, memory: MemoryByCategory) -> None:
        self._found.memory = memory


def account_of(loop: Loop) -> dict[str, Any] | None:
    """Takes the first steps of a run; returns the account on rank 0, None on the others. Collective.

    Keys: `ranks`, `steps` (timed), `traffic`, `memory`, `time` and `communication`, in bytes and seconds; see
    `render/account.py` for what they say.
    """
    session, recorder = loop.session, loop.session.recorder
    mine = RankAccount(loop.resolved.mesh.coordinates(session.rank))
    loop.observer = watch = _Watch(loop, mine)
    loop.steps(UNTIMED_STEPS)
    recorder.timeline = timeline = Timeline()
    loop.steps(TIMED_STEPS)
    recorder.timeline = None
    timed = watch.metrics[UNTIMED_STEPS:]
    mine.step_seconds = sum(step.step_seconds for step in timed) / len(timed)
    mine.under_way = {axis: all_ / len(timed) for axis, all_ in timeline.seconds_by_axis().items()}
    for step in timed:
        for axis, seconds in step.exposed_seconds.items():
            mine.exposed[axis] = mine.exposed.get(axis, 0.0) + seconds / len(timed)
    data = sum(step.seconds.get("data", 0.0) for step in timed) / len(timed)
    mine.computing_seconds = mine.step_seconds - sum(mine.exposed.values()) - data
    with recorder.paused():
        everyone = [mine] * session.world_size
        dist.all_gather_object(everyone, mine)
    if not session.is_main:
        return None
    job = _job(loop.resolved.config, session.world_size)
    return document(job, everyone)


def _job(config: Config, ranks: int) -> Job:
    """The job of the run; without a cluster, on CPU ranks with the matmul rate measured at the start."""
    job = job_of(msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, ranks=ranks)))
    cluster, measured = config.cluster, config.machine.peak_flops
    if cluster.preset or cluster.path or not measured:
        return job
    device = job.hardware.device
    factor = measured / device.matmul_of(job.precision)
    scaled = {
        name: {kind: rate * factor for kind, rate in cast(Mapping[str, float], getattr(device, name)).items()}
        for name in ("peak", "matmul", "attention")
    }
    hardware = msgspec.structs.replace(job.hardware, device=msgspec.structs.replace(device, **scaled))
    return dataclasses.replace(job, hardware=hardware)


def document(job: Job, found: Sequence[RankAccount]) -> dict[str, Any]:
    """Predicted beside measured; times are means over the ranks."""
    memory = [*memory_lines(job, found), transient_line(job)]
    return {
        "ranks": len(found),
        "steps": TIMED_STEPS,
        "traffic": [line._asdict() for line in traffic_lines(job, found)],
        "memory": [line._asdict() for line in memory],
        **_times(job, found),
    }


def _times(job: Job, found: Sequence[RankAccount]) -> dict[str, Any]:
    ledger = estimate(job)
    time = ledger.time
    axes: dict[str, dict[str, float]] = {}

    def of(axis: str) -> dict[str, float]:
        return axes.setdefault(
            axis, dict.fromkeys(("predicted", "predicted_exposed", "measured", "measured_exposed"), 0.0)
        )

    for row in ledger.traffic:
        of(row.axis)["predicted"] += row.seconds
        of(row.axis)["predicted_exposed"] += row.exposed_seconds
    if job.pp > 1:  # a rank that waits for a message does not know whether it is on its way or not made yet
        of("pp")["predicted"] += time.bubble
        of("pp")["predicted_exposed"] += time.bubble
    for of_rank in found:
        for axis, seconds in of_rank.under_way.items():
            of(axis)["measured"] += seconds / len(found)
        for axis, seconds in of_rank.exposed.items():
            of(axis)["measured_exposed"] += seconds / len(found)
    return {
        "time": {
            "step": [_mean(of_rank.step_seconds for of_rank in found), time.step],
            "computing": [
                _mean(of_rank.computing_seconds for of_rank in found),
                time.compute + time.optimizer + time.other,
            ],
        },
        "communication": {axis: axes[axis] for axis in sorted(axes)},
    }


def _mean(values: Any) -> float:
    values = list(values)
    return float(sum(values) / len(values))
