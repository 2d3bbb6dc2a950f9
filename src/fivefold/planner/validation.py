"""Predictions against published runs: every row estimated with the same constants, errors by source.

A source counts once, however many rows it has: the bar is the median of the per-source medians of |error|.
"""

import re
from collections.abc import Iterator, Sequence
from importlib.resources import as_file, files
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from fivefold.ledger.physics import Physics
from fivefold.ledger.total import Ledger, estimate
from fivefold.planner.runs import Missing, Row, job_of, number, read_rows, rounding

GIB = 2.0**30
TRUSTED = ("A", "B", "")
MEASURED = ("step_time_s", "derived_step_time_s", "tokens_per_s_per_gpu", "peak_mem_gib")


class Check(NamedTuple):
    """One quantity of one row: predicted against measured, or why not."""

    id: str
    source: str
    quantity: str  # "step_time" (seconds) or "peak_memory" (bytes)
    predicted: float | None
    measured: float | None
    in_fitted_range: bool
    skipped: str | None

    @property
    def error(self) -> float | None:
        """predicted / measured − 1."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1.0

    def document(self) -> dict[str, Any]:
        found = self._asdict()
        found["error"] = self.error
        return found


def validate(path: Path | None = None) -> list[Check]:
    """Checks of a file of runs; without one, of the rows that ship (presets/validation/runs.tsv)."""
    if path is not None:
        return list(checks(read_rows(path)))
    with as_file(files("fivefold") / "presets" / "validation" / "runs.tsv") as shipped:
        return list(checks(read_rows(shipped)))


def checks(rows: Sequence[Row]) -> Iterator[Check]:
    """Every measured quantity of every row that is trusted (rows that say nothing of trust are)."""
    physics = Physics()
    for row in rows:
        quantities = dict(_measured(row))
        if not quantities:
            if not any(number(row, column) for column in MEASURED):
                yield _skip(row, "step_time", None, f"no {', '.join(MEASURED)}")
            continue
        try:
            job = job_of(row, physics)
            ledger = estimate(job)
        except Missing as column:
            yield from (_skip(row, name, value, f"no {column}") for name, value in quantities.items())
            continue
        except (ValueError, ArithmeticError) as error:
            why = str(error) if isinstance(error, ValueError) else "no sizes and degrees that go together"
            yield from (_skip(row, name, value, why) for name, value in quantities.items())
            continue
        for name, value in quantities.items():
            predicted = (
                ledger.time.step / rounding(row, job) if name == "step_time" else peak_memory(row, ledger)
            )
            if value is None:
                predicted = ledger.fullest.memory.peak
            fitted = _in_fitted_range(row, ledger)
            yield Check(row["id"], row["source"], name, predicted, value, fitted, None)


def _measured(row: Row) -> Iterator[tuple[str, float | None]]:
    seconds = number(row, "step_time_s") or number(row, "derived_step_time_s") or _from_rate(row)
    if seconds and row.get("trust_time", "A") in TRUSTED:
        yield "step_time", seconds
    if ran_out(row):
        yield "peak_memory", None
    gib = number(row, "peak_mem_gib")
    if gib and row.get("trust_mem", "A") in TRUSTED:
        yield "peak_memory", gib * GIB


def ran_out(row: Row) -> bool:
    """Whether the row says that the run did not fit: then the prediction must not either (measured is null)."""
    said = re.search(r"\boom\b|_oom$|out of memory", f"{row['id']} {row.get('notes', '')}", re.IGNORECASE)
    return said is not None and not number(row, "peak_mem_gib") and not number(row, "step_time_s")


def _from_rate(row: Row) -> float | None:
    """Step time from tokens per second and GPU."""
    rate, batch = number(row, "tokens_per_s_per_gpu"), number(row, "global_batch_seqs")
    length, world = number(row, "seq_len"), number(row, "n_gpus")
    return batch * length / rate / world if rate and batch and length and world else None


def _skip(row: Row, name: str, value: float | None, why: str) -> Check:
    return Check(row["id"], row["source"], name, None, value, False, why)


def peak_memory(row: Row, ledger: Ledger) -> float:
    """What `mem_kind` says was measured: allocated or reserved bytes, or all of the device's, on which rank."""
    kind = row.get("mem_kind", "").lower()
    memories = [item.memory for item in ledger.ranks]
    if "last rank" in kind:
        return memories[-1].allocated
    if "nvidia-smi" in kind:
        return max(memories[0].peak, memories[-1].peak)
    if "reserved" in kind:
        return max(memory.peak for memory in memories) - ledger.job.physics.context_bytes
    return max(memory.allocated for memory in memories)


def _in_fitted_range(row: Row, ledger: Ledger) -> bool:
    """Whether rows like this one shaped the fitted constants: its GPU and precision, dense or with experts."""
    kind = row.get("gpu", "").split("-")[0].split(" ")[0]
    return kind in ("A100", "H100", "GB200") and ledger.job.precision in ("bf16", "fp8")


def summary(found: Sequence[Check]) -> dict[str, Any]:
    """Counts and errors by quantity and source."""
    return {name: _summary([c for c in found if c.quantity == name]) for name in ("step_time", "peak_memory")}


def _summary(found: Sequence[Check]) -> dict[str, Any]:
    by_source: dict[str, list[float]] = {}
    for check in found:
        if check.error is not None:
            by_source.setdefault(check.source, []).append(check.error)
    errors = [abs(error) for own in by_source.values() for error in own]
    if not errors:
        return {"rows": len(found), "predicted": 0}
    sources = {
        name: {"rows": len(own), "median_error": median(map(abs, own)), "bias": median(own)}
        for name, own in by_source.items()
    }
    return {
        "rows": sum(check.measured is not None for check in found),
        "predicted": len(errors),
        "median_of_source_medians": median(item["median_error"] for item in sources.values()),
        "mean_error": mean(errors),
        "within_25_percent": sum(error <= 0.25 for error in errors) / len(errors),
        "worst": max(errors),
        "ran_out": sum(check.measured is None and check.skipped is None for check in found),
        "sources": sources,
    }
