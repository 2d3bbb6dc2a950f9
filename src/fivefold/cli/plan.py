"""The best layout for a model on a cluster, the ranking, and why the others are worse."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from fivefold.cli.arguments import add_config_arguments, add_json_argument, new_file, number, positive
from fivefold.config.load import dump, load, written_keys
from fivefold.config.tree import Config
from fivefold.ledger.job import Job
from fivefold.ledger.simulate import collector_paused
from fivefold.ledger.total import estimate
from fivefold.planner.advice import neighbours, unfit
from fivefold.planner.document import course_of, document, layout_of, layout_text, run_cost, title_of
from fivefold.planner.export import accelerate, deepspeed, megatron, torchtitan
from fivefold.planner.figures import front, gantt
from fivefold.planner.requests import config_of, request_of
from fivefold.planner.search import Outcome, search
from fivefold.planner.space import Request, size
from fivefold.render.html import page
from fivefold.render.ledger import cost_text, ledger_text, same_text
from fivefold.render.tables import table
from fivefold.render.units import bytes_text, count_text, percent_text, seconds_text

PEERS = {
    "accelerate": accelerate.emit,
    "deepspeed": deepspeed.emit,
    "megatron": megatron.emit,
    "torchtitan": torchtitan.emit,
}
SHOWN = (
    "pp",
    "schedule",
    "chunks",
    "dp_replicate",
    "dp_shard",
    "zero",
    "cp",
    "tp",
    "sequence_parallel",
    "ep",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    add_json_argument(parser)
    parser.add_argument(
        "--tokens", type=number, default=0.0, help="also say days and cost for so many tokens"
    )
    parser.add_argument("--keep", type=positive, default=10, help="length of the ranking")
    parser.add_argument(
        "--emit",
        choices=("fivefold", *PEERS),
        help="print only the best layout: as a config that trains it, or in a peer's own form",
    )
    parser.add_argument("--html", type=new_file, metavar="FILE", help="write a page with pictures")
    parser.epilog = (
        "Keys of [parallel] and batch.micro_batch that the config or --set writes are fixed; -1 and what is "
        "not written is free."
    )


@collector_paused()
def run(arguments: argparse.Namespace) -> int:
    """0 = a layout fits, 1 = none does."""
    config = load(arguments.config, arguments.overrides)
    request = request_of(config, written_keys(arguments.config, arguments.overrides))
    outcome = search(request, keep=arguments.keep)
    if not outcome.ranking:
        lines = unfit(request, outcome)
        if arguments.json:
            print(
                json.dumps(
                    {**_counts(request, outcome), "best": None, "ranking": [], "reasons": lines}, indent=1
                )
            )
        else:
            print("nothing fits\n" + "\n".join(lines))
        return 1
    best = outcome.ranking[0]
    if arguments.emit:
        _emit(config, best.job, arguments.emit)
        return 0
    found = _document(request, outcome)
    course = course_of(config, best.job)
    if course.growths:
        found["ramp"] = [{"global_batch": b.global_batch, "steps": steps} for b, steps in course.stages()]
    if arguments.tokens:
        found["run"] = run_cost(estimate(best.job), arguments.tokens, course)
    if arguments.html:
        text = page(
            title_of(config),
            layout_text(best.job),
            found["best"],
            gantt(best.job) if best.job.pp > 1 else None,
            found.get("run"),
            found["ranking"],
            found["neighbours"],
            front(request),
        )
        arguments.html.write_text(text, encoding="utf-8")
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        print(_text(found))
        if course.growths:
            print(f"\n{course.reason}; the steps above are of the last batch")
        if arguments.tokens:
            print("\n" + cost_text(found["run"]))
    return 0


def _emit(config: Config, job: Job, peer: str) -> None:
    """The layout on stdout; what the peer cannot express on stderr."""
    if peer == "fivefold":
        print(dump(config_of(config, job)), end="")
        return
    text, missing = PEERS[peer](job)
    if ramp := course_of(config, job).summary:
        missing.append(f"batch.ramp ({ramp}) here; what is written is its last batch")
    print(text, end="")
    for line in missing:
        print(f"fivefold: {peer} cannot express {line}", file=sys.stderr)


def _counts(request: Request, outcome: Outcome) -> dict[str, Any]:
    return {
        "searched": size(request),
        "feasible": outcome.feasible,
        "simulated": outcome.simulated,
        "seconds": outcome.seconds,
    }


def _document(request: Request, outcome: Outcome) -> dict[str, Any]:
    ledgers = [estimate(ranked.job) for ranked in outcome.ranking]
    ranking = [
        {
            "parallel": layout_of(ledger.job),
            "micro_batch": ledger.job.micro_batch,
            "step": ledger.time.step,
            "tokens_per_second_per_gpu": ledger.tokens_per_second_per_gpu,
            "mfu": ledger.utilization("causal"),
            "memory_peak": ledger.fullest.memory.peak,
            "bubble_fraction": ledger.timeline.bubble / ledger.timeline.makespan,
            "same": [layout_of(job) for job in ranked.same],
            "same_but_for": _differing([ranked.job, *ranked.same]),
        }
        for ranked, ledger in zip(outcome.ranking, ledgers, strict=True)
    ]
    best = ledgers[0]
    return {
        **_counts(request, outcome),
        "best": {
            **document(best),
            "parallel": layout_of(best.job),
            "micro_batch": best.job.micro_batch,
            "accumulation": best.job.microbatches,
        },
        "ranking": ranking,
        "neighbours": neighbours(best.job, best.time.step, request.smaller, request.fixed),
    }


def _differing(jobs: Sequence[Job]) -> list[str]:
    """Keys of [parallel] in which the jobs are not all alike."""
    first, *others = map(layout_of, jobs)
    return [key for key in first if any(other[key] != first[key] for other in others)]


def _text(found: dict[str, Any]) -> str:
    names = ("pp", "schedule", "v", "dp_r", "dp_s", "zero", "cp", "tp", "sp", "ep", "mb", "recompute")
    head = ("", *names, "step", "tokens/s/GPU", "MFU", "memory", "bubble")
    rows = [
        [
            str(place),
            *(_plain(item["parallel"][key]) for key in SHOWN),
            str(item["micro_batch"]),
            item["parallel"]["recompute"],
            seconds_text(item["step"]),
            count_text(item["tokens_per_second_per_gpu"]),
            percent_text(item["mfu"]),
            bytes_text(item["memory_peak"]),
            percent_text(item["bubble_fraction"]),
        ]
        for place, item in enumerate(found["ranking"], start=1)
    ]
    lines = table(head, rows).splitlines()
    ranking = lines[:2]
    for line, item in zip(lines[2:], found["ranking"], strict=True):
        ranking += [line, *(f"    {note}" for note in same_text(item))]
    worse = "\n".join(f"  {line}" for line in found["neighbours"])
    return (
        f"{found['searched']:,} layouts in {found['seconds']:.2f} s, {found['simulated']} schedules simulated\n\n"
        + "\n".join(ranking)
        + f"\n\nthe best\n{ledger_text(found['best'])}\n\nits neighbours\n{worse}"
    )


def _plain(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
