"""How much memory a process may still take: the host's, or what its cgroup, or one above it, leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.trainer.host_memory import host_memory

GIB = 1 << 30


@pytest.mark.parametrize(
    ("cgroup", "files", "free_gib"),
    [
        ("0::/\n", {}, 20),
        ("0::/\n", {"": (8, 5, 1)}, 4),
        ("0::/job/task\n", {"job/task": ("max", 5, 0), "job": (8, 7, 0)}, 1),
        ("0::/job/task\n", {"job/task": (64, 5, 0)}, 20),
        ("4:cpu,cpuacct:/job\n2:memory:/outside\n0::/\n", {"memory": (6, 3, 1)}, 4),
        ("2:memory:/job\n0::/\n", {"memory": (1 << 32, 9, 0), "memory/job": (2, 3, 0)}, 0),
    ],
)
def test_memory_that_is_free(
    tmp_path: Path, cgroup: str, files: dict[str, tuple[int | str, int, int]], free_gib: int
) -> None:
    """`files`: by cgroup its limit, what is used and what of it can be given up, in GiB."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(cgroup)
    (tmp_path / "meminfo").write_text(f"MemFree: 1 kB\nMemAvailable: {20 * GIB >> 10} kB\n")
    for name, (limit, used, inactive) in files.items():
        directory = tmp_path / "cgroups" / name
        directory.mkdir(parents=True, exist_ok=True)
        old = name.startswith("memory")
        most = limit if isinstance(limit, str) else limit * GIB
        (directory / ("memory.limit_in_bytes" if old else "memory.max")).write_text(f"{most}\n")
        (directory / ("memory.usage_in_bytes" if old else "memory.current")).write_text(f"{used * GIB}\n")
        prefix = "total_" if old else ""
        (directory / "memory.stat").write_text(f"cache 5\n{prefix}inactive_file {inactive * GIB}\n")
    assert host_memory(tmp_path, tmp_path / "cgroups").available == free_gib * GIB
