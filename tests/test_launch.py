"""Who am I among the ranks; starting local ranks; what a person is told when one fails or is stopped."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from fivefold.config.errors import BadInput
from fivefold.trainer.place import Place, first_host, place_from, threads_of_rank, usable_cores
from fivefold.trainer.stop import StopSignal
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

RANK = str(Path(__file__).with_name("launch_rank.py"))
LOCAL = """
import sys
from pathlib import Path
from fivefold.trainer.launch import start_local
print("launcher ready", flush=True)
sys.exit(start_local(sys.argv[3:], int(sys.argv[1]), Path(sys.argv[2])))
"""
SECOND_OF_TWO = Place(1, 2, 1, 2, "localhost", 33221, "torchrun", launcher_has_store=True)
FOREVER = "100000"


# Places


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


def test_a_rank_computes_on_its_share() -> None:
    program = (
        "import os, torch\n"
        "from fivefold.trainer.launch import as_rank\n"
        "from fivefold.trainer.place import place_from\n"
        "with as_rank(place_from(os.environ)):\n"
        "    print(torch.get_num_threads())\n"
    )
    for environment, threads in ((SRUN, max(1, usable_cores() // 2)), (SRUN | {"OMP_NUM_THREADS": "2"}, 2)):
        clean = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=clean | environment
        )
        assert done.stdout == f"{threads}\n", done.stderr


# Local ranks


@contextmanager
def started(*command: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A launcher in a session of its own, killed in the end if it should still be there."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def local(mode: str, steps: str = "4", failure_file: str = "unused") -> tuple[str, ...]:
    return (sys.executable, "-c", LOCAL, "2", failure_file, RANK, mode, steps)


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"ended without saying {text!r}: {process.stderr.read() if process.stderr else ''}")


def end(process: subprocess.Popen[str], timeout: float = 60.0) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=timeout)
    return process.returncode, output, errors


def test_local_ranks() -> None:
    with started(*local("well")) as process:
        code, output, errors = end(process)
    assert (code, errors) == (0, "")
    steps = [f"rank {rank} of 2 steps as fivefold" for rank in range(2)]
    assert sorted(output.splitlines()) == ["launcher ready", *steps]


@pytest.mark.parametrize(
    ("mode", "code", "line"),
    [
        ("kill", 1, "fivefold: rank 1 was killed by SIGKILL: usually the kernel, out of memory"),
        ("exit", 1, "fivefold: rank 1 ended with exit code 7 and recorded no reason"),
        ("bad", 2, "fivefold: run.toml:3: batch.global_batch = 5: 2 ranks do not divide it"),
    ],
)
def test_a_failed_rank_is_told_in_one_line(mode: str, code: int, line: str) -> None:
    with started(*local(mode)) as process:
        returned, _, errors = end(process)
    assert returned == code
    assert len(errors.splitlines()) == 1, errors
    assert errors.startswith(line)


def test_an_exception_is_told_in_one_line_and_its_traceback_kept(tmp_path: Path) -> None:
    file = tmp_path / "run" / "failure.txt"
    with started(*local("raise", failure_file=str(file))) as process:
        code, _, errors = end(process)
    assert code == 1
    said = "fivefold: rank 1 failed: RuntimeError: the loss is a banana and so is the gradient"
    assert errors == f"{said} (traceback: {file})\n"
    assert 'raise RuntimeError("the loss is a banana' in file.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_ranks_save(number: signal.Signals) -> None:
    with started(*local("well", FOREVER)) as process:
        wait_for(process, "steps")
        process.send_signal(number)
        process.send_signal(number)  # an echo, as when terminal and launcher both pass on a Ctrl-C
        code, output, errors = end(process)
    assert code == 1
    assert output.count("saved") == 2
    assert errors.splitlines() == [
        f"fivefold: {number.name}: the ranks finish their step and save; a second one kills them",
        f"fivefold: stopped by {number.name}",
    ]


def test_a_second_signal_kills() -> None:
    with started(*local("slow", FOREVER)) as process:
        wait_for(process, "steps")
        process.send_signal(signal.SIGINT)
        wait_for(process, "saves")
        time.sleep(2.1)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        code, output, errors = end(process)
    assert code == 1
    assert time.monotonic() - began < 10.0
    assert "saved" not in output
    assert errors.splitlines()[-1] == "fivefold: killed; what was not saved yet is lost"


@pytest.mark.parametrize("seconds", [0.1, 1.5])
def test_a_signal_before_the_ranks_run(seconds: float) -> None:
    """While the launcher loads torch, and while the ranks do: nothing is left running, nothing is dumped."""
    with started(*local("well", FOREVER)) as process:
        wait_for(process, "launcher ready")
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        code, output, errors = end(process)
    assert code == 1
    assert output.count("saved") == output.count("saves")  # not even one step is needed for that
    assert "fivefold: stopped by SIGINT" in errors.splitlines()[-1]
    assert "Traceback" not in errors


@pytest.mark.full
def test_a_save_may_take_longer_than_the_agents_grace() -> None:
    with started(*local("slow", FOREVER)) as process:
        wait_for(process, "steps")
        process.send_signal(signal.SIGTERM)
        code, output, _ = end(process, timeout=120.0)
    assert code == 1
    assert output.count("saved") == 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_ranks_do_not_outlive_a_killed_launcher() -> None:
    with started(*local("well", FOREVER)) as process:
        wait_for(process, "steps")
        process.kill()
        output, _ = process.communicate(timeout=30.0)  # ends when the last rank has closed the pipe
    assert output.count("saved") == 2


def test_the_working_directory_shadows_nothing(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit(9)")
    start = [sys.executable, "-P", "-c", LOCAL, "1", "unused", "-c", "import random"]
    assert subprocess.run(start, cwd=tmp_path, capture_output=True, timeout=60).returncode == 0


# Other launchers, really


def launcher(*command: str) -> list[str]:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed here")
    return [*command, sys.executable, RANK, "well", "4"]


def check_two_ranks(command: list[str], name: str) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert lines == [f"rank {rank} of 2 steps as {name}" for rank in range(2)]


def test_real_torchrun() -> None:
    check_two_ranks(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", RANK, "well", "4"], "torchrun"
    )


@pytest.mark.full
def test_real_openmpi() -> None:
    check_two_ranks(launcher("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2"), "mpirun")


@pytest.mark.full
def test_real_mpich() -> None:
    check_two_ranks(launcher("mpirun.mpich", "-genv", "MASTER_PORT", "29511", "-n", "2"), "mpirun")


@pytest.mark.full
def test_real_srun() -> None:
    command = launcher("srun", "-n", "2")
    if subprocess.run(["sinfo"], capture_output=True).returncode:
        pytest.skip("srun is installed, but no Slurm controller answers")
    check_two_ranks(command, "srun")


# Stopping


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_stop_signal_notes_the_first_and_restores(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopSignal() as stop:
        assert not stop
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGINT)  # an echo: within two seconds
        assert stop
        assert stop.name == number.name
    assert signal.getsignal(number) is before


def test_a_later_interrupt_ends_the_process() -> None:
    program = (
        "import os, signal, time\n"
        "from fivefold.trainer import stop\n"
        "stop.ECHO_SECONDS = 0.05\n"
        "with stop.StopSignal():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(0.1)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"  # Slurm sends one at the end of a grace time: no reason to go
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('alive')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "")
