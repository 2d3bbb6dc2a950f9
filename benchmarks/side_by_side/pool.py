"""Processes of one system, started once and asked for steps when it is their turn."""

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from side_by_side.sizes import Size
from side_by_side.systems import System

WORKER = Path(__file__).with_name("worker.py")


PATIENCE_SECONDS = 600.0
"""Without an answer for so long, a system counts as hanging."""


class RefusedError(Exception):
    """The system will not, or cannot, do what it was asked: its reason in one line."""


class Running:
    """The ranks of one system, waiting for their turn.

    Attributes:
        first_step_seconds: from starting the processes to the end of the first step on every rank.
        peak_bytes: high-water resident memory of the fullest rank, as of the last steps.
    """

    def __init__(self, system: System, size: Size, machine: dict[str, Any] | None) -> None:
        self.system = system
        self.peak_bytes = 0
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the ranks
        spec = json.dumps(
            {
                "maker": system.maker,
                "options": system.options,
                "replicas": system.replicas,
                "micro_batches": system.micro_batches,
                "size": asdict(size),
                "machine": machine,
            }
        )
        started = time.perf_counter()
        port = _free_port()
        self._ranks = [self._start(spec, rank, port) for rank in range(system.ranks)]
        try:
            self._answers()
        except BaseException:
            self.close()
            raise
        self.first_step_seconds = time.perf_counter() - started

    def steps(self, count: int) -> float:
        """Seconds that `count` steps took, until the last rank had done them."""
        started = time.perf_counter()
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.write(f"{count}\n")
            process.stdin.flush()
        answers = self._answers()
        seconds = time.perf_counter() - started
        self.peak_bytes = max(answer["peak_bytes"] for answer in answers)
        return seconds

    def close(self) -> None:
        """Ends the processes."""
        for process in self._ranks:
            process.kill()  # a polite end waits for process groups that may be broken
        for process in self._ranks:
            process.wait()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, spec: str, rank: int, port: int) -> subprocess.Popen[str]:
        ranks = self.system.ranks
        environment = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
        # DeepSpeed asks for the accelerator by name; gloo must not look the host's name up.
        environment |= {
            "DS_ACCELERATOR": "cpu",
            "GLOO_SOCKET_IFNAME": "lo",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if ranks > 1:
            environment |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "GROUP_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        return subprocess.Popen(
            [sys.executable, str(WORKER), spec],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )

    def _answers(self) -> list[dict[str, Any]]:
        """One answer of every rank."""
        found = []
        deadline = time.perf_counter() + PATIENCE_SECONDS
        for process in self._ranks:
            assert process.stdout is not None
            left = max(0.0, deadline - time.perf_counter())
            if not select.select([process.stdout], [], [], left)[0]:
                raise RefusedError(f"no answer in {PATIENCE_SECONDS:.0f} s; last words: {self._last_line()}")
            line = process.stdout.readline()
            answer = json.loads(line) if line else {"refused": self._last_line()}
            if "refused" in answer:
                raise RefusedError(answer["refused"])
            found.append(answer)
        return found

    def _last_line(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return lines[-1] if lines else "ended without a word"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
