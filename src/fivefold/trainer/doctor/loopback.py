"""`python -m fivefold.trainer.doctor.loopback start`: two local ranks all-reduce; rank 0 prints times as JSON."""

import json
import os
import sys
import time

from fivefold.trainer.launch import as_rank, start_local
from fivefold.trainer.place import Place, open_store, place_from

RANKS = 2
TIMEOUT_SECONDS = 30.0
SMALL, LARGE = 2, 4 << 20  # float32 elements: 8 bytes and 16 MiB


def main() -> int:
    """Starts the ranks ("start"), or is one (its argument is the time of the start)."""
    if sys.argv[1:] == ["start"]:
        words = ["-m", "fivefold.trainer.doctor.loopback", str(time.time())]
        return start_local(words, RANKS, imports=["fivefold.trainer.session"], saves=False)
    place = place_from(os.environ)
    assert place is not None
    with as_rank(place):
        _reduce(place, started=float(sys.argv[1]))
    return 0


def _reduce(place: Place, started: float) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from fivefold.collectives.record import Recorder
    from fivefold.trainer import machine
    from fivefold.trainer.session import torch_backend

    device = (
        machine.device(place.local_rank) if torch.accelerator.device_count() >= RANKS else torch.device("cpu")
    )
    backend = machine.default_backend(device)
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    store = open_store(place, TIMEOUT_SECONDS)
    name = torch_backend(backend, device, Recorder(), timeout)
    dist.init_process_group(name, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)
    seconds = {}
    for name, elements in (("small", SMALL), ("large", LARGE)):
        tensor = torch.ones(elements, device=device)
        dist.all_reduce(tensor)
        if not bool((tensor == place.world_size).all()):
            raise RuntimeError(f"all_reduce of ones over {place.world_size} ranks gave {tensor[0].item()}")
        if name == "small":
            seconds["start"] = time.time() - started
        times = []
        for _ in range(10):
            before = time.perf_counter()
            dist.all_reduce(tensor)
            machine.synchronize(device)
            times.append(time.perf_counter() - before)
        seconds[name] = min(times)
    dist.barrier()
    dist.destroy_process_group()
    if place.rank == 0:
        print(
            json.dumps({"backend": backend} | {f"{name}_seconds": value for name, value in seconds.items()})
        )


if __name__ == "__main__":
    sys.exit(main())
