"""Batch and learning rate: what a batch of so many tokens needs, and what a change of it changes."""

import argparse
import json
from dataclasses import asdict, replace
from typing import Any

from fivefold.cli.arguments import add_config_arguments, add_json_argument, whole_number
from fivefold.config.errors import BadInput
from fivefold.config.load import load, written_keys
from fivefold.planner.batches import degrees, on_devices, rates, sequences, splits, step_seconds, warnings
from fivefold.planner.requests import request_of
from fivefold.render.tables import table
from fivefold.render.units import count_text, duration_text, lr_text, seconds_text
from fivefold.spec.batch import BatchPlan
from fivefold.spec.ramp import plan_course

SCALES = {"K": 2**10, "M": 2**20, "G": 2**30, "k": 10**3, "m": 10**6, "B": 10**9, "T": 10**12}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    add_json_argument(parser)
    parser.add_argument(
        "--tokens",
        metavar="COUNT",
        help="target tokens a step, e.g. 16M (= 16 · 2^20) or 16000000; default: the config's batch",
    )
    parser.add_argument("--devices", type=whole_number, default=0, help="default: the cluster's")
    parser.add_argument(
        "--budget", metavar="COUNT", default="0", help="tokens of the whole run, e.g. 1T (= 10^12)"
    )


def run(arguments: argparse.Namespace) -> int:
    """0 = the batch is legal on the devices, 1 = no data-parallel degree divides it."""
    config = load(arguments.config, arguments.overrides)
    written = written_keys(arguments.config, arguments.overrides)
    request = request_of(config, written)
    if arguments.devices:
        request = replace(request, hardware=on_devices(request.hardware, arguments.devices))
    length = config.batch.sequence_length
    target = sequences(_count(arguments.tokens), length) if arguments.tokens else request.global_batch
    reference = config.optimizer.lr_reference_batch or request.global_batch
    course = plan_course(config.batch.ramp, BatchPlan(target, 1, target, 1, length))
    found_degrees = degrees(config, written, request.hardware.devices)
    ways = [w for w in splits(target, found_degrees) if course.carries(w.data_parallel * w.micro_batch)]
    budget = _count(arguments.budget)
    found: dict[str, Any] = {
        "reference_batch": reference,
        "global_batch": target,
        "global_batch_tokens": target * length,
        "ramp": [{"global_batch": plan.global_batch, "steps": steps} for plan, steps in course.stages()],
        "legal": [asdict(way) for way in ways],
        "learning_rates": [asdict(rate) for rate in rates(config, reference, target)],
        "warnings": warnings(config, reference, target),
    }
    if config.cluster.preset or config.cluster.path:
        found["time"] = [
            _time(step_seconds(request, size), size, length, budget)
            for size in dict.fromkeys((reference, target))
        ]
    print(json.dumps(found, indent=1) if arguments.json else _text(found, length, course.summary))
    return int(not ways)


def _count(text: str) -> int:
    scale = SCALES.get(text[-1:], 0)
    try:
        count = round(float(text[:-1]) * scale) if scale else int(text)
    except (ValueError, OverflowError):
        count = -1
    if count < 0:
        raise BadInput(f"{text}: expected a number of tokens ≥ 0, e.g. 4194304, 4M or 1T")
    return count


def _time(step: float | None, size: int, length: int, budget: int) -> dict[str, Any]:
    steps = -(-budget // (size * length)) if budget else None
    return {
        "global_batch": size,
        "step_seconds": step,
        "tokens_per_second": size * length / step if step else None,
        "steps": steps,
        "run_seconds": steps * step if steps and step else None,
    }


def _text(found: dict[str, Any], length: int, ramp: str) -> str:
    parts = [
        f"batch {found['global_batch']} sequences = {count_text(found['global_batch_tokens'])} tokens "
        f"({found['global_batch'] / found['reference_batch']:g} × the reference {found['reference_batch']})"
    ]
    parts += [ramp] if ramp else []
    ways = found["legal"]
    if ways:
        rows = [[str(w["data_parallel"]), str(w["micro_batch"]), str(w["accumulation"])] for w in ways[:24]]
        more = f"\n… {len(ways) - 24} more" if len(ways) > 24 else ""
        parts.append(table(("data parallel", "micro-batch", "accumulation"), rows, left=0) + more)
    else:
        parts.append("no data-parallel degree of these devices divides it")
    rows = [[rate["rule"], lr_text(rate["lr"]), rate["note"]] for rate in found["learning_rates"]]
    parts.append(table(("lr rule", "lr", "note"), rows, left=3))
    for item in found.get("time", ()):
        if item["step_seconds"] is None:
            parts.append(f"batch {item['global_batch']}: no layout fits")
            continue
        run_time = (
            f", {item['steps']} steps, {duration_text(item['run_seconds'])}" if item["run_seconds"] else ""
        )
        parts.append(
            f"batch {item['global_batch']}: {seconds_text(item['step_seconds'])} a step, "
            f"{count_text(item['tokens_per_second'])} tokens/s{run_time}"
        )
    parts += [f"note: {line}" for line in found["warnings"]]
    return "\n\n".join(parts)
