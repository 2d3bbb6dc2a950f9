"""Every line of a ledger explains itself, and the numbers it puts in give its value when they are worked out."""

import re
from math import ceil
from pathlib import Path

import pytest

from fivefold.cli.main import main
from fivefold.config.load import load
from fivefold.ledger.physics import Physics
from fivefold.ledger.total import Ledger, estimate
from fivefold.planner.explain import explain, lines
from fivefold.planner.jobs import job_of
from fivefold.planner.runs import job_of as job_of_row

LAYOUTS = {
    "zero 3, tp, sp": ("llama3-70b", "tp=8 dp_shard=16 zero=3 sequence_parallel=true recompute=full"),
    "zero 2": ("llama3-8b", "dp_shard=16 dp_replicate=8 zero=2"),
    "zero 1, one micro-batch": ("llama3-8b", "dp_shard=128 zero=1"),
    "v-shaped pipeline, cp": ("llama3-70b", "tp=4 pp=4 dp_shard=4 cp=2 zero=1 schedule=zbv recompute=full"),
    "interleaved, uneven": ("llama2-7b", "pp=4 dp_replicate=32 schedule=interleaved chunks=3"),
    "one stage a rank": ("llama2-7b", "pp=8 dp_replicate=16 recompute=attention"),
    "ulysses": ("qwen2.5-7b", "cp=4 dp_shard=32 zero=3 context=ulysses recompute=elementwise"),
    "experts": ("qwen3-30b-a3b", "ep=8 dp_shard=64 zero=2 tp=2"),
    "experts, pipeline": ("qwen3-30b-a3b", "ep=8 dp_shard=16 zero=3 tp=2 pp=4 sequence_parallel=true"),
    "latent attention": ("deepseek-v3", "ep=64 dp_shard=16 cp=4 zero=1 pp=2 recompute=full"),
    "tied": ("gpt2", "dp_shard=16 zero=1 pp=4 tp=2"),
    "tied, v-shaped": ("gpt2", "dp_shard=32 zero=2 pp=2 tp=2 schedule=dualpipev"),
    "a program": ("llama3-8b", "dp_replicate=128 dp_shard=1 algorithm=double-tree"),
    "muon": ("llama3-8b", "dp_shard=16 zero=2 tp=2 dp_replicate=4"),
    "muon, few tokens": ("qwen2.5-7b", "dp_shard=128 zero=3 recompute=full"),
    "muon of experts": ("qwen3-30b-a3b", "ep=8 dp_shard=16 zero=1 pp=4 dp_replicate=2"),
    "compressed": ("llama3-8b", "dp_replicate=8 dp_shard=16 zero=1 compression=int8"),
}


def ledger_of(
    path: Path, model: str, sets: str, cluster: str = "16x8 h100", optimizer: str = "adamw"
) -> Ledger:
    path.write_text(
        f'[model]\npreset = "{model}"\n[cluster]\npreset = "{cluster}"\n[batch]\nglobal_batch = 128\n'
        'sequence_length = 1024\n[precision]\ndtype = "bf16"\n'
    )
    keys = {"dp_replicate": "1", "dp_shard": "1"} | dict(word.split("=") for word in sets.split())
    overrides = [f"parallel.{key}={value}" for key, value in keys.items()]
    return estimate(job_of(load(str(path), [*overrides, f"optimizer.name={optimizer}"])))


def worked_out(expression: str) -> float:
    """The arithmetic of an explanation: its signs and units as a person reads them."""
    text = expression.replace(",", "").replace(" B", "").replace("·", "*").replace("−", "-")
    text = re.sub(r"⌈([^⌉]+)⌉", r"ceil(\1)", text)
    assert re.fullmatch(r"(?:ceil|[\d.e+\-*/() ])+", text), text
    return float(eval(text, {"ceil": ceil, "__builtins__": {}}))


def check(ledger: Ledger) -> None:
    found = lines(ledger)
    assert len(set(found)) == len(found)
    for line in found:
        formula, numbers, source = explain(ledger, line).splitlines()
        assert formula
        assert source.startswith("source: ")
        claims = [part.partition(" → ")[::2] for part in numbers.split("; ") if " → " in part]
        assert claims, numbers
        for expression, value in claims:
            said = float(value.replace(",", "").split()[0])
            assert worked_out(expression) == pytest.approx(said, rel=2e-9, abs=1e-9), f"{line}: {numbers}"


@pytest.mark.parametrize("name", LAYOUTS)
def test_numbers_put_in_give_the_value(name: str, tmp_path: Path) -> None:
    optimizer = "muon" if name.startswith("muon") else "adamw"
    check(ledger_of(tmp_path / "c.toml", *LAYOUTS[name], optimizer=optimizer))


def test_on_cpus_too(tmp_path: Path) -> None:
    check(ledger_of(tmp_path / "c.toml", "gpt2", "dp_shard=4 zero=2", "1x4 cpu"))


def test_of_a_published_fp8_run() -> None:
    row = {
        "id": "x", "source": "Megatron-Bridge", "gpu": "H100", "n_gpus": "64", "layers": "32", "hidden": "4096",
        "heads": "32", "kv_heads": "8", "ffn_hidden": "14336", "vocab": "128256", "seq_len": "8192",
        "global_batch_seqs": "128", "micro_batch": "1", "tp": "2", "pp": "2", "vpp": "4", "precision": "fp8",
        "zero_stage_or_fsdp": "ZeRO-1",
    }  # fmt: skip
    check(estimate(job_of_row(row, Physics())))


def test_values_are_those_of_the_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Experts' traffic has a line of its own, beside that of the dense parameters."""
    ledger = ledger_of(tmp_path / "c.toml", *LAYOUTS["experts, pipeline"])
    rows = [line for line in lines(ledger) if line.startswith("traffic.")]
    assert len(rows) == len(ledger.traffic)
    assert "traffic.dp_shard.reduce_scatter.gradient.2" in rows
    second = ledger.traffic[rows.index("traffic.dp_shard.reduce_scatter.gradient.2")]
    assert "expert parameters" in second.formula
    assert f"→ {round(second.bytes_per_rank):,} B" in explain(
        ledger, "traffic.dp_shard.reduce_scatter.gradient.2"
    )
    assert main(["estimate", str(tmp_path / "c.toml"), "--explain", "traffic.tp.all_reduce"]) == 2
    assert "did you mean" in capsys.readouterr().err
