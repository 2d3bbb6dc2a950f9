"""Sizes as people write them: 64K, 16M, or 1K:64M for every fourfold between."""

from fivefold.config.errors import BadInput, shortened

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


def _size(text: str) -> int:
    number, scale = (text[:-1], SCALES[text[-1]]) if text[-1:] in SCALES else (text, 1)
    if not number.isdigit() or int(number) == 0:
        raise BadInput(f"--sizes {shortened(text)}: expected a number of bytes, e.g. 64K or 16M")
    return int(number) * scale
