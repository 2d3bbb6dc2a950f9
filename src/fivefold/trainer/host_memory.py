"""How much memory a process may still take before the kernel kills one, itself perhaps.

Nothing fails at the limit of a container or a batch job: the process is killed.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_CGROUPS = Path("/sys/fs/cgroup")
_FILES = {  # by version: the limit, what counts against it, the part of it that is given up when memory is needed
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


class Memory(NamedTuple):
    """Bytes that a process may still take, and of how many in all."""

    available: int
    total: int


def host_memory(processes: Path = Path("/proc"), cgroups: Path = _CGROUPS) -> Memory:
    """Those of the host, or of this process's cgroup, or one above it, that is limited to less."""
    names = "MemAvailable:", "MemTotal:"
    available, total = (_number(processes / "meminfo", name) * 1024 for name in names)
    for directory, version in _own(processes / "self/cgroup", cgroups):
        limit_file, used_file, inactive = _FILES[version]
        with suppress(OSError, ValueError):  # none here, or no limit: "max"
            limit, used = (int((directory / file).read_text()) for file in (limit_file, used_file))
            available = min(available, limit - used + _number(directory / "memory.stat", inactive))
            total = min(total, limit)
    return Memory(max(0, available), total)


def _own(listed: Path, cgroups: Path) -> Iterator[tuple[Path, int]]:
    """The directories of the cgroups that a process is in, and of which version each is."""
    for line in _lines(listed):
        _, controllers, name = line.split(":", 2)
        if not controllers:
            roots, version = [cgroups, cgroups / "unified"], 2
        elif "memory" in controllers.split(","):
            roots, version = [cgroups / "memory"], 1
        else:
            continue
        own = Path(name.lstrip("/"))
        yield from ((root / part, version) for root in roots for part in (own, *own.parents))


def _number(file: Path, name: str) -> int:
    """What is behind a name in a file of a name and a number a line; 0 if nothing is."""
    lines = (line.split() for line in _lines(file))
    return next((int(number) for found, number, *_ in lines if found == name), 0)


def _lines(file: Path) -> list[str]:
    """Those of a file; none if there is none."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
