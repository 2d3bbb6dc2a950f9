"""Data of the pictures: the pipeline's actions in time, and the front of step time against memory."""

from dataclasses import replace
from typing import Any

import msgspec

from fivefold.ledger import pipeline
from fivefold.ledger.job import Job
from fivefold.planner.search import search
from fivefold.planner.space import Wish
from fivefold.spec.schedules import Kind

LETTERS = {Kind.FORWARD: "F", Kind.INPUT_GRAD: "B", Kind.WEIGHT_GRAD: "W", Kind.BACKWARD: "B"}


def gantt(job: Job, most_actions: int = 1600) -> dict[str, Any]:
    """Every rank's actions: [kind letter, stage, micro-batch, start, end]; the first ones of each rank where
    there are too many to draw."""
    built = pipeline.stages(job, pipeline.costs(job))
    line = pipeline.timeline(job, built, trace=True)
    rows: list[list[tuple[str, int, int, float, float]]] = []
    each = max(72, most_actions // job.pp)
    for own, starts in zip(line.actions, line.starts, strict=True):
        row: list[tuple[str, int, int, float, float]] = []
        for action, start in zip(own[:each], starts[:each], strict=True):
            times = built[action.stage].times
            length = (
                times.input_grad + times.weight_grad if action.kind is Kind.BACKWARD else times[action.kind]
            )
            row.append((LETTERS[action.kind], action.stage, action.microbatch, start, start + length))
        rows.append(row)
    cut = any(len(own) > each for own in line.actions)
    until = min(row[-1][4] for row in rows) if cut else line.makespan
    return {"ranks": rows, "until": until, "makespan": line.makespan, "cut": cut, "schedule": job.schedule}


def front(wish: Wish, parts: int = 8) -> list[dict[str, float]]:
    """The best step under every part of the device's memory: the Pareto front of time against memory."""
    capacity = wish.hardware.device.memory
    found = []
    for part in range(parts, 0, -1):
        device = msgspec.structs.replace(wish.hardware.device, memory=int(capacity * part / parts))
        less = replace(wish, hardware=msgspec.structs.replace(wish.hardware, device=device))
        best = search(less, keep=1).ranking
        if not best:
            break
        found.append({"memory": capacity * part / parts, "step": best[0].seconds})
    return found
