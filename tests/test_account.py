"""What a run cost beside what was predicted; and that evaluation and sampling work on every axis."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fivefold.collectives.group import register
from fivefold.collectives.record import Recorder, Timeline
from fivefold.config.load import load
from fivefold.proof.run_account import account_of
from fivefold.render.account import account_text, is_equal
from fivefold.spec.legal import resolve_config
from fivefold.trainer.loop import Loop
from fivefold.trainer.place import place_from
from fivefold.trainer.worker import first_steps
from ranks import Ranks

CONFIG = f"""
[model]
layers = 4
hidden = 32
heads = 4
kv_heads = 2
ffn = 72
vocab = 600
tied = true
[batch]
global_batch = 8
micro_batch = 2
sequence_length = 32
[schedule]
warmup_tokens = 1000
[data]
path = "{Path(json.__file__).parent}"
cache_dir = "CACHE"
[run]
name = "tiny"
eval_batches = 2
[machine]
matmul = "highest"
malloc = "default"
peak_flops = 1e9
"""
EXPERTS = """
[model.experts]
count = 4
top_k = 2
ffn = 24
auxiliary_loss = 0.01
"""
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "sequence parallel": {"tp": 2, "sequence_parallel": True},
    "ring": {"cp": 2},
    "ulysses": {"cp": 2, "context": "ulysses"},
    "pp": {"pp": 2},
    "zbv": {"pp": 2, "schedule": "zbv", "chunks": 2},
    "zero 3": {"dp_shard": 2, "zero": 3},
    "pp, zero 3": {"pp": 2, "dp_shard": 2, "zero": 3},
    "ep": {"dp_shard": 2, "ep": 2, "zero": 1},
    "ep over cp, tp": {"cp": 2, "tp": 2, "ep": 2},
    "ep, pp": {"dp_shard": 2, "ep": 2, "pp": 2, "zero": 2},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a dense config and one with experts."""
    directory = tmp_path_factory.mktemp("account")
    text = CONFIG.replace("CACHE", str(directory / "data"))
    (directory / "dense.toml").write_text(text)
    (directory / "experts.toml").write_text(text + EXPERTS)
    return directory


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4, backend=None) as started:
        yield started


def settings(parallel: dict[str, Any], *more: str) -> list[str]:
    layout = {"dp_shard": 1} | parallel
    return [f"parallel.{key}={json.dumps(value)}".replace('"', "") for key, value in layout.items()] + list(
        more
    )


def source(place: Path, name: str) -> str:
    return str(place / ("experts.toml" if "ep" in LAYOUTS[name] else "dense.toml"))


def told(loop: Loop) -> tuple[float, list[int]]:
    """The held-out loss after a step, and a text."""
    loop.steps(1)
    loop._evaluate()
    assert loop.last_evaluation is not None
    return loop.last_evaluation, loop.sample([5, 6, 7], 6)


def on_rank(_rank: int, world_size: int, source: str, overrides: list[str], take: Any) -> Any:
    torch.set_num_threads(1)
    there = place_from(os.environ) if world_size > 1 else None
    return first_steps(resolve_config(load(source, overrides), world_size), there, take)


@pytest.mark.parametrize("name", LAYOUTS)
def test_evaluates_and_samples_as_one_rank_does(ranks: Ranks, place: Path, name: str) -> None:
    more = ("precision.dtype=float64", "batch.micro_batch=1")
    config, overrides = source(place, name), settings(LAYOUTS[name], *more)
    count = resolve_config(load(config, overrides)).mesh.world_size
    loss, text = ranks.run(on_rank, config, settings({}, *more), told, world_size=1)[0]
    assert len(text) == 6
    for found_loss, found_text in ranks.run(on_rank, config, overrides, told, world_size=count):
        assert found_loss == pytest.approx(loss, rel=1e-12)
        assert found_text == text


@pytest.mark.parametrize("name", ["sequence parallel", "zbv", "pp, zero 3", "ep over cp, tp"])
def test_account_of_a_run(ranks: Ranks, place: Path, name: str) -> None:
    """Every byte as predicted; memory equal in every line that does not say why not."""
    config, overrides = source(place, name), settings(LAYOUTS[name])
    count = resolve_config(load(config, overrides)).mesh.world_size
    found, *others = ranks.run(on_rank, config, overrides, account_of, world_size=count)
    assert others == [None] * (count - 1)
    assert is_equal(found), found["traffic"]
    for line in found["memory"]:
        assert line["measured"] == line["predicted"] or line["note"], line
    axes = {line["axis"] for line in found["traffic"]}
    assert axes - {"ep"} <= found["communication"].keys()
    for axis, line in found["communication"].items():
        assert 0 <= line["measured_exposed"] <= line["measured"] * (1 + 1e-9), axis
    waited = sum(line["measured_exposed"] for line in found["communication"].values())
    measured, predicted = found["time"]["step"]
    assert 0 < waited < measured
    assert predicted > 0
    assert "NOT EQUAL" not in account_text(found)


@pytest.mark.parametrize(
    ("method", "optimizer", "layout"),
    [
        ("topk", "sgd", {"dp_replicate": 2, "tp": 2}),
        ("int8", "adamw", {"dp_replicate": 2, "tp": 2}),
        ("powersgd", "adamw", {"dp_replicate": 2, "tp": 2}),
        ("topk", "sgd", {"dp_replicate": 2, "dp_shard": 2, "zero": 1}),
        ("topk", "sgd", {"cp": 2, "ep": 2}),
    ],
)
def test_what_compression_keeps_is_predicted(
    ranks: Ranks, place: Path, method: str, optimizer: str, layout: dict[str, int]
) -> None:
    """Of copies under tensor parallel, and of experts that no other rank has, nothing: the optimizer then keeps their
    momentum."""
    name = "experts" if "ep" in layout else "dense"
    more = (f"parallel.compression={method}", f"optimizer.name={optimizer}", "model.tied=false")
    config, overrides = str(place / f"{name}.toml"), settings(layout, *more)
    world = 2 if "ep" in layout else 4
    found = ranks.run(on_rank, config, overrides, account_of, world_size=world)[0]
    states = [
        line for line in found["memory"] if line["category"] in ("parameters", "gradients", "optimizer")
    ]
    assert len(states) == 3
    for line in states:
        assert line["measured"] == line["predicted"], line


def test_the_command_prints_it_and_leaves_nothing(place: Path) -> None:
    words = [sys.executable, "-m", "fivefold", "train", "dense.toml", "--account", "--set", "parallel.tp=2"]
    before = set(place.iterdir())
    done = subprocess.run(words, cwd=place, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tp all_reduce" in done.stdout
    assert "exposed" in done.stdout
    assert set(place.iterdir()) == before | {place / "data"}
    assert not list((place / "data").rglob(".account-*"))
    refused = subprocess.run([*words, "--resume"], cwd=place, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert "leave out --resume" in refused.stderr


# What is exposed


def waits(rank: int, world_size: int, pause: float) -> tuple[dict[str, float], dict[str, float]]:
    """Rank 1 comes late to a blocking call, and computes while an asynchronous one is under way."""
    from datetime import timedelta

    recorder = Recorder()
    dist.init_process_group(register(recorder, timedelta(seconds=30)), rank=rank, world_size=world_size)
    group = dist.new_group(list(range(world_size)), group_desc="mesh_tp")
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    recorder.clear()
    recorder.timeline = timeline = Timeline()
    time.sleep(pause * rank)
    dist.all_reduce(tensor, group=group)
    work = dist.all_reduce(tensor, async_op=True)
    time.sleep(pause)
    work.wait()
    with recorder.paused():
        time.sleep(pause * rank)
        dist.all_reduce(tensor, group=group)
    return recorder.exposed_by_axis(), timeline.seconds_by_axis()


def test_waiting_is_told_by_axis(ranks: Ranks) -> None:
    pause = 0.5
    (first, under_way), (second, _) = ranks.run(waits, pause, world_size=2)
    assert first["tp"] >= 0.8 * pause  # it came in time and waited for the other
    assert second["tp"] < first["tp"]
    assert first["world"] < first["tp"]  # hidden behind what this rank did meanwhile
    assert under_way["tp"] >= first["tp"] - 1e-6
    assert first["tp"] < 2 * pause + 0.2  # what happens under `paused` is not the step's


def test_calls_at_once_count_once() -> None:
    timeline = Timeline()
    for axis, start, stop in (("tp", 0.0, 2.0), ("pp", 5.0, 6.0), ("tp", 1.0, 3.0), ("tp", 4.0, 4.5)):
        timeline.add(axis, start, stop)
    assert timeline.seconds_by_axis() == {"tp": 3.5, "pp": 1.0}
