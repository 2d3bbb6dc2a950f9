"""Compares the ledger with what ranks measured: bytes by axis and collective, memory by category."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from fivefold.collectives.record import Row
from fivefold.ledger.job import Job
from fivefold.ledger.total import estimate, traffic_of
from fivefold.observe.memory import MemoryByCategory
from fivefold.spec.schedules import SPLITS_BACKWARD


class Seen(Protocol):
    """What one rank measured; `traffic_of_memory` is that of the step whose `memory` it is."""

    @property
    def coordinates(self) -> dict[str, int]: ...
    @property
    def traffic(self) -> list[Row]: ...
    @property
    def memory(self) -> MemoryByCategory | None: ...
    @property
    def traffic_of_memory(self) -> list[Row]: ...


class TrafficLine(NamedTuple):
    """Bytes of one optimizer step. `equal`: on every pipeline stage."""

    axis: str
    primitive: str
    phase: str
    measured: int
    predicted: int
    equal: bool

    @property
    def name(self) -> str:
        return f"{self.axis} {self.primitive} {self.phase}"


class MemoryLine(NamedTuple):
    """Bytes of a category, each on the rank where it is largest. `note` explains a difference, or why nothing was
    measured."""

    category: str
    measured: int | None
    predicted: int
    note: str = ""


def traffic_lines(job: Job, found: Sequence[Seen]) -> list[TrafficLine]:
    """Measured beside predicted bytes, summed over the pipeline stages.

    Compared are the bytes of each stage's first rank, which holds the most where shards are uneven. What a rank sends
    to experts depends on routing: there the sum over all ranks of the stage is compared. With a program in place of
    the backend's collectives (`parallel.algorithm`), ranks send different amounts, and all data ranks are compared.
    """
    job = dataclasses.replace(job, imbalance=1.0)
    lines: dict[tuple[str, str, str], TrafficLine] = {}
    for stage in range(job.pp):
        of_stage = [of_rank for of_rank in found if of_rank.coordinates["pp"] == stage]
        measured, everywhere = _bytes(of_stage[0].traffic), Counter[tuple[str, str, str]]()
        for of_rank in of_stage:
            everywhere.update(_bytes(of_rank.traffic))
        predicted = _predicted(job, stage, 0)
        wrong = _wrong_messages(job, stage, of_stage)
        for key in sorted(measured.keys() | predicted.keys() | wrong):
            here, told = measured[key], round(predicted.get(key, 0.0))
            if key[0] == "ep":
                here, told = everywhere[key], round(predicted.get(key, 0.0) * len(of_stage))
            equal = here == told and key not in wrong
            before = lines.get(key, TrafficLine(*key, 0, 0, True))
            lines[key] = TrafficLine(
                *key, before.measured + here, before.predicted + told, before.equal and equal
            )
    return [lines[key] for key in sorted(lines)]


def _predicted(job: Job, stage: int, place: int) -> dict[tuple[str, str, str], float]:
    """Predicted bytes by axis, primitive and phase; `place`: the rank's number on the data and context axes."""
    found: dict[tuple[str, str, str], float] = {}
    for row in traffic_of(job, stage, place):
        name = row.axis, str(row.primitive), row.phase
        found[name] = found.get(name, 0.0) + row.bytes_per_rank
    return found


def _wrong_messages(job: Job, stage: int, of_stage: Sequence[Seen]) -> set[tuple[str, str, str]]:
    """With a program in place of the backend's collectives: the lines in which some rank's bytes differ."""
    if job.stack.algorithm == "backend":
        return set()
    wrong = set()
    for place, of_rank in enumerate(of_stage[:: job.tp]):
        measured, predicted = _bytes(of_rank.traffic), _predicted(job, stage, place)
        for axis, primitive, phase in measured.keys() | predicted.keys():
            key = axis, primitive, phase
            if (
                axis.startswith("dp_")
                and primitive == "send"
                and measured[key] != round(predicted.get(key, 0.0))
            ):
                wrong.add(key)
    return wrong


def _bytes(rows: Iterable[Row]) -> Counter[tuple[str, str, str]]:
    """By axis, primitive and phase; a message counts where it is sent."""
    found: Counter[tuple[str, str, str]] = Counter()
    for row in rows:
        if row.primitive not in ("recv", "barrier"):
            found[row.axis, row.primitive, row.phase] += row.bytes_per_rank
    return found


def memory_lines(job: Job, found: Sequence[Seen]) -> list[MemoryLine]:
    """Measured beside predicted bytes; activations are what autograd and recomputation save for backward."""
    if job.ep > 1:
        job = dataclasses.replace(job, imbalance=expert_load(job, found))
    ledger = estimate(job)
    told = [of_rank.memory for of_rank in found if of_rank.memory is not None]
    lines = [
        MemoryLine(
            name,
            max(getattr(memory, name) for memory in told),
            round(max(getattr(of_class.memory, name) for of_class in ledger.ranks)),
        )
        for name in ("parameters", "gradients", "optimizer")
    ]
    note = ""
    if job.ep > 1:
        note = f"predicted for {job.imbalance:.3f} × the mean rows of experts, the busiest rank's, in every layer"
    elif job.model.experts.count and job.pp > 1 and job.schedule in SPLITS_BACKWARD:
        note = "a split backward lets the sums of the auxiliary loss go with its first half"
    saved = max(memory.activations for memory in told)
    lines.append(MemoryLine("activations", saved, round(max(ledger.timeline.peak_in_flight)), note))
    return lines


def transient_line(job: Job) -> MemoryLine:
    """The predicted buffers: messages, and temporaries of a layer's backward."""
    fullest = max(of_class.memory.buffers for of_class in estimate(job).ranks)
    return MemoryLine(
        "buffers", None, round(fullest), "messages and a layer's temporaries, which no list of tensors names"
    )


def expert_load(job: Job, found: Sequence[Seen]) -> float:
    """Rows that the experts of the busiest rank received in a step, over the mean. Derived from the bytes it sent: a
    rank sends back as many rows as it received, and the rest of the forward's traffic is equal on all ranks."""
    mean = dataclasses.replace(job, imbalance=1.0)
    loads = [1.0]
    for of_rank in found:
        rows = [row for row in traffic_of(mean, of_rank.coordinates["pp"]) if row.axis == "ep"]
        for row in rows:
            if row.phase == "forward":
                counts = 8.0 * job.model.experts.count * row.times / 3
                each = (row.bytes_per_rank - counts) / 2
                here = _bytes(of_rank.traffic_of_memory)["ep", "all_to_all", "forward"]
                loads.append((here - counts - each) / each)
    return max(loads)
