"""Ring reduce-scatter, all-gather and all-reduce (Patarasuk and Yuan 2009)."""

from fivefold.ledger.programs.steps import Program, Transfer


def reduce_scatter(ranks: int) -> Program:
    """n − 1 rounds; rank r ends with chunk r summed."""
    return _ring("ring reduce-scatter", ranks, ranks - 1)


def all_gather(ranks: int) -> Program:
    """n − 1 rounds; starts with chunk r on rank r."""

    def rounds(index: int) -> list[Transfer]:
        return [Transfer(r, (r + 1) % ranks, (r - index) % ranks, False) for r in range(ranks)]

    return Program("ring all-gather", ranks, ranks, ranks - 1, rounds, uniform=True)


def all_reduce(ranks: int) -> Program:
    """2(n − 1) rounds: reduce-scatter, then all-gather."""
    return _ring("ring all-reduce", ranks, 2 * (ranks - 1))


def _ring(name: str, ranks: int, length: int) -> Program:
    def rounds(index: int) -> list[Transfer]:
        reduce = index < ranks - 1
        return [Transfer(r, (r + 1) % ranks, (r - 1 - index) % ranks, reduce) for r in range(ranks)]

    return Program(name, ranks, ranks, length, rounds, uniform=True)
