"""The processes on the other side: which of them share this host, and whether they live."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from torch.distributed import Store  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Peer:
    """A rank's process. `host` is equal for processes that can map each other's memory."""

    rank: int  # global
    host: str
    pid: int
    started: int  # in clock ticks since boot: tells it from a later process with the same id

    @classmethod
    def this(cls, rank: int, host: str) -> Self:
        """This process, as the given rank."""
        return cls(rank, host, os.getpid(), _state(os.getpid())[1])

    def condition(self) -> str:
        """What keeps this process of the same host from answering: "dead", "stopped", or ""."""
        state, started = _state(self.pid)
        if started != self.started or state in "ZX":
            return "dead"
        return "stopped" if state in "Tt" else ""


def this_host(directory: Path) -> str:
    """What processes have in common that can reach each other's files in `directory` through /proc.

    The same running kernel, the same process ids (containers have their own), the same file system.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}/{os.stat(directory).st_dev}"


class Directory:
    """The peers met so far; each group asks for its own ranks, all of which ask."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._known: dict[int, Peer] = {}

    def meet(self, store: Store, rank: int, global_ranks: list[int]) -> list[Peer]:
        """The peers of a group in its order. Collective over the group; `store` is the group's own."""
        me = global_ranks[rank]
        this = self._known.setdefault(me, Peer.this(me, self._host))
        store.set(f"peer/{rank}", json.dumps([this.host, this.pid, this.started]))
        for i, other in enumerate(global_ranks):
            if other not in self._known:
                self._known[other] = Peer(other, *json.loads(store.get(f"peer/{i}")))
        return [self._known[other] for other in global_ranks]


def _state(pid: int) -> tuple[str, int]:
    """A process's state letter and its start, in clock ticks; ("X", -1) if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The second field, the name, is in parentheses and may hold anything.
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "X", -1
    return fields[0].decode(), int(fields[19])
