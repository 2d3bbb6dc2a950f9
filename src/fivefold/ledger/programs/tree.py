"""Double binary tree all-reduce (Sanders 2009; NCCL trees.cc), pipelined over pieces of the vector.

Rank r > 0 with lowest set bit b has parent (r ^ b) | 2b, or r ^ b where that is outside; children r ± b/2.
The second tree is the mirror image (even n) or shifted by one (odd n), so that inner ranks of one are
leaves of the other; each carries half of the vector.
"""

from math import ceil, log2, sqrt

from fivefold.ledger.programs.steps import Link, Program, Transfer


def parent(rank: int, ranks: int) -> int:
    """The parent in the first tree; -1 for the root."""
    if rank == 0:
        return -1
    bit = rank & -rank
    up = (rank ^ bit) | (bit << 1)
    return up if up < ranks else rank ^ bit


def parents(ranks: int) -> tuple[list[int], list[int]]:
    """Parents of every rank in both trees."""
    first = [parent(rank, ranks) for rank in range(ranks)]

    def map_rank(rank: int) -> int:
        return ranks - 1 - rank if ranks % 2 == 0 else (rank + 1) % ranks

    second = [-1] * ranks
    for rank, up in enumerate(first):
        second[map_rank(rank)] = map_rank(up) if up >= 0 else -1
    return first, second


def depth(up: list[int]) -> list[int]:
    """Distance to the root of every rank."""
    found = []
    for start in range(len(up)):
        rank, steps = start, 0
        while up[rank] >= 0:
            rank, steps = up[rank], steps + 1
        found.append(steps)
    return found


def all_reduce(ranks: int, pieces: int) -> Program:
    """2·`pieces` chunks, half on each tree; piece q starts climbing in round q, then descends."""
    trees = parents(ranks)
    depths = [depth(up) for up in trees]
    height = max(max(own) for own in depths) if ranks > 1 else 0

    def rounds(index: int) -> list[Transfer]:
        found = []
        for tree, (up, level) in enumerate(zip(trees, depths, strict=True)):
            for rank in range(ranks):
                if up[rank] < 0:
                    continue
                climbing = index - (height - level[rank])
                falling = index - height - (level[rank] - 1)
                if 0 <= climbing < pieces:
                    found.append(Transfer(rank, up[rank], 2 * climbing + tree, True))
                if 0 <= falling - pieces + 1 < pieces:
                    found.append(Transfer(up[rank], rank, 2 * (falling - pieces + 1) + tree, False))
        return found

    length = 2 * (height + pieces - 1) if ranks > 1 else 0
    return Program("double-tree", "all_reduce", ranks, 2 * pieces, length, rounds)


def best_pieces(ranks: int, size: float, link: Link) -> int:
    """Pieces that balance pipeline filling against latency: q* = √((⌈lg n⌉ − 1) · S/(bw · α))."""
    levels = ceil(log2(ranks)) - 1
    return max(1, round(sqrt(max(0, levels) * size / (link.bandwidth * max(link.latency, 1e-9)))))


def all_reduce_seconds(ranks: int, size: float, link: Link) -> float:
    """2(⌈lg n⌉ + q − 1)(α + S/(q·bw)) at the best q: the program's rounds, each of a full link.

    A rank that is inner in one tree receives from two children half the vector each, in pieces S/(2q), and
    is a leaf in the other: S/q a round at most (Sanders 2009).
    """
    if ranks == 1:
        return 0.0
    pieces = best_pieces(ranks, size, link)
    return 2 * (ceil(log2(ranks)) + pieces - 1) * (link.latency + size / pieces / link.bandwidth)
