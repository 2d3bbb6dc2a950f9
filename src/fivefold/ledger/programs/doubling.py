"""All-gather and reduce-scatter in ⌈lg n⌉ rounds for any number of ranks (Bruck 1997)."""

from fivefold.ledger.programs.steps import Program, Transfer, backwards


def all_gather(ranks: int) -> Program:
    """After k rounds rank r holds chunks r … r + 2ᵏ − 1 (mod n); what is missing in the last is sent in part."""

    def rounds(index: int) -> list[Transfer]:
        held = 1 << index
        sent = min(held, ranks - held)
        return [
            Transfer(r, (r - held) % ranks, (r + offset) % ranks, False)
            for r in range(ranks)
            for offset in range(sent)
        ]

    return Program("doubling", "all_gather", ranks, ranks, (ranks - 1).bit_length(), rounds)


def reduce_scatter(ranks: int) -> Program:
    """The all-gather turned round: halves, where n is a power of two."""
    return backwards("halving", all_gather(ranks))
