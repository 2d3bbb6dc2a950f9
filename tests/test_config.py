"""The config tree in and out of TOML: round trips, presets, overrides, run directories; what explains it; its speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from fivefold.cli.main import main
from fivefold.config import load as loading
from fivefold.config.errors import ConfigError
from fivefold.config.explain import entries, key_paths, section_paths, sections
from fivefold.config.load import dump, load, parse, preset_names
from fivefold.config.tree import Config
from fivefold.spec.legal import resolve_config

PATIENT = settings(deadline=None, max_examples=60)  # the machine may be busy
REFERENCE = Path(__file__).parents[1] / "docs" / "reference.md"
TEXT = st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=20)


def values(node: inspect.Type) -> st.SearchStrategy[Any]:
    """Legal values of a key's type."""
    if isinstance(node, inspect.Metadata):
        return values(node.type)
    if isinstance(node, inspect.IntType):
        most = (1 << 63) - 1 if node.le is None else node.le
        return st.integers(-(1 << 63) if node.ge is None else node.ge, most)
    if isinstance(node, inspect.FloatType):
        low, high = (node.gt if node.ge is None else node.ge), (node.lt if node.le is None else node.le)
        return st.floats(
            low,
            high,
            allow_nan=False,
            allow_infinity=False,
            exclude_min=node.gt is not None,
            exclude_max=node.lt is not None,
        )
    if isinstance(node, inspect.StrType):
        return (
            st.sampled_from(["tiny", "two words", "Läufe", "2026-01-01"])
            if node.pattern
            else TEXT.map("a".__add__)
        )
    if isinstance(node, inspect.LiteralType):
        return st.sampled_from(node.values)
    if isinstance(node, inspect.BoolType):
        return st.booleans()
    if isinstance(node, inspect.StructType):
        return st.fixed_dictionaries({field.name: values(field.type) for field in node.fields})
    if isinstance(node, inspect.VarTupleType):
        return st.lists(values(node.item_type), max_size=3)
    assert isinstance(node, inspect.TupleType)
    return st.tuples(*map(values, node.item_types)).map(list)


def key_types(
    struct: type[msgspec.Struct], above: tuple[str, ...] = ()
) -> dict[tuple[str, ...], inspect.Type]:
    """The type of every key below a section."""
    found: dict[tuple[str, ...], inspect.Type] = {}
    for field in inspect.type_info(struct).fields:  # type: ignore[union-attr]
        path = (*above, field.name)
        node = field.type.type if isinstance(field.type, inspect.Metadata) else field.type
        options = node.types if isinstance(node, inspect.UnionType) else (node,)
        nested = [option.cls for option in options if isinstance(option, inspect.StructType)]
        found |= key_types(nested[0], path) if nested else {path: field.type}
    return found


KEY_TYPES = key_types(Config)
SETTINGS = st.lists(
    st.sampled_from(sorted(KEY_TYPES)).flatmap(
        lambda path: values(KEY_TYPES[path]).map(lambda value: (path, value))
    ),
    max_size=8,
)


def table(pairs: list[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    """The nested table that gives each key its value; the last one counts."""
    whole: dict[str, Any] = {}
    for path, value in pairs:
        node = whole
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = value
    return whole


@PATIENT
@given(pairs=SETTINGS)
def test_a_dumped_config_is_read_back_the_same(pairs: list[tuple[tuple[str, ...], Any]]) -> None:
    config = msgspec.convert(table(pairs), Config)
    text = dump(config)
    assert parse(text) == config
    assert dump(parse(text)) == text


MADE_ELSEWHERE = (("model", "preset"), ("model", "path"))  # what they name would have to exist


@PATIENT
@given(pairs=SETTINGS)
def test_loading_a_file_and_a_dump_of_it_agree(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[tuple[str, ...], Any]]
) -> None:
    pairs = [pair for pair in pairs if pair[0] not in MADE_ELSEWHERE]
    file = tmp_path_factory.getbasetemp() / "any.toml"
    file.write_text(dump(msgspec.convert(table(pairs), Config)), encoding="utf-8")
    config = load(str(file))
    file.write_text(dump(config), encoding="utf-8")
    assert load(str(file)) == config


@PATIENT
@given(pairs=SETTINGS)
def test_overrides_say_the_same_as_a_file(pairs: list[tuple[tuple[str, ...], Any]]) -> None:
    pairs = [pair for pair in pairs if pair[0] not in MADE_ELSEWHERE]
    overrides = [f"{'.'.join(path)}={toml(value)}" for path, value in pairs]
    expected = msgspec.convert(table([(("run", "name"), "quickstart"), *quickstart(), *pairs]), Config)
    assert load("quickstart", overrides) == expected


def toml(value: Any) -> str:
    """A value in one line of TOML, whose lists may hold tables."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return f"[{', '.join(map(toml, value))}]"
    return json.dumps(value, ensure_ascii=False)


def quickstart() -> list[tuple[tuple[str, ...], Any]]:
    text = (Path(loading.__file__).parents[1] / "presets" / "runs" / "quickstart.toml").read_text()
    return [
        ((section, name), value)
        for section, keys in tomllib.loads(text).items()
        for name, value in keys.items()
    ]


def test_a_dump_names_every_key_that_has_a_value() -> None:
    def paths(node: dict[str, Any], above: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
        found: set[tuple[str, ...]] = set()
        for name, value in node.items():
            path = (*above, name)
            found |= paths(value, path) if isinstance(value, dict) else {path}
        return found

    absent = {path for path in key_paths() if path[:2] == ("model", "rope_scaling")}
    assert paths(tomllib.loads(dump(Config()))) == key_paths().keys() - absent
    scaled = msgspec.convert({"model": {"rope_scaling": {"factor": 2.0}}}, Config)
    assert paths(tomllib.loads(dump(scaled))) == key_paths().keys()


def test_every_run_preset_loads_and_is_legal() -> None:
    assert "quickstart" in preset_names("runs")
    for name in preset_names("runs"):
        config = load(name)
        assert config.run.name == name
        resolve_config(config)


def test_every_model_preset_loads() -> None:
    for name in preset_names("models"):
        assert load("quickstart", [f"model.preset={name}"]).model.preset == name


@pytest.fixture
def presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose presets are those that a test writes."""
    monkeypatch.setattr(loading, "files", lambda package: tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "presets" / "models").mkdir(parents=True)
    (tmp_path / "presets" / "models" / "v1.5-moe.toml").write_text(
        "layers = 6\nhidden = 96\nheads = 6\n[experts]\ncount = 8\nffn = 32\ntop_k = 3\n"
    )
    return tmp_path


def test_a_preset_lies_under_the_keys_of_the_file_and_those_under_the_overrides(presets: Path) -> None:
    (presets / "a.toml").write_text('[model]\npreset = "v1.5-moe"\nlayers = 2\n[model.experts]\nffn = 16\n')
    model = load("a.toml", ["model.heads=12", "model.experts.count=4"]).model
    assert (model.layers, model.hidden, model.heads) == (2, 96, 12)
    assert (model.experts.count, model.experts.ffn, model.experts.top_k) == (4, 16, 3)
    assert (model.kv_heads, model.head_dim) == (12, 8)  # derived last, from what was merged


def test_a_preset_may_be_chosen_by_an_override(presets: Path) -> None:
    (presets / "a.toml").write_text("")
    assert load("a.toml", ["model.preset=v1.5-moe"]).model.experts.count == 8
    assert preset_names("models") == ["v1.5-moe"]
    assert preset_names("runs") == []  # no such directory
    with pytest.raises(
        ConfigError, match=r'model\.preset = "v1\.5": unknown preset; did you mean "v1\.5-moe"\?$'
    ):
        load("a.toml", ["model.preset=v1.5"])


def test_a_config_of_a_preset_is_complete_in_itself(presets: Path) -> None:
    (presets / "a.toml").write_text('[model]\npreset = "v1.5-moe"\n')
    config = load("a.toml")
    assert parse(dump(config)) == config
    (presets / "presets" / "models" / "v1.5-moe.toml").write_text("layers = 1\n")
    (presets / "b.toml").write_text(dump(config))
    assert load("b.toml") == config  # a preset that changes changes no past run


def test_values_of_overrides(tmp_path: Path) -> None:
    file = tmp_path / "my run.toml"
    file.write_text('[run]\nsteps = 5\n[optimizer]\nname = "sgd"\n')
    config = load(
        str(file),
        [
            "run.steps = 7 ",
            "run.steps=0x10",
            "optimizer.lr=1e-2",
            "optimizer.betas=[0.8, 0.9]",
            "precision.dtype=bf16",
            "data.path=a b/c=d # e",
            "data.tokenizer='x y'",
            "run.dir=2026-01-01",
            "model.experts={count=4, ffn=8}",
            "checkpoint.asynchronous=false",
            "log.sinks=[]",
        ],
    )
    assert (config.run.steps, config.run.name, config.run.dir) == (16, "my run", "2026-01-01")
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.betas) == ("sgd", 0.01, (0.8, 0.9))
    assert (config.data.path, config.data.tokenizer) == ("a b/c=d # e", "x y")
    assert (config.model.experts.count, config.model.experts.ffn) == (4, 8)
    assert config.precision.dtype == "bf16"
    assert not config.checkpoint.asynchronous
    assert config.log.sinks == ()


def test_a_run_directory_is_its_config_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    (old / "config.toml").write_text(dump(load("quickstart", [f"run.dir={old}", "run.name=mine"])))
    assert load(str(old)).run.dir == str(old)
    old.rename(new)
    moved = load(str(new), ["run.steps=9"])
    assert (moved.run.dir, moved.run.name, moved.run.steps) == (str(new), "mine", 9)
    monkeypatch.chdir(new)
    assert load(".").run.dir == "."
    assert load(str(new), ["run.dir=other"]).run.dir == "other"  # the same once more, elsewhere


@pytest.mark.parametrize(
    ("source", "name"),
    [("a.toml", "a"), ("v1.5.toml", "v1.5"), ("notes", "notes"), (".toml", "run"), ("..toml", "run")],
)
def test_a_run_is_named_after_its_file(
    source: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / source).write_text("")
    assert load(source).run.name == name


def test_a_broken_config_of_a_checkpoint_is_refused_as_a_file_is() -> None:
    with pytest.raises(ConfigError, match=r"^step-3:2: not TOML"):
        parse("[model]\nlayers", "step-3")
    with pytest.raises(ConfigError, match=r"^step-3:2: model\.layers = 0"):
        parse("[model]\nlayers = 0", "step-3")


def test_every_key_and_section_is_explained() -> None:
    assert set(key_paths()) == set(KEY_TYPES)
    for item in entries():
        assert item.description.endswith("."), item.key
        assert item.type, item.key
    for name, text in sections().items():
        assert text.endswith("."), name
        assert "\n" not in text, name


def test_every_default_is_legal() -> None:
    """Defaults are not validated by msgspec; writing each out and reading it back does."""
    assert parse(dump(Config())) == Config()


@pytest.mark.parametrize("key", ["", "model", "model.experts", "parallel.zero"])
def test_explain(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [key] if key else []
    expected = [item for item in entries() if f"{item.key}.".startswith(f"{key}." if key else "")]
    assert main(["config", "explain", *words]) == 0
    text = capsys.readouterr().out
    assert all(f"{item.key} = " in text and item.description in text for item in expected)
    assert text.count("\n    ") == len(expected)
    if tuple(key.split(".")) in section_paths():
        assert text.startswith(sections()[key])
    assert main(["config", "explain", *words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["key"] for row in rows] == [item.key for item in expected]


def test_the_reference_page_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "reference"]) == 0
    printed = capsys.readouterr().out
    assert REFERENCE.read_text(encoding="utf-8") == printed, (
        "run: fivefold config reference > docs/reference.md"
    )
    for item in entries():
        assert item.description in printed
    for name in sections():
        assert f"## [{name}]" in printed


def test_show_prints_what_loads_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "quickstart", "--set", "run.steps=7"]) == 0
    assert parse(capsys.readouterr().out) == load("quickstart", ["run.steps=7"])


def test_check_and_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "quickstart"]) == 0
    checked = capsys.readouterr().out
    assert "dp_replicate 2 (2 ranks), zero 0" in checked
    assert "accumulation 1 = global batch 16 / (micro-batch 8 × data-parallel 2); 4,096 tokens" in checked
    assert main(["config", "check", "quickstart", "--ranks", "1", "--set", "parallel.dp_replicate=1"]) == 0
    assert "layout: one rank, zero 0" in capsys.readouterr().out
    assert main(["config", "presets"]) == 0
    assert "quickstart" in capsys.readouterr().out


QUICK = [["--help"], ["config", "explain"], ["config", "check", "quickstart"], ["train", "--help"]]


@pytest.mark.parametrize("words", QUICK, ids=" ".join)
def test_quick_commands_take_less_than_half_a_second(words: list[str]) -> None:
    """CPU time of the whole process, which a busy machine does not change; the best of three."""
    assert min(cpu_seconds(words) for _ in range(3)) < 0.5


def cpu_seconds(words: list[str]) -> float:
    process = subprocess.Popen([sys.executable, "-m", "fivefold", *words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("words", QUICK, ids=" ".join)
def test_quick_commands_import_nothing_heavy(words: list[str]) -> None:
    program = (
        "import sys\nfrom fivefold.cli.main import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "print(*{'torch', 'numpy', 'rich', 'tokenizers'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60)
    assert done.stdout
    assert done.stderr == "\n"
