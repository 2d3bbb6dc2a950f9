"""TOML in and out: presets laid underneath, overrides on top, every error with its line."""

import re
import tomllib
from collections.abc import Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from fivefold.config.errors import ConfigError, did_you_mean
from fivefold.config.explain import entries, entry
from fivefold.config.tree import Config

Table = dict[str, Any]


def load(source: str, overrides: Sequence[str] = ()) -> Config:
    """The config of a TOML file, a run directory or the run preset of that name.

    Args:
        source: path of a TOML file, of a run directory (its config.toml), or the name of a run preset.
        overrides: `section.key=value` strings; the value is TOML, or plain text where TOML fails.

    Raises:
        ConfigError: one line with the place (file and line, or the override) and what would be right.
    """
    text, where = _read(source)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not TOML: {error}") from None
    places = _Places(where, text)
    for override in overrides:
        _apply_override(table, override, places)
    _check_keys(table, places)
    name = table.get("model", {}).get("preset", "")
    if isinstance(name, str) and name:
        table["model"] = _merge(_preset_table("models", name, places), table["model"])
    run = table.setdefault("run", {})
    if not run.get("name"):
        run["name"] = _default_name(source)
    if Path(source).is_dir():
        run["dir"] = source  # also when the run has been moved
    return _convert(table, places)


def written_keys(source: str, overrides: Sequence[str] = ()) -> frozenset[str]:
    """Keys ("section.key") that the file of `source` or the overrides write, as against those left to default."""
    text, where = _read(source)
    table = tomllib.loads(text)
    for override in overrides:
        _apply_override(table, override, _Places(where, text))
    return frozenset(
        f"{section}.{key}" for section, keys in table.items() if isinstance(keys, dict) for key in keys
    )


def parse(text: str, where: str = "config") -> Config:
    """The config written in `text`, complete in itself (no presets, no derived names)."""
    return _convert(tomllib.loads(text), _Places(where, text))


def dump(config: Config) -> str:
    """`config` as TOML, every value written out, so that a later change of a default changes no past run."""
    return tomli_w.dumps(_without_none(msgspec.to_builtins(config)))


def preset_names(kind: str) -> list[str]:
    """Names of the presets of a kind: "models", "clusters" or "runs"."""
    return sorted(
        item.name.removesuffix(".toml") for item in _presets(kind).iterdir() if item.name.endswith(".toml")
    )


class _Places:
    """Where each key was written, for error lines."""

    def __init__(self, where: str, text: str) -> None:
        self.where = where
        self.lines = _key_lines(text)
        self.overrides: dict[str, str] = {}

    def of(self, key: str) -> str:
        for written, override in self.overrides.items():
            if key == written or key.startswith(written + "."):
                return f"--set {override}"
        while key:
            if key in self.lines:
                return f"{self.where}:{self.lines[key]}"
            key = key.rpartition(".")[0]
        return self.where


def _key_lines(text: str) -> dict[str, int]:
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if heading := re.match(r"\s*\[\s*([^\[\]]+?)\s*\]", line):
            table = heading[1]
            lines.setdefault(table, number)
        elif assignment := re.match(r"""\s*([\w."'-]+?)\s*=""", line):
            key = assignment[1].replace('"', "").replace("'", "")
            lines.setdefault(f"{table}.{key}" if table else key, number)
    return lines


def _read(source: str) -> tuple[str, str]:
    path = Path(source)
    if path.is_dir():
        path = path / "config.toml"
        if not path.is_file():
            raise ConfigError(f"{source}: a directory without config.toml is not a run directory")
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8"), str(path)
        except UnicodeDecodeError:
            raise ConfigError(f"{path}: not a text file; a config is TOML in UTF-8") from None
    presets = preset_names("runs")
    if source in presets:
        return (_presets("runs") / f"{source}.toml").read_text(encoding="utf-8"), f"preset {source}"
    raise ConfigError(f"{source}: no such file, run directory or run preset; {did_you_mean(source, presets)}")


def _presets(kind: str) -> Traversable:
    return files("fivefold") / "presets" / kind


def _preset_table(kind: str, name: str, places: _Places) -> Table:
    names = preset_names(kind)
    if name not in names:
        key = {"models": "model.preset", "clusters": "cluster.preset"}[kind]
        raise ConfigError(f'{places.of(key)}: {key} = "{name}": unknown preset; {did_you_mean(name, names)}')
    return tomllib.loads((_presets(kind) / f"{name}.toml").read_text(encoding="utf-8"))


def _default_name(source: str) -> str:
    path = Path(source)
    return path.name if path.is_dir() else path.name.removesuffix(".toml")


def _apply_override(table: Table, override: str, places: _Places) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or "." not in key:
        raise ConfigError(f'--set {override}: expected section.key=value, e.g. "run.steps=10"')
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    *parents, leaf = key.split(".")
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(f'--set {override}: "{parent}" is a key, not a section')
    table[leaf] = value
    places.overrides[key] = override


def _check_keys(table: Table, places: _Places) -> None:
    known = {item.key for item in entries()}
    sections = {part for key in known for part in _prefixes(key)}

    def walk(node: Table, prefix: str) -> None:
        for name, value in node.items():
            key = f"{prefix}.{name}" if prefix else name
            if key in sections:
                if not isinstance(value, dict):
                    raise ConfigError(f"{places.of(key)}: {key} is a section: write [{key}]")
                walk(value, key)
            elif key not in known:
                raise ConfigError(f"{places.of(key)}: {key}: unknown key; {_key_hint(key, known, sections)}")

    walk(table, "")


def _prefixes(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _key_hint(key: str, known: set[str], sections: set[str]) -> str:
    section, _, name = key.rpartition(".")
    if section not in sections and section:
        return did_you_mean(section, sections)
    siblings = {item.removeprefix(section + ".") for item in known if item.rpartition(".")[0] == section}
    elsewhere = sorted(item for item in known if item.rpartition(".")[2] == name)
    if elsewhere:
        return f'did you mean "{elsewhere[0]}"?'
    return did_you_mean(name, siblings or sections)


def _convert(table: Table, places: _Places) -> Config:
    try:
        return msgspec.convert(table, Config)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        key = re.sub(r"\[.*\]", "", path.strip("`.")).strip(".")
        raise ConfigError(_type_error(key, problem, table, places)) from None


def _type_error(key: str, problem: str, table: Table, places: _Places) -> str:
    value: Any = table
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else value
    wanted = entry(key)
    shown = msgspec.json.encode(value).decode() if not isinstance(value, dict) else "{…}"
    return f"{places.of(key)}: {key} = {shown}: expected {wanted.type if wanted else problem}"


def _merge(base: Table, over: Table) -> Table:
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def _without_none(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _without_none(value) for key, value in node.items() if value is not None}
    return list(node) if isinstance(node, tuple) else node
