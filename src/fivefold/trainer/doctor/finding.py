"""One line of the doctor's report."""

from dataclasses import dataclass
from typing import Literal

MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """Something looked at. "good" and "fact" ask for nothing; a "note" matters in the case it names; a
    "problem" is wrong here. The last two say how to mend it.
    """

    section: str
    name: str
    value: str
    state: Literal["good", "fact", "note", "problem"] = "fact"
    mend: str = ""


def size(count: float) -> str:
    """Bytes for people."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"
