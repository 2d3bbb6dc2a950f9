"""Further places that metrics go to, each an extra to install: TensorBoard, Weights & Biases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from fivefold.config.errors import BadInput
from fivefold.observe.metrics import StepMetrics


class Sink(Protocol):
    """What receives a run's numbers; lives on rank 0 only."""

    def step(self, metrics: StepMetrics) -> None:
        """An optimizer step is done."""

    def evaluation(self, step: int, loss: float) -> None:
        """Held-out loss, in nats per unmasked token, after `step` optimizer steps."""

    def close(self) -> None:
        """The run is over; writes what is still held back."""


def check_sinks(names: Iterable[str]) -> None:
    """Refuses sinks whose package is missing, before anything is started; imports none of them.

    Raises:
        BadInput: with the extra to install.
    """
    for name in names:
        spec = find_spec(name)
        if (
            spec is None or spec.origin is None
        ):  # no origin: a mere directory, such as ./wandb of earlier runs
            raise BadInput(f'log.sinks: {name} is not installed; install "fivefold[{name}]"')


def open_sinks(
    names: Iterable[str], directory: Path, config: Mapping[str, Any], resume_step: int = 0
) -> list[Sink]:
    """The sinks of `names`, writing to or beside the run `directory`.

    Args:
        config: the run's config as plain data, for sinks that show it.
        resume_step: steps already done; what was recorded beyond it is superseded.
    """
    check_sinks(names)
    return [
        TensorBoardSink(directory, resume_step)
        if name == "tensorboard"
        else WandbSink(directory, config, resume_step)
        for name in names
    ]


class TensorBoardSink:
    """Scalars under RUN/tensorboard, by step."""

    def __init__(self, directory: Path, resume_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides events of steps that a resumed run makes again
        self._writer: Any = SummaryWriter(
            str(directory / "tensorboard"), purge_step=resume_step + 1 if resume_step else None
        )

    def step(self, metrics: StepMetrics) -> None:
        for name, value in metrics.scalars().items():
            self._writer.add_scalar(name, value, metrics.step)

    def evaluation(self, step: int, loss: float) -> None:
        self._writer.add_scalar("evaluation/loss", loss, step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A Weights & Biases run named after the run directory, continued on resume.

    Steps are logged as a metric of their own ("step" is every plot's x axis): W&B ignores what is logged at
    an earlier step of its own counter, which a resumed run does.
    """

    def __init__(self, directory: Path, config: Mapping[str, Any], resume_step: int = 0) -> None:
        import wandb

        self._run: Any = wandb.init(
            project="fivefold",
            name=directory.name,
            dir=str(directory),
            config=dict(config),
            id=_wandb_id(directory, resume_step),
            resume="allow",
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def step(self, metrics: StepMetrics) -> None:
        self._run.log(metrics.scalars() | {"step": metrics.step})

    def evaluation(self, step: int, loss: float) -> None:
        self._run.log({"evaluation/loss": loss, "step": step})

    def close(self) -> None:
        self._run.finish()


def _wandb_id(directory: Path, resume_step: int) -> str:
    """The id kept in the run directory if the run is resumed, else a new one, which is kept there."""
    path = directory / "wandb-id.txt"
    if resume_step and path.exists():
        return path.read_text(encoding="utf-8").strip()
    identity = uuid4().hex[:12]
    path.write_text(identity + "\n", encoding="utf-8")
    return identity
