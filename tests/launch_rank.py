"""A rank for tests/test_launch.py: steps with a collective each, and misbehaves on rank 1 as told.

    python launch_rank.py MODE STEPS

MODE: "well", "raise", "raise-shm" (over shared memory), "raise-unrecorded" (on a full disk), "kill" (leaving a child
behind), "exit", "leave" (as if all were done), "bad" (input), "slow" (saves for a long time when asked to stop),
"computes" (in threads), "exits" (and says so).
Each rank prints what happens to it, so that the test can wait for it.
"""

import atexit
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

from fivefold.config.errors import BadInput
from fivefold.trainer.launch import as_rank
from fivefold.trainer.place import Place, open_store, place_from
from fivefold.trainer.stop import StopSignal

STEP_SECONDS = 0.05
SAVE_SECONDS = {"slow": 60.0}


def main(mode: str, steps: int) -> None:
    place = place_from(os.environ)
    assert place is not None
    with as_rank(place), StopSignal() as stop:
        stop.listen()
        if mode == "bad":
            raise BadInput("run.toml:3: batch.global_batch = 5: 2 ranks do not divide it")
        train(place, mode, steps, stop)


def train(place: Place, mode: str, steps: int, stop: StopSignal) -> None:
    import torch
    import torch.distributed as dist

    store = open_store(place, 30.0)
    backend = "gloo"
    if mode.endswith("-shm"):
        from fivefold.collectives.record import Recorder
        from fivefold.trainer.session import torch_backend

        backend = torch_backend("shm", torch.device("cpu"), Recorder(), timedelta(seconds=30))
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size)
    for step in range(steps):
        stopping = torch.tensor([float(bool(stop)), 1.0])
        dist.all_reduce(stopping)
        assert stopping[1] == place.world_size
        if stopping[0]:
            say(place, "saves")
            time.sleep(SAVE_SECONDS.get(mode, 0.1))
            say(place, "saved")
            break
        if step == 1:
            say(place, f"steps as {place.launcher}")
        if mode == "computes" and step == 0:
            torch.ones(1 << 20).exp()
        if mode == "exits" and step == 0:
            atexit.register(say, place, "exits")
        if step == 2 and place.rank == 1:
            misbehave(mode)
        time.sleep(STEP_SECONDS)
    dist.barrier()
    dist.destroy_process_group()


def misbehave(mode: str) -> None:
    if mode == "raise-unrecorded":
        os.environ["TORCHELASTIC_ERROR_FILE"] = "/dev/full"
    if mode.startswith("raise"):
        raise RuntimeError("the loss is a banana\nand so is the gradient")
    if mode == "leave":
        os._exit(0)
    if mode == "kill":
        subprocess.Popen(["sleep", "1000"])  # holds the pipes that the test reads
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "exit":
        os._exit(7)


def say(place: Place, what: str) -> None:
    # One write for the line: print writes the newline apart, and ranks share the pipe.
    sys.stdout.write(f"rank {place.rank} of {place.world_size} {what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
