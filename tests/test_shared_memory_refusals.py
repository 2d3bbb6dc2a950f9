"""Calls through shared memory that do not match those of other ranks, or that no rank could carry out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fivefold.collectives.group import register
from fivefold.collectives.record import Recorder
from fivefold.collectives.shared_memory.transport import SharedMemory
from ranks import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, backend=None) as ranks:
        yield ranks


def join() -> None:
    dist.init_process_group(register(Recorder(), timedelta(seconds=5), SharedMemory()))


def check_wrong(rank: int, n: int, kind: str) -> str:
    join()
    x = torch.ones(10 + (rank if kind == "size" else 0))
    try:
        if kind == "message":
            dist.send(x, 1) if rank == 0 else dist.recv(torch.empty(3), 0)
        elif kind == "splits":
            rows = [1, 3] if rank else [2, 2]
            dist.all_to_all_single(torch.empty(4), torch.ones(4), rows, rows)
        elif kind == "root":
            dist.broadcast(x, rank)
            dist.barrier()
        elif kind == "type":
            dist.all_reduce(torch.ones(5, dtype=torch.float64) if rank else x)
        elif kind == "reduction":
            dist.all_reduce(x, dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)
        elif rank == 0 or kind == "size":
            dist.all_reduce(x)
        else:
            dist.broadcast(x, 1)
            dist.barrier()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "rank", "text"),
    [
        ("size", 0, "rank 1 has entered all_reduce of 44 bytes of torch.float32, not all_reduce of 40 bytes"),
        ("reduction", 0, "1 has entered all_reduce (MAX) of 40 bytes of torch.float32, not all_reduce of 40"),
        ("type", 0, "of 40 bytes of torch.float64, not all_reduce of 40 bytes of torch.float32"),
        ("collective", 0, "rank 1 has entered broadcast of 40 bytes with root 1, not all_reduce of 40 bytes"),
        ("root", 0, "1 has entered broadcast of 40 bytes with root 1, not broadcast of 40 bytes with root 0"),
        ("message", 1, "rank 0 has sent 40 bytes, 12 are expected"),
        ("splits", 0, "rank 1 sends 4 bytes, 8 are expected"),
    ],
)
def test_calls_that_do_not_match_are_told(ranks: Ranks, kind: str, rank: int, text: str) -> None:
    assert text in ranks.run(check_wrong, kind)[rank]


def check_refused(rank: int, n: int) -> None:
    """Calls of which this rank alone knows that they are wrong: refused before anything is sent or written."""
    join()
    guarded = torch.full((64,), -1.0)
    place, long = guarded[24:28], torch.ones(8)
    wide = torch.ones(4, dtype=torch.float64)
    elsewhere = torch.ones(4, device="meta")
    unequal, one, none = (
        "cannot be exchanged for",
        f"tensors given: 1, ranks: {n}",
        f"none of the group's {n} ranks",
    )
    calls: list[tuple[str, Callable[[], object]]] = [
        (unequal, lambda: dist.all_to_all_single(place, long)),
        (unequal, lambda: dist.all_to_all_single(torch.empty(16), long)),
        (
            unequal,
            lambda: dist.all_to_all_single(place, torch.ones(6), [2, 2], [4, 2] if rank == 0 else [2, 4]),
        ),
        (unequal, lambda: dist.all_to_all([place, place], [long, long])),
        (one, lambda: dist.all_to_all([place], [torch.ones(4)])),
        (unequal, lambda: dist.all_gather_single(place, long)),
        (unequal, lambda: dist.all_gather_single(torch.empty(32), long)),
        (unequal, lambda: dist.all_gather_single(place, torch.ones(4, dtype=torch.int16))),
        (unequal, lambda: dist.all_gather([place, place], long)),
        (one, lambda: dist.all_gather([place], torch.ones(4))),
        (unequal, lambda: dist.reduce_scatter_single(place, torch.ones(4))),
        (unequal, lambda: dist.reduce_scatter_single(place, torch.ones(16))),
        (unequal, lambda: dist.reduce_scatter_single(place, wide)),
        (unequal, lambda: dist.reduce_scatter(place, [long, long])),
        (one, lambda: dist.reduce_scatter(place, [torch.ones(4)])),
        (none, lambda: dist.broadcast(place, n)),
        (none, lambda: dist.reduce(place, n)),
        (none, lambda: dist.send(place, n + 1)),
        (none, lambda: dist.recv(place, n + 1)),
        ("on meta", lambda: dist.all_reduce(elsewhere)),
        ("on meta", lambda: dist.all_gather_single(torch.empty(8), elsewhere)),
        ("on meta", lambda: dist.recv(elsewhere, 1 - rank)),
    ]
    if rank == 0:
        calls += [
            (unequal, lambda: dist.scatter(place, [long, long], 0)),
            (one, lambda: dist.scatter(place, [torch.ones(4)], 0)),
            (unequal, lambda: dist.gather(long, [place, place], 0)),
            (one, lambda: dist.gather(torch.ones(4), [place], 0)),
        ]
    for text, call in calls:
        with pytest.raises(RuntimeError, match=text):
            call()
    assert (guarded == -1.0).all()
    dist.all_reduce(place)
    assert (place == -n).all()


def test_what_would_be_written_past_the_end_of_a_tensor_is_refused(ranks: Ranks) -> None:
    ranks.run(check_refused)
