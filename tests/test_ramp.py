"""Batches that grow: exact arithmetic, legal on the layout, and a run that resumes on its way up."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fivefold.cli.main import main
from fivefold.config.errors import ConfigError
from fivefold.config.tree import Batch, BatchRamp, Parallel, Schedule
from fivefold.spec.batch import BatchPlan
from fivefold.spec.legal import resolve_config
from fivefold.spec.ramp import plan_course
from test_run import CONFIG, fivefold, metrics, numbers
from toy import toy_config

UNIT = "micro_batch 1 × data-parallel 2 = 2"
RAMP = BatchRamp(start=2, increment=2, tokens=600)


@given(
    unit=st.integers(1, 6),
    start=st.integers(1, 5),
    increment=st.integers(1, 4),
    growths=st.integers(1, 6),
    tokens=st.integers(1, 4000),
    length=st.sampled_from([1, 7, 12]),
    steps=st.integers(0, 60),
)
def test_the_course_is_what_stepping_through_it_gives(
    unit: int, start: int, increment: int, growths: int, tokens: int, length: int, steps: int
) -> None:
    """The batch grows when samples · length · growths reach the next multiple of the ramp's tokens."""
    size = unit * (start + growths * increment)
    last = BatchPlan(size, unit, start + growths * increment, 1, length)
    ramp = BatchRamp(start=unit * start, increment=unit * increment, tokens=tokens)
    course = plan_course(ramp, last)
    samples, sizes = 0, list[int]()
    for _ in range(steps):
        plan = course.at(samples)
        reached = samples * length * growths // tokens
        assert plan.global_batch == unit * (start + min(reached, growths) * increment)
        assert plan.global_batch == plan.micro_batch * plan.accumulation * plan.data_parallel
        samples += plan.global_batch
        sizes.append(plan.global_batch)
    assert course.samples_after(steps) == samples
    staged = [plan.global_batch for plan, count in course.stages() for _ in range(count or steps)]
    assert staged[:steps] == sizes


def test_without_a_ramp_every_step_is_alike() -> None:
    resolved = resolve_config(toy_config(global_batch=4))
    assert [resolved.course.at(samples) for samples in (0, 9, 10**9)] == [resolved.batch] * 3
    assert resolved.samples == 5 * 4


def test_learning_rate_stays_in_tokens() -> None:
    """At the same token it is the same with and without a ramp of as many tokens in all."""
    base = toy_config(global_batch=8, steps=6)
    ramped = replace(base, batch=replace(base.batch, ramp=RAMP), run=replace(base.run, steps=9))
    plain, grown = resolve_config(base).learning_rate, resolve_config(ramped).learning_rate
    # 2, 2, … until 200 tokens are consumed (9 steps of 24), then 4 …
    assert grown.total_tokens == 12 * 2 * 9
    assert plain.total_tokens == 12 * 8 * 6
    schedule = Schedule(kind="constant", warmup_tokens=500)
    rates = [resolve_config(replace(c, schedule=schedule)).learning_rate for c in (base, ramped)]
    assert all(rates[0].at(tokens) == rates[1].at(tokens) for tokens in (1, 24, 499, 500, 5000))


@pytest.mark.parametrize(
    ("ramp", "said"),
    [
        (
            {"start": 3, "increment": 2, "tokens": 9},
            "start = 3: not a multiple of UNIT; nearest legal: 2 or 4",
        ),
        (
            {"start": 2, "increment": 5, "tokens": 9},
            "increment = 5: not a multiple of UNIT; nearest legal: 4 or 6",
        ),
        (
            {"start": 2, "increment": 4, "tokens": 9},
            "increment = 4: does not lead from start 2 to the global batch 8; nearest legal: 2 or 6",
        ),
        (
            {"start": 8, "increment": 2, "tokens": 9},
            "start = 8: expected less than the global batch 8 it grows to",
        ),
        (
            {"start": 2, "increment": 2},
            "tokens = 0: a ramp needs start, increment and tokens; set tokens ≥ 1, or all of them 0",
        ),
        (
            {"tokens": 9},
            "start = 0: a ramp needs start, increment and tokens; set start ≥ 1, or all of them 0",
        ),
    ],
)
def test_what_cannot_be_carried_is_refused(ramp: dict[str, Any], said: str) -> None:
    config = toy_config(global_batch=8, dp_shard=2)
    config = replace(config, batch=replace(config.batch, ramp=BatchRamp(**ramp)))
    with pytest.raises(ConfigError) as error:
        resolve_config(config)
    assert str(error.value) == f"batch.ramp.{said}".replace("UNIT", UNIT)


def test_a_pipeline_schedule_must_exist_for_every_batch() -> None:
    config = toy_config(global_batch=8)
    config = replace(
        config,
        parallel=Parallel(pp=2, schedule="interleaved", chunks=1),
        batch=Batch(global_batch=8, ramp=BatchRamp(start=1, increment=1, tokens=90), sequence_length=12),
    )
    with pytest.raises(
        ConfigError, match=r"batch.ramp reaches 5 sequences: schedule interleaved .* legal: 4 or 6"
    ):
        resolve_config(config)


def test_batch_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.toml").write_text(
        "[batch]\nglobal_batch = 32\nsequence_length = 100\n[batch.ramp]\nstart = 8\nincrement = 8\ntokens = 9000\n"
    )
    assert main(["batch", str(tmp_path / "c.toml"), "--json", "--devices", "16"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ramp"] == [
        {"global_batch": 8, "steps": 4},
        {"global_batch": 16, "steps": 2},
        {"global_batch": 24, "steps": 2},
        {"global_batch": 32, "steps": None},
    ]
    assert {way["data_parallel"] * way["micro_batch"] for way in found["legal"]} == {1, 2, 4, 8}
    assert main(["batch", str(tmp_path / "c.toml"), "--devices", "16"]) == 0
    assert (
        "ramp from 8 sequences, 8 more every 3,000 tokens: 8 steps, 11,200 tokens" in capsys.readouterr().out
    )


def test_a_run_ramps_up_and_resumes_on_its_way(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(CONFIG)
    ramp = {
        "batch.ramp.start": 1,
        "batch.ramp.increment": 1,
        "batch.ramp.tokens": 300,
        "batch.global_batch": 4,
    }
    settings = ramp | {"run.dir": "whole", "run.steps": 8}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    assert "ramp from 1 sequences" in fivefold(tmp_path, "train", "tiny.toml", *words).stdout
    rows = metrics(tmp_path / "whole")
    # 1 until 100 tokens (4 rows of 32), 2 until 200, 3 until 300
    assert [row["tokens"] // 32 for row in rows] == [1, 2, 3, 4, 6, 8, 11, 15]
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    for later in (6, 8):
        shutil.rmtree(tmp_path / "again" / "checkpoints" / f"step-{later}")
    fivefold(tmp_path, "train", "again", "--resume", "--set", "run.dir=again")
    assert numbers(metrics(tmp_path / "again")[-5:]) == numbers(rows[-5:])


def test_a_huge_ramp_that_leads_nowhere_is_refused_with_the_nearest_that_do() -> None:
    last = BatchPlan(2**31, 1, 2**31, 1, 4096)
    with pytest.raises(ConfigError, match="nearest legal: 2147483647"):
        plan_course(BatchRamp(start=1, increment=127, tokens=9), last)


def test_a_ramp_of_billions_of_batches_is_refused_with_the_nearest_increment() -> None:
    last = BatchPlan(2**31, 1, 2**31, 1, 4096)
    wrong = (
        "increment = 1: the batch would grow 2147483646 times .* at most 4096 times; nearest legal: 549791"
    )
    with pytest.raises(ConfigError, match=wrong):
        plan_course(BatchRamp(start=2, increment=1, tokens=9), last)
    assert plan_course(BatchRamp(start=2, increment=549791, tokens=9), last).growths <= 4096


@given(
    unit=st.integers(1, 12), start=st.integers(1, 9), increment=st.integers(1, 9), growths=st.integers(0, 5)
)
def test_a_unit_carries_a_course_if_it_divides_every_batch(
    unit: int, start: int, increment: int, growths: int
) -> None:
    size = start + growths * increment
    ramp = BatchRamp(start=start, increment=increment, tokens=9) if growths else BatchRamp()
    course = plan_course(ramp, BatchPlan(size, 1, size, 1, 7))
    assert course.carries(unit) == all(plan.global_batch % unit == 0 for plan in course.plans())
