"""Sizes as people write them: 64K, 16M, or 1K:64M for every fourfold between."""

from collections.abc import Sequence

from fivefold.config.errors import BadInput, shortened
from fivefold.render.units import bytes_text

SCALES = {"K": 2**10, "M": 2**20, "G": 2**30}
FACTOR = 4


def read_sizes(text: str) -> list[int]:
    """Bytes, in the order given.

    Raises:
        BadInput: not a list of sizes.
    """
    found: list[int] = []
    for item in text.split(","):
        first, colon, last = item.partition(":")
        size, end = _size(first), _size(last if colon else first)
        if end < size:
            raise BadInput(f"--sizes {shortened(item)}: the second size is below the first")
        while size <= end:
            found.append(size)
            size *= FACTOR
    return found


def check_memory(sizes: Sequence[int], ranks: int, buffers: int, available: int) -> None:
    """Refuses sizes whose buffers this host cannot hold.

    Args:
        ranks: on this host.
        buffers: of one size that a rank holds, about.
        available: bytes, more than none.

    Raises:
        BadInput: with the largest size that may fit.
    """
    share = available // (ranks * buffers)
    if max(sizes) > share:
        raise BadInput(
            f"--sizes: {bytes_text(max(sizes))} takes about {buffers} such buffers on each of {ranks} ranks, and "
            f"{bytes_text(available)} are available here; at most {bytes_text(share)}"
        )


def _size(text: str) -> int:
    number, scale = (text[:-1], SCALES[text[-1]]) if text[-1:] in SCALES else (text, 1)
    if not number.isdecimal() or len(number) > 18 or int(number) == 0:
        raise BadInput(f"--sizes {shortened(text)}: expected a number of bytes, e.g. 64K or 16M")
    return int(number) * scale
