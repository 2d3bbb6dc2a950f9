"""When the rounds of a pipeline have become alike: from then on every further round adds the same seconds.

An action starts when the last of those that it waits for has ended, so where all starts of some rounds
are later by the same than those of rounds before, all that follow are, too. A few rounds then stand for any number.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import isnan, nan
from operator import sub
from typing import NamedTuple

from fivefold.spec import schedules
from fivefold.spec.schedules import Entry, Kind

ROUNDS = 3  # that must be alike
TOLERANCE = 1e-11  # relative difference of two rounds' seconds that rounding may make


class Window(NamedTuple):
    """The rounds of a rank's list that more micro-batches would not change.

    Attributes:
        first, end: the positions between which it is whole rounds.
        period: actions of a round.
        least, most: the first micro-batch of any forward or backward in a round. What comes after the last ROUNDS
            rounds waits for nothing before them if, over all ranks, these lie no more than ROUNDS rounds apart.
    """

    first: int
    end: int
    period: int
    least: int
    most: int


class Growth(NamedTuple):
    """What any further `rounds` rounds add together."""

    rounds: int
    seconds: float


def trials(name: schedules.Name, ranks: int, microbatches: int, most: int) -> Iterator[int]:
    """Numbers of micro-batches, up to `most`, whose lists are those of `microbatches` but for whole rounds of one a
    rank, and are much shorter; ascending."""
    rest = microbatches % ranks
    if rest and name in schedules.IN_ROUNDS:  # their rounds are longer ones
        return
    few = 8 * ranks + rest
    while 2 * few <= microbatches and few <= most:
        yield few
        few += 3 * (few - rest)


@lru_cache(maxsize=16384)
def window(name: schedules.Name, rank: int, ranks: int, microbatches: int, chunks: int) -> Window | None:
    """None where one round more changes more than the number of rounds."""
    own = schedules.rank_entries(name, rank, ranks, microbatches, chunks)
    more = schedules.rank_entries(name, rank, ranks, microbatches + ranks, chunks)
    period = len(more) - len(own)
    end = next((at for at, (one, two) in enumerate(zip(own, more, strict=False)) if one != two), len(own))
    first = end - period
    if first < 0 or not all(map(_is_later, own[first:], more[end:], [ranks] * len(own))):
        return None
    begun: dict[tuple[bool, int], int] = {}
    for kind, stage, microbatch, _ in own[first:end]:
        if kind is not Kind.WEIGHT_GRAD:  # nobody waits for it
            begun.setdefault((kind is Kind.FORWARD, stage), microbatch)
    while first and _is_later(own[first - 1], own[first - 1 + period], ranks):
        first -= 1
    return Window(first, end, period, min(begun.values()), max(begun.values()))


def _is_later(one: Entry, two: Entry, ranks: int) -> bool:
    """Whether `two` is `one` of the next round."""
    return one[:2] == two[:2] and one[2] + ranks == two[2] and one[3] == two[3]


def growth(starts: Sequence[Sequence[float]], windows: Sequence[Window | None], ranks: int) -> Growth | None:
    """What further rounds add, given the starts of each rank's actions; None while they do not repeat. Where a rank
    waits for what is in flight, bursts of micro-batches may take several rounds to repeat."""
    found = [one for one in windows if one is not None]
    if len(found) < len(windows):
        return None
    if max(one.most for one in found) - min(one.least for one in found) > ROUNDS * ranks:
        return None
    most = min((one.end - one.first) // one.period for one in found) - ROUNDS
    for rounds in range(1, min(most, 2 * ranks) + 1):
        seconds = [_added(own, one, rounds) for own, one in zip(starts, found, strict=True)]
        if not any(isnan(one) for one in seconds) and _alike(min(seconds), max(seconds)):
            return Growth(rounds, seconds[0])
    return None


def _added(starts: Sequence[float], found: Window, rounds: int) -> float:
    """Seconds by which the last ROUNDS rounds start later than those `rounds` before them; NaN unless all do alike."""
    begin, end, back = found.end - ROUNDS * found.period, found.end, rounds * found.period
    if not _alike(*sorted((starts[begin] - starts[begin - back], starts[end - 1] - starts[end - 1 - back]))):
        return nan
    added = list(map(sub, starts[begin:end], starts[begin - back : end - back]))
    return max(added) if _alike(min(added), max(added)) else nan


def _alike(low: float, high: float) -> bool:
    return high - low <= TOLERANCE * high
