"""Interleaving: which source of a mixture each consumed sample comes from.

After i samples a source of weight w among weights of sum W has given ⌊(w·i + r) / W⌋ of them (r, from the
seed, shifts its turns: 0 ≤ r < W): never one sample from its exact share. Where there are more than two, the
heaviest source takes its turns first, the next one takes its turns among the samples that are left, and so
on; so the k-th is always less than 1 + 1/1 + 1/2 + … + 1/(k-1) samples from its share, and any W samples in
a row hold exactly w of each. A place is computed alone, in whole numbers: no rounding adds up, no table grows.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fivefold.data.permutation import round_keys
from fivefold.data.source import whole_weights


class Turns:
    """The order of sources with these weights (each > 0)."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        """Raises DataError where the weights have no small common denominator."""
        self.weights = whole_weights(weights)
        self._order = sorted(range(len(weights)), key=lambda source: -self.weights[source])
        self._shifts = [round_keys(seed, source)[0] for source in range(len(weights))]

    def at(self, counters: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each of `counters` [n] (samples consumed before): the source whose turn it is, and how many
        samples it has given before, both [n]."""
        source, place = np.empty_like(counters), np.empty_like(counters)
        waiting, left = np.arange(counters.size), counters
        for taker, weight, rest in self._chain():
            before, after = (self._taken(taker, weight, rest, at) for at in (left, left + 1))
            takes = after > before
            source[waiting[takes]], place[waiting[takes]] = taker, before[takes]
            waiting, left = waiting[~takes], (left - before)[~takes]
        return source, place

    def given(self, consumed: int) -> list[int]:
        """How many of the first `consumed` samples come from each source, [sources]."""
        counts = [0] * len(self.weights)
        left = np.array([consumed], dtype=np.int64)
        for taker, weight, rest in self._chain():
            taken = self._taken(taker, weight, rest, left)
            counts[taker] = int(taken[0])
            left = left - taken
        return counts

    def _chain(self) -> list[tuple[int, int, int]]:
        """(source, its weight, weight of itself and all after it), heaviest first."""
        weights = [self.weights[source] for source in self._order]
        return [(source, weights[n], sum(weights[n:])) for n, source in enumerate(self._order)]

    def _taken(self, source: int, weight: int, rest: int, left: NDArray[np.int64]) -> NDArray[np.int64]:
        """⌊(weight · left + shift) / rest⌋, with products below 2^62 only."""
        whole, part = np.divmod(left, rest)
        taken: NDArray[np.int64] = weight * whole + (weight * part + self._shifts[source] % rest) // rest
        return taken
