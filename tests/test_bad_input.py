"""Malformed input through the real command: exit code 2, one line that says what, where and what is right, no trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from bad_commands import COMM, COMMANDS, VERIFY
from bad_input import BASE, FILES, OVERRIDES, Case, keys, train
from fivefold.cli.main import main
from fivefold.config.errors import BadInput, RunFailed
from fivefold.config.load import load
from fivefold.trainer.directory import write_run

CONTRADICTIONS = [
    keys("degree of 0", "parallel.tp=0", "parallel.tp = 0", "at least 1, or -1"),
    keys(
        "two open degrees",
        ("parallel.pp=-1", "parallel.dp_shard=-1"),
        "parallel.pp = parallel.dp_shard = -1",
        "only one",
    ),
    keys(
        "product is not the ranks",
        ("run.ranks=6", "parallel.dp_replicate=2", "parallel.dp_shard=2"),
        "dp_replicate 2 · dp_shard 2 = 4 ranks, but the run has 6",
        "run.ranks",
        "start 4 ranks",
    ),
    keys(
        "open degree does not come out",
        ("run.ranks=7", "parallel.dp_replicate=2"),
        "parallel.dp_shard = -1",
        "does not divide 7",
        "6 or 8",
    ),
    keys("too many ranks", "run.ranks=2000000", "run.ranks = 2000000", "≤ 1048576"),
    keys("no such zero", "parallel.zero=4", "parallel.zero = 4", "one of 0, 1, 2, 3"),
    keys("zero over one rank", "parallel.zero=3", "parallel.zero = 3", "dp_shard × cp = 1", "zero = 0"),
    keys(
        "zero over replicas",
        ("parallel.zero=1", "parallel.dp_replicate=4"),
        "parallel.zero = 1",
        "nothing to split over",
        "dp_shard ≥ 2",
    ),
    keys(
        "indivisible batch",
        ("batch.global_batch=50", "batch.micro_batch=4", "parallel.dp_replicate=3"),
        "batch.global_batch = 50",
        "micro_batch 4 × data-parallel 3 = 12",
        "nearest legal: 48 or 60",
    ),
    keys(
        "batch below one micro-batch",
        ("batch.global_batch=3", "batch.micro_batch=4"),
        "batch.global_batch = 3",
        "nearest legal: 4",
    ),
    keys(
        "both batch keys",
        ("batch.global_batch=4", "batch.global_batch_tokens=2048"),
        "batch.global_batch and batch.global_batch_tokens",
        "give one",
    ),
    keys(
        "batch tokens no multiple of the sequence",
        ("batch.global_batch_tokens=1000", "batch.sequence_length=512"),
        "batch.global_batch_tokens = 1000",
        "sequence_length 512",
        "nearest legal: 512 or 1024",
    ),
    keys(
        "batch tokens no multiple of the ranks'",
        ("batch.global_batch_tokens=1536", "batch.sequence_length=512", "parallel.dp_replicate=2"),
        "batch.global_batch_tokens = 1536",
        "nearest legal: 1024 or 2048",
    ),
    keys(
        "sequence too long",
        ("batch.sequence_length=2048", "model.max_positions=1024"),
        "batch.sequence_length = 2048",
        "at most 1024",
    ),
    keys(
        "heads do not divide",
        ("model.heads=5", "model.kv_heads=5"),
        "model.heads = 5",
        "model.hidden = 64",
        "nearest legal: 4 or 8",
    ),
    keys("KV heads do not divide", "model.kv_heads=3", "model.kv_heads = 3", "model.heads = 8", "2 or 4"),
    keys("more KV heads than heads", "model.kv_heads=16", "model.kv_heads = 16", "nearest legal: 8"),
    keys("astronomic KV heads", f"model.kv_heads={2**62}", "model.kv_heads", "nearest legal: 8"),
    keys("odd head", "model.head_dim=7", "model.head_dim = 7", "even"),
    keys("no width", "model.ffn=0", "model.ffn = 0", "need a width"),
    keys(
        "rotary band upside down",
        "model.rope_scaling.low_freq_factor=4",
        "model.rope_scaling.low_freq_factor = 4.0",
        "less than high_freq_factor",
    ),
    keys("tp", "parallel.tp=3", "parallel.tp = 3", "8 heads, 4 KV heads", "nearest legal: 2 or 4"),
    keys(
        "tp beyond heads", "parallel.tp=16", "parallel.tp = 16: does not divide 8 heads", "nearest legal: 8"
    ),
    keys(
        "tp for every unit at once",
        ("parallel.tp=4", "model.ffn=98"),
        "parallel.tp = 4: does not divide 98 columns",
        "nearest legal: 2",
    ),
    keys(
        "tp for experts and dense layers at once",
        (
            "parallel.tp=8",
            "model.kv_heads=8",
            "model.experts={count=8, ffn=16, shared_ffn=12, dense_layers=1}",
            "model.ffn=96",
        ),
        "parallel.tp = 8: does not divide 4 columns",
        "nearest legal: 4",
    ),
    keys(
        "ep",
        ("parallel.ep=4", "parallel.dp_shard=12", "parallel.zero=1", "model.experts={count=6, ffn=8}"),
        "parallel.ep = 4: does not divide 6 experts",
        "nearest legal: 3 or 6",
    ),
    keys(
        "ep beyond the shards",
        ("parallel.ep=8", "parallel.dp_shard=4", "parallel.zero=1", "model.experts={count=8, ffn=8}"),
        "parallel.ep = 8: does not divide dp_shard × cp = 4",
        "nearest legal: 4",
    ),
    keys(
        "ep over replicas",
        ("parallel.ep=2", "parallel.dp_shard=2", "model.experts={count=8, ffn=8}"),
        "parallel.ep = 2: does not divide dp_shard × cp = 1",
        "set zero = 1",
    ),
    keys(
        "Ulysses with heads that do not divide",
        ("parallel.cp=3", 'parallel.context="ulysses"'),
        "parallel.cp = 3: does not divide 8 heads (context = ulysses), 4 KV heads",
        "nearest legal: 2 or 4",
    ),
    keys(
        "more context ranks than tokens",
        ("parallel.cp=16", "batch.sequence_length=8"),
        "parallel.cp = 16: more ranks than a sequence has tokens",
        "at most batch.sequence_length = 8",
    ),
    keys("ep without experts", "parallel.ep=2", "parallel.ep = 2", "no experts", "ep = 1"),
    keys("sequence parallel without tp", "parallel.sequence_parallel=true", "but tp = 1", "false"),
    keys("more stages than layers", "parallel.pp=7", "parallel.pp × chunks = 7 × 1", "at most 6"),
    keys("chunks without pp", "parallel.chunks=2", "parallel.chunks = 2", "pp = 1", "chunks = 1"),
    keys(
        "chunks that the schedule has not",
        ("parallel.chunks=2", "parallel.pp=2"),
        "parallel.chunks = 2",
        "schedule 1f1b has 1",
        '"interleaved"',
    ),
    keys(
        "micro-batches that the schedule has not",
        ("parallel.pp=2", 'parallel.schedule="dualpipev"', "batch.global_batch=3"),
        "batch.global_batch = 3",
        "dualpipev",
        "nearest legal: 4",
    ),
    keys("experts without a width", "model.experts.count=4", "model.experts.ffn = 0", "need a width"),
    keys("more experts a token than there are", "model.experts={count=4, ffn=8, top_k=5}", "at most 4"),
    keys("expert groups", "model.experts={count=8, ffn=8, groups=3}", "model.experts.groups = 3", "2 or 4"),
    keys(
        "experts a token of few groups",
        "model.experts={count=8, ffn=8, groups=4, top_k=3}",
        "model.experts.top_k = 3",
        "at most 2",
        "1 of 4 groups",
    ),
    keys("no layer with experts", "model.experts={count=8, ffn=8, dense_layers=4}", "none of the 4 layers"),
    keys("latent without width", "model.latent.kv_rank=16", "model.latent.value_dim = 0", "width"),
    keys("a path beside a mixture", 'data.sources=[{path="x"}]', "data.path and data.sources", "give one"),
    keys(
        "warmup given twice",
        ("schedule.warmup_tokens=512", "schedule.warmup_steps=1"),
        "schedule.warmup_tokens and schedule.warmup_steps",
        "give one",
    ),
]
TRAIN = [
    train("what is not trained yet", ('model.positions="alibi"', "model.embedding_norm=true"), "not train"),
    train("missing data", "data.path=nowhere", "data.path", "nowhere", '"python:stdlib"'),
    train("data path that cannot be one", "data.path=" + "x" * 5000, "data.path", "no file or directory"),
    train("empty directory", "data.path=empty", "data.path", "empty holds no files", **{"empty/.hidden": ""}),
    train("bad line", "data.path=a.jsonl", "a.jsonl:1:", "not a line of JSON", **{"a.jsonl": '{"text": '}),
    train(
        "no such field", "data.path=a.jsonl", "a.jsonl:1:", "data.text_field", **{"a.jsonl": '{"txt": "x"}'}
    ),
    train("ids alone", "data.path=a.uint16.bin", "a.uint16.bin", "data.tokenizer", **{"a.uint16.bin": b"ab"}),
    train("missing tokenizer", "data.tokenizer=t.json", "data.tokenizer", "t.json is not a file"),
    train("run.dir is a file", "run.dir=text", "run.dir = text", "not a directory", "another run.dir"),
    train("run.dir below a file", "run.dir=text/a/b", "run.dir = text/a/b", "text is not a directory"),
    train("runs is a file", (), "runs/a", "runs is not a directory", runs="a file"),
    train("run.dir holds a run", "run.dir=old", "old: holds a run", "--resume", **{"old/config.toml": ""}),
    train("run.dir holds checkpoints", "run.dir=old", "holds a run", **{"old/checkpoints/step-1/x": ""}),
]
CASES = FILES + OVERRIDES + CONTRADICTIONS + TRAIN + COMMANDS + VERIFY + COMM


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def write(directory: Path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def contents(directory: Path) -> dict[str, bytes]:
    paths = sorted(directory.rglob("*"))
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in paths}


def check_refusal(code: int, out: str, err: str, says: tuple[str, ...]) -> None:
    assert code == 2, err
    assert out == ""
    assert err.startswith("fivefold: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert len(err) < 600
    for words_said in says:
        assert words_said in err


def test_case_names_are_unique() -> None:
    groups = (FILES, OVERRIDES, CONTRADICTIONS, TRAIN, COMMANDS, VERIFY)
    assert all(len({case.name for case in group}) == len(group) for group in groups)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refused_in_one_line(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, case.files)
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path)
    code = main(list(case.words))
    out, err = capsys.readouterr()
    check_refusal(code, out, err, case.says)
    assert contents(tmp_path) == before


REPRESENTATIVE = (
    "unknown key",
    "tp",
    "indivisible batch",
    "missing data",
    "run.dir holds a run",
    "nothing to resume",
    "generate from no run",
    "unknown command",
    "layout that is illegal",
)


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_refused_by_the_command_before_anything_heavy(name: str, tmp_path: Path) -> None:
    """As a person runs it, with a torch and a numpy that say so when they are imported."""
    case = next(case for case in CASES if case.name == name)
    heavy, work = tmp_path / "heavy", tmp_path / "work"
    write(heavy, {f"{name}/__init__.py": f"raise SystemExit('{name} was imported')" for name in HEAVY})
    write(work, case.files)
    before = contents(work)
    environment = dict(os.environ) | {"PYTHONPATH": str(heavy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "fivefold", *case.words]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=60)
    check_refusal(done.returncode, done.stdout, done.stderr, case.says)
    assert contents(work) == before


HEAVY = ("torch", "numpy", "rich")


def test_missing_sink_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = [name for name in ("tensorboard", "wandb") if find_spec(name) is None]
    if not missing:
        pytest.skip("both are installed")
    write(tmp_path, {"a.toml": BASE, "text": "some text\n"})
    monkeypatch.chdir(tmp_path)
    code = main(["train", "a.toml", "--set", f"log.sinks={json.dumps(missing[:1])}"])
    out, err = capsys.readouterr()
    check_refusal(code, out, err, ("log.sinks", missing[0], f'"fivefold[{missing[0]}]"'))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_run_directory_that_may_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, {"a.toml": BASE, "text": "some text\n", "locked/.keep": ""})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "locked").chmod(0o500)
    code = main(["train", "a.toml", "--set", "run.dir=locked/run"])
    out, err = capsys.readouterr()
    check_refusal(code, out, err, ("run.dir = locked/run", "locked may not be written to"))


def test_debug_shows_where_a_refusal_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="unknown key"):
        main(["config", "check", "quickstart", "--set", "run.stepz=1", "--debug"])


@pytest.mark.parametrize(
    ("error", "line"), [(KeyboardInterrupt(), "stopped by SIGINT"), (RunFailed("no more"), "no more")]
)
def test_what_ends_a_run_is_one_line(
    error: BaseException, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(words: list[str]) -> int:
        raise error

    monkeypatch.setattr("fivefold.cli.main._dispatch", end)
    assert main(["train"]) == 1
    assert capsys.readouterr().err == f"fivefold: {line}\n"


def test_of_runs_that_chose_one_directory_at_once_one_gets_it(tmp_path: Path) -> None:
    run, tokenizer = tmp_path / "run", tmp_path / "tokenizer.json"
    tokenizer.write_text("first")
    write_run(run, load("quickstart"), tokenizer, resume=False)
    tokenizer.write_text("second")
    with pytest.raises(BadInput, match="holds a run already"):
        write_run(run, load("quickstart"), tokenizer, resume=False)
    assert (run / "tokenizer.json").read_text() == "first"
    write_run(run, load("quickstart", ["run.steps=7"]), tokenizer, resume=True)
    assert load(str(run)).run.steps == 7
    assert sorted(path.name for path in run.iterdir()) == ["config.toml", "tokenizer.json"]
