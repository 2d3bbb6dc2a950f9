"""TOML in and out: presets laid underneath, overrides on top, every error with its line."""

import json
import os.path
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from fivefold.config.errors import ConfigError, did_you_mean, flaw, shortened
from fivefold.config.explain import KeyPath, hint, key_paths, section_paths
from fivefold.config.huggingface import config_file, model_table, read_config_json, written_as
from fivefold.config.tree import Config

Table = dict[str, Any]


def load(source: str, overrides: Sequence[str] = ()) -> Config:
    """The config of a TOML file, a run directory or the run preset of that name.

    Args:
        source: path of a TOML file, of a run directory (its config.toml), or the name of a run preset.
        overrides: `section.key=value` strings; the value is TOML, or plain text where that fails.

    Raises:
        ConfigError: one line with the place (file and line, or the override) and what would be right.
    """
    sources = [_file(*_read(source)), *(_override(text) for text in overrides)]
    table: Table = {}
    for each in sources:
        _check(each, each.table)
        table = _merge(table, each.table)
    model, run = table.setdefault("model", {}), table.setdefault("run", {})
    below: list[_Source] = []
    if isinstance(preset := model.get("preset"), str) and preset:
        table["model"] = _merge(_preset_table("models", "model.preset", preset, sources), model)
    if isinstance(path := model.get("path"), str) and path and not os.path.isdir(source):
        below = [_hugging_face(path, sources)]
        table["model"] = _merge(below[0].table["model"], model)
        if os.path.isfile(tokenizer := Path(path).expanduser() / "tokenizer.json"):
            data = table.setdefault("data", {})
            data["tokenizer"] = data.get("tokenizer") or str(tokenizer)
    if not run.get("name"):
        run["name"] = _default_name(source)
    if os.path.isdir(source) and not any(each.holds(("run", "dir")) for each in sources[1:]):
        run["dir"] = source  # also when the run has been moved
    return _convert(table, [*below, *sources])


def written_keys(source: str, overrides: Sequence[str] = ()) -> frozenset[str]:
    """Keys ("section.key") that the file of `source` or the overrides write, not those left to default."""
    table: Table = {}
    for each in (_file(*_read(source)), *(_override(text) for text in overrides)):
        table = _merge(table, each.table)
    return frozenset(
        f"{section}.{key}" for section, keys in table.items() if isinstance(keys, dict) for key in keys
    )


def parse(text: str, where: str = "config") -> Config:
    """The config written in `text`, complete in itself (no presets, no derived names).

    Raises:
        ConfigError: as `load` does.
    """
    source = _file(text, where)
    _check(source, source.table)
    return _convert(source.table, [source])


def dump(config: Config) -> str:
    """`config` as TOML, every value written out, so that a later change of a default changes no past run."""
    return tomli_w.dumps(_without_none(msgspec.to_builtins(config)))


def preset_names(kind: str) -> list[str]:
    """Names of the presets of a kind: "models", "clusters" or "runs"."""
    directory = _presets(kind)
    names = [item.name for item in directory.iterdir()] if directory.is_dir() else []
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


@dataclass(frozen=True, slots=True)
class _Source:
    """Where keys were written: a file, or one override (which has no lines)."""

    table: Table
    where: str
    text: str = ""

    def holds(self, path: KeyPath) -> bool:
        node: Any = self.table
        for name in path:
            if not isinstance(node, dict) or name not in node:
                return False
            node = node[name]
        return True

    def error(self, path: KeyPath, problem: str) -> ConfigError:
        """A line about a key: where it is written (its line, or its section's), its name, and `problem`."""
        lines = _key_lines(self.text)
        above = (path[:end] for end in range(len(path), 0, -1))
        place = next((f"{self.where}:{lines[key]}" for key in above if key in lines), self.where)
        return ConfigError(f"{place}: {_shown_key(path)}{problem}")


@dataclass(frozen=True, slots=True)
class _HuggingFace(_Source):
    """The model section that a config.json describes; errors name its own keys."""

    theirs: Table = field(default_factory=dict)

    def error(self, path: KeyPath, problem: str) -> ConfigError:
        name, value = written_as(self.theirs, path[1:])
        return ConfigError(f"{self.where}: {name} = {_shown(value)}: {problem.partition(': ')[2]}")


def _origin(path: KeyPath, sources: Sequence[_Source]) -> _Source:
    """Where the value of a key comes from: the last source that gives it, else the config itself, from which it
    follows."""
    itself = next(each for each in sources if not isinstance(each, _HuggingFace))
    return next((each for each in reversed(sources) if each.holds(path)), itself)


def _key_lines(text: str) -> dict[KeyPath, int]:
    """The line on which each key of a TOML text is first written: statement by statement, with TOML's parser."""
    rows, found, section, start = text.split("\n"), dict[KeyPath, int](), KeyPath(), 0
    for end in range(1, len(rows) + 1):
        try:
            written = list(_paths(tomllib.loads("\n".join(rows[start:end]))))
        except tomllib.TOMLDecodeError:  # the statement goes on in the next line
            continue
        is_heading = rows[start].lstrip().startswith("[")
        above = KeyPath() if is_heading else section
        for path in written:
            found.setdefault(above + path, start + 1)
        section = written[-1] if is_heading else section
        start = end
    return found


def _paths(table: Table) -> Iterator[KeyPath]:
    for name, value in table.items():
        yield (name,)
        inner = value[0] if isinstance(value, list) and value else value
        if isinstance(inner, dict):
            yield from ((name, *path) for path in _paths(inner))


def _file(text: str, where: str) -> _Source:
    return _Source(_toml(text, where), where, text)


def _toml(text: str, where: str) -> Table:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also for numbers and dates that cannot be
        problem, _, place = str(error).rpartition(" (at ")
        numbers = re.findall(r"\d+", place) or [str(text.rstrip().count("\n") + 1)]
        raise ConfigError(f"{where}:{numbers[0]}: not TOML: {problem or error}") from None


def _read(source: str) -> tuple[str, str]:
    """The text of a config, and what to call it. os.path answers "no" where a path cannot even be one."""
    path = Path(source)
    if source and os.path.isdir(path):
        path = path / "config.toml"
        if not path.is_file():
            raise ConfigError(f"{source}: a directory without config.toml is not a run directory")
    if os.path.isfile(path):
        try:
            return path.read_text(encoding="utf-8-sig"), str(path)
        except UnicodeDecodeError:
            raise ConfigError(f"{path}: not a text file; a config is TOML in UTF-8") from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    presets = preset_names("runs")
    if source in presets:
        return _preset_text("runs", source), f"preset {source}"
    raise ConfigError(
        f'"{shortened(source)}": no such file, run directory or run preset; {did_you_mean(source, presets)}'
    )


def _presets(kind: str) -> Traversable:
    return files("fivefold") / "presets" / kind


def _preset_text(kind: str, name: str) -> str:
    return (_presets(kind) / f"{name}.toml").read_text(encoding="utf-8")


def _preset_table(kind: str, key: str, name: str, sources: Sequence[_Source]) -> Table:
    names = preset_names(kind)
    if name not in names:
        path = tuple(key.split("."))
        problem = f" = {_shown(name)}: unknown preset; {did_you_mean(name, names)}"
        raise _origin(path, sources).error(path, problem)
    return tomllib.loads(_preset_text(kind, name))


def _hugging_face(path: str, sources: Sequence[_Source]) -> _Source:
    """The model section that a Hugging Face model describes. The config of a run holds it already."""
    key = ("model", "path")
    if any(each.table.get("model", {}).get("preset") for each in sources):
        raise _origin(key, sources).error(
            key, f" = {_shown(path)}: model.preset is given, too; give one of the two"
        )
    try:
        theirs = read_config_json(path)
        return _HuggingFace({"model": model_table(theirs)}, str(config_file(path)), theirs=theirs)
    except ConfigError as error:
        raise _origin(key, sources).error(key, f" = {_shown(path)}: {error}") from None


def _default_name(source: str) -> str:
    path = Path(source)
    name = path.resolve().name if path.is_dir() else path.name.removesuffix(".toml")
    return name.lstrip(".") or "run"


def _override(text: str) -> _Source:
    where = f"--set {shortened(text)}"
    key, _, written = text.partition("=")
    names = [name.strip() for name in key.split(".")]
    if "=" not in text or len(names) < 2 or not all(names):
        raise ConfigError(f'{where}: expected section.key=value, e.g. "run.steps=10"')
    table: Any = _value(tuple(names), written)
    for name in reversed(names):
        table = {name: table}
    return _Source(table, where)


def _value(path: KeyPath, written: str) -> Any:
    """What an override gives: one TOML value, else plain text; a key of text reads 2026-01-01 as text, too."""
    try:
        table = tomllib.loads(f"value = {written}")
    except (ValueError, RecursionError):
        return written.strip()
    known, value = key_paths().get(path), table["value"]
    is_text = len(table) > 1 or (known and isinstance(known.default, str) and not isinstance(value, str))
    return written.strip() if is_text else value


def _check(source: _Source, node: Table, above: KeyPath = ()) -> None:
    """Refuses keys that do not exist and values that no key can have."""
    for name, value in node.items():
        path = (*above, name)
        if path in section_paths():
            if not isinstance(value, dict):
                raise source.error(path, f": a section, not a value; give its keys, e.g. {_first_key(path)}")
            _check(source, value, path)
        elif path not in key_paths():
            raise source.error(path, f": unknown key; {hint(path)}")
        elif problem := flaw(value):
            raise source.error(path, f" = {_shown(value)}: {problem}")


def _first_key(section: KeyPath) -> str:
    return next(item.key for path, item in key_paths().items() if path[: len(section)] == section)


def _convert(table: Table, sources: Sequence[_Source]) -> Config:
    try:
        return msgspec.convert(table, Config)
    except msgspec.ValidationError as error:
        problem, _, at = str(error).partition(" - at `$.")
        path = tuple(at.rstrip("`").partition("[")[0].split("."))  # the key of a list, not a place in it
    value: Any = table
    for name in path:
        value = value[name]
    known = key_paths().get(path)
    raise _origin(path, sources).error(
        path, f" = {_shown(value)}: expected {known.type if known else problem}"
    )


def _shown_key(path: KeyPath) -> str:
    return ".".join(name if re.fullmatch(r"[\w-]+", name) else _shown(name) for name in path)


def _shown(value: Any) -> str:
    return "{…}" if isinstance(value, dict) else shortened(json.dumps(value, ensure_ascii=False, default=str))


def _merge(base: Table, over: Table) -> Table:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _without_none(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _without_none(value) for key, value in node.items() if value is not None}
    return list(node) if isinstance(node, tuple) else node
