"""What a person is told when something asked for cannot be."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from math import isfinite
from typing import Any


class BadInput(ValueError):  # noqa: N818 - it names the input, not the program, as what is wrong
    """Something a person gave cannot be used: one line that says what, where, and what would be right.

    Commands print the line and exit with 2.
    """


class RunFailed(RuntimeError):  # noqa: N818 - it is the run that failed, as it may, not the program
    """A run, or what it left, cannot be used any further: one line that says what, where, and what would help.

    Commands print the line and exit with 1.
    """


HAS_DIED = "has died"
"""Ends what a rank says of another without which it cannot go on; whoever tells of a failed run tells of that one."""


class ConfigError(BadInput):
    """A config file, an override or a combination of keys."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint that ends an error line: the nearest known word, else all of them."""
    names = sorted(known)
    close = get_close_matches(word, names, n=1, cutoff=0.5)
    return f'did you mean "{close[0]}"?' if close else "known: " + (", ".join(names) or "none")


def nearest(value: int, legal: Iterable[int]) -> str:
    """The legal values next below and above `value`, which is none, for an error line."""
    candidates = list(legal)
    below = max((candidate for candidate in candidates if candidate < value), default=None)
    above = min((candidate for candidate in candidates if candidate > value), default=None)
    return " or ".join(str(candidate) for candidate in (below, above) if candidate is not None)


def nearest_multiples(value: int, unit: int) -> str:
    """The positive multiples of `unit` next below and above `value`, which is none, for an error line."""
    below = value // unit * unit
    return " or ".join(str(multiple) for multiple in (below, below + unit) if multiple > 0)


def shortened(text: str, length: int = 80) -> str:
    """`text` as an error line can quote it: with its end, which in paths tells most."""
    begin = length // 3
    return text if len(text) <= length else f"{text[:begin]}…{text[begin + 1 - length :]}"


def flaw(value: Any) -> str:
    """What no value of any key may be; "" where it is none of that."""
    if isinstance(value, list | dict):
        inner = value if isinstance(value, list) else [*value, *value.values()]
        return next(filter(None, map(flaw, inner)), "")
    if isinstance(value, float) and not isfinite(value):
        return "expected a finite number"
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return "expected a whole number of at most 64 bits"
    if isinstance(value, str) and re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", value):
        return "expected text without control characters, in UTF-8"
    return ""
