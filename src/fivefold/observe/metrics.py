"""What one optimizer step says about itself, and the file that keeps it: RUN/metrics.jsonl."""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from fivefold.config.errors import RunFailed
from fivefold.observe.clock import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One optimizer step of the whole job, the same numbers on every layout.

    Attributes:
        step: optimizer steps done, this one included; the first is 1.
        tokens: tokens consumed since the run began, this step's included.
        step_tokens: tokens of this step, over all ranks.
        loss: nats per unmasked token of the global batch.
        grad_norm: norm of the whole gradient before clipping.
        lr: learning rate this step was made with.
        seconds: wall seconds of this step by place (`StepClock.lap`); their sum is `step_seconds`.
        memory_bytes: rank 0's allocator peak on a GPU, high-water resident set on a CPU.
        mfu: model FLOP/s as a part of the peak, in [0, 1]; None when no peak is known.
        loss_scale: fp16's loss scale; None for every other precision.
        skipped: the update was not applied, because the gradient was not finite.
        expert_load: choices of the busiest expert over the mean of its layer (1 = balanced), the worst layer's; None
            without experts.
        traffic: bytes per rank (ledger convention) that collectives moved in this step, by axis.
        exposed_seconds: of this step, those in which rank 0 waited in communication that nothing hid, by axis (under pp
            with the pipeline's bubble); empty where the backend does not tell (nccl).
    """

    step: int
    tokens: int
    step_tokens: int
    loss: float
    grad_norm: float
    lr: float
    seconds: Mapping[Place, float]
    memory_bytes: int
    mfu: float | None = None
    loss_scale: float | None = None
    skipped: bool = False
    expert_load: float | None = None
    traffic: Mapping[str, int] = field(default_factory=dict)
    exposed_seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks; times `step_seconds` it gives `step_tokens` again."""
        return self.step_tokens / max(self.step_seconds, 1e-9)

    def as_dict(self) -> dict[str, Any]:
        """Everything by its contract name, numbers as they are."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "tokens_per_second": self.tokens_per_second,
            "step_seconds": self.step_seconds,
            "step_tokens": self.step_tokens,
            "mfu": self.mfu,
            "memory_bytes": self.memory_bytes,
            "loss_scale": self.loss_scale,
            "skipped": self.skipped,
            "expert_load": self.expert_load,
            "seconds": dict(self.seconds),
            "traffic": dict(self.traffic),
            "exposed_seconds": dict(self.exposed_seconds),
        }

    def to_json(self) -> str:
        """One line of JSON. JSON has no NaN: see `json_line`."""
        return json_line(self.as_dict())

    def scalars(self) -> dict[str, float]:
        """Flat names and numbers, for sinks that plot: loss, seconds/compute, traffic/tp, …"""
        flat: dict[str, float] = {}
        for name, value in self.as_dict().items():
            if isinstance(value, dict):
                flat |= {f"{name}/{key}": float(part) for key, part in value.items()}
            elif value is not None and name != "step":
                flat[name] = float(value)
        return flat


def json_line(record: Mapping[str, Any]) -> str:
    """`record` as one line of valid JSON.

    A number that is not finite becomes null, and "non_finite" says which one it was:
    `{"loss": null, "non_finite": {"loss": "nan"}}`. The key is absent when all numbers are finite, so a
    reader that does not know it still reads every line.
    """
    odd = {
        name: str(value) for name, value in record.items() if isinstance(value, float) and not isfinite(value)
    }
    clean = {name: None if name in odd else value for name, value in record.items()}
    if odd:
        clean["non_finite"] = odd
    return json.dumps(clean, allow_nan=False)


class MetricsFile:
    """RUN/metrics.jsonl, one line per optimizer step, and RUN/evaluations.jsonl, one per evaluation.

    Lines reach the operating system as they are written, so what a killed run did can be read. A run that
    resumes at `resume_step` first drops what lies beyond it, so that no step appears twice.
    """

    def __init__(self, directory: Path, resume_step: int = 0) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._steps = _LineFile(directory / "metrics.jsonl", resume_step)
        self._evaluations = _LineFile(directory / "evaluations.jsonl", resume_step)

    def step(self, metrics: StepMetrics) -> None:
        self._steps.write(metrics.to_json())

    def evaluation(self, step: int, loss: float) -> None:
        self._evaluations.write(json_line({"step": step, "loss": loss}))

    def close(self) -> None:
        self._steps.close()
        self._evaluations.close()


class _LineFile:
    """A file of JSON lines that each bear a step."""

    def __init__(self, path: Path, resume_step: int) -> None:
        _drop_lines(path, lambda line: _step_of(line) > resume_step)
        self._file = path.open("a", encoding="utf-8", buffering=1)  # flushed line by line

    def write(self, line: str) -> None:
        try:
            self._file.write(line + "\n")
        except OSError as error:
            raise RunFailed(
                f"cannot write {self._file.name}: {error.strerror}; make room, then --resume"
            ) from None

    def close(self) -> None:
        with suppress(OSError):  # of a line whose writing has failed before
            self._file.close()


def _step_of(line: str) -> float:
    """The step of a line; infinite for a line torn by a crash, which is so dropped with the later ones."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _drop_lines(path: Path, unwanted: Callable[[str], bool]) -> None:
    """Rewrites `path` without the unwanted lines; a crash on the way leaves the old file or the new one."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    kept = [line for line in lines if not unwanted(line)]
    temporary = path.with_name(path.name + ".new")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
