"""Who am I among the ranks: real launchers' environments, and what is told about wrong ones."""

from dataclasses import replace

import pytest

from fivefold.config.errors import BadInput
from fivefold.trainer.place import Place, first_host, place_from, threads_of_rank, usable_cores
from launch_environments import (
    ACCELERATE,
    ACCELERATE_ONE,
    MPICH,
    OPENMPI,
    SALLOC,
    SBATCH,
    SRUN,
    SRUN_ONE,
    TORCHRUN,
)

SECOND_OF_TWO = Place(1, 2, 1, 2, "localhost", 33221, "torchrun", launcher_has_store=True)


def test_torchrun() -> None:
    assert place_from(TORCHRUN) == SECOND_OF_TWO


def test_accelerate() -> None:
    expected = replace(SECOND_OF_TWO, launcher="accelerate", master_address="127.0.0.1", master_port=29500)
    assert place_from(ACCELERATE) == expected


@pytest.mark.parametrize("environment", [OPENMPI, SRUN], ids=["mpirun", "srun"])
def test_launchers_without_an_address(environment: dict[str, str]) -> None:
    place = place_from(environment)
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (1, 2, 1, 2)
    assert place.master_address == "127.0.0.1"
    assert 1024 < place.master_port < 32768
    assert place.one_host
    assert not place.launcher_has_store


def test_a_launcher_inside_a_launcher() -> None:
    """`srun --ntasks=1 torchrun …` and mpirun's daemons as Slurm steps: the innermost counts."""
    assert place_from(SRUN_ONE | TORCHRUN) == SECOND_OF_TWO
    assert place_from(SRUN | TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}) == replace(
        SECOND_OF_TWO, rank=0, local_rank=0
    )
    inside = place_from(SRUN_ONE | OPENMPI)
    assert inside is not None
    assert inside.launcher == "mpirun"


@pytest.mark.parametrize(
    "environment",
    [{}, SBATCH, SALLOC, SRUN_ONE, ACCELERATE_ONE, SRUN | {"SLURM_STEP_ID": str(0xFFFFFFFA)}],
    ids=["nothing", "sbatch", "salloc", "srun of one task", "accelerate of one process", "interactive step"],
)
def test_processes_that_are_no_rank(environment: dict[str, str]) -> None:
    assert place_from(environment) is None


def test_jobs_on_one_host_get_ports_of_their_own() -> None:
    jobs = [SRUN | {"SLURM_JOB_ID": str(job)} for job in range(50)]
    jobs += [SRUN | {"SLURM_STEP_ID": str(step)} for step in range(1, 5)]
    jobs += [OPENMPI | {"PMIX_NAMESPACE": str(1147863041 + 65536 * job)} for job in range(50)]
    ports = [place.master_port for place in map(place_from, jobs) if place]
    assert len(ports) == len(jobs)
    assert len(set(ports)) >= len(ports) - 1  # two of a hundred may meet by chance


def test_mpich_needs_a_port() -> None:
    with pytest.raises(BadInput, match="mpirun -genv MASTER_PORT 29500"):
        place_from(MPICH)
    place = place_from(MPICH | {"MASTER_PORT": "29511"})
    assert place == Place(1, 2, 1, 2, "127.0.0.1", 29511, "mpirun")


def test_mpirun_over_hosts_needs_an_address() -> None:
    over_hosts = OPENMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    with pytest.raises(BadInput, match=r"mpirun -x MASTER_ADDR=10\.0\.0\.1"):
        place_from(over_hosts)
    place = place_from(over_hosts | {"MASTER_ADDR": "10.0.0.7"})
    assert place is not None
    assert place.master_address == "10.0.0.7"
    assert not place.one_host


def test_srun_over_hosts() -> None:
    over_hosts = SRUN | {
        "SLURM_STEP_NODELIST": "gpu[003-004,17],login1",
        "SLURM_STEP_NUM_TASKS": "7",
        "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
        "SLURM_NODEID": "3",
        "SLURM_LOCALID": "0",
        "SLURM_PROCID": "6",
    }
    place = place_from(over_hosts)
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (6, 7, 0, 1)
    assert place.master_address == "gpu003"
    first = place_from(over_hosts | {"SLURM_NODEID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"})
    assert first is not None
    assert (first.local_world_size, first.master_port) == (2, place.master_port)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("vm", "vm"),
        ("a1,a2", "a1"),
        ("gpu[003-007,9],login1", "gpu003"),
        ("r[2-3]c[08,10]", "r2c08"),
        ("n-1.example.org,n-2.example.org", "n-1.example.org"),
    ],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"RANK": "0"}, "RANK=0 is set, but WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT not"),
        (TORCHRUN | {"RANK": "2"}, "rank 2 of 2"),
        (TORCHRUN | {"LOCAL_RANK": "5"}, "local rank 5 of 2"),
        (TORCHRUN | {"WORLD_SIZE": "two"}, "WORLD_SIZE = 'two': expected a whole number"),
        (SRUN | {"WORLD_SIZE": "8"}, "WORLD_SIZE=8 is set, but srun says 2: unset WORLD_SIZE"),
        (
            SRUN
            | {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "1"},
            "RANK=0 is set, but srun says 1: unset RANK",
        ),
        (SRUN | {"SLURM_STEP_NUM_TASKS": ""}, "SLURM_STEP_NUM_TASKS = '': expected a whole number"),
        (
            {name: text for name, text in OPENMPI.items() if "SIZE" not in name},
            "OMPI_COMM_WORLD_SIZE is missing",
        ),
    ],
)
def test_contradictions_are_told_in_a_line(environment: dict[str, str], says: str) -> None:
    with pytest.raises(BadInput) as caught:
        place_from(environment)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_threads_of_a_rank() -> None:
    mpirun, srun = place_from(OPENMPI), place_from(SRUN)
    assert mpirun is not None
    assert srun is not None
    assert threads_of_rank(OPENMPI | {"OMP_NUM_THREADS": "3"}, mpirun) is None
    assert threads_of_rank(OPENMPI, mpirun) == usable_cores()  # each rank is bound to its own cores
    assert threads_of_rank(SRUN, srun) == max(1, usable_cores() // 2)
    assert threads_of_rank(SRUN | {"SLURM_CPUS_PER_TASK": "12"}, srun) == 12
