"""Where this process stands among the ranks of its job: the one place that reads rank variables.

torchrun, `accelerate launch` and Fivefold itself set RANK, WORLD_SIZE and the address of rank 0; Slurm's
srun, OpenMPI's mpirun and Hydra's (MPICH, Intel MPI) have names of their own and leave the address open.
Imports no torch: whether a command must start ranks is decided before anything heavy is loaded.
"""

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.config.errors import BadInput

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

RUN_ID = "fivefold-local-launcher"
"""Begins the run id of ranks that `launch.start_local` starts; a dash and its process id follow."""
# Ports derived from a job's id, below those that kernels hand out for outgoing connections (32768 and up).
FIRST_PORT, PORTS = 12000, 20000
# Slurm numbers real steps from 0; ids from here on stand for the batch script, an interactive shell, ….
SLURM_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's place in its job."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_address: str
    master_port: int
    launcher: str  # "fivefold", "torchrun", "accelerate", "srun", "mpirun"
    launcher_has_store: bool = False  # the launcher serves the key-value store at the master's port
    restart: int = 0  # how often the launcher has restarted the ranks
    launcher_process: int = 0  # its id, the parent of this process; 0 = not known

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.world_size and 0 <= self.local_rank < self.local_world_size):
            raise BadInput(
                f"{self.launcher}: rank {self.rank} of {self.world_size}, local rank {self.local_rank} of "
                f"{self.local_world_size}: contradictory; unset rank variables left over from another job"
            )

    @property
    def one_host(self) -> bool:
        return self.local_world_size == self.world_size


def place_from(environment: Mapping[str, str]) -> Place | None:
    """This process's place as its launcher tells it, or None for a process that no launcher made a rank.

    None also inside a batch script, a `salloc` shell and a Slurm step of one task: those may start ranks.

    Args:
        environment: os.environ.

    Raises:
        BadInput: variables that are partial or contradict each other.
    """
    own = environment.get("TORCHELASTIC_RUN_ID") is not None
    started = _from_mpirun(environment) or _from_srun(environment) if not own else None
    if "RANK" not in environment:
        _check(environment, started)
        return started
    place = _from_torchrun(environment)
    _check(environment, started)
    return place


def open_store(place: Place, timeout_seconds: float) -> "Store":
    """The key-value store through which the ranks of `place`'s job find each other.

    For `init_process_group(backend, store=…, rank=…, world_size=…)`. An elastic launcher already serves one
    at the master's port; else rank 0 does.
    """
    from datetime import timedelta

    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    store = TCPStore(
        place.master_address,
        place.master_port,
        place.world_size,
        is_master=place.rank == 0 and not place.launcher_has_store,
        timeout=timedelta(seconds=timeout_seconds),
    )
    # A launcher's store outlives a restart, and so would the addresses of the ranks before it.
    return PrefixStore(f"fivefold/{place.restart}", store)


def usable_cores() -> int:
    """Cores this process may use: its affinity mask, or a container's quota if that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroups of version 2, or no quota ("max")
        return cores


def threads_of_rank(environment: Mapping[str, str], place: Place) -> int | None:
    """How many threads a rank should compute with, or None where OMP_NUM_THREADS has decided it.

    Without this, every rank under srun and mpirun would start a thread per core of the host.
    """
    if environment.get("OMP_NUM_THREADS"):
        return None
    if place.launcher == "srun" and "SLURM_CPUS_PER_TASK" in environment:
        return _number(environment, "SLURM_CPUS_PER_TASK")
    if "OMPI_MCA_orte_bound_at_launch" in environment:
        return usable_cores()  # the cores OpenMPI bound this rank to are its own
    return max(1, usable_cores() // place.local_world_size)


def _from_torchrun(environment: Mapping[str, str]) -> Place:
    names = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in environment]
    if missing:
        raise BadInput(
            f"RANK={environment['RANK']} is set, but {', '.join(missing)} not: start with torchrun, "
            "which sets them all, or unset RANK"
        )
    run_id = environment.get("TORCHELASTIC_RUN_ID", "")
    world_size = _number(environment, "WORLD_SIZE")
    own, _, launcher_process = run_id.rpartition("-")
    accelerate = any(name.startswith("ACCELERATE_") for name in environment)
    return Place(
        rank=_number(environment, "RANK"),
        world_size=world_size,
        local_rank=_number(environment, "LOCAL_RANK"),
        local_world_size=_number(environment, "LOCAL_WORLD_SIZE", world_size),
        master_address=environment["MASTER_ADDR"],
        master_port=_number(environment, "MASTER_PORT"),
        launcher="fivefold" if own == RUN_ID else "accelerate" if accelerate else "torchrun",
        launcher_has_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restart=_number(environment, "TORCHELASTIC_RESTART_COUNT", 0),
        launcher_process=int(launcher_process) if own == RUN_ID and launcher_process.isdigit() else 0,
    )


def _from_mpirun(environment: Mapping[str, str]) -> Place | None:
    """OpenMPI, or Hydra. Before Slurm: mpirun starts its remote daemons as Slurm steps."""
    if "OMPI_COMM_WORLD_RANK" in environment:
        names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
        job = environment.get("PMIX_NAMESPACE", environment.get("OMPI_MCA_ess_base_jobid", ""))
        export = "-x"
    elif "PMI_RANK" in environment and "MPI_LOCALRANKID" in environment:
        names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
        job = ""  # Hydra gives its jobs no id
        export = "-genv"
    else:
        return None
    rank, world_size, local_rank, local_world_size = (_number(environment, name) for name in names)
    address = environment.get("MASTER_ADDR")
    if address is None:
        if local_world_size < world_size:
            raise BadInput(
                "mpirun over several hosts does not say where rank 0 is: give its host's address, e.g. "
                f"mpirun {export} MASTER_ADDR{'=' if export == '-x' else ' '}10.0.0.1 …"
            )
        address = "127.0.0.1"
    if "MASTER_PORT" not in environment and not job:
        raise BadInput(
            "this mpirun gives its jobs no id to derive a port from: choose a free one, e.g. "
            f"mpirun {export} MASTER_PORT{'=' if export == '-x' else ' '}29500 …"
        )
    port = _number(environment, "MASTER_PORT", _port(job))
    return Place(rank, world_size, local_rank, local_world_size, address, port, "mpirun")


def _from_srun(environment: Mapping[str, str]) -> Place | None:
    """A task of a Slurm job step. A batch script has SLURM_PROCID and SLURM_NTASKS too, but no step."""
    step = environment.get("SLURM_STEP_ID", "")
    if not step.isdigit() or int(step) >= SLURM_SPECIAL_STEP or "SLURM_PROCID" not in environment:
        return None
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    name = next((name for name in names if name in environment), names[0])
    world_size = _number(environment, name)
    if world_size == 1:
        return None
    per_node = _tasks_per_node(
        environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", ""))
    )
    node = _number(environment, "SLURM_NODEID", 0)
    if node >= len(per_node):
        raise BadInput(f"srun: node {node} is not among SLURM_STEP_TASKS_PER_NODE; start the step with srun")
    nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", ""))
    address = "127.0.0.1" if len(per_node) == 1 else first_host(nodes)
    return Place(
        rank=_number(environment, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(environment, "SLURM_LOCALID"),
        local_world_size=per_node[node],
        master_address=environment.get("MASTER_ADDR", address),
        master_port=_number(environment, "MASTER_PORT", _port(f"{environment.get('SLURM_JOB_ID')}.{step}")),
        launcher="srun",
    )


def _check(environment: Mapping[str, str], started: Place | None) -> None:
    """RANK and WORLD_SIZE left over in a shell would turn one job of n ranks into n wrong ones."""
    if started is None:
        return
    for name, true in (("RANK", started.rank), ("WORLD_SIZE", started.world_size)):
        if environment.get(name, str(true)) != str(true):
            raise BadInput(
                f"{name}={environment[name]} is set, but {started.launcher} says {true}: unset {name}, "
                "which is left over from elsewhere"
            )


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: "gpu[003-007,9],login1" → "gpu003"."""
    # A comma inside brackets does not end the first entry.
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first)


def _tasks_per_node(text: str) -> list[int]:
    """ "2(x3),1" → [2, 2, 2, 1]."""
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return list(chain.from_iterable([int(tasks)] * int(times or 1) for tasks, times in runs))


def _port(job: str) -> int:
    """The same on all ranks of a job, and another for another job on the same host."""
    return FIRST_PORT + zlib.crc32(job.encode()) % PORTS


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.strip().isdigit():
        problem = "is missing" if text is None else f"= {text!r}: expected a whole number"
        raise BadInput(f"environment variable {name} {problem}; start with torchrun, srun or mpirun")
    return int(text)
