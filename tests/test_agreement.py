"""Skips and stops are agreed: what one rank alone sees, all ranks act on, in the same step."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.config.tree import Config, Precision
from fivefold.observe.memory import SavedActivations
from fivefold.parallel.local import LocalParameter
from fivefold.proof.gather import wholes
from fivefold.spec.legal import resolve_config
from fivefold.spec.parameters import Parameter
from fivefold.spec.parts import Part
from fivefold.trainer.batches import MicroBatch, held_out_share
from fivefold.trainer.loss_scale import LossScale
from fivefold.trainer.state import tensors
from fivefold.trainer.step import local_square_norm
from ranks import Ranks
from test_run import CONFIG, settings
from toy import CPU, global_batch, start_group, stepper_on, toy_config


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3, backend=None) as started:
        yield started


def poison_gradient(module: torch.nn.Module, value: float) -> None:
    """The gradient of one weight gets one bad element, in one row, so in one shard."""

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        bad = gradient.clone()
        bad[5, 0] = value
        return bad

    query = module.layers["1"].attention.query  # type: ignore[index,union-attr]
    query.register_forward_pre_hook(lambda part, _: part.weight.register_hook(spoil) and None)  # type: ignore[union-attr]


def poison_output(module: torch.nn.Module, value: float) -> None:
    module.layers["0"].feed_forward.register_forward_hook(lambda *parts: parts[-1] * value)  # type: ignore[index,union-attr]


def step_with_poison(
    rank: int, world_size: int, config: Config, sick: int, value: float, where: str
) -> dict[str, Any]:
    """One good step, then one in which `sick` alone has a bad number: what the second did to everything."""
    recorder = start_group()
    resolved = resolve_config(config, world_size)
    stepper = stepper_on(resolved, recorder)

    def share(step: int) -> list[MicroBatch]:
        batch, data_rank = global_batch(config, step), resolved.mesh.data_rank(rank)
        ids = range(100, 100 + config.batch.global_batch)
        rows = [resolved.batch.rows(i, data_rank) for i in range(resolved.batch.accumulation)]
        return [
            MicroBatch.of(batch.rows(r.start, r.stop), CPU, sequences=len(ids), sample_ids=tuple(ids[r]))
            for r in rows
        ]

    assert stepper.step(share(0), 1e-3).skipped is None
    before = wholes(tensors(stepper.model, stepper.optimizer)).tensors
    if rank == sick:
        (poison_gradient if where == "gradient" else poison_output)(stepper.model.module, value)
    result = stepper.step(share(1), 1e-3)
    after = wholes(tensors(stepper.model, stepper.optimizer)).tensors
    unchanged = all(torch.equal(before[n], after[n]) for n in before)
    updates = {float(s["step"]) for s in stepper.optimizer.torch.state.values()}
    cleared = all(p.value.grad is None for p in stepper.model.parameters)
    return {
        "skipped": result.skipped,
        "unchanged": unchanged,
        "updates": updates,
        "cleared": cleared,
        "loss_scale": stepper.loss_scale.value,
    }


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("value", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.full)])
def test_one_ranks_bad_gradient_is_skipped_by_all(ranks: Ranks, zero: int, value: float) -> None:
    for sick in range(3):
        config = toy_config(zero=zero, global_batch=6)
        results = ranks.run(step_with_poison, config, sick, value, "gradient")
        for result in results:
            assert result["unchanged"]
            assert result["cleared"]
            assert result["updates"] == {1.0}
            assert result["skipped"] == results[0]["skipped"]
            assert "gradient of layers.1.attention.query.weight" in result["skipped"]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_an_overflow_on_one_rank_halves_the_loss_scale_of_all(ranks: Ranks, zero: int) -> None:
    for sick in range(3):
        config = toy_config(zero=zero, dtype="fp16", global_batch=6)
        for result in ranks.run(step_with_poison, config, sick, float("inf"), "gradient"):
            assert result["unchanged"]
            assert result["loss_scale"] == 2.0**15


def test_loss_scale_grows_backs_off_and_has_a_floor() -> None:
    scale = LossScale.of(Precision(dtype="fp16", loss_scale_growth_steps=3, min_loss_scale=16384.0))
    seen = []
    for skipped in (True, False, False, False, False, True, True, True, False, False, False):
        scale.update(skipped)
        seen.append(scale.value)
    low, middle, high = 16384.0, 32768.0, 65536.0
    assert seen == [middle, middle, middle, high, high, middle, low, low, low, low, middle]
    fixed = LossScale.of(Precision(dtype="bf16"))
    fixed.update(True)
    assert fixed.value == 1.0


@pytest.mark.parametrize("zero", [0, 3])
def test_report_names_rank_module_micro_batch_and_samples(ranks: Ranks, zero: int) -> None:
    for sick in range(3):
        config = toy_config(zero=zero, global_batch=6)
        results = ranks.run(step_with_poison, config, sick, float("nan"), "output")
        said = results[0]["skipped"]
        assert all(result["skipped"] == said and result["unchanged"] for result in results)
        expected = (
            f"rank {sick}: output of layers.0.feed_forward in forward, micro-batch 0, samples {100 + sick}"
        )
        assert expected in said


SICK = """
# `fivefold train`, where rank 1's model computes NaN from step 3 on.
import sys
from fivefold.cli.main import main
from fivefold.trainer import loop

class Sick(loop.Loop):
    def _step(self):
        if self.session.rank == 1 and self.counters.step == 2:
            part = self.model.module.layers["1"].attention
            part.register_forward_hook(lambda *parts: parts[-1] * float("nan"))
        return super()._step()

from fivefold.trainer import worker
worker.Loop = Sick
sys.exit(main(sys.argv[1:]))
"""
START = "import sys; from fivefold.trainer.launch import start_local; sys.exit(start_local(sys.argv[1:], 2))"


def test_all_ranks_stop_within_seconds_and_say_where(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(CONFIG)
    (tmp_path / "sick.py").write_text(SICK)
    skips = ["--set", "precision.max_skips=1", "--set", "run.steps=1000"]
    words = ["sick.py", "train", "tiny.toml", *settings("sick", 2, 3, *skips)]
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", START, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    errors = done.stderr.splitlines()
    assert len(errors) == 1, done.stderr
    for words_said in (
        "step 4",
        "rank 1",
        "layers.1.attention",
        "micro-batch 0",
        "samples",
        "2 skips in a row",
    ):
        assert words_said in errors[0]
    rows = [json.loads(line) for line in (tmp_path / "sick" / "metrics.jsonl").read_text().splitlines()]
    assert [row["skipped"] for row in rows] == [False, False, True, True]
    assert time.monotonic() - started < 60  # 2 ranks start, tokenize, fail and end


def test_memory_with_accumulation_is_that_without(ranks: Ranks) -> None:
    """The token count is known before the first backward, so nothing of a micro-batch outlives its backward."""
    for once, four_times in ranks.run(peaks_of_steps, toy_config(zero=3, global_batch=3)):
        assert once == four_times


def peaks_of_steps(rank: int, world_size: int, config: Config) -> list[int]:
    resolved = resolve_config(config, world_size)
    stepper = stepper_on(resolved, start_group())
    share = held_out_share(global_batch(config, 0), resolved.batch, resolved.mesh.data_rank(rank), CPU)
    peaks = []
    for micro_batches in (share, share * 4):
        with SavedActivations(stepper.model.module.parameters()) as activations:
            stepper.step(micro_batches, 1e-3)
        peaks.append(activations.peak_bytes)
    return peaks


def test_the_norm_of_many_elements_is_not_eaten_by_rounding() -> None:
    """torch's own norm of these is 2e-4 too small on a CPU."""
    value = torch.nn.Parameter(torch.zeros(2000, 4000))
    value.grad = 1e-3 * torch.randn(2000, 4000, generator=torch.Generator().manual_seed(1))
    spec = Parameter("embedding.weight", (2000, 4000), "embedding")
    held = LocalParameter(spec, Part((0, 0), (2000, 4000)), value, copies=1)
    exact = value.grad.double().square().sum().item()
    assert local_square_norm([held]) == pytest.approx(exact, rel=3e-6)
