"""Arguments that commands share."""

import argparse
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import TypeVar

from fivefold.config.errors import shortened

N = TypeVar("N", int, float)


def add_config_arguments(parser: argparse.ArgumentParser, what: str = "CONFIG") -> None:
    """CONFIG, --set and --debug."""
    parser.add_argument(
        "config", metavar=what, help="a TOML file, a run directory, or the name of a run preset"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        dest="overrides",
        help="override one key; may be given any number of times",
    )
    add_debug_argument(parser)


def add_debug_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")


def whole_number(text: str) -> int:
    """The type of an argument that counts: 0 or more, in 64 bits."""
    return _checked(text, int, lambda value: 0 <= value < 1 << 63, "a whole number ≥ 0 of at most 64 bits")


def positive(text: str) -> int:
    """The type of an argument that counts from 1."""
    return _checked(text, int, lambda value: 1 <= value < 1 << 31, "a whole number ≥ 1")


def number(text: str) -> float:
    """The type of an argument that measures: 0 or more, finite."""
    return _checked(text, float, lambda value: value >= 0 and isfinite(value), "a finite number ≥ 0")


def new_file(text: str) -> Path:
    """The type of an argument that names a file to write: its directory is there."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f'"{shortened(text)}": expected a file in a directory that exists')
    return path


def _checked(text: str, convert: Callable[[str], N], is_legal: Callable[[N], bool], what: str) -> N:
    try:
        value = convert(text)
        legal = is_legal(value)
    except ValueError:
        legal = False
    if not legal:
        raise argparse.ArgumentTypeError(f'"{shortened(text)}": expected {what}')
    return value
