"""The host: software, processor, memory, limits, and a launcher's traces."""

import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fivefold.config.errors import BadInput
from fivefold.trainer.doctor.finding import MIB, Finding, size
from fivefold.trainer.host_memory import host_memory
from fivefold.trainer.place import place_from, usable_cores

PACKAGES = ("fivefold", "msgspec", "rich")
TRAIN_PACKAGES = ("torch", "numpy", "safetensors", "tokenizers")
OLDEST_TORCH = (2, 13)
INSTALL = 'pip install "fivefold[train]"'
OPEN_FILES = 4096  # a rank of a big job holds a socket per peer and process group, and its data shards
SMALL_SHM = 256 * MIB  # containers often get 64 MiB; shared-memory and NCCL collectives need more
SMALL_DISK = 256 * MIB
INFINIBAND = Path("/sys/class/infiniband")


def check_host(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Everything but network and settings."""
    yield from _software()
    yield from _hardware()
    yield from _limits()
    yield _launcher(environment)


def _software() -> Iterator[Finding]:
    yield Finding("Software", "python", f"{platform.python_version()}, {sys.executable}", "good")
    for package in PACKAGES + TRAIN_PACKAGES:
        yield _package(package)
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), "")
    yield Finding("Software", "compiler", compiler or "none; only torch.compile would need one")
    libc = " ".join(platform.libc_ver()) or "not glibc"
    yield Finding("Software", "system", f"{platform.system()} {platform.release()}, {libc}")


def _package(name: str) -> Finding:
    try:
        found = version(name)
    except PackageNotFoundError:
        return Finding("Software", name, "not installed", "note", f"planning works; to train: {INSTALL}")
    if name == "torch" and tuple(int(part) for part in found.split(".")[:2]) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return Finding("Software", name, found, "problem", f"older than {oldest}: {INSTALL}")
    return Finding("Software", name, found, "good")


def _hardware() -> Iterator[Finding]:
    yield Finding("Hardware", "processor", _processor())
    cores, all_cores = usable_cores(), os.cpu_count() or 1
    less = f" of {all_cores} (affinity mask or container quota)" if cores < all_cores else ""
    yield Finding("Hardware", "cores", f"{cores}{less}")
    available, total = host_memory()
    if total:
        yield Finding("Hardware", "memory", f"{size(available)} available of {size(total)}")
    yield _disk(
        "/dev/shm", "too small for collectives through shared memory: docker run --shm-size=8g", SMALL_SHM
    )
    yield _disk(".", "runs, token shards and checkpoints are written here by default: make room", SMALL_DISK)


def _disk(path: str, mend: str, least: int) -> Finding:
    """Free space of a file system; too little is a problem."""
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return Finding("Hardware", path, str(error))
    name, text = ("disk here" if path == "." else path), f"{size(usage.free)} free of {size(usage.total)}"
    return Finding("Hardware", name, text, *(("problem", mend) if usage.free < least else ("good",)))


def _processor() -> str:
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _limits() -> Iterator[Finding]:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY or files >= OPEN_FILES:
        yield Finding("Limits", "open files", _limit(files), "good")
    else:
        mend = f"enough for a few ranks; for hundreds: ulimit -n {max(OPEN_FILES, min(most, 1 << 16))}"
        yield Finding("Limits", "open files", _limit(files), "note", mend)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    rdma = INFINIBAND.is_dir() and any(INFINIBAND.iterdir())
    if rdma and locked != resource.RLIM_INFINITY:
        mend = "InfiniBand registers its buffers as locked memory: ulimit -l unlimited"
        yield Finding("Limits", "locked memory", _limit(locked), "problem", mend)
    else:
        yield Finding("Limits", "locked memory", _limit(locked) + ("" if rdma else "; no InfiniBand here"))


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


def _launcher(environment: Mapping[str, str]) -> Finding:
    try:
        place = place_from(environment)
    except BadInput as error:
        return Finding("Launcher", "variables", "contradictory", "problem", str(error))
    if place is None:
        return Finding("Launcher", "variables", "none: fivefold starts the local ranks itself", "good")
    return Finding("Launcher", "variables", f"{place.launcher}: rank {place.rank} of {place.world_size}")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
