"""Every key with its type, default and meaning, read off the config tree itself."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from fivefold.config.errors import did_you_mean
from fivefold.config.tree import Config

KeyPath = tuple[str, ...]
"""A key or section by the names that lead to it: ("model", "experts", "count")."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of the config tree."""

    key: str
    type: str
    default: Any
    description: str


@cache
def entries() -> tuple[Entry, ...]:
    """All keys, in the order of the tree."""
    return tuple(_walk(Config, ""))


@cache
def sections() -> dict[str, str]:
    """Each section's name with the first line of its documentation."""
    return {name: (section.__doc__ or "").strip() for name, section in _sections(Config, "")}


@cache
def key_paths() -> dict[KeyPath, Entry]:
    """The entry of every key."""
    return {tuple(item.key.split(".")): item for item in entries()}


@cache
def section_paths() -> frozenset[KeyPath]:
    """All sections."""
    return frozenset(tuple(name.split(".")) for name in sections())


def hint(path: KeyPath) -> str:
    """What was probably meant by a key that does not exist; ends an error line."""
    known = key_paths().keys() | section_paths()
    if elsewhere := sorted(".".join(other) for other in known if other[-1] == path[-1]):
        return "did you mean " + " or ".join(f'"{other}"' for other in elsewhere) + "?"
    *section, name = next(path[:end] for end in range(1, len(path) + 1) if path[:end] not in known)
    return did_you_mean(name, {other[-1] for other in known if list(other[:-1]) == section})


def _walk(struct: type[msgspec.Struct], prefix: str) -> Iterator[Entry]:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        key = f"{prefix}{field.name}"
        node, description = _unwrap(field.type)
        nested = _struct(node)
        if nested is not None:
            yield from _walk(nested, key + ".")
        else:
            yield Entry(key, _type_text(field.type), field.default, description)


def _sections(struct: type[msgspec.Struct], prefix: str) -> Iterator[tuple[str, type[msgspec.Struct]]]:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        nested = _struct(_unwrap(field.type)[0])
        if nested is not None:
            yield f"{prefix}{field.name}", nested
            yield from _sections(nested, f"{prefix}{field.name}.")


def _unwrap(node: inspect.Type) -> tuple[inspect.Type, str]:
    if isinstance(node, inspect.Metadata):
        return node.type, str((node.extra_json_schema or {}).get("description", ""))
    return node, ""


def _struct(node: inspect.Type) -> type[msgspec.Struct] | None:
    if isinstance(node, inspect.UnionType):
        return next((found for found in map(_struct, node.types) if found), None)
    return node.cls if isinstance(node, inspect.StructType) else None


def _type_text(node: inspect.Type) -> str:
    if isinstance(node, inspect.Metadata):
        return str((node.extra_json_schema or {}).get("title", "")) or _type_text(node.type)
    if isinstance(node, inspect.LiteralType):
        return "one of " + ", ".join(msgspec.json.encode(value).decode() for value in node.values)
    if isinstance(node, inspect.IntType | inspect.FloatType):
        noun = "a whole number" if isinstance(node, inspect.IntType) else "a number"
        bounds = [
            f"{sign} {bound}"
            for sign, bound in (("≥", node.ge), (">", node.gt), ("≤", node.le), ("<", node.lt))
            if bound is not None
        ]
        return " ".join([noun, " and ".join(bounds)]).strip()
    if isinstance(node, inspect.BoolType):
        return "true or false"
    if isinstance(node, inspect.StrType):
        return "text, not empty" if node.min_length else "text"
    if isinstance(node, inspect.TupleType):
        return f"a list of {len(node.item_types)} ({', '.join(map(_type_text, node.item_types))})"
    if isinstance(node, inspect.VarTupleType) and isinstance(node.item_type, inspect.StructType):
        keys = (f"{field.name}: {_type_text(field.type)}" for field in node.item_type.fields)
        return f"a list of tables ({'; '.join(keys)})"
    if isinstance(node, inspect.VarTupleType):
        return f"a list, each {_type_text(node.item_type)}"
    return type(node).__name__
