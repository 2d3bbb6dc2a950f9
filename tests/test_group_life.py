"""How recorded groups end: by a dead peer, a timeout, or in peace."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fivefold.collectives.work import CollectiveError
from ranks import Ranks, run_ranks
from recorded import (
    TRANSPORTS,
    batch_of,
    join,
    make_model,
    mesh_of,
    over,
    ranks_over,
    wait,
)

ranks = pytest.fixture(scope="module", params=TRANSPORTS)(ranks_over)


def until_error(collective: Callable[[], Any]) -> tuple[str, float]:
    """Calls until it fails: the message of the CollectiveError, and the seconds it took."""
    start = time.monotonic()
    try:
        for _ in range(10):  # what the dead rank had sent before may still be accepted
            collective()
    except CollectiveError as error:
        return str(error), time.monotonic() - start
    raise AssertionError("no error")


def check_dead_peer(rank: int, n: int) -> list[tuple[str, float]]:
    recorder = join()
    x = torch.ones(4)
    groups = [dist.new_group(group_desc=f"mesh_{axis}") for axis in ("tp", "cp", "dp_shard", "pp")]
    for group in groups:
        dist.all_reduce(x, group=group)
    model = make_model()
    fully_shard(model, mesh=DeviceMesh.from_group(groups[2], "cpu"))
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    tp, cp, _, pp = groups
    errors = [
        until_error(lambda: dist.all_reduce(x, group=tp)),
        until_error(lambda: dist.all_gather_object([None] * n, 1, group=tp)),
        until_error(lambda: wait(functional.all_reduce(x, "sum", group=cp))),
        until_error(lambda: model(batch_of(rank))),
        until_error(lambda: dist.recv(x, group_src=1, group=pp)),
    ]
    entered = max((call for group in recorder.groups if (call := group.entered)), key=lambda call: call.since)
    assert (entered.primitive, entered.peer) == ("recv", 1)
    return errors


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_dead_peer_is_one_clear_line_within_seconds(transport: str) -> None:
    results = run_ranks(partial(over, transport, check_dead_peer), 3, backend=None, dies={1})
    for rank, others in ((0, "ranks 1, 2"), (2, "ranks 0, 1")):
        messages = [message for message, _ in results[rank]]
        for message, pattern in zip(
            messages,
            [
                rf"rank {rank}: all_reduce number \d+ on axis tp with {others} failed: .+",
                rf"rank {rank}: all_gather number \d+ on axis tp with {others} failed: .+",
                rf"rank {rank}: all_reduce number \d+ on axis cp with {others} failed: .+",
                rf"rank {rank}: all_gather number \d+ on axis dp_shard with {others} failed: .+",
                rf"rank {rank}: recv number 1 on axis pp with rank 1 failed: .+",
            ],
            strict=True,
        ):
            assert re.fullmatch(pattern, message), message
        assert sum(seconds for _, seconds in results[rank]) < 5.0


def check_timeout(rank: int, n: int) -> str:
    join(timeout=0.5)
    group = mesh_of(tp=2).get_group("tp")  # torch would give it 30 minutes
    dist.all_reduce(torch.ones(1), group=group)
    if rank == 1:
        time.sleep(1.5)
        return ""
    message, seconds = until_error(lambda: dist.all_reduce(torch.ones(1), group=group))
    assert 0.4 < seconds < 1.4
    return message


def test_every_group_has_the_timeout_registered(ranks: Ranks) -> None:
    message = ranks.run(check_timeout, world_size=2)[0]
    assert message.startswith(
        "rank 0: all_reduce number 2 on axis tp with rank 1 failed: Timed out waiting 500ms"
    )


# --- the end of a process

LIFE = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
from fivefold.collectives.group import register
from fivefold.collectives.record import Recorder
from fivefold.collectives.shared_memory.transport import SharedMemory

rank, store, destroy = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2), sys.argv[3] == "destroy"
shared = SharedMemory() if sys.argv[4] == "shm" else None
dist.init_process_group(register(Recorder(), timedelta(seconds=20), shared), store=store, rank=rank, world_size=2)
group = dist.new_group(group_desc="mesh_tp")
pending = dist.all_reduce(torch.ones(1000), group=group, async_op=True)
dist.all_reduce(torch.ones(1))
pending.wait()
dist.barrier()
if destroy:
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("ending", ["destroy", "leave"])
def test_processes_end_cleanly(tmp_path: Path, ending: str, transport: str) -> None:
    arguments = [str(tmp_path / "store"), ending, transport]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LIFE, str(rank), *arguments], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 0, errors
        assert "terminate called" not in errors
        assert "Traceback" not in errors
