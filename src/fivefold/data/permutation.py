"""A random order of 0 … size-1 of which any place can be computed alone.

A Feistel network permutes the numbers of 2h bits, whatever its round function (Luby & Rackoff 1988); values
that fall outside 0 … size-1 are sent through again until they fall inside ("cycle walking", Black & Rogaway
2002), which leaves an exact permutation. No table is kept: an epoch of 10^10 samples costs no memory.
"""

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8  # four make it pseudo-random for wide halves; small sizes have halves of a few bits, and need more
_MASK64 = (1 << 64) - 1


def permute(places: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The numbers at `places` (each in 0 … size-1, any shape) of the order given by (seed, epoch).

    For all `places` together the result holds 0 … size-1 once each. size is at most 2^62.
    """
    assert size >= 1
    assert places.size == 0 or (places.min() >= 0 and places.max() < size)
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = round_keys(seed, epoch)
    result = np.empty(places.size, dtype=np.int64)
    pending = np.arange(places.size)  # where in `result` the values not yet inside belong
    values = places.ravel().astype(np.uint64)
    while pending.size:  # the network covers fewer than 4 · size numbers: some four turns, whatever the size
        values = _feistel(values, half_bits, keys)
        inside = values < size
        result[pending[inside]] = values[inside]
        pending, values = pending[~inside], values[~inside]
    return result.reshape(places.shape)


def _feistel(values: NDArray[np.uint64], half_bits: int, keys: list[int]) -> NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ np.uint64(key)) & mask)
    return (left << shift) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea & Flood 2014): every output bit depends on every input bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def round_keys(seed: int, epoch: int) -> list[int]:
    """SplitMix64 started from (seed, epoch); both are mixed one after the other, so (1, 0) ≠ (0, 1)."""
    keys = []
    state = 0
    for number in (seed, epoch, *range(ROUNDS)):
        word = np.array([(state + number + 0x9E3779B97F4A7C15) & _MASK64], dtype=np.uint64)
        state = int(_mix(word)[0])
        keys.append(state)
    return keys[2:]
