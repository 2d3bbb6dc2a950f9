"""metrics.jsonl is what other people's scripts read: contract keys, valid JSON, no step twice."""

import json
import math
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fivefold.config.errors import BadInput, RunFailed
from fivefold.config.tree import Config, Run
from fivefold.observe.metrics import MetricsFile, StepMetrics
from fivefold.observe.observer import Observer, open_observer
from fivefold.observe.sinks import TensorBoardSink, check_sinks


def metrics(step: int = 1, **changes: Any) -> StepMetrics:
    values: dict[str, Any] = {
        "step": step,
        "tokens": 4096 * step,
        "step_tokens": 4096,
        "loss": 5.5,
        "grad_norm": 0.5,
        "lr": 3e-4,
        "seconds": {"compute": 0.75, "communication": 0.25},
        "memory_bytes": 1 << 20,
        "traffic": {"dp_replicate": 4096},
    }
    return StepMetrics(**values | changes)


def read(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_line_has_the_contract_keys() -> None:
    line = json.loads(metrics(3, mfu=0.4).to_json())
    assert line == {
        "step": 3,
        "tokens": 12288,
        "loss": 5.5,
        "grad_norm": 0.5,
        "lr": 3e-4,
        "tokens_per_second": 4096.0,
        "step_seconds": 1.0,
        "step_tokens": 4096,
        "mfu": 0.4,
        "memory_bytes": 1 << 20,
        "loss_scale": None,
        "skipped": False,
        "expert_load": None,
        "seconds": {"compute": 0.75, "communication": 0.25},
        "traffic": {"dp_replicate": 4096},
        "exposed_seconds": {},
    }


def test_tokens_per_second_times_seconds_is_what_the_loader_counted() -> None:
    line = json.loads(metrics(seconds={"compute": 0.123, "data": 0.0456, "other": 0.001}).to_json())
    assert line["tokens_per_second"] * line["step_seconds"] == pytest.approx(4096, rel=1e-12)


def test_numbers_that_are_not_finite_stay_valid_json(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    file.step(metrics(1, loss=math.nan, grad_norm=math.inf, skipped=True))
    file.evaluation(1, -math.inf)
    file.close()
    (line,) = read(tmp_path / "metrics.jsonl")
    assert (line["loss"], line["grad_norm"], line["skipped"]) == (None, None, True)
    assert line["non_finite"] == {"loss": "nan", "grad_norm": "inf"}
    assert read(tmp_path / "evaluations.jsonl") == [{"step": 1, "loss": None, "non_finite": {"loss": "-inf"}}]


def test_each_line_can_be_read_at_once(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    for step in (1, 2):
        file.step(metrics(step))
        assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == list(range(1, step + 1))
    file.close()


def test_resume_drops_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    for step in range(1, 6):
        file.step(metrics(step))
        file.evaluation(step, 5.0)
    file.close()
    with (tmp_path / "metrics.jsonl").open("a") as torn:
        torn.write('{"step": 6, "tok')  # killed while it wrote

    resumed = MetricsFile(tmp_path, resume_step=3)
    resumed.step(metrics(4))
    resumed.evaluation(4, 4.0)
    resumed.close()
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [line["step"] for line in read(tmp_path / "evaluations.jsonl")] == [1, 2, 3, 4]
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "evaluations.jsonl"}


def test_a_new_run_in_an_old_directory_starts_an_empty_file(tmp_path: Path) -> None:
    for _ in range(2):
        file = MetricsFile(tmp_path)
        file.step(metrics(1))
        file.close()
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [1]


def test_scalars_are_flat_numbers() -> None:
    scalars = metrics(skipped=True).scalars()
    assert scalars["seconds/compute"] == 0.75
    assert scalars["traffic/dp_replicate"] == 4096
    assert scalars["skipped"] == 1.0
    assert "loss_scale" not in scalars  # None is no number
    assert all(isinstance(value, float) for value in scalars.values())


def test_a_missing_package_is_refused_by_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.observe.sinks.find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r'log\.sinks: wandb is not installed; install "fivefold\[wandb\]"'):
        check_sinks(("wandb",))
    check_sinks(())


def test_a_mere_directory_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()  # what earlier runs leave in the working directory
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(BadInput, match="wandb is not installed"):
        check_sinks(("wandb",))


def test_checking_sinks_imports_nothing_heavy() -> None:
    code = "import sys, fivefold.observe.sinks; print('torch' in sys.modules, 'rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="needs tensorboard")
def test_tensorboard_gets_every_scalar(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    for step in (1, 2, 3):
        sink.step(metrics(step, loss=6.0 - step))
    sink.close()
    resumed = TensorBoardSink(tmp_path, resume_step=2)
    resumed.step(metrics(3, loss=0.5))
    resumed.evaluation(3, 4.5)
    resumed.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 5.0), (2, 4.0), (3, 0.5)]
    assert [event.value for event in events.Scalars("evaluation/loss")] == [4.5]


def test_only_rank_0_writes(tmp_path: Path) -> None:
    config = Config(run=Run(steps=2))
    for rank in (1, 0):
        with open_observer(config, tmp_path / str(rank), rank=rank, stream=sys.stderr) as observer:
            observer.step(metrics(1))
            observer.evaluation(1, 5.0)
            observer.note("a note")
    assert not (tmp_path / "1").exists()
    assert len(read(tmp_path / "0" / "metrics.jsonl")) == 1


def test_every_sink_gets_every_event(tmp_path: Path) -> None:
    first, second = MetricsFile(tmp_path / "a"), MetricsFile(tmp_path / "b")
    with Observer(sinks=[first, second]) as observer:
        observer.step(metrics(1))
        observer.evaluation(1, 5.0)
    for name in ("a", "b"):
        assert len(read(tmp_path / name / "metrics.jsonl")) == 1
        assert read(tmp_path / name / "evaluations.jsonl") == [{"step": 1, "loss": 5.0}]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
def test_a_full_disk_is_told_in_one_line_and_once(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    file._steps._file = open("/dev/full", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
    with pytest.raises(RunFailed, match=r"cannot write /dev/full: No space left on device; make room"):
        file.step(metrics())
    file.close()
