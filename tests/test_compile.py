"""machine.compile: refused where it cannot work, and the same numbers where it can."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from fivefold.cli.main import main
from fivefold.config.tree import Machine
from ranks import Ranks
from test_dropout import trained
from test_parity import all_errors, check
from toy import MODEL, reference, toy_config


def test_without_a_compiler_it_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["train", "quickstart", "--set", "machine.compile=true"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "machine.compile = true: no C++ compiler here (no-such-compiler)" in error
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, backend=None) as started:
        yield started


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("recompute", ["none", "attention", "elementwise", "full"])
def test_compiled_layers_equal_one_process(ranks: Ranks, recompute: str) -> None:
    for world_size, zero in ((1, 0), (2, 3)):
        config = toy_config(
            dtype="float32", zero=zero, recompute=recompute, global_batch=4, micro_batch=2, steps=3
        )
        config = replace(config, model=replace(MODEL, dropout=0.1), machine=Machine(compile=True))
        plain = replace(config, machine=Machine())
        expected = reference(plain)
        exact = reference(replace(plain, precision=replace(plain.precision, dtype="float64")))
        # AdamW divides each element by its own size: those that are all rounding move by as much as any.
        updated = 3 * max(e for name, e in all_errors(expected, exact).items() if not name.startswith("grad"))
        check(trained(ranks, config, world_size, timeout=900.0), expected, 1e-5, min(updated, 1e-4))
