"""What refusals offer in place of what was asked."""

from __future__ import annotations

import re

from fivefold.config.errors import ConfigError


def offered(error: ConfigError, refused: int) -> list[int]:
    """The legal values that a refusal names, at most one on each side of the refused one."""
    match = re.search(r"nearest legal[^:]*: (\d+)(?: or (\d+))?$", str(error))
    assert match, str(error)
    values = [int(value) for value in match.groups() if value]
    assert sum(value < refused for value in values) <= 1
    assert sum(value > refused for value in values) <= 1
    return values
