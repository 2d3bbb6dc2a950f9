"""`fivefold comm`: what it prints, the fits it makes, and that a calibrated file reaches estimate and plan."""

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fivefold.cli.comm.sizes import check_memory, read_sizes
from fivefold.cli.main import main
from fivefold.collectives.bench import Bench, Case
from fivefold.collectives.fit import Point, fit, median_error
from fivefold.config.errors import BadInput
from fivefold.config.tree import Cluster
from fivefold.ledger.hardware import load_hardware
from fivefold.ledger.network import collective_seconds, wires
from fivefold.ledger.physics import Physics
from fivefold.ledger.programs.steps import Link
from fivefold.trainer.comm import bus_bytes
from fivefold.trainer.host_memory import host_memory
from fivefold.trainer.machine import backends, default_backend
from ranks import run_ranks

BENCH = {
    "primitive",
    "algorithm",
    "bytes",
    "ranks",
    "seconds",
    "algbw",
    "busbw",
    "predicted_seconds",
    "wrong",
}


def fivefold(*words: str, **environment: str) -> str:
    command = [sys.executable, "-m", "fivefold", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_bench_of_every_primitive_algorithm_and_the_backend_itself(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    words = ["--ranks", "2", "--sizes", "8,4K", "--json", "--html", str(page)]
    rows = json.loads(fivefold("comm", "bench", *words))["rows"]
    # One line of measured times for each, and one of predicted ones, with two sizes.
    lines = re.findall(r"<polyline points='([^']*)' [^>]*?(dash|width)", page.read_text())
    drawn = [kind for points, kind in lines if len(points.split()) == 2]
    assert drawn.count("width") == len(rows) / 2
    assert drawn.count("dash") == sum(row["predicted_seconds"] is not None for row in rows) / 2 > 0
    assert rows[0].keys() >= BENCH
    assert all(row["wrong"] == 0 and row["seconds"] > 0 and row["ranks"] == 2 for row in rows)
    named = {(row["primitive"], row["algorithm"]) for row in rows}
    for primitive in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        assert (primitive, default_backend(torch.device("cpu"))) in named
    assert {("all_reduce", "ring"), ("all_reduce", "double-tree"), ("broadcast", "binomial")} <= named
    for row in rows:
        assert row["bytes"] in (8, 4096)
        assert row["busbw"] == pytest.approx(bus_bytes(row["primitive"], row["bytes"], 2) / row["seconds"])


class Spoilt(Bench):
    """A bench whose collectives give wrong results: the halves exchanged, another rank's, or one element off."""

    how = ""

    def _call(self, case: Case, given: Tensor, output: Tensor) -> Callable[[], None]:
        right = super()._call(case, given, output)
        result = output if output.numel() else given

        def call() -> None:
            right()
            if self.how == "halves":
                result.copy_(result.roll(len(result) // 2))
            elif self.how == "ranks":
                everyone = [torch.empty_like(result) for _ in range(self.ranks)]
                dist.all_gather(everyone, result)
                result.copy_(everyone[self.rank - 1])
            elif self.how == "element":
                result[-1] += 1

        return call


def count_wrong(rank: int, n: int) -> dict[tuple[str, str], int]:
    link, cpu = Link(1e-5, 1e9), torch.device("cpu")
    bench = Spoilt({"gloo": dist.group.WORLD}, link, n, cpu, lambda: None)  # type: ignore[dict-item]
    found = {}
    for primitive in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        for bench.how in ("", "halves", "ranks", "element"):
            case = Case(primitive, "gloo", "gloo", 1 << 12, torch.float32)
            found[primitive, bench.how] = bench.measure([case], 1)[0].wrong
    return found


def test_wrong_results_are_counted() -> None:
    """Of vectors whose length is a power of two, too, where chunks are most alike."""
    for found in run_ranks(count_wrong, 2):
        for (primitive, how), wrong in found.items():
            same_everywhere = how == "ranks" and primitive in ("all_reduce", "all_gather", "broadcast")
            if not how or same_everywhere:
                assert wrong == 0, (primitive, how)
            elif how == "element":
                assert wrong == 2, primitive
            else:
                assert wrong > 500, (primitive, how)


@pytest.mark.full
def test_bench_under_torchrun_with_hosts_taken_for_two(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    words = ["comm", "bench", "--sizes", "4K", "--primitives", "all_reduce,all_to_all", "--per-host", "2"]
    words += ["--algorithms", "gloo,hierarchical,two-hop@gloo", "--type", "bf16", "--op", "max", "--json"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone"]
    done = subprocess.run(
        [*torchrun, "-m", "fivefold", *words, "--html", str(page)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [(row["primitive"], row["algorithm"]) for row in rows] == [
        ("all_reduce", "gloo"),
        ("all_reduce", "hierarchical"),
        ("all_to_all", "gloo"),
        ("all_to_all", "two-hop@gloo"),
    ]
    assert all(row["wrong"] == 0 and row["type"] == "bf16" and row["predicted_seconds"] > 0 for row in rows)
    assert "two-hop" in page.read_text()


def test_a_calibrated_file_reaches_the_ledger(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    words = ["comm", "calibrate", "--ranks", "2", "--sizes", "1K:16K", "--output", str(file), "--json"]
    rows = json.loads(fivefold(*words))["rows"]
    assert {row["primitive"] for row in rows} >= {"all_reduce", "reduce_scatter", "send"}
    default, *others = backends(torch.device("cpu"))
    assert default == default_backend(torch.device("cpu"))
    assert "gloo" in (default, *others)
    assert [row["backend"] for row in rows] == [default] * 6 + [name for name in others for _ in range(6)]
    hardware = load_hardware(Cluster(path=str(file)))
    assert hardware is not None
    assert hardware.devices == 2
    reduce = next(item for item in hardware.measured if item.primitive == "all_reduce")
    assert (reduce.smallest, reduce.largest) == (1024, 16384)
    found = collective_seconds("all_reduce", 20000.0, 2, 1, wires(hardware, Physics()))
    assert found == pytest.approx(reduce.link.seconds(20000.0))
    config = ["--set", f"cluster.path={file}", "--set", "batch.global_batch=16"]
    estimated = json.loads(fivefold("estimate", "quickstart", "--json", *config))
    assert estimated["world_size"] == 2
    gradient = [row for row in estimated["traffic"] if row["primitive"] == "all_reduce"]
    once = [row["seconds"] / row["count"] for row in gradient]
    sizes = [row["bytes_per_rank"] / row["count"] for row in gradient]
    assert once == pytest.approx([reduce.link.seconds(size) for size in sizes])
    over_gloo = json.loads(
        fivefold("estimate", "quickstart", "--json", *config, "--set", "parallel.backend=gloo")
    )
    [found] = [row for row in over_gloo["traffic"] if row["phase"] == "gradient"]
    own = next(row for row in hardware.measured if (row.primitive, row.backend) == ("all_reduce", "gloo"))
    assert found["seconds"] / found["count"] == pytest.approx(
        own.link.seconds(found["bytes_per_rank"] / found["count"])
    )
    # What was measured over one backend says nothing of another.
    assert hardware.measured_over(default).measured == hardware.measured_over("default").measured
    assert hardware.measured_over("nccl").measured == ()


@given(
    latency=st.floats(1e-6, 1e-3),
    bandwidth=st.floats(1e7, 1e11),
    slowdown=st.floats(3.0, 10.0),
    knee=st.booleans(),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=20)
def test_a_fit_finds_the_line_behind_noisy_and_spoilt_times(
    latency: float, bandwidth: float, slowdown: float, knee: bool, seed: int
) -> None:
    sizes = [4.0**power for power in range(5, 14)]
    true = Link(latency, bandwidth, sizes[5], bandwidth / slowdown) if knee else Link(latency, bandwidth)
    noise = random.Random(seed)
    points = [Point(size, true.seconds(size) * noise.uniform(0.97, 1.03)) for size in sizes]
    spoilt = noise.choice(range(1, 8))
    points[spoilt] = Point(sizes[spoilt], points[spoilt].seconds * 5)
    between = [Point(2 * size, true.seconds(2 * size)) for size in sizes[:-1]]
    assert median_error(fit(points), between) < 0.15


@pytest.mark.parametrize("count", [4, 5, 7])
def test_noise_moves_lines_little_straight_or_bent(count: int) -> None:
    sizes = [4.0**power for power in range(11 - count, 11)]  # up to 1 MiB
    for seed in range(20):
        noise = random.Random(seed)
        for true in (Link(2e-5, 1e9), Link(3e-3, 2e10, 2.0**17, 8e7)):
            found = fit([Point(size, true.seconds(size) * noise.gauss(1.0, 0.04)) for size in sizes])
            assert found.seconds(2.0**21) == pytest.approx(true.seconds(2.0**21), rel=0.25)


def test_trace_draws_every_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "ring.html"
    assert main(["comm", "trace", "ring", "--ranks", "3", "--html", str(page)]) == 0
    text = capsys.readouterr().out
    assert "ring all_reduce over 3 ranks: 4 rounds, 3 chunks" in text
    assert "round 1:  0→1 c2+   1→2 c0+   2→0 c1+\n  rank 0  121\n  rank 1  112\n  rank 2  211\n" in text
    assert text.rstrip().endswith("rank 0  ███\n  rank 1  ███\n  rank 2  ███")
    assert page.read_text().count("marker-end") == 12
    assert main(["comm", "trace", "two-hop", "--ranks", "4", "--json"]) == 0
    rounds = json.loads(capsys.readouterr().out)["rounds"]
    assert [len(round_) for round_ in rounds] == [8, 8]


def test_sizes() -> None:
    assert read_sizes("64K,1M:16M") == [65536, 1 << 20, 4 << 20, 16 << 20]
    with pytest.raises(BadInput, match="below the first"):
        read_sizes("1M:1K")
    with pytest.raises(BadInput, match="expected a number of bytes"):
        read_sizes("²K")


def test_sizes_that_do_not_fit_into_memory_are_refused() -> None:
    check_memory([1 << 10, 1 << 30], 2, 8, 16 << 30)
    with pytest.raises(
        BadInput, match=r"1\.00 GiB takes about 8 such buffers on each of 2 ranks.*at most 960 MiB"
    ):
        check_memory([1 << 10, 1 << 30], 2, 8, 15 << 30)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the buffers are in the accelerator's memory")
@pytest.mark.skipif(host_memory()[0] == 0, reason="this system does not tell how much memory is left")
@pytest.mark.parametrize(
    "words", [["bench", "--sizes", "100000G"], ["calibrate", "--sizes", "1K:100000G", "--output", "x.toml"]]
)
def test_no_rank_starts_for_sizes_that_do_not_fit(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["comm", *words]) == 2
    assert "are available here; at most" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["bench", "--sizes", "3Q"], "--sizes 3Q: expected a number of bytes"),
        (["bench", "--primitives", "all_redcue"], 'did you mean "all_reduce"?'),
        (["bench", "--primitives", ","], "--primitives: name one at least, of all_reduce"),
        (["bench", "--algorithms", "rign"], 'did you mean "ring"?'),
        (["bench", "--algorithms", "ring@gluu"], 'did you mean "gloo"?'),
        (["bench", "--algorithms", "fake"], 'no backend or algorithm "fake"'),
        (["bench", "--ranks", "1"], "two ranks at least"),
        (["bench", "--ranks", "4", "--per-host", "3"], "give a divisor of 4"),
        (["bench", "--op", "mean", "--type", "int64"], "take sum, max or min"),
        (["bench", "--cluster", "none.toml"], "no such file"),
        (["calibrate", "--output", "none/at/all.toml"], "a directory that exists"),
        (["calibrate", "--output", "x.toml", "--sizes", "1K"], "three sizes at least"),
        (["calibrate", "--output", "x.toml", "--sizes", "1K,2K,3K"], "three sizes at least"),
        (["calibrate", "--output", "x.toml", "--sizes", "1M,64K,1K"], "three sizes at least"),
        (["trace", "ring", "--ranks", "0"], "1 to 64 ranks"),
        (["trace", "double-tree", "--pieces", "1000000"], "1 to 64 pieces"),
        (["trace", "scatter-al-gather"], 'did you mean "scatter-all-gather"?'),
        (["trace", "hierarchical", "--ranks", "6", "--per-host", "4"], "divisor of 6"),
        (["trace", "binomial", "--ranks", "2", "--root", "2"], "the ranks are 0 to 1"),
        (["cost", "1x8 h1000"], "did you mean"),
    ],
)
def test_bad_input(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["comm", *words]) == 2
    assert says in capsys.readouterr().err
