"""Which tokens of a sequence each context-parallel rank holds.

Lengths need not divide: ranks differ by one token at most, and none holds padding.
"""

from typing import Literal

Kind = Literal["ring", "ulysses"]
Span = tuple[int, int]


KEPT_PROBABILITIES = 2048**2


def keeps_probabilities(queries: int, keys: int) -> bool:
    """Whether attention on CPUs saves a head's probabilities for backward. Beyond this size it recomputes them, so that
    memory grows linearly with the sequence length."""
    return queries * keys <= KEPT_PROBABILITIES


def most_tokens(length: int, cp: int) -> int:
    """The most tokens of a rank: the first `length` mod `cp` ranks hold one more than the others."""
    return -(-length // cp)


def spans(length: int, cp: int, rank: int, kind: Kind) -> tuple[Span, ...]:
    """The spans [start, stop) of a sequence that context-parallel rank `rank` holds, in order.

    Ulysses: one span. Ring: the sequence is divided into 2·cp chunks, and a rank holds one from the front and its
    mirror image from the back, so that causal attention is equal work for all ranks (zigzag).
    """
    sizes = [length // cp + (other < length % cp) for other in range(cp)]
    if kind == "ulysses" or cp == 1:
        start = sum(sizes[:rank])
        return ((start, start + sizes[rank]),)
    fronts = [front_tokens(size) for size in sizes]
    start = sum(fronts[:rank])
    stop = length - sum(size - front for size, front in zip(sizes[:rank], fronts[:rank], strict=True))
    back = sizes[rank] - fronts[rank]
    return (start, start + fronts[rank]), (stop - back, stop)


def front_tokens(tokens: int) -> int:
    """How many of a rank's `tokens` belong to its front chunk (ring)."""
    return -(-tokens // 2)
