"""What a person sees, rendered to text."""

import contextlib
import io
import os
import pty
import re
import termios
import threading
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from fivefold.config.model import Experts, Model
from fivefold.config.tree import Batch, Config, Log, Optimizer, Parallel, Run, Schedule
from fivefold.observe.console import RunConsole
from fivefold.observe.facts import EndFacts, SourceFacts, StartFacts
from fivefold.observe.grid import layout_picture
from fivefold.observe.live import LiveLine, RunProgress, plain_line
from fivefold.observe.memory import MemoryByCategory
from fivefold.observe.metrics import StepMetrics
from fivefold.observe.pages import end_page, memory_page, start_page
from fivefold.spec.legal import resolve_config
from fivefold.spec.mesh import Mesh

WIDTHS = (40, 80, 100, 120)


def render(what: RenderableType, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), record=True, highlight=False)
    console.print(what)
    return "\n".join(line.rstrip() for line in console.export_text().splitlines())


def columns(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in line)


def config(parallel: Mapping[str, Any] | None = None, **sections: Any) -> Config:
    values: dict[str, Any] = {
        "model": Model(layers=6, hidden=256, heads=8, kv_heads=4, vocab=4096),
        "parallel": Parallel(**(parallel or {"pp": 2, "dp_shard": 2, "tp": 2, "zero": 2})),
        "batch": Batch(global_batch=32, micro_batch=2, sequence_length=512),
        "optimizer": Optimizer(lr=3e-4, lr_scaling="sqrt", lr_reference_batch=64),
        "schedule": Schedule(warmup_steps=10),
        "run": Run(name="quickstart", steps=30),
    }
    return Config(**values | sections)


def start_facts(config: Config, **changes: Any) -> StartFacts:
    values: dict[str, Any] = {
        "resolved": resolve_config(config),
        "directory": Path("runs/quickstart"),
        "sources": [SourceFacts("python:stdlib", 1.0, 1823, 8_412_331, 2, 0.06)],
        "unigram_entropy": 6.218,
        "device": "CPU, 1 thread a rank, gloo",
        "matmul": "highest: 92 GFLOP/s against 61 GFLOP/s for medium",
        "peak_flops": 92.1e9,
        "peak_source": "measured at start",
    }
    return StartFacts(**values | changes)


def end_facts(**changes: Any) -> EndFacts:
    values: dict[str, Any] = {
        "step": 30,
        "loss": 3.912,
        "evaluation_loss": 4.051,
        "unigram_entropy": 6.218,
        "tokens": 491_520,
        "seconds": 391.2,
        "checkpoint": Path("runs/quickstart/checkpoints/step-30"),
        "sample": "def name(self):\n    return self.name",
        "next_commands": [("fivefold generate runs/quickstart", "let the model write")],
    }
    return EndFacts(**values | changes)


def step_metrics(step: int, **changes: Any) -> StepMetrics:
    values: dict[str, Any] = {
        "step": step,
        "tokens": 16384 * step,
        "step_tokens": 16384,
        "loss": 4.2134,
        "grad_norm": 0.5238,
        "lr": 3e-4,
        "seconds": {"compute": 0.85, "communication": 0.12, "data": 0.03},
        "memory_bytes": 1_288_490_188,
        "mfu": 0.412,
    }
    return StepMetrics(**values | changes)


def progress(*steps: StepMetrics, total: int = 300) -> RunProgress:
    found = RunProgress(total)
    for metrics in steps:
        found.add(metrics)
    return found


def test_start_page_says_what_runs_and_why() -> None:
    page = " ".join(render(start_page(start_facts(config())), 120).split())
    for wanted in (
        "Fivefold trains quickstart",
        "6.45 M parameters 6 layers · hidden 256 · 8 heads (4 for keys and values)",
        "pp 2 × dp_shard 2 × tp 2 = 8 ranks",
        "pp 1 │ 4 │ 5 │ 6 │ 7 │",
        "zero 2: optimizer state and gradients split over dp_shard",
        "32 sequences × 512 tokens = 16,384 tokens a step",
        "accumulation 8 = global batch 32 / (micro-batch 2 × data-parallel 2)",
        "peak 2.12e-4 = 3.00e-4 × √(32 / 64): sqrt scaling from the batch it was tuned at",
        "warmup 20 steps (328 K tokens), then a cosine to 2.12e-5",
        "1,823 documents, 8.41 M tokens from python:stdlib; files left out, not UTF-8 text: 2",
        "unigram entropy 6.218 nats",
        "30 steps read 492 K tokens, 0.06 passes over them",
        "float32 throughout",
        "highest: 92 GFLOP/s against 61 GFLOP/s for medium",
        "92.1 GFLOP/s a rank, measured at start; MFU is stated against it",
        "runs/quickstart",
    ):
        assert wanted in page


def test_start_page_of_other_runs() -> None:
    moe = config(
        {"dp_shard": 4, "ep": 4, "cp": 2, "zero": 1, "recompute": "full"},
        model=Model(layers=2, experts=Experts(count=8, ffn=344)),
        optimizer=Optimizer(),
        schedule=Schedule(kind="wsd"),
    )
    page = " ".join(render(start_page(start_facts(moe, start_step=7)), 120).split())
    assert "quickstart, resumed after step 7" in page
    assert "active for a token" in page
    assert "8 experts of 344, top 2" in page
    assert "split over dp_shard × cp" in page
    assert "ep 4, re-using dp_shard × cp" in page
    assert "recompute full" in page
    assert "peak 3.00e-4 as given (optimizer.lr) no warmup, then constant, and linear" in page
    assert "one rank" in render(start_page(start_facts(config({"dp_shard": 1}))))


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    memory = MemoryByCategory(26_214_400, 26_214_400, 52_428_800, 99 * 2**20, 1 << 18)
    for page in (start_page(start_facts(config())), memory_page(memory), end_page(end_facts())):
        assert max(map(columns, render(page, width).splitlines())) <= width


def test_a_long_path_is_folded_not_cut() -> None:
    path = Path("/" + "/".join(f"directory{n}" for n in range(20)))
    page = render(end_page(end_facts(checkpoint=path, sample="", next_commands=())), 80)
    assert str(path) in "".join(page.split())


def test_the_picture_holds_every_rank_at_its_coordinates() -> None:
    picture = layout_picture(Mesh(pp=2, dp_shard=2, tp=2)).plain
    assert picture.splitlines() == [
        "dp_shard   0       1",
        "      tp   0   1   0   1",
        "         ┌───┬───┬───┬───┐",
        "    pp 0 │ 0 │ 1 │ 2 │ 3 │",
        "    pp 1 │ 4 │ 5 │ 6 │ 7 │",
        "         └───┴───┴───┴───┘",
    ]


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(dp_replicate=16),
        Mesh(tp=3),
        Mesh(dp_replicate=2, dp_shard=2, cp=2, tp=2),
        Mesh(dp_replicate=2, tp=8),
        Mesh(dp_shard=5, tp=3),
    ],
)
def test_every_rank_is_drawn_once_and_fits_a_page(mesh: Mesh) -> None:
    lines = layout_picture(mesh).plain.splitlines()
    cells = [cell.strip() for line in lines for cell in line.split("│")[1:-1]]
    assert cells == [str(rank) for rank in range(mesh.world_size)]
    assert max(map(len, lines)) <= 80 - 16


def test_many_ranks_are_summarised() -> None:
    picture = layout_picture(Mesh(pp=4, dp_shard=8, tp=8)).plain
    assert "ranks 0 … 255" in picture
    assert "0, 64, 128, 192" in picture
    assert "0, 8, 16, … 56" in picture


def test_memory_bars_are_to_scale() -> None:
    page = render(memory_page(MemoryByCategory(10 << 20, 10 << 20, 20 << 20, 40 << 20, 0)), 100)
    bars = {name: line.count("█") for line in page.splitlines() for name in line.split()[:1]}
    assert (bars["optimizer"], bars["activations"], bars["buffers"]) == (15, 30, 0)
    assert "80.0 MiB on rank 0" in page


def test_end_page_holds_the_loss_against_the_unigram_entropy() -> None:
    page = " ".join(render(end_page(end_facts()), 120).split())
    assert "3.912 at step 30, 2.31 nats below the unigram entropy 6.218" in page
    assert "4.051 on held-out samples, 2.17 nats below" in page
    assert "well below" in page
    assert "492 K tokens in 6 min 31 s, 1.26 K tokens/s on average" in page
    assert "runs/quickstart/checkpoints/step-30" in page
    assert "fivefold generate runs/quickstart let the model write" in page


@pytest.mark.parametrize(
    ("loss", "evaluation", "verdict"),
    [
        (3.0, None, "well below"),
        (3.0, 6.0, "only just below"),  # the worse of the two decides
        (6.3, None, "not below"),
        (float("nan"), None, "not below"),
        (3.0, float("nan"), "not below"),
    ],
)
def test_verdict(loss: float, evaluation: float | None, verdict: str) -> None:
    assert verdict in render(end_page(end_facts(loss=loss, evaluation_loss=evaluation)), 120)


def test_a_sample_cannot_steer_the_terminal() -> None:
    page = render(end_page(end_facts(sample="a\x1b[31m[bold]b\x07\tc")))
    assert "a�[31m[bold]b�" in page


def test_speeds_are_totals_not_means_of_means() -> None:
    slow = step_metrics(1, step_tokens=100, seconds={"compute": 9.0}, mfu=0.1)
    fast = step_metrics(2, step_tokens=900, seconds={"compute": 0.5, "data": 0.5}, mfu=0.5)
    found = progress(slow, fast)
    assert found.tokens_per_second == pytest.approx(1000 / 10)
    assert found.mfu == pytest.approx((0.1 * 9 + 0.5 * 1) / 10)
    assert found.seconds_left == pytest.approx(298 * 5)
    assert found.shares()["compute"] == pytest.approx(0.95)


def test_only_the_last_steps_count_for_speed() -> None:
    found = progress(step_metrics(1, seconds={"compute": 1000.0}), *map(step_metrics, range(2, 30)))
    assert found.tokens_per_second == pytest.approx(16384)


@pytest.mark.parametrize("width", [10, 20, 40, 60, 79, 80, 100, 120, 150, 250])
def test_the_live_line_is_one_line_of_any_width(width: int) -> None:
    text = render(LiveLine(progress(step_metrics(120, skipped=True, loss=float("nan")))), width)
    assert len(text.splitlines()) == 1
    assert columns(text) <= width


def test_the_live_line_gives_up_the_least_wanted_first() -> None:
    line = LiveLine(progress(step_metrics(120)))
    assert all(word in render(line, 40) for word in ("120/300", "3:00 left", "loss 4.213"))
    assert all(word in render(line, 80) for word in ("16.4 K tokens/s", "grad 0.524", "lr 3.00e-4"))
    assert all(word in render(line, 100) for word in ("MFU 41%", "1.20 GiB"))
    assert "comm 12%" in render(line, 120)
    assert render(line, 200).endswith("compute 85%  comm 12%  data 3%")


def test_the_bar_keeps_its_place_while_numbers_change() -> None:
    texts = [
        render(LiveLine(progress(step_metrics(step, loss=loss, grad_norm=norm))), 100)
        for step, loss, norm in ((2, 4.2134, 0.5238), (99, 10.1, 1.0), (120, 4.2, 12.345))
    ]
    assert len({text.index("/300") for text in texts}) == 1


def test_the_plain_line_names_everything() -> None:
    line = plain_line(progress(step_metrics(120, loss_scale=1024.0, skipped=True)))
    assert line == (
        "step 120/300  loss 4.213  grad_norm 0.524  lr 3.00e-4  16.4 K tokens/s  MFU 41.2%  memory 1.20 GiB  "
        "loss scale 1024  1 skipped  compute 85%, comm 12%, data 3%  3 min 00 s left"
    )


def run_console(stream: io.TextIOBase, every: int = 10) -> None:
    console = RunConsole(config(log=Log(every=every)), stream)  # type: ignore[arg-type]
    console.start(start_facts(config()))
    for step in range(1, 31):
        console.step(step_metrics(step))
        if step == 1:
            console.memory(MemoryByCategory(1 << 20, 1 << 20, 2 << 20, 3 << 20, 0))
        if step == 15:
            console.note("a note [with brackets] \x1b[31m" + "that is long " * 12)
            console.evaluation(15, 5.0)
    console.finish(end_facts())
    console.close()


def test_a_log_has_plain_lines_and_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as continuous integration sets it
    stream = io.StringIO()
    run_console(stream)
    text = stream.getvalue()
    assert not [
        character for character in text if unicodedata.category(character) == "Cc" and character != "\n"
    ]
    steps = [line.split()[1] for line in text.splitlines() if line.startswith("step ") and "/30" in line]
    assert steps == ["1/30", "10/30", "20/30", "30/30"]
    assert "a note [with brackets] �[31m" + "that is long " * 12 in text  # on one line
    assert "step 15: evaluation loss 5.000, 1.22 nats below the unigram entropy" in text


def test_a_code_page_without_the_signs_ends_no_run() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    run_console(stream)
    stream.flush()
    assert b"step 30/30" in raw.getvalue()


def read_all(descriptor: int, chunks: list[bytes]) -> None:
    """Reads a pseudo-terminal until its other end is closed, which Linux tells by an error."""
    with contextlib.suppress(OSError):
        while chunk := os.read(descriptor, 1 << 16):
            chunks.append(chunk)


@pytest.mark.parametrize("width", [60, 120])
def test_on_a_terminal_one_line_lives_and_the_cursor_comes_back(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(width))
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, width))
    chunks: list[bytes] = []
    reader = threading.Thread(target=read_all, args=(ours, chunks))
    reader.start()
    with open(theirs, "w", encoding="utf-8") as stream:
        monkeypatch.setattr("fivefold.observe.console.REFRESH_SECONDS", 0.0)
        console = RunConsole(config(log=Log(every=1)), stream)
        console.start(start_facts(config()))
        for step in range(1, 31):
            console.step(step_metrics(step))
            if step == 15:
                console.note("a note")
        console.close()
    reader.join()
    os.close(ours)
    output = b"".join(chunks).decode()
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1  # cursor hidden, and shown again
    assert "a note" in output
    drawn = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]+", output)]
    assert max(map(columns, drawn)) <= width
    assert "30/30" in drawn[-1] or "30/30" in drawn[-2]
    assert "step 1/30" not in output  # no plain lines


def test_exposed_communication_is_named_by_axis() -> None:
    """In a log's line and, where it is wide enough, in the live one; what takes no time is not named."""
    shown = progress(step_metrics(1, exposed_seconds={"pp": 0.07, "tp": 0.12, "world": 0.001}))
    assert "exposed: tp 12%, pp 7%" in plain_line(shown)
    assert "exposed: tp 12%, pp 7%" in LiveLine(shown).text(200).plain
    assert "exposed" not in LiveLine(shown).text(60).plain
    assert "exposed" not in plain_line(progress(step_metrics(1)))
