"""Recursive halving-doubling and recursive doubling all-reduce (Rabenseifner 2004) for any number of ranks.

Beyond a power of two n', pairs fold first: each of the n − n' even ranks below 2(n − n') gives its whole vector to
the odd rank after it, which takes part for both and returns the result at the end.
"""

from dataclasses import replace

from fivefold.ledger.programs.steps import Link, Program, Transfer, joined


def all_reduce(ranks: int) -> Program:
    """2 · lg n' rounds: halve distance and data, then double; two more where pairs fold."""
    power, levels = _power(ranks)

    def rounds(index: int) -> list[Transfer]:
        down = index < levels
        level = index if down else 2 * levels - 1 - index
        distance = power >> (level + 1)
        found = []
        for rank in range(power):
            peer = rank ^ distance
            owner = peer if down else rank  # the half that is the peer's to reduce, or mine to give
            start = owner // distance * distance
            found += [Transfer(rank, peer, chunk, down) for chunk in range(start, start + distance)]
        return found

    inner = Program("halving-doubling", "all_reduce", ranks, power, 2 * levels, rounds)
    return _folded(inner, power)


def doubling_all_reduce(ranks: int) -> Program:
    """lg n' rounds in which pairs at distance 1, 2, 4, … exchange and add whole vectors; for small ones."""
    power, levels = _power(ranks)

    def rounds(index: int) -> list[Transfer]:
        return [Transfer(rank, rank ^ (1 << index), 0, True) for rank in range(power)]

    return _folded(Program("recursive-doubling", "all_reduce", ranks, 1, levels, rounds), power)


def all_reduce_seconds(ranks: int, size: float, link: Link) -> float:
    """2·lg n'·α + 2(n'−1)/n'·S/bw, and 2(α + S/bw) for folding: what the program costs, in closed form."""
    power, levels = _power(ranks)
    fold = 2 * (link.latency + size / link.bandwidth) if power != ranks else 0.0
    moved = 2 * (power - 1) / power * size / link.bandwidth
    return fold + 2 * levels * link.latency + moved


def _power(ranks: int) -> tuple[int, int]:
    """The largest power of two among `ranks`, and its logarithm."""
    levels = ranks.bit_length() - 1
    return 1 << levels, levels


def _folded(inner: Program, power: int) -> Program:
    """`inner`, written for ranks 0…power−1, carried out by one rank of each pair."""
    ranks, chunks = inner.ranks, inner.chunks
    pairs = ranks - power
    if pairs == 0:
        return inner

    def real(rank: int) -> int:
        return 2 * rank + 1 if rank < pairs else rank + pairs

    def rounds(index: int) -> list[Transfer]:
        return [t._replace(source=real(t.source), target=real(t.target)) for t in inner.rounds(index)]

    def fold(index: int) -> list[Transfer]:
        return [Transfer(2 * p, 2 * p + 1, c, True) for p in range(pairs) for c in range(chunks)]

    def unfold(index: int) -> list[Transfer]:
        return [Transfer(2 * p + 1, 2 * p, c, False) for p in range(pairs) for c in range(chunks)]

    before = replace(inner, length=1, rounds=fold)
    after = replace(inner, length=1, rounds=unfold)
    core = replace(inner, rounds=rounds)
    return joined(inner.name, "all_reduce", joined(inner.name, "all_reduce", before, core), after)
