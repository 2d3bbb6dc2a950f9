"""A Hugging Face config.json as the model section of a config, and back."""

import json
import os.path
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from fivefold.config.errors import ConfigError, did_you_mean, flaw, shortened
from fivefold.config.explain import KeyPath, key_paths
from fivefold.config.families import FAMILIES, REQUIRED, Family, Key, Table
from fivefold.config.model import Experts, Model

CONFIG_JSON = "config.json"
_ROPE_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_context": "original_max_position_embeddings",
}
"""Keys of `tree.RopeScaling`, and theirs."""


def config_file(path: str | Path) -> Path:
    """The config.json that `path` is, or that is in the directory `path`."""
    file = Path(path).expanduser()
    return file / CONFIG_JSON if os.path.isdir(file) else file


def read_config_json(path: str | Path) -> Table:
    """The content of `config_file(path)`.

    Raises:
        ConfigError: in one line: there is none, or it is not JSON, or of a family that is not known.
    """
    file = config_file(path)
    try:
        theirs = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # ValueError also of text that is not UTF-8
        raise ConfigError(f"{file}: not JSON: {error}") from None
    if not isinstance(theirs, dict) or not isinstance(theirs.get("model_type"), str):
        raise ConfigError(f'{file}: no Hugging Face config.json (it has no "model_type")')
    if theirs["model_type"] not in FAMILIES:
        known = did_you_mean(theirs["model_type"], FAMILIES)
        raise ConfigError(f"{file}: model_type {_shown(theirs['model_type'])} is not known here; {known}")
    return theirs


def model_table(theirs: Table) -> Table:
    """The model section that a config.json describes, as `config.load` merges it.

    Raises:
        ConfigError: a key is missing, or says something that the decoder does not compute.
    """
    family = FAMILIES[theirs["model_type"]]
    if problem := next(_not_computed(theirs, family), None):
        raise ConfigError(f'config.json of a "{theirs["model_type"]}": {problem}')
    found: Table = {}
    said = {key.ours: _value(theirs, key) for key in family.keys}
    for ours, value in (family.implied | said).items():
        section, _, name = ours.rpartition(".")
        (found.setdefault(section, {}) if section else found)[name] = value
    if family.rope_theta:
        found |= _rotary(theirs, family)
    return found


def read_model(path: str | Path) -> Model:
    """The model that a config.json, or the one in a directory, describes.

    Raises:
        ConfigError: as `read_config_json` and `model_table` do, or a value is of the wrong type.
    """
    theirs = read_config_json(path)
    try:
        table = model_table(theirs)
    except ConfigError as error:
        raise ConfigError(f"{config_file(path)}: {error}") from None
    try:
        return msgspec.convert(table, Model)
    except msgspec.ValidationError as error:
        ours = tuple(str(error).partition(" - at `$.")[2].rstrip("`").split("."))
        name, value = written_as(theirs, ours)
        expected = key_paths()["model", *ours].type
        raise ConfigError(f"{config_file(path)}: {name} = {_shown(value)}: expected {expected}") from None


def written_as(theirs: Table, ours: KeyPath) -> tuple[str, Any]:
    """The key of a config.json that says what `ours`, a key of the model section, says; and its value."""
    rope = _rope(theirs)
    scaling = _ROPE_SCALING.get(ours[-1], "") if ours[0] == "rope_scaling" else ours[0]
    if scaling in rope:
        return scaling, rope[scaling]
    names = next(
        (key.theirs for key in FAMILIES[theirs["model_type"]].keys if key.ours == ".".join(ours)), ours[-1:]
    )
    name = next((name for name in names if theirs.get(name) is not None), names[0])
    return name, theirs.get(name)


def config_json(model: Model) -> Table | None:
    """The config.json of the first family that computes exactly `model`; None where none does."""
    for model_type, family in FAMILIES.items():
        theirs = _written(model, model_type, family)
        try:
            again = msgspec.convert(model_table(theirs), Model)
        except (ConfigError, msgspec.ValidationError):
            continue
        if _computed(again) == _computed(model):
            return theirs
    return None


def nearest_architecture(model: Model) -> str:
    """The family that differs from `model` in fewest keys, and which they are, where `config_json` finds none."""
    ours, found = _flat(_computed(model)), dict[str, list[str]]()
    for model_type, family in FAMILIES.items():
        try:
            theirs = _flat(
                _computed(msgspec.convert(model_table(_written(model, model_type, family)), Model))
            )
        except (ConfigError, msgspec.ValidationError):
            continue
        found[family.architecture] = [
            f"model.{key} = {json.dumps(value)}" for key, value in ours.items() if theirs.get(key) != value
        ]
    name = min(found, key=lambda name: len(found[name]))
    return f"{name} comes nearest, but not with {', '.join(found[name])}"


def _flat(model: Model) -> Table:
    """Values by key; those of a section as "section.key"."""
    found: Table = {}
    for name, value in msgspec.to_builtins(model).items():
        found |= (
            {f"{name}.{key}": inner for key, inner in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
    return found


def _not_computed(theirs: Table, family: Family) -> Iterator[str]:
    for name, value in _read(theirs, family):
        if problem := flaw(value):
            yield f"{name} = {_shown(value)}: {problem}"
    for name, values in family.accepted.items():
        if name in theirs and theirs[name] not in values:
            yield _refusal(name, theirs[name], [json.dumps(value) for value in values])
    for one, other in family.alike:
        if bool(theirs.get(one)) != bool(theirs.get(other)):
            yield _refusal(one, theirs.get(one, False), [json.dumps(bool(theirs.get(other)))])
    for key in family.keys:
        given = [name for name in key.theirs if theirs.get(name) is not None]
        if not given and key.default is REQUIRED:
            yield f"{key.theirs[0]} is missing"
        for name in given:
            if key.values and str(theirs[name]) not in key.values:
                yield _refusal(name, theirs[name], key.values)
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(theirs.get(name) or {}, dict):
            yield f"{name} = {_shown(theirs[name])}: expected an object"
            return
    rope_type = _rope(theirs)["rope_type"]
    if family.rope_theta and rope_type not in family.rope_types:
        yield _refusal("rope_type", rope_type, family.rope_types)


def _refusal(name: str, value: Any, computed: Iterable[str]) -> str:
    return f"{name} = {_shown(value)}: not computed here; expected {' or '.join(computed)}"


def _shown(value: Any) -> str:
    return shortened(json.dumps(value))


def _read(theirs: Table, family: Family) -> Iterator[tuple[str, Any]]:
    """The keys that a family's model follows from, and what the file says of them."""
    tables = [(theirs, [name for key in family.keys for name in key.theirs])]
    if family.rope_theta:
        tables.append((theirs, ["rope_theta"]))
        own = (theirs.get("rope_parameters"), theirs.get("rope_scaling"))
        tables += [(rope, ["rope_theta", *_ROPE_SCALING.values()]) for rope in own if isinstance(rope, dict)]
    for table, names in tables:
        yield from ((name, table[name]) for name in names if table.get(name) is not None)


class _Sizes(Table):
    """A config.json from which other sizes follow: what is read must be one."""

    def __getitem__(self, name: str) -> int:
        size = super().__getitem__(name)
        if type(size) is not int or size < 0:
            raise ConfigError(f"{name} = {_shown(size)}: expected a whole number ≥ 0")
        return size


def _value(theirs: Table, key: Key) -> Any:
    for name in key.theirs:
        if theirs.get(name) is not None:
            return key.values.get(theirs[name], theirs[name]) if key.values else theirs[name]
    if not callable(key.default):
        return key.default
    try:
        found = key.default(_Sizes((name, value) for name, value in theirs.items() if value is not None))
    except KeyError:
        raise ConfigError(f"{key.theirs[0]} is missing, and does not follow from the other sizes") from None
    if problem := flaw(found):
        raise ConfigError(f"{key.theirs[0]} follows from the other sizes as {_shown(found)}: {problem}")
    return found


def _rope(theirs: Table) -> Table:
    """`rope_parameters`, which older files call `rope_scaling` (and its `rope_type` only `type`)."""
    found = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    return {"rope_type": found.get("type", "default"), **found}


def _rotary(theirs: Table, family: Family) -> Table:
    rope = _rope(theirs)
    said = (rope.get("rope_theta"), theirs.get("rope_theta"))
    theta = next((value for value in said if value is not None), family.rope_theta)
    if rope["rope_type"] != "llama3":
        return {"rope_theta": theta}
    return {
        "rope_theta": theta,
        "rope_scaling": {ours: rope[name] for ours, name in _ROPE_SCALING.items() if name in rope},
    }


def _written(model: Model, model_type: str, family: Family) -> Table:
    """What config.json says of `model` if it is of this family."""
    ours = msgspec.to_builtins(model)
    theirs: Table = {"architectures": [family.architecture], "model_type": model_type}
    for key in family.keys:
        section, _, name = key.ours.rpartition(".")
        value = (ours[section] if section else ours)[name]
        theirs[key.theirs[0]] = next((word for word, means in key.values.items() if means == value), value)
    if family.rope_theta:
        theirs["rope_theta"] = model.rope_theta
        if scaling := ours["rope_scaling"]:
            written = {name: scaling[key] for key, name in _ROPE_SCALING.items()}
            theirs["rope_scaling"] = {"rope_type": "llama3", **written}
    return theirs


def _computed(model: Model) -> Model:
    """`model` without what does not change its logits."""
    experts = model.experts
    if not experts.count:
        experts = Experts()
    elif not experts.router_bias:
        experts = replace(experts, bias_update_rate=0.0)
    dense = not experts.count or experts.dense_layers > 0
    rotary = model.positions == "rotary"
    return replace(
        model,
        preset="",
        path="",
        ffn=model.ffn if dense else 0,
        experts=experts,
        rope_theta=model.rope_theta if rotary else 1.0,
        rope_scaling=model.rope_scaling if rotary else None,
        dropout=0.0,
    )
