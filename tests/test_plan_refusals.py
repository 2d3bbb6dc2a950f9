"""What a plan refuses, and what it says instead, leads to a plan; what it emits is what others take."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fivefold.cli.main import main
from fivefold.config.load import load
from fivefold.planner.advice import neighbours
from fivefold.planner.jobs import job_of


def call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, base: str, *sets: str
) -> tuple[int, Any]:
    """(exit code, the document or the line of the refusal); `base`: model, cluster, batch."""
    model, cluster, batch = base.split(", ")
    path = tmp_path / "c.toml"
    path.write_text(
        f'[model]\npreset = "{model}"\n[cluster]\npreset = "{cluster}"\n[batch]\nglobal_batch = {batch}\n'
        'sequence_length = 1024\n[precision]\ndtype = "bf16"\n'
    )
    code = main([command, str(path), "--json", *(word for key in sets for word in ("--set", key))])
    out, err = capsys.readouterr()
    return code, err.strip() if code == 2 else json.loads(out)


REFUSED = [
    ("gpt2-xl, 16x8 h100, 128", ["parallel.tp=8"], "nearest legal: 1", ["parallel.tp=1"]),
    ("gpt2-xl, 2x5 h100, 100", ["parallel.tp=4"], "nearest legal: 1 or 5", ["parallel.tp=5"]),
    ("qwen2.5-7b, 3x6 h100, 72", ["parallel.tp=3"], "nearest legal: 2", ["parallel.tp=2"]),
    ("llama3-8b, 2x4 h100, 64", ["parallel.pp=4", "parallel.tp=3"], "nearest legal: 2", ["parallel.tp=2"]),
    (
        "llama3-8b, 2x4 h100, 64",
        ["parallel.pp=4", "parallel.dp_replicate=2", "parallel.tp=4"],
        "pp × dp_replicate × tp = 4 × 2 × 4 = 32: does not divide the cluster's 8 devices; nearest legal: 4 × 2 × 1",
        ["parallel.tp=1"],
    ),
    (
        "llama3-8b, 2x4 h100, 64",
        ["parallel.zero=3", "parallel.algorithm=double-tree"],
        "set zero = 0, or algorithm = ring",
        ["parallel.zero=0"],
    ),
    (
        "llama3-8b, 2x4 h100, 64",
        ["parallel.algorithm=ring", "parallel.compression=int8"],
        "1 of the 2",
        ["parallel.algorithm=backend"],
    ),
]


@pytest.mark.parametrize(("base", "sets", "says", "instead"), REFUSED)
def test_following_a_refusal_leads_to_a_plan(
    base: str,
    sets: list[str],
    says: str,
    instead: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, line = call(tmp_path, capsys, "plan", base, *sets)
    assert code == 2
    assert says in line
    assert call(tmp_path, capsys, "plan", base, *sets, *instead)[0] == 0


@pytest.mark.parametrize(
    ("base", "sets"),
    [
        ("llama3-70b, 1x4 h100, 64", ["parallel.zero=1"]),
        ("llama3-8b, 1x2 rtx4090, 64", ["parallel.recompute=none", "batch.micro_batch=3"]),
        ("gpt3-175b, 2x4 a100-40, 16", ["batch.micro_batch=16"]),
        ("llama3-8b, 1x4 h100, 8", ["parallel.chunks=7", "parallel.dp_replicate=4"]),
    ],
)
def test_what_does_not_fit_fits_as_it_is_told(
    base: str, sets: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = call(tmp_path, capsys, "plan", base, *sets)
    assert code == 1
    last = found["reasons"][-1]
    told = re.fullmatch(r"it fits(?: on (\d+) devices)?(?: with (.*))? \(\S+ m?s a step\)", last)
    assert told, last
    if told[1]:
        base = re.sub(r"\d+x", f"{int(told[1]) // int(re.search(r'x(.)', base)[1])}x", base)  # type: ignore[index]
    batch = ("micro_batch", "global_batch")
    moved = [word.split(" = ") for word in (told[2] or "").split(", ") if word]
    sets += [f"{'batch' if key in batch else 'parallel'}.{key}={value.lower()}" for key, value in moved]
    assert call(tmp_path, capsys, "plan", base, *sets)[0] == 0


@pytest.mark.parametrize(
    "sets",
    [
        ["parallel.compression=int8"],
        ["parallel.compression=powersgd", "parallel.pp=2"],
        ["parallel.algorithm=double-tree"],
        ["parallel.schedule=zbv", "parallel.pp=1"],
        ["parallel.dp_replicate=2"],
        ["parallel.dp_replicate=2", "parallel.zero=0"],
    ],
)
@pytest.mark.parametrize("model", ["llama3-8b", "qwen2.5-0.5b"])
def test_what_is_emitted_is_taken_to_the_digit(
    model: str, sets: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where gradients have sums of their own, which not every layout has; tied ends rule some out."""
    base = f"{model}, 1x8 h100, 16"
    code, found = call(tmp_path, capsys, "plan", base, *sets)
    if "compression" in sets[0] and "pp=2" in sets[-1] and model == "qwen2.5-0.5b":
        assert code == 2
        return
    assert code == 0
    words = [word for key in sets for word in ("--set", key)]
    assert main(["plan", str(tmp_path / "c.toml"), "--emit", "fivefold", *words]) == 0
    best = tmp_path / "best.toml"
    best.write_text(capsys.readouterr().out)
    assert main(["estimate", str(best), "--json"]) == 0
    same = json.loads(capsys.readouterr().out)
    assert same == {key: found["best"][key] for key in same}
    replicas = found["best"]["parallel"]["dp_replicate"]
    assert "parallel.dp_replicate=2" not in sets or replicas % 2 == 0


def test_a_better_neighbour_says_which_key_forbids_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, sets = "llama3-8b, 2x8 h100, 64", ["parallel.recompute=full", "parallel.pp=2"]
    neighbours = call(tmp_path, capsys, "plan", base, *sets)[1]["neighbours"]
    better = [line for line in neighbours if "(-" in line]
    assert better
    assert all(" is fixed" in line for line in better)
    free = call(tmp_path, capsys, "plan", base)[1]["neighbours"]
    assert not [line for line in free if "(-" in line or " is fixed" in line]


def test_batch_on_another_number_of_devices_takes_their_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {}
    for nodes, devices in ((2, ""), (8, "16"), (2, "32"), (4, "")):
        call(tmp_path, capsys, "batch", f"llama3-8b, {nodes}x8 h100, 64")
        words = ["--devices", devices] if devices else []
        assert main(["batch", str(tmp_path / "c.toml"), "--json", *words]) == 0
        steps[nodes, devices] = json.loads(capsys.readouterr().out)["time"][0]["step_seconds"]
    assert steps[2, ""] == steps[8, "16"]
    assert steps[4, ""] == steps[2, "32"]
    assert main(["batch", str(tmp_path / "c.toml"), "--devices", "20"]) == 2
    assert "nearest legal: 16 or 24" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "base", "words"),
    [
        ("plan", "llama3-8b, 99999999999x8 h100, 64", []),
        ("plan", "llama3-8b, 2x8 h100, 9007199254740993", []),
        ("batch", "llama3-8b, 2x8 h100, 64", ["--devices", "9007199254740992"]),
        ("batch", "llama3-8b, 2x8 h100, 64", ["--tokens", "999999T"]),
    ],
)
def test_what_nobody_has_is_refused_at_once(
    command: str, base: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, cluster, batch = base.split(", ")
    path = tmp_path / "c.toml"
    path.write_text(
        f'[model]\npreset = "{model}"\n[cluster]\npreset = "{cluster}"\n[batch]\nglobal_batch = {batch}\n'
        "sequence_length = 1000\n"
    )
    assert main([command, str(path), *words]) == 2
    assert "expected at most 2147483648" in capsys.readouterr().err


def test_neighbours_of_very_many_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One step from as many replicas as there can be are more than there can be."""
    call(tmp_path, capsys, "estimate", "llama3-8b, 1x8 h100, 16", "parallel.tp=2", "parallel.pp=2")
    sets = ["parallel.tp=2", "parallel.pp=4", "parallel.dp_replicate=1", "parallel.dp_shard=1"]
    job = replace(job_of(load(str(tmp_path / "c.toml"), sets)), dp_replicate=1 << 20)
    lines = neighbours(job, 1.0)
    assert any("<= 1048576" in line for line in lines)


def test_batch_counts_an_axis_of_minus_one_as_free(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = "llama3-8b, 2x8 h100, 64"
    found = call(
        tmp_path, capsys, "batch", base, "parallel.tp=4", "parallel.cp=-1", "parallel.dp_replicate=2"
    )[1]
    assert {way["data_parallel"] for way in found["legal"]} == {2, 4}
    assert len(found["time"]) == 1
