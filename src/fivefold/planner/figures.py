"""Data of the pictures: the pipeline's actions in time, and the front of step time against memory."""

from dataclasses import replace
from typing import Any

import msgspec

from fivefold.ledger import pipeline
from fivefold.ledger.job import Job
from fivefold.ledger.simulate import Timeline, least_alike
from fivefold.ledger.total import estimate
from fivefold.planner.search import search
from fivefold.planner.space import Request
from fivefold.spec.schedules import Kind

LETTERS = {Kind.FORWARD: "F", Kind.INPUT_GRAD: "B", Kind.WEIGHT_GRAD: "W", Kind.BACKWARD: "B"}
MOST_RANKS = 32
MOST_ACTIONS = 192  # of one rank that can be told apart side by side

Drawn = tuple[str, int, int, float, float]
"""An action: kind's letter, chunk of its rank, micro-batch, start and end in seconds."""


def gantt(job: Job) -> dict[str, Any]:
    """The pipeline in time: `panels` of (start, end, rows of (rank, actions)). All of the step in one, or its
    beginning and its end where there are too many actions to tell apart; of many ranks evenly spaced ones."""
    built = pipeline.stages(job, pipeline.costs(job))
    makespan = pipeline.timeline(job, built).makespan
    job = replace(job, microbatches=least_alike(job.pp, job.microbatches))  # rounds that repeat are not drawn
    line = pipeline.timeline(job, built, trace=True)
    late = makespan - line.makespan
    step = -(-job.pp // MOST_RANKS)
    shown = sorted({*range(0, job.pp, step), job.pp - 1})
    rows = {rank: _drawn(job, built, line, rank) for rank in shown}
    span = _span(line)
    windows = [(0.0, line.makespan)]
    if 2 * span < line.makespan:
        windows = [(0.0, span), (line.makespan - span, line.makespan)]
    panels = [_panel(rows, *window, late if window[0] else 0.0) for window in windows]
    return {"schedule": job.schedule, "ranks": job.pp, "makespan": makespan, "panels": panels}


def _panel(rows: dict[int, list[Drawn]], start: float, end: float, late: float) -> dict[str, Any]:
    """What is done from `start` to `end`, all `late` seconds later."""
    drawn = {rank: [a for a in own if a[3] < end and a[4] > start] for rank, own in rows.items()}
    return {
        "start": start + late,
        "end": end + late,
        "rows": [
            (rank, [(kind, chunk, micro, a + late, b + late) for kind, chunk, micro, a, b in own])
            for rank, own in drawn.items()
        ],
    }


def _drawn(job: Job, built: list[pipeline.Stage], line: Timeline, rank: int) -> list[Drawn]:
    """What a rank does, in order; work without length is left out."""
    chunk = {stage: number for number, stage in enumerate(pipeline.own_stages(job, rank))}
    found = []
    for action, start in zip(line.actions[rank], line.starts[rank], strict=True):
        times = built[action.stage].times
        whole = action.kind is Kind.BACKWARD
        length = times.input_grad + times.weight_grad if whole else times[action.kind]
        if length > 0:
            place = chunk[action.stage], action.microbatch
            found.append((LETTERS[action.kind], *place, start, start + length))
    return found


def _span(line: Timeline) -> float:
    """Seconds to show at either end of a step: as many actions as can be told apart, and the first rank's wait
    for its first backward."""
    most = max(map(len, line.actions))
    if most <= MOST_ACTIONS:
        return line.makespan
    actions = zip(line.actions[0], line.starts[0], strict=True)
    first_backward = next(start for action, start in actions if action.kind is not Kind.FORWARD)
    return max(line.makespan * MOST_ACTIONS / 2 / most, 1.4 * first_backward)


def front(request: Request, parts: int = 8) -> list[dict[str, float]]:
    """Step time against memory: the best layout under every part of the device's memory, with the memory it
    needs; each is faster than those that need less."""
    capacity = request.hardware.device.memory
    found: list[dict[str, float]] = []
    for part in range(parts, 0, -1):
        most = capacity * part / parts
        if found and found[-1]["memory"] <= most:
            continue
        device = msgspec.structs.replace(request.hardware.device, memory=int(most))
        less = replace(request, hardware=msgspec.structs.replace(request.hardware, device=device))
        best = search(less, keep=1).ranking
        if not best:
            break
        if found and best[0].seconds <= found[-1]["step"]:
            found.pop()
        found.append({"memory": estimate(best[0].job).fullest.memory.peak, "step": best[0].seconds})
    return found
