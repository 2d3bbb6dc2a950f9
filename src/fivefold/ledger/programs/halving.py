"""Recursive halving-doubling all-reduce (Rabenseifner 2004) for powers of two; other counts fold first."""

from math import log2

from fivefold.ledger.programs.steps import Link, Program, Transfer, seconds


def all_reduce(ranks: int) -> Program:
    """2 · lg n rounds: halve distance and data, then double. `ranks` must be a power of two."""
    levels = int(log2(ranks))
    if 1 << levels != ranks:
        raise ValueError(f"halving-doubling needs a power of two, not {ranks} ranks")

    def rounds(index: int) -> list[Transfer]:
        down = index < levels
        level = index if down else 2 * levels - 1 - index
        distance = ranks >> (level + 1)
        found = []
        for rank in range(ranks):
            peer = rank ^ distance
            owner = peer if down else rank  # the half that is the peer's to reduce, or mine to give
            start = owner // distance * distance
            found += [Transfer(rank, peer, chunk, down) for chunk in range(start, start + distance)]
        return found

    return Program("halving-doubling all-reduce", ranks, ranks, 2 * levels, rounds)


def all_reduce_seconds(ranks: int, size: float, link: Link) -> float:
    """2·lg n·α + 2(n−1)/n·S/bw; the ranks beyond a power of two first give, at last receive, all of S."""
    power = 1 << (ranks.bit_length() - 1)
    fold = 2 * (link.latency + size / link.bandwidth) if power != ranks else 0.0
    levels = power.bit_length() - 1
    moved = 2 * (power - 1) / power * size / link.bandwidth
    return fold + 2 * levels * link.latency + moved


__all__ = ["all_reduce", "all_reduce_seconds", "seconds"]
