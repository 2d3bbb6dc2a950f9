"""Whole runs through the command: resumed bit for bit, stopped by a signal, killed and gone on with elsewhere."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.config.errors import BadInput
from fivefold.config.load import load
from fivefold.data.samples import Samples
from fivefold.data.store import open_store
from fivefold.trainer import checkpoint_directory
from fivefold.trainer.checkpoint import load_tensors
from fivefold.trainer.directory import choose_directory
from fivefold.trainer.identity import check_resume, identity, refuse_change

TEXT = Path(json.__file__).parent  # real text, quickly tokenized
CONFIG = f"""
[model]
layers = 2
hidden = 32
heads = 4
kv_heads = 2
ffn = 72
vocab = 600
[batch]
global_batch = 12
micro_batch = 1
sequence_length = 32
[optimizer]
lr = 3e-3
[schedule]
warmup_tokens = 1000
[data]
path = "{TEXT}"
cache_dir = "data"
[run]
name = "tiny"
steps = 12
[checkpoint]
every = 3
keep_last = 20
[machine]
matmul = "highest"
malloc = "default"
peak_flops = 1e9
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the config and the prepared data."""
    directory = tmp_path_factory.mktemp("runs")
    (directory / "tiny.toml").write_text(CONFIG)
    return directory


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "fivefold", *words]


def fivefold(place: Path, *words: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(*words), cwd=place, capture_output=True, text=True, timeout=120)
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def settings(name: str, ranks: int, zero: int = 0, *more: str) -> list[str]:
    degree = {"parallel.dp_shard": ranks if zero else 1, "parallel.dp_replicate": 1 if zero else ranks}
    pairs = {"run.dir": name, "parallel.zero": zero} | degree
    return [word for k, v in pairs.items() for word in ("--set", f"{k}={v}")] + list(more)


def metrics(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def numbers(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(r["step"], r["tokens"], r["loss"], r["grad_norm"], r["lr"]) for r in rows]


def final_tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_tensors(run / "checkpoints" / f"step-{step}", prefix="")


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """An uninterrupted run on 2 ranks, zero 3."""
    fivefold(place, "train", "tiny.toml", *settings("whole", 2, 3))
    return place / "whole"


def test_a_run_leaves_what_the_contract_says(whole: Path) -> None:
    assert (whole / "config.toml").exists()
    assert (whole / "tokenizer.json").exists()
    rows = metrics(whole)
    assert [row["step"] for row in rows] == list(range(1, 13))
    keys = {"step", "tokens", "loss", "grad_norm", "lr", "tokens_per_second", "step_seconds", "memory_bytes"}
    assert keys | {"loss_scale", "skipped"} <= rows[0].keys()
    assert [
        checkpoint_directory.step_of(path) for path in checkpoint_directory.complete(whole / "checkpoints")
    ] == [3, 6, 9, 12]
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.parametrize("step", [3, pytest.param(9, marks=pytest.mark.full)])
def test_resumed_run_equals_the_uninterrupted_one_to_the_bit(place: Path, whole: Path, step: int) -> None:
    copy = place / f"resumed-{step}"
    shutil.copytree(whole, copy)
    for path in checkpoint_directory.complete(copy / "checkpoints"):
        if checkpoint_directory.step_of(path) > step:
            shutil.rmtree(path)
    fivefold(place, "train", str(copy), "--resume")
    assert numbers(metrics(copy)) == numbers(metrics(whole))
    expected = final_tensors(whole, 12)
    found = final_tensors(copy, 12)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("ranks", "zero"),
    [(1, 0), pytest.param(3, 3, marks=pytest.mark.full), pytest.param(4, 0, marks=pytest.mark.full)],
)
def test_goes_on_in_another_layout(place: Path, whole: Path, ranks: int, zero: int) -> None:
    copy = place / f"moved-{ranks}-{zero}"
    shutil.copytree(whole, copy)
    for path in checkpoint_directory.complete(copy / "checkpoints"):
        if checkpoint_directory.step_of(path) > 6:
            shutil.rmtree(path)
    fivefold(place, "train", str(copy), "--resume", *settings(str(copy), ranks, zero))
    for mine, theirs in zip(metrics(copy), metrics(whole), strict=True):
        assert mine["tokens"] == theirs["tokens"]
        assert mine["lr"] == theirs["lr"]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


def test_generate_reads_any_run(place: Path, whole: Path) -> None:
    done = fivefold(place, "generate", "whole", "--prompt", "def ", "--tokens", "8", "--json")
    said = json.loads(done.stdout)
    assert said["prompt"] == "def "
    assert said["text"]
    again = fivefold(
        place, "generate", "whole/checkpoints/step-12", "--prompt", "def ", "--tokens", "8", "--json"
    )
    assert json.loads(again.stdout) == said


def wait_for_steps(run: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 90
    while len(metrics(run)) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("how", [pytest.param("SIGTERM", marks=pytest.mark.full), "Ctrl-C"])
def test_a_signal_finishes_the_step_saves_and_stops(place: Path, whole: Path, how: str) -> None:
    run = place / f"stopped-{how}"
    words = command("train", "tiny.toml", *settings(run.name, 2, 3, "--set", "run.steps=100000"))
    process = subprocess.Popen(
        words, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for_steps(run, 4, process)
    started = time.monotonic()
    if how == "SIGTERM":
        process.send_signal(signal.SIGTERM)
    else:
        os.killpg(process.pid, signal.SIGINT)  # a terminal signals the launcher and every rank
    output, errors = process.communicate(timeout=60)
    assert time.monotonic() - started < 20
    assert process.returncode == 1
    assert "Traceback" not in output + errors
    assert len(errors.splitlines()) <= 2, errors
    last = metrics(run)[-1]["step"]
    assert checkpoint_directory.step_of(checkpoint_directory.complete(run / "checkpoints")[-1]) == last
    fivefold(place, "train", str(run), "--resume", "--set", f"run.steps={last + 1}")
    assert [row["step"] for row in metrics(run)] == list(range(1, last + 2))


LOGGED = """
# `fivefold train`, with every rank writing down which samples it really reads.
import json, sys
from fivefold.cli.main import main
from fivefold.trainer import loop

def logged(samples, plan, consumed, *where, read=loop.training_share):
    share = read(samples, plan, consumed, *where)
    ids = [i for micro_batch in share for i in micro_batch.sample_ids]
    with open("consumed.jsonl", "a") as file:
        file.write(json.dumps([consumed // plan.global_batch + 1, ids]) + "\\n")
    return share

loop.training_share = logged
sys.exit(main(sys.argv[1:]))
"""


def consumed(place: Path, since: int) -> dict[int, list[int]]:
    """Sample ids by step, from line `since` of the log on."""
    steps: dict[int, list[int]] = {}
    for line in (place / "consumed.jsonl").read_text().splitlines()[since:]:
        step, ids = json.loads(line)
        steps.setdefault(step, []).extend(ids)
    return steps


def torchrun(place: Path, ranks: int, *words: str) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.Popen(
        [sys.executable, *launcher, "logged.py", *words],
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture
def killed(place: Path, whole: Path) -> Iterator[Path]:
    (place / "logged.py").write_text(LOGGED)
    (place / "consumed.jsonl").write_text("")
    yield place / "killed"
    shutil.rmtree(place / "killed", ignore_errors=True)


def test_over_three_kills_no_sample_is_skipped_or_repeated(place: Path, killed: Path) -> None:
    """SIGKILL to all processes at a random moment, then on with other ranks and the other zero stage."""
    chance = random.Random(2)
    layouts = [(2, 3), (3, 0), (1, 0), (2, 0)]
    kept: dict[int, list[int]] = {}
    for attempt, (ranks, zero) in enumerate(layouts):
        since = len((place / "consumed.jsonl").read_text().splitlines())
        before = len(metrics(killed))
        source = ["train", "killed", "--resume"] if attempt else ["train", "tiny.toml"]
        steps = ["--set", "run.steps=60", "--set", "checkpoint.every=2"]
        process = torchrun(place, ranks, *source, *settings("killed", ranks, zero, *steps))
        if attempt < 3:
            wait_for_steps(killed, before + 6, process)
            time.sleep(chance.uniform(0, 0.3))
            os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate(timeout=120)[0]
        assert attempt < 3 or process.returncode == 0, output
        seen = consumed(place, since)
        restarted_at = min(seen)
        if attempt:
            assert restarted_at > 1, "nothing was saved"
        kept = {step: ids for step, ids in kept.items() if step < restarted_at} | seen
    assert sorted(kept) == list(range(1, 61))
    for step, ids in kept.items():
        assert len(ids) == len(set(ids)) == 12, step
    samples = samples_of(place)
    whole_steps = samples.training_count // 12
    first_epoch = [i for step in range(1, whole_steps + 1) for i in kept[step]]
    assert len(set(first_epoch)) == len(first_epoch)
    assert {i for step in kept for i in kept[step]} == set(
        samples.sample_ids(0, samples.training_count).tolist()
    )
    for step, ids in kept.items():
        assert set(ids) == set(samples.sample_ids(12 * (step - 1), 12).tolist()), step
    assert [row["step"] for row in metrics(killed)] == list(range(1, 61))


def samples_of(place: Path) -> Samples:
    config = load(str(place / "whole"))
    store = open_store(next((place / "data").glob("*/manifest.json")).parent)
    return Samples(store, config.data, 32, config.run.seed)


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in done.stdout
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


def test_a_resume_that_would_mean_another_run_is_refused_and_changes_nothing(
    place: Path, whole: Path
) -> None:
    copy = place / "refused"
    shutil.copytree(whole, copy)
    config = (copy / "config.toml").read_text()
    alone = settings(str(copy), 1)
    more = ["--set", "run.steps=14", "--set", "model.rope_theta=5.0"]
    done = fivefold(place, "train", str(copy), "--resume", *alone, *more, expect=2)
    assert f"model.rope_theta = 5.0: {copy}/checkpoints/step-12 was trained with" in one_line(done)
    more = ["--set", "run.steps=14", "--set", "data.validation_fraction=0"]
    done = fivefold(place, "train", str(copy), "--resume", *alone, *more, expect=2)
    assert "other samples" in one_line(done)
    ranks = settings(
        str(copy), 2, 0, *more, "--set", "run.timeout_seconds=0.01"
    )  # in which no ranks could meet
    assert "other samples" in one_line(fivefold(place, "train", str(copy), "--resume", *ranks, expect=2))
    newest = copy / "checkpoints" / "step-12"
    with pytest.raises(BadInput, match=r"run\.seed = 5: .*step-12 was trained with"):  # no rank needed
        check_resume(load(str(copy), ["run.seed=5"]), newest.parent, lambda: None)
    with pytest.raises(BadInput, match="other samples"):
        check_resume(load(str(copy)), newest.parent, lambda: "of another fraction")
    check_resume(load(str(copy)), newest.parent, lambda: None)
    (newest / "manifest.json").write_text("{")  # whoever loads it says what is wrong
    check_resume(load(str(copy), ["run.seed=5"]), newest.parent, lambda: None)
    assert (copy / "config.toml").read_text() == config
    assert numbers(metrics(copy)) == numbers(metrics(whole))


@pytest.mark.parametrize("resume", [True, False])
def test_a_checkpoint_is_not_taken_for_a_run(whole: Path, resume: bool) -> None:
    """It has a config.toml as well; a run that began there would write over it."""
    run = load(str(whole / "checkpoints" / "step-12")).run
    with pytest.raises(BadInput, match=f"step-12: a checkpoint; .*resume its run, {whole}"):
        choose_directory(run, resume)


def test_weights_that_were_converted_are_no_run_to_resume(whole: Path, tmp_path: Path) -> None:
    step = tmp_path / "checkpoints" / "step-0"
    shutil.copytree(whole / "checkpoints" / "step-12", step)
    manifest = json.loads((step / "manifest.json").read_text())
    (step / "manifest.json").write_text(json.dumps(manifest | {"counters": {}}))
    with pytest.raises(BadInput, match=r"step-0 holds weights alone.*--set model\.path=DIR"):
        check_resume(load(str(whole)), step.parent, lambda: None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.seed", 5),
        ("model.hidden", 64),
        ("optimizer.name", "adamw"),
        ("precision.dtype", "float64"),
        ("optimizer.momentum", 0),
        ("model.max_positions", 64),
    ],
)
def test_what_a_run_keeps_for_life(whole: Path, key: str, value: int | str) -> None:
    settings = ["optimizer.name=sgd", "model.positions=learned"]
    before = identity(load(str(whole), settings), "samples")
    after = identity(load(str(whole), [*settings, f"{key}={value}"]), "samples")
    refuse_change(before, before, whole)
    with pytest.raises(BadInput, match=f"{key} = {value}: {whole} was trained with"):
        refuse_change(before, after, whole)


def test_a_run_that_is_done_says_so(place: Path, whole: Path) -> None:
    evaluations = (whole / "evaluations.jsonl").read_text()
    done = fivefold(place, "train", str(whole), "--resume")
    assert "step 12 of run.steps = 12 is done; train on with" in done.stdout
    assert "nan" not in done.stdout
    assert (whole / "evaluations.jsonl").read_text() == evaluations


def test_a_damaged_checkpoint_is_one_line_that_says_what_to_do(place: Path, whole: Path) -> None:
    copy = place / "damaged"
    shutil.copytree(whole, copy)
    newest = copy / "checkpoints" / "step-12"
    with (newest / "config.toml").open("a") as file:
        file.write("#")
    done = fivefold(
        place, "train", str(copy), "--resume", *settings(str(copy), 1), "--set", "run.steps=14", expect=1
    )
    assert f"move {newest} away to go on from the checkpoint before it" in one_line(done)
    assert "config.toml has" in one_line(fivefold(place, "generate", str(copy), expect=1))


def test_a_reader_who_goes_away_stops_the_run_and_nothing_is_lost(place: Path, whole: Path) -> None:
    run = place / "unheard"
    words = command("train", "tiny.toml", *settings(run.name, 1, 0, "--set", "run.steps=100000"))
    more = ["--set", "log.every=1"]
    process = subprocess.Popen(
        [*words, *more], cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for_steps(run, 2, process)
    assert process.stdout
    assert process.stderr
    process.stdout.close()
    assert process.wait(timeout=30) == 1
    assert process.stderr.read() == "fivefold: nobody reads the output any more: the run saves and stops\n"
    process.stderr.close()
    last = metrics(run)[-1]["step"]
    assert checkpoint_directory.step_of(checkpoint_directory.complete(run / "checkpoints")[-1]) == last


def test_a_run_that_goes_on_in_fp16_begins_with_its_own_loss_scale(place: Path, whole: Path) -> None:
    copy = place / "to-fp16"
    shutil.copytree(whole, copy)
    more = ["--set", "run.steps=13", "--set", "precision.dtype=fp16"]
    fivefold(place, "train", str(copy), "--resume", *settings(str(copy), 1), *more)
    assert metrics(copy)[-1]["loss_scale"] == load(str(copy)).precision.initial_loss_scale
