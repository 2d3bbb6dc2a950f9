"""Ring reduce-scatter, all-gather and all-reduce (Patarasuk and Yuan 2009)."""

from fivefold.ledger.programs.steps import Program, Transfer, joined


def all_gather(ranks: int) -> Program:
    """n − 1 rounds; starts with chunk r on rank r."""

    def rounds(index: int) -> list[Transfer]:
        return [Transfer(r, (r + 1) % ranks, (r - index) % ranks, False) for r in range(ranks)]

    return Program("ring", "all_gather", ranks, ranks, ranks - 1, rounds, uniform=True)


def reduce_scatter(ranks: int) -> Program:
    """n − 1 rounds; rank r ends with chunk r summed."""

    def rounds(index: int) -> list[Transfer]:
        return [Transfer(r, (r + 1) % ranks, (r - 1 - index) % ranks, True) for r in range(ranks)]

    return Program("ring", "reduce_scatter", ranks, ranks, ranks - 1, rounds, uniform=True)


def all_reduce(ranks: int) -> Program:
    """2(n − 1) rounds: reduce-scatter, then all-gather."""
    return joined("ring", "all_reduce", reduce_scatter(ranks), all_gather(ranks))
