"""Estimates say where they go beyond the sizes that a calibrated file was fitted on, and only where it counts."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w

from fivefold.cli.main import main
from fivefold.ledger import hardware
from fivefold.ledger.hardware import Measured


def cluster_file(folder: Path, largest: float, rate: float = 1e8) -> str:
    """Two CPU ranks of a host, every primitive fitted from 64 KiB to `largest` bytes."""
    cpu = hardware.kind("cpu")
    measured = tuple(
        Measured(primitive, "gloo", 2, 1, 1e-5, rate, 65536, largest, 0.05)
        for primitive in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
    )
    made = msgspec.structs.replace(
        cpu, node=msgspec.structs.replace(cpu.node, devices=2), nodes=1, measured=measured
    )
    path = folder / "cluster.toml"
    path.write_text(tomli_w.dumps(msgspec.to_builtins(made)), encoding="utf-8")
    return str(path)


def output(capsys: pytest.CaptureFixture[str], command: str, *sets: str, form: tuple[str, ...] = ()) -> str:
    assert main([command, "quickstart", *form, *(word for one in sets for word in ("--set", one))]) == 0
    return capsys.readouterr().out


def notes(capsys: pytest.CaptureFixture[str], *sets: str) -> Any:
    return json.loads(output(capsys, "estimate", *sets, form=("--json",)))["notes"]


TWO = "parallel.dp_replicate=2"


def test_a_size_beyond_the_fitted_range_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = f"cluster.path={cluster_file(tmp_path, 2**20)}"
    [line] = notes(capsys, file, TWO)
    assert line.startswith("dp_replicate all_reduce inside node: ")
    assert "the cluster file was fitted from 64.0 KiB to 1.00 MiB" in line
    assert line.endswith("are extrapolated")
    assert f"note: {line}" in output(capsys, "estimate", file, TWO).splitlines()
    assert f"note: {line}" in output(capsys, "plan", file, TWO, "parallel.zero=0").splitlines()


def test_inside_the_range_and_for_what_takes_no_time_nothing_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scalars of 8 bytes are far below the range; of the gradients, a fast link makes less than a hundredth."""
    assert notes(capsys, f"cluster.path={cluster_file(tmp_path, 2**26)}", TWO) == []
    assert notes(capsys, f"cluster.path={cluster_file(tmp_path, 2**20, 1e12)}", TWO) == []
    assert notes(capsys, 'cluster.preset="2 h100"', TWO) == []


def test_sizes_below_the_range_and_messages_of_programs_are_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = f"cluster.path={cluster_file(tmp_path, 2**20, 1e7)}"
    short = ("batch.micro_batch=1", "batch.sequence_length=16")
    small, edge = notes(capsys, file, "parallel.dp_replicate=1", "parallel.pp=2", *short)
    assert small.startswith("pp send inside node: 16.0 KiB each")
    assert edge.startswith("embedding all_reduce inside node: 4.00 MiB each")
    [ring] = notes(capsys, file, TWO, "parallel.algorithm=ring")
    assert ring.startswith("dp_replicate send inside node: ")
