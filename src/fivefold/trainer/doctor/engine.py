"""torch on this machine: devices, backends, the matmul path, and a real collective between two ranks."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist

from fivefold.config.tree import Machine
from fivefold.trainer import machine
from fivefold.trainer.doctor.finding import Finding, size

LOOPBACK_SECONDS = 90.0  # starting two ranks takes 3; a hung one is found out by its own timeout before this


def check_engine() -> Iterator[Finding]:
    """Devices, backends and the choices that `train` would make."""
    device = machine.device()
    yield from _devices(device)
    yield _backends(device)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a rank has where ranks share a CPU
    try:
        reasons = [machine.measure(Machine(), "float32", device)[1]]
        # Everything but the peak is settled here, so only that is measured.
        reasons.append(machine.measure(Machine(matmul="highest", malloc="default"), "bf16", device)[1])
    finally:
        torch.set_num_threads(threads)
    for part in "; ".join(reasons).split("; "):
        name, _, value = part.partition(" ")
        yield Finding("Compute", name, value, "good")


def _devices(device: torch.device) -> Iterator[Finding]:
    if device.type == "cpu":
        if shutil.which("nvidia-smi"):
            mend = (
                f"torch {torch.__version__} cannot use this host's NVIDIA GPUs: install a CUDA build of torch"
            )
            yield Finding("Compute", "devices", "CPU only", "problem", mend)
        else:
            yield Finding("Compute", "devices", "CPU, no accelerator")
        return
    for index in range(torch.accelerator.device_count()):
        free, total = torch.accelerator.get_memory_info(index)
        name = torch.get_device_module(device).get_device_name(index)
        yield Finding(
            "Compute", f"{device.type}:{index}", f"{name}, {size(free)} free of {size(total)}", "good"
        )


def _backends(device: torch.device) -> Finding:
    available = {
        "shm": machine.shares_memory(),
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    text = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in available.items())
    default = machine.default_backend(device)
    if not available.get(default, dist.is_backend_available(default)):
        mend = f"{device.type} ranks talk through {default}, which this torch lacks: install another build of torch"
        return Finding("Compute", "backends", text, "problem", mend)
    return Finding("Compute", "backends", f"{text}; default {default}", "good")


def check_loopback() -> Finding:
    """Two ranks of this host, started as `train` starts them, reduce tensors together."""
    command = [sys.executable, "-m", "fivefold.trainer.doctor.loopback", "start"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOOPBACK_SECONDS)
    except subprocess.TimeoutExpired:
        mend = "the ranks hung: a firewall on loopback, or GLOO_SOCKET_IFNAME is not a usable interface"
        return Finding("Collectives", "2 ranks", f"nothing in {LOOPBACK_SECONDS:.0f} s", "problem", mend)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Finding("Collectives", "2 ranks", "failed", "problem", last.removeprefix("fivefold: "))
    result = json.loads(done.stdout)
    value = (
        f"all_reduce {result['small_seconds'] * 1e6:.0f} µs for 8 bytes, {result['large_seconds'] * 1e3:.1f} ms "
        f"for 16 MiB; ranks up in {result['start_seconds']:.1f} s"
    )
    return Finding("Collectives", f"2 ranks, {result['backend']}", value, "good")
