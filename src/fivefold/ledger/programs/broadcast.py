"""Broadcast from a root: a binomial tree for small vectors, scatter and all-gather for large ones."""

from fivefold.ledger.programs import ring
from fivefold.ledger.programs.steps import Program, Transfer, joined


def binomial(ranks: int, root: int = 0) -> Program:
    """⌈lg n⌉ rounds; those who have the vector double in each."""

    def rounds(index: int) -> list[Transfer]:
        have = 1 << index
        pairs = [(place, place + have) for place in range(have) if place + have < ranks]
        return [Transfer((a + root) % ranks, (b + root) % ranks, 0, False) for a, b in pairs]

    return Program("binomial", "broadcast", ranks, 1, (ranks - 1).bit_length(), rounds, root=root)


def scatter_all_gather(ranks: int, root: int = 0) -> Program:
    """⌈lg n⌉ + n − 1 rounds (van de Geijn): 2(n−1)/n of the vector, instead of ⌈lg n⌉ times all of it."""
    levels = (ranks - 1).bit_length()

    def rounds(index: int) -> list[Transfer]:
        half = 1 << (levels - 1 - index)
        found = []
        for place in range(0, ranks, 2 * half):
            target = place + half
            chunks = range(target, min(place + 2 * half, ranks)) if target < ranks else ()
            found += [
                Transfer((place + root) % ranks, (target + root) % ranks, (chunk + root) % ranks, False)
                for chunk in chunks
            ]
        return found

    scatter = Program("scatter", "broadcast", ranks, ranks, levels, rounds, root=root)
    return joined("scatter-all-gather", "broadcast", scatter, ring.all_gather(ranks))
