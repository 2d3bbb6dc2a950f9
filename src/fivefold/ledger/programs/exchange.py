"""All-to-all: directly between every pair, or in two hops where ranks share hosts."""

from fivefold.ledger.programs.steps import Program, Transfer


def pairwise(ranks: int) -> Program:
    """n − 1 rounds; in round i rank r sends to r + i and receives from r − i."""

    def rounds(index: int) -> list[Transfer]:
        pairs = [(rank, (rank + index + 1) % ranks) for rank in range(ranks)]
        return [Transfer(rank, target, rank * ranks + target, False) for rank, target in pairs]

    return Program("pairwise", "all_to_all", ranks, ranks**2, ranks - 1, rounds)


def two_hop(ranks: int, local: int) -> Program:
    """First inside the host to the rank of the target's place, then between hosts, `local` chunks a message.

    (G−1)α₁ + (G−1)/G·Sβ₁ + (N−1)α₂ + (N−1)/N·Sβ₂: as many bytes between hosts, in messages G times as large.
    """
    hosts = ranks // local

    def rounds(index: int) -> list[Transfer]:
        found = []
        for rank in range(ranks):
            host, place = divmod(rank, local)
            if index < local - 1:
                via = (place + index + 1) % local
                chunks = [rank * ranks + other * local + via for other in range(hosts)]
                found += [Transfer(rank, host * local + via, chunk, False) for chunk in chunks]
            else:
                other = (host + index - local + 2) % hosts
                target = other * local + place
                sources = range(host * local, (host + 1) * local)
                found += [Transfer(rank, target, source * ranks + target, False) for source in sources]
        return found

    return Program("two-hop", "all_to_all", ranks, ranks**2, local - 1 + hosts - 1, rounds)
