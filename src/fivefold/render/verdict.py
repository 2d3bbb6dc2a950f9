"""Verdicts of `fivefold verify` for people."""

from collections.abc import Sequence
from typing import Any

MOST_WRONG = 6


def case_title(found: dict[str, Any]) -> str:
    """A layout in one line: what differs from one rank."""
    parallel = found["parallel"]
    words = [
        f"{axis} {parallel[axis]}"
        for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
        if parallel[axis] > 1
    ]
    words += [parallel["schedule"]] * (parallel["pp"] > 1) + [parallel["context"]] * (parallel["cp"] > 1)
    words += ["sequence parallel"] * parallel["sequence_parallel"]
    words += [f"zero {parallel['zero']}", f"recompute {parallel['recompute']}"]
    count = found["accumulation"]
    return ", ".join([*words, f"{count} micro-batch{'es' * (count != 1)}"])


def case_lines(found: dict[str, Any]) -> list[str]:
    """One layout's verdict."""
    lines = [f"{'holds' if found['passed'] else 'DOES NOT HOLD'}: {case_title(found)}"]
    if found["problem"]:
        lines.append(f"  could not be compared: {found['problem']}")
    lines += [
        f"  errors in {dtype}: loss {of['loss']:.1e}, gradients {of['gradient']:.1e}, parameters {of['parameter']:.1e}"
        for dtype, of in found["errors"].items()
    ]
    if found["first_divergence"]:
        kind = f": {found['kind']}" if found["kind"] else ""
        lines.append(f"  first wrong: {found['first_divergence']}{kind}")
    if found["axis"]:
        lines.append(f"  axis: {found['axis']}")
    if found["routing"]:
        lines.append(f"  routing as in one process: {found['routing']}")
    wrong = found["wrong"]
    lines += [f"  {line}" for line in wrong[:MOST_WRONG]]
    if len(wrong) > MOST_WRONG:
        lines.append(f"  and {len(wrong) - MOST_WRONG} more")
    for name, (measured, predicted) in found["traffic"].items():
        lines.append(f"  traffic {name}: {measured:,} bytes measured, {predicted:,} predicted")
    if found["traffic_matches"] and found["problem"] is None:
        lines.append("  traffic: every byte as predicted")
    for name, (measured, predicted) in found["memory"].items():
        note = found["memory_notes"].get(name, "") if measured != predicted else ""
        shown = f"  memory {name}: {measured:,} bytes measured, {predicted:,} predicted"
        lines.append(f"{shown} ({note})" if note else shown)
    return lines


def summary_line(documents: Sequence[dict[str, Any]], seconds: float) -> str:
    """How many hold, and how long it took."""
    failed = sum(not found["passed"] for found in documents)
    counted = f"{len(documents)} layout{'s' * (len(documents) != 1)}"
    verdict = f"{failed} do not hold" if failed else "all hold" if len(documents) > 1 else "it holds"
    return f"{counted} verified in {seconds:.0f} s: {verdict if documents else 'none'}"
