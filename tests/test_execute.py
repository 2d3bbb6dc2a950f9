"""Every program, run on real ranks, equals a reference computed in float64 from all ranks' inputs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.collectives.execute import OPERATIONS, Execution, Operation
from fivefold.ledger.programs.catalogue import PROGRAMS, TWO_LEVEL, Setting, program
from fivefold.ledger.programs.steps import Program, Transfer, bounds
from ranks import Ranks, run_ranks

WORLD = 4
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD) as started:
        yield started


def given(rank: int, length: int, dtype: torch.dtype, seed: int) -> Tensor:
    """What a rank puts in: any rank can compute any other's."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    values = torch.randn(length, generator=generator, dtype=torch.float64)
    return (values * 100).round().to(dtype) if dtype == torch.int64 else values.to(dtype)


def reference(operation: Operation, inputs: list[Tensor]) -> Tensor:
    stacked = torch.stack([each.double() for each in inputs])
    if operation in ("sum", "mean"):
        total = stacked.sum(0)
        if operation == "mean":
            total = total / len(inputs)
            total = total.trunc() if inputs[0].dtype == torch.int64 else total
        return total
    return stacked.amax(0) if operation == "max" else stacked.amin(0)


def assert_close(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """Each of n − 1 additions, and the division, rounds once, relative to the partial sums' size."""
    dtype = found.dtype
    if dtype == torch.int64:
        assert torch.equal(found.double(), expected)
        return
    size = torch.stack([each.double().abs() for each in inputs]).sum(0)
    allowed = torch.finfo(dtype).eps * len(inputs) * size
    assert bool(((found.double() - expected).abs() <= allowed).all()), (found, expected)


def settings(primitive: str, name: str, n: int) -> list[Setting]:
    hosts = [local for local in range(1, n + 1) if n % local == 0] if name in TWO_LEVEL else [1]
    pieces = [1, 3] if name == "double-tree" else [1]
    roots = [0, n - 1] if primitive == "broadcast" else [0]
    return [Setting(n, local, piece, root) for local in hosts for piece in pieces for root in roots]


def check_one(
    primitive: str,
    execution: Execution,
    length: int,
    dtype: torch.dtype,
    seed: int,
    chosen: Sequence[Operation] = OPERATIONS,
) -> None:
    rank, n = execution.rank, execution.program.ranks
    inputs = [given(other, length, dtype, seed) for other in range(n)]
    mine, places = inputs[rank].clone(), bounds(length, n)
    part = slice(places[rank], places[rank + 1])
    if primitive == "all_reduce":
        for operation in chosen:
            tensor = mine.clone()
            execution.all_reduce(tensor, operation)
            assert_close(tensor, reference(operation, inputs), inputs)
    elif primitive == "reduce_scatter":
        for operation in chosen:
            output = torch.empty(part.stop - part.start, dtype=dtype)
            execution.reduce_scatter(output, mine, operation)
            assert_close(output, reference(operation, inputs)[part], [each[part] for each in inputs])
        assert torch.equal(mine, inputs[rank])
    elif primitive == "all_gather":
        output = torch.empty_like(mine)
        execution.all_gather(output, inputs[0][part])
        assert torch.equal(output, inputs[0])
    elif primitive == "broadcast":
        execution.broadcast(mine)
        assert torch.equal(mine, inputs[execution.program.root])
    else:
        wide = [given(other, length * n, dtype, seed) for other in range(n)]
        output = torch.empty_like(wide[rank])
        execution.all_to_all(output, wide[rank])
        expected = torch.cat([each[rank * length : (rank + 1) * length] for each in wide])
        assert torch.equal(output, expected)


def check_every_program(rank: int, n: int, seed: int) -> int:
    """All programs × lengths (none, shorter than the world, not divisible, divisible), types and operations in turns;
    then all types × operations at one length."""
    generator, checked = torch.Generator().manual_seed(seed), 0
    drawn = [int(torch.randint(1, 400, (1,), generator=generator)) for _ in range(2)]
    for primitive, names in PROGRAMS.items():
        for name in names:
            for setting in settings(primitive, name, n):
                execution = Execution(program(primitive, name, setting))
                for index, length in enumerate([0, 1, n - 1, n, 7 * n, drawn[0]]):
                    dtype, turn = DTYPES[(index + seed + checked) % len(DTYPES)], length + seed
                    chosen = [OPERATIONS[turn % 4], OPERATIONS[(turn + 1) % 4]]
                    check_one(primitive, execution, length, dtype, seed, chosen)
                    checked += 1
            for dtype in DTYPES:
                check_one(primitive, execution, drawn[1], dtype, seed)
    return checked


@pytest.mark.parametrize("n", range(1, WORLD + 1))
def test_every_program_equals_the_reference(ranks: Ranks, n: int) -> None:
    seed = int(torch.randint(0, 10**6, (1,)))
    assert min(ranks.run(check_every_program, seed, world_size=n)) >= 60


@pytest.mark.full
def test_every_program_equals_the_reference_on_five() -> None:
    assert min(run_ranks(check_every_program, 5, 5)) >= 60


def check_sub_groups(rank: int, n: int, seed: int) -> None:
    """Every program on two groups at work at the same time, of ranks that are not neighbours; then on three ranks."""
    generator = torch.Generator().manual_seed(seed)
    for lists in ([[3, 1], [2, 0]], [[0, 3, 2]]):
        made = [(members, dist.new_group(members)) for members in lists]
        length = int(torch.randint(0, 40, (1,), generator=generator))
        for members, group in made:
            if rank not in members:
                continue
            for primitive, names in PROGRAMS.items():
                for index, name in enumerate(names):
                    execution = Execution(program(primitive, name, Setting(len(members))), group)
                    check_one(primitive, execution, length, DTYPES[(seed + index) % len(DTYPES)], seed)


def test_sub_groups(ranks: Ranks) -> None:
    ranks.run(check_sub_groups, int(torch.randint(0, 10**6, (1,))))


def check_same_bits(rank: int, n: int) -> list[list[float]]:
    """float32 sums of every all-reduce, to be compared between ranks and repeats."""
    found = []
    for name in PROGRAMS["all_reduce"]:
        execution = Execution(program("all_reduce", name, Setting(n, 1, 2)))
        for _ in range(2):
            tensor = given(rank, 37, torch.float32, 7)
            execution.all_reduce(tensor)
            found.append(tensor.tolist())
    return found


def test_an_all_reduce_gives_the_same_bits_on_every_rank_and_again(ranks: Ranks) -> None:
    first, *others = ranks.run(check_same_bits)
    assert all(other == first for other in others)
    assert all(first[index] == first[index + 1] for index in range(0, len(first), 2))


def check_late(rank: int, n: int) -> list[float]:
    """Rank 2's chunk may reach rank 0 while that still has to send its own to rank 1, or to add rank 1's: which is
    late."""
    found = []
    for first in (Transfer(0, 1, 0, False), Transfer(1, 0, 0, True)):
        rounds = [[first], [Transfer(2, 0, 0, False)]]
        execution = Execution(Program("two rounds", "broadcast", n, 1, len(rounds), rounds.__getitem__))
        dist.barrier()
        if rank == 1:
            time.sleep(0.3)
        tensor = torch.full((1000,), float(rank + 1))
        execution.broadcast(tensor)
        found += tensor.unique().tolist()
    return found


def test_what_comes_a_round_ahead_of_late_ranks_spoils_nothing(ranks: Ranks) -> None:
    assert ranks.run(check_late, world_size=3) == [[3.0, 3.0], [1.0, 2.0], [3.0, 3.0]]


def check_misuse(rank: int, n: int) -> None:
    with pytest.raises(ValueError, match="a program for 3 ranks in a group of 4"):
        Execution(program("all_reduce", "ring", Setting(3)))
    with pytest.raises(ValueError, match="a program for all_gather, not all_reduce"):
        Execution(program("all_gather", "ring", Setting(n))).all_reduce(torch.ones(1))
    with pytest.raises(ValueError, match="where this rank's part has"):
        Execution(program("all_gather", "ring", Setting(n))).all_gather(torch.ones(10), torch.ones(10))


def test_misuse_is_refused_before_anything_is_sent(ranks: Ranks) -> None:
    ranks.run(check_misuse)
