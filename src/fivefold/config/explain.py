"""Every key with its type, default and meaning, read off the config tree itself."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from fivefold.config.tree import Config


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


def entry(key: str) -> Entry | None:
    """The entry of one key, or None."""
    return next((item for item in entries() if item.key == key), None)


@cache
def sections() -> dict[str, str]:
    """Each section's name with the first line of its documentation."""
    return {name: (section.__doc__ or "").strip() for name, section in _sections(Config, "")}


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
            yield Entry(key, _type_text(node), field.default, description)


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
    node = _unwrap(node)[0]
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
        return "text"
    if isinstance(node, inspect.TupleType):
        return f"a list of {len(node.item_types)} ({', '.join(map(_type_text, node.item_types))})"
    if isinstance(node, inspect.VarTupleType):
        return f"a list, each {_type_text(node.item_type)}"
    return type(node).__name__
