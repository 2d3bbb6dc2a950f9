"""What ranks copy in the collectives that only move data, played through without processes."""

import random
from collections.abc import Sequence

import pytest

from fivefold.collectives.shared_memory import moves
from fivefold.collectives.shared_memory.moves import Schedule

SLOT = 64


def play(
    schedules: Sequence[Schedule], inputs: list[list[bytes]], outputs: list[list[bytearray]]
) -> list[list[bytearray]]:
    """Carries out every rank's schedule, and holds it to its rules."""
    assert len({schedule.note for schedule in schedules}) == 1
    assert len({tuple(start for start, _ in schedule.steps) for schedule in schedules}) == 1
    everyone = set(range(len(schedules)))
    for number, (start, _) in enumerate(schedules[0].steps):
        steps = [schedule.steps[number][1] for schedule in schedules]
        slots = [bytearray(SLOT) for _ in schedules]
        for rank, step in enumerate(steps):
            for part, there, size in step.puts:
                assert there + size <= SLOT
                slots[rank][there : there + size] = inputs[rank][part][start : start + size]
        for rank, step in enumerate(steps):
            met = [taken[0] for taken in step.takes]
            assert sorted([*met, *step.unmet]) == sorted(everyone - {rank})  # each other rank once
            for part, out, size in step.own:
                outputs[rank][out][start : start + size] = inputs[rank][part][start : start + size]
            for sender, out, there, size in step.takes:
                outputs[rank][out][start : start + size] = slots[sender][there : there + size]
    return outputs


@pytest.mark.parametrize("seed", range(40))
def test_every_byte_arrives(seed: int) -> None:
    chance = random.Random(seed)
    ranks = chance.randint(2, 5)
    root = chance.randrange(ranks)
    width = SLOT // ranks
    size = chance.choice([0, 1, SLOT - 1, SLOT, SLOT + 1, 3 * SLOT + 7])
    sizes = tuple(chance.choice([0, 5, size]) for _ in range(ranks))
    world = range(ranks)

    sources = [chance.randbytes(n) for n in sizes]
    found = play(
        [moves.all_gather(me, SLOT, sizes) for me in world],
        [[source] for source in sources],
        [[bytearray(n) for n in sizes] for _ in world],
    )
    assert found == [sources] * ranks

    table = [[chance.choice([0, 3, size]) for _ in world] for _ in world]
    longest = max(map(max, table))
    sent = [[chance.randbytes(n) for n in row] for row in table]
    columns = [tuple(table[sender][me] for sender in world) for me in world]
    found = play(
        [moves.all_to_all(me, width, tuple(table[me]), columns[me], longest) for me in world],
        sent,
        [[bytearray(n) for n in columns[me]] for me in world],
    )
    assert found == [[sent[sender][me] for sender in world] for me in world]

    message = chance.randbytes(size)
    begun = [[bytearray(message if me == root else bytes(size))] for me in world]
    found = play(
        [moves.broadcast(me, ranks, SLOT, root, size) for me in world], [[message] for _ in world], begun
    )
    assert found == [[message]] * ranks

    sources = [chance.randbytes(size) for _ in world]
    found = play(
        [moves.gather(me, ranks, SLOT, root, size) for me in world],
        [[source] for source in sources],
        [[bytearray(size) for _ in world] if me == root else [] for me in world],
    )
    assert found[root] == sources

    found = play(
        [moves.scatter(me, ranks, width, root, size) for me in world],
        [sources if me == root else [] for me in world],
        [[bytearray(size)] for _ in world],
    )
    assert found == [[source] for source in sources]


def test_rounds_that_are_alike_are_kept_once() -> None:
    schedule = moves.all_gather(0, SLOT, (1000 * SLOT, 1000 * SLOT))
    assert len(schedule.steps) == 1000
    assert len({id(step) for _, step in schedule.steps}) == 1
