"""What the tests of spec/ share: how patient they are, any mesh, what a refusal offers."""

from __future__ import annotations

import re

from hypothesis import settings
from hypothesis import strategies as st

from fivefold.config.errors import ConfigError
from fivefold.spec.mesh import Mesh

PATIENT = settings(deadline=None, max_examples=60)  # the machine may be busy
degree = st.integers(1, 4)
meshes = st.builds(Mesh, pp=degree, dp_replicate=degree, dp_shard=degree, cp=degree, tp=degree)


def offered(error: ConfigError, refused: int) -> list[int]:
    """The legal values that a refusal names, at most one on each side of the refused one."""
    match = re.search(r"nearest legal[^:]*: (\d+)(?: or (\d+))?$", str(error))
    assert match, str(error)
    values = [int(value) for value in match.groups() if value]
    assert sum(value < refused for value in values) <= 1
    assert sum(value > refused for value in values) <= 1
    return values
