"""The planner's commands as people and scripts meet them: contracts, exit codes, bars."""

import json
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from fivefold.cli.main import main
from fivefold.config.load import load
from fivefold.planner.figures import gantt
from fivefold.planner.jobs import job_of
from fivefold.planner.validation import summary, validate
from fivefold.render.gantt import gantt_text

PLAN = """
[model]
preset = "llama3-8b"
[cluster]
preset = "2x8 h100"
[batch]
global_batch = 64
sequence_length = 8192
[precision]
dtype = "bf16"
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    return str(path)


def document(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    assert main(words) == code
    out = capsys.readouterr().out
    return json.loads(out)


def test_estimate_keeps_its_contract(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    layout = ("--set", "parallel.zero=3", "--set", "parallel.recompute=attention")
    found = document(capsys, "estimate", config, "--json", *layout)
    assert {"fits", "reason", "world_size", "bubble_fraction", "communication_compute_ratio"} <= set(found)
    assert {"tokens_per_second_per_gpu", "tflops_per_gpu", "mfu", "hfu"} <= set(found)
    assert {"total", "active", "per_rank_max"} <= set(found["parameters"])
    parts = ("parameters", "gradients", "optimizer", "activations", "buffers", "peak", "capacity", "rank")
    assert set(parts) <= set(found["memory"])
    assert {"model_per_step", "hardware_per_step", "optimizer_per_step"} == set(found["flops"])
    assert {"step", "compute", "exposed_communication", "bubble", "optimizer"} <= set(found["time"])
    keys = {
        "axis",
        "primitive",
        "phase",
        "count",
        "bytes_per_rank",
        "wire_bytes",
        "seconds",
        "exposed_seconds",
    }
    assert all(keys <= set(row) for row in found["traffic"])
    assert found["world_size"] == 16
    assert found["parameters"]["total"] == 8_030_261_248
    time = found["time"]
    assert time["step"] == pytest.approx(sum(v for k, v in time.items() if k != "step"), rel=1e-6)
    memory = found["memory"]
    assert memory["peak"] == pytest.approx(sum(memory[k] for k in (*parts[:5], "overhead")))


def test_estimate_says_no_with_one(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "estimate", config, "--json", "--set", "parallel.dp_replicate=16", code=1)
    assert not found["fits"]
    assert "missing" in found["reason"]
    assert main(["estimate", config, "--set", "parallel.tp=3"]) == 2
    assert main(["estimate", config, "--set", "parallel.pp=4", "--set", "parallel.schedule=dualpipev",
                 "--set", "parallel.zero=1", "--set", "batch.global_batch=4"]) == 2  # fmt: skip
    assert "8" in capsys.readouterr().err  # the nearest legal number of micro-batches


def test_estimate_of_muon(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Against AdamW: one moment less of the layers' matrices, which travel whole, and their products; nothing else."""
    layout = ("--set", "parallel.tp=2", "--set", "parallel.dp_shard=8", "--set", "parallel.zero=1")
    adamw = document(capsys, "estimate", config, "--json", *layout)
    muon = document(capsys, "estimate", config, "--json", *layout, "--set", "optimizer.name=muon")
    matrices = 32 * (2 * 4096**2 + 2 * 1024 * 4096 + 3 * 14336 * 4096) // 16
    assert adamw["memory"]["optimizer"] - muon["memory"]["optimizer"] == 4 * matrices
    exchanged = [row for row in muon["traffic"] if row["primitive"] == "all_to_all"]
    assert {(row["axis"], row["phase"], row["count"]) for row in exchanged} == {
        ("dp_shard", "optimizer", 2),
        ("tp", "optimizer", 2),
    }
    for row in exchanged:  # 2 B an element there and back; rank 0 has at most a fifth more than the mean
        assert 4 * matrices <= row["bytes_per_rank"] <= 1.2 * 4 * matrices
    products = 6 * 2 * 4096**3 + 2 * (4 * 1024**2 * 4096 + 2 * 1024**3)
    products += 3 * (4 * 4096**2 * 14336 + 2 * 4096**3)
    assert (adamw["flops"]["optimizer_per_step"], muon["flops"]["optimizer_per_step"]) == (
        0,
        32 * 5 * products,
    )
    seconds = 32 * 5 * products / 16 / 800e12
    assert seconds < muon["time"]["optimizer"] - adamw["time"]["optimizer"] < 2 * seconds
    assert muon["time"]["compute"] == adamw["time"]["compute"]


@pytest.mark.parametrize("more", [(), ("--set", "optimizer.name=muon", "--set", "parallel.tp=2")], ids=str)
def test_every_line_explains_itself(
    config: str, more: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    zero = ("--set", "parallel.zero=3", "--set", "parallel.recompute=attention", *more)
    assert main(["estimate", config, *zero, "--explain", "list"]) == 0
    for line in capsys.readouterr().out.split():
        assert main(["estimate", config, *zero, "--explain", line]) == 0
        out = capsys.readouterr().out
        assert "source:" in out
        assert any(letter.isdigit() for letter in out)
    assert main(["estimate", config, *zero, "--explain", "memory.optimiser"]) == 2


def test_plan_keeps_its_contract(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "plan", config, "--json")
    assert {"searched", "feasible", "seconds", "best", "ranking", "neighbours"} <= set(found)
    assert found["best"]["fits"]
    assert found["best"]["time"]["step"] == pytest.approx(found["ranking"][0]["step"])
    steps = [item["step"] for item in found["ranking"]]
    assert steps == sorted(steps)
    shared = [item for item in found["ranking"] if item["same"]]
    assert shared
    for item in shared:
        assert set(item["same_but_for"]) <= {"zero", "dp_replicate", "dp_shard"}
        assert all(layout != item["parallel"] for layout in item["same"])
    assert main(["plan", config]) == 0
    assert f"and {len(shared[0]['same'])} more within 0.1% that differ only in" in capsys.readouterr().out


@pytest.mark.parametrize(
    "schedule", ["", "1f1b", "interleaved", "zbv", "zb_h1", "interleaved_zb", "dualpipev"]
)
def test_the_plan_is_a_config(
    config: str, schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What plan emits, estimate takes, and finds the same step."""
    fixed = ["--set", f"parallel.schedule={schedule}", "--set", "parallel.pp=4"] if schedule else []
    found = document(capsys, "plan", config, "--json", *fixed)
    assert main(["plan", config, "--emit", "fivefold", *fixed]) == 0
    best = tmp_path / "best.toml"
    best.write_text(capsys.readouterr().out)
    assert document(capsys, "estimate", str(best), "--json")["time"]["step"] == pytest.approx(
        found["best"]["time"]["step"]
    )


def test_forcing_tp_across_nodes_shows_its_price(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Worked question: NVLink to InfiniBand under tensor parallel."""
    inside = document(capsys, "plan", config, "--json", "--set", "parallel.tp=8")["best"]
    across = document(capsys, "plan", config, "--json", "--set", "parallel.tp=16")
    assert across["best"]["time"]["step"] > 1.2 * inside["time"]["step"]
    rows = [row for row in across["best"]["traffic"] if row["axis"] == "tp" and row["phase"] != "gradient"]
    assert rows  # sums of gradients of replicated KV heads stay between two neighbours
    assert all(row["link"] == "between nodes" for row in rows)


def test_a_cluster_larger_than_its_batch_is_told_the_nearest_batch(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--set", 'cluster.preset="7777777x8 h100"', "--set", "parallel.dp_replicate=-1"]
    found = document(capsys, "plan", config, "--json", *sizes, code=1)
    batch = int(found["reasons"][0].rpartition(" ")[2])
    assert document(capsys, "plan", config, "--json", *sizes, "--set", f"batch.global_batch={batch}")["best"]


def test_a_plan_states_what_a_run_costs_where_the_cluster_has_a_price(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preset = resources.files("fivefold") / "presets" / "clusters" / "h100.toml"
    cluster = tmp_path / "priced.toml"
    cluster.write_text("nodes = 2\nprice = 2.5\n" + preset.read_text(encoding="utf-8"), encoding="utf-8")
    words = ["--set", "cluster.preset=", "--set", f"cluster.path={cluster}"]
    found = document(capsys, "plan", config, "--json", "--tokens", "1e9", *words)
    run, best = found["run"], found["best"]
    rate = best["tokens_per_second_per_gpu"] * best["world_size"]
    assert run["days"] == pytest.approx(1e9 / rate / 86400)
    assert run["device_hours"] == pytest.approx(run["days"] * 24 * best["world_size"])
    assert run["price_per_hour"] == 2.5
    assert run["price"] == pytest.approx(2.5 * run["device_hours"])


RAMP = [
    "--set",
    "batch.ramp.start=4",
    "--set",
    "batch.ramp.increment=20",
    "--set",
    "batch.ramp.tokens=3000000",
]


def test_a_plan_carries_every_batch_of_a_ramp(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best layout of the last batch cannot carry the first; the plan's can, trains, and says what it costs."""
    free = document(capsys, "plan", config, "--json")
    found = document(capsys, "plan", config, "--json", "--tokens", "1e9", *RAMP)
    batches = [4, 24, 44, 64]
    assert [stage["global_batch"] for stage in found["ramp"]] == batches
    for item in found["ranking"]:
        layout = item["parallel"]
        unit = item["micro_batch"] * layout["dp_replicate"] * layout["dp_shard"]
        assert all(batch % unit == 0 for batch in batches)
    layout = free["best"]["parallel"]
    assert 4 % (free["best"]["micro_batch"] * layout["dp_replicate"] * layout["dp_shard"])
    assert main(["plan", config, "--emit", "fivefold", *RAMP]) == 0
    best = tmp_path / "best.toml"
    best.write_text(capsys.readouterr().out)
    seconds, left = 0.0, 1e9
    for stage in found["ramp"]:
        size = [
            "--set",
            "batch.ramp.start=0",
            "--set",
            "batch.ramp.increment=0",
            "--set",
            "batch.ramp.tokens=0",
        ]
        size += ["--set", f"batch.global_batch={stage['global_batch']}"]
        step = document(capsys, "estimate", str(best), "--json", *size)["time"]["step"]
        steps = stage["steps"] or left / (64 * 8192)
        seconds, left = seconds + steps * step, left - steps * stage["global_batch"] * 8192
    assert found["run"]["days"] == pytest.approx(seconds / 86400)
    assert main(["plan", config, *RAMP]) == 0
    assert "ramp from 4 sequences, 20 more every 1,000,000 tokens" in capsys.readouterr().out
    refused = document(capsys, "plan", config, "--json", *RAMP, "--set", "parallel.pp=1", "--set", "parallel.cp=1",
                       "--set", "parallel.tp=1", code=1)  # fmt: skip
    assert any("batch.ramp.increment = 20 is no multiple of" in line for line in refused["reasons"])


def test_a_plan_that_cannot_be_says_what_would(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", config, "--json", "--set", 'model.preset="llama3-405b"']
    found = document(capsys, *words, code=1)
    assert found["best"] is None
    text = " ".join(found["reasons"])
    assert "GiB" in text
    assert "devices" in text


def test_batch_arithmetic(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """From 4M to 16M tokens: four times the batch, 4 × linear, 2 × sqrt, a warning for linear under AdamW."""
    words = ["batch", config, "--json", "--tokens", "16M", "--set", "batch.global_batch=512"]
    found = document(capsys, *words, "--set", "optimizer.lr=1e-4")
    assert found["global_batch"] == 2048
    lr = {item["rule"]: item["lr"] for item in found["learning_rates"]}
    assert lr == pytest.approx({"none": 1e-4, "linear": 4e-4, "sqrt": 2e-4})
    assert any("break" in item["note"] for item in found["learning_rates"] if item["rule"] == "linear")
    for way in found["legal"]:
        assert way["data_parallel"] * way["micro_batch"] * way["accumulation"] == 2048
    assert main(["batch", config, "--tokens", "10000"]) == 2
    assert "8192 or 16384" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "--keep", "0"),
        ("plan", "--keep", "-3"),
        ("plan", "--set", "parallel.ep=2"),
        (
            "plan",
            "--set",
            "parallel.tp=16",
            "--set",
            "model.preset=gpt2-xl",
            "--set",
            "batch.sequence_length=1024",
        ),
        ("plan", "--set", "batch.sequence_length=262144"),
        ("plan", "--set", "parallel.tp=0"),
        ("plan", "--set", "parallel.tp=8", "--set", "parallel.pp=4"),
        ("plan", "--set", "parallel.chunks=3", "--set", "parallel.schedule=zbv"),
        ("plan", "--set", "parallel.chunks=2", "--set", "parallel.pp=1"),
        ("plan", "--set", "parallel.zero=2", "--set", "parallel.dp_shard=1", "--set", "parallel.cp=1"),
        ("plan", "--set", "batch.ramp.start=5"),
        ("plan", "--html", "/none/1.html"),
        ("batch", "--budget", "-5"),
        ("batch", "--devices", "-1"),
        ("estimate", "--tokens", "-1"),
    ],
    ids=" ".join,
)
def test_counts_that_are_none_are_refused(
    config: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    command, *rest = words
    assert main([command, config, *rest]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert any(letter.isdigit() for letter in told)


@pytest.fixture(scope="module")
def checks() -> Any:
    return validate()


def test_predictions_are_within_their_bars(checks: Any) -> None:
    totals = summary(checks)
    time, memory = totals["step_time"], totals["peak_memory"]
    assert time["median_of_source_medians"] <= 0.10
    assert memory["median_of_source_medians"] <= 0.08
    assert time["within_25_percent"] >= 0.90
    assert (time["predicted"] + memory["predicted"]) / (time["rows"] + memory["rows"]) >= 0.70


def test_calculons_eight_rows(checks: Any) -> None:
    """Korthikanti 2022 table 5: mean error ≤ 3.6 %, worst ≤ 8.8 % (Calculon's own figures)."""
    errors = [abs(check.error) for check in checks if check.id.startswith("korth22_t5")]
    assert len(errors) == 8
    assert sum(errors) / 8 <= 0.036
    assert max(errors) <= 0.088


def test_skips_name_a_missing_column(checks: Any) -> None:
    assert all(check.skipped.startswith("no ") for check in checks if check.predicted is None)


def test_validate_takes_other_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file with fewer columns; an unknown GPU is skipped with its reason, never a crash."""
    path = tmp_path / "runs.tsv"
    head = "id source gpu n_gpus layers hidden ffn_hidden heads vocab seq_len tp pp dp micro_batch global_batch_seqs"
    cells = "a some H100-SXM-80GB 8 32 4096 14336 32 128256 8192 1 1 8 1 64"
    several = "c some H100-SXM-80GB 8 32 4,096 14,336 32 128,256 8,192 1 1 8 1 64"
    odd = "d some H100-SXM-80GB 8 32 4096 14336 32 128256 inf 0 1 8 1 64"
    other = "b some Abacus 8 32 4096 14336 32 128256 8192 1 1 8 1 64"
    rows = [
        [*line.split(), last]
        for line, last in (
            (head, "step_time_s"),
            (cells, "9.0"),
            (other, "9.0"),
            (several, "1.2.3"),
            (several, "9.0"),
            (odd, "9.0"),
        )
    ]
    path.write_text("\n".join("\t".join(row) for row in rows) + "\n")
    main(["validate", str(path), "--json"])
    found = json.loads(capsys.readouterr().out)["rows"]
    assert found[0]["predicted"] > 0
    assert found[1]["skipped"]
    assert {row["predicted"] for row in found if row["id"] == "c"} == {found[0]["predicted"]}
    assert found[-1]["skipped"] == "no seq_len"
    assert main(["validate", str(tmp_path / "none.tsv")]) == 2


@pytest.mark.parametrize("words", [["plan", "--help"], ["estimate", "quickstart", "--json"]])
def test_planning_needs_no_torch(words: list[str]) -> None:
    """Start-up is the laptop's: no torch, no numpy."""
    code = (
        "import sys; from fivefold.cli.main import main\n"
        f"try: main({words!r})\nexcept SystemExit: pass\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_pages_stand_alone(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One file, nothing loaded from elsewhere, every picture in it, well-formed SVG."""
    from xml.etree import ElementTree

    page = tmp_path / "plan.html"
    words = ["--set", "parallel.pp=4", "--set", 'parallel.schedule="interleaved"', "--html", str(page)]
    assert main(["plan", config, *words]) == 0
    text = page.read_text()
    assert "http" not in text
    assert "<script" not in text
    assert "src=" not in text
    for heading in (
        "Memory of each rank class",
        "Pipeline",
        "Its traffic, by axis and link",
        "Step time against memory",
        "Ranking",
    ):
        assert heading in text
    for part in text.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + part.split("</svg>")[0] + "</svg>")
    capsys.readouterr()
    schedule = ["--set", "parallel.pp=4", "--set", 'parallel.schedule="zbv"', "--set", "parallel.zero=1"]
    for recompute in ("none", "full"):  # under full a split backward leaves weight gradients nothing to do
        main(["estimate", config, *schedule, "--set", f"parallel.recompute={recompute}"])
        out = capsys.readouterr().out
        assert "schedule zbv" in out
        assert "F forward" in out


def test_pictures_of_long_pipelines_show_both_ends(config: str) -> None:
    """More ranks and actions than can be told apart: some ranks, the beginning and the end; nothing outside."""
    sets = ["cluster.preset=8x8 h100", "parallel.pp=32", "parallel.zero=1", "batch.global_batch=256"]
    for keys, panels in ((sets, 2), ([*sets, "batch.global_batch=64"], 1)):
        found = gantt(job_of(load(config, keys)))
        assert len(found["panels"]) == panels
        assert found["panels"][0]["start"] == 0
        assert found["panels"][-1]["end"] == found["makespan"]
        for panel in found["panels"]:
            assert [rank for rank, _ in panel["rows"]] == list(range(32))
            for _, actions in panel["rows"]:
                ends = [action[4] for action in actions]
                assert all(start < panel["end"] and end > panel["start"] for *_, start, end in actions)
                assert all(a <= b[3] * (1 + 1e-9) for a, b in zip(ends, actions[1:], strict=False))
    many = gantt(
        job_of(load(config, [*sets, "cluster.preset=17x2 h100", "parallel.pp=34", "parallel.zero=0"]))
    )
    assert [rank for rank, _ in many["panels"][0]["rows"]][-2:] == [32, 33]
    assert len(gantt_text(many).splitlines()) == 1 + 18
