"""Hierarchical all-reduce: reduce-scatter inside each host, all-reduce between hosts, all-gather inside.

Every rank of a host carries 1/G of the vector over the slow links: (N−1)/N · 2S/G a rank instead of the ring's
2(n−1)/n · S on the ranks at the ends of a host.
"""

from fivefold.ledger.programs import ring
from fivefold.ledger.programs.steps import Program, Transfer, joined


def all_reduce(ranks: int, local: int) -> Program:
    """2(G−1) rounds inside and 2(N−1) between. `local` = G must divide `ranks`."""
    hosts = ranks // local

    def lifted(inner: Program, inside: bool) -> Program:
        """A ring over G ranks on groups of N chunks, in every host; or over N hosts on one chunk each, for every
        place. Chunk place · N + j is part j of what that place carries."""

        def rounds(index: int) -> list[Transfer]:
            found = []
            for source, target, chunk, reduce in inner.rounds(index):
                for other in range(hosts if inside else local):
                    if inside:
                        a, b = other * local + source, other * local + target
                        parts = range(chunk * hosts, (chunk + 1) * hosts)
                        found += [Transfer(a, b, part, reduce) for part in parts]
                    else:
                        a, b = source * local + other, target * local + other
                        found.append(Transfer(a, b, other * hosts + chunk, reduce))
            return found

        return Program("hierarchical", "all_reduce", ranks, ranks, inner.length, rounds)

    name, kind = "hierarchical", "all_reduce"
    ahead = joined(
        name, kind, lifted(ring.reduce_scatter(local), True), lifted(ring.all_reduce(hosts), False)
    )
    return joined(name, kind, ahead, lifted(ring.all_gather(local), True))
