"""Starting local ranks; what a person is told when one fails or is stopped."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fivefold.config.errors import BadInput
from fivefold.trainer import launch, machine
from fivefold.trainer.place import RUN_ID, usable_cores
from fivefold.trainer.stop import StopSignal
from launch_environments import SRUN

RANK = str(Path(__file__).with_name("launch_rank.py"))
LOCAL = """
import multiprocessing
import sys
from pathlib import Path
from fivefold.trainer import launch
if __name__ == "__main__":
    print("launcher ready", flush=True)
    sys.exit(launch.start_local(sys.argv[3:], int(sys.argv[1]), Path(sys.argv[2])))
"""
AFRESH = LOCAL.replace(
    "if __name__", "launch.rank_context = lambda imports: multiprocessing.get_context('spawn')\nif __name__"
)
EITHER_WAY = pytest.mark.parametrize("program", [LOCAL, AFRESH], ids=["forks", "afresh"])
"""As forks of the launcher, and each as a new Python, as where there are GPUs."""
FOREVER = "100000"
NEEDS_SHARED_MEMORY = pytest.mark.skipif(not machine.shares_memory(), reason="shared memory: Linux on x86-64")


# Local ranks


@contextmanager
def started(*command: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A launcher, killed in the end if it should still be there."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
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


def local(mode: str, steps: str = "4", failure_file: str = "unused", program: str = LOCAL) -> tuple[str, ...]:
    return (sys.executable, "-c", program, "2", failure_file, RANK, mode, steps)


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"ended without saying {text!r}: {process.stderr.read() if process.stderr else ''}")


def end(process: subprocess.Popen[str], timeout: float = 60.0) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=timeout)
    return process.returncode, output, errors


@EITHER_WAY
def test_local_ranks(program: str) -> None:
    with started(*local("exits", program=program), TORCHELASTIC_RESTART_COUNT="left over") as process:
        code, output, errors = end(process)
    assert (code, errors) == (0, "")
    lines = [f"rank {rank} of 2 {what}" for rank in range(2) for what in ("exits", "steps as fivefold")]
    assert sorted(output.splitlines()) == ["launcher ready", *lines]


@pytest.mark.parametrize(
    ("mode", "code", "line"),
    [
        ("kill", 1, "fivefold: rank 1 was killed by SIGKILL: usually the kernel, out of memory"),
        ("exit", 1, "fivefold: rank 1 ended with exit code 7 and recorded no reason"),
        ("leave", 1, "fivefold: rank 1 ended early, with exit code 0; rank 0 failed: RuntimeError: "),
        ("bad", 2, "fivefold: run.toml:3: batch.global_batch = 5: 2 ranks do not divide it"),
    ],
)
def test_a_failed_rank_is_told_in_one_line(mode: str, code: int, line: str, tmp_path: Path) -> None:
    with started(*local(mode, failure_file=str(tmp_path / "failure.txt"))) as process:
        returned, _, errors = end(process)
    assert returned == code
    assert len(errors.splitlines()) == 1, errors
    assert errors.startswith(line)


@pytest.mark.parametrize("mode", ["raise", pytest.param("raise-shm", marks=NEEDS_SHARED_MEMORY)])
@EITHER_WAY
def test_an_exception_is_told_in_one_line_and_its_traceback_kept(
    program: str, mode: str, tmp_path: Path
) -> None:
    file = tmp_path / "run" / "failure.txt"
    with started(*local(mode, failure_file=str(file), program=program)) as process:
        code, _, errors = end(process)
    assert code == 1
    said = "fivefold: rank 1 failed: RuntimeError: the loss is a banana and so is the gradient"
    assert errors == f"{said} (traceback: {file})\n"
    assert 'raise RuntimeError("the loss is a banana' in file.read_text()


def test_ranks_compute_though_their_launcher_has_threads() -> None:
    """GNU OpenMP in a fork waits forever for threads that the launcher had."""
    computed = LOCAL.replace(
        "    sys.exit(", "    import torch\n    torch.ones(1 << 20).exp()\n    sys.exit("
    )
    with started(*local("computes", program=computed), OMP_NUM_THREADS="2") as process:
        code, _, errors = end(process)
    assert (code, errors) == (0, "")


def test_ranks_without_a_store_are_ended() -> None:
    threadless = (
        "import torch.distributed\n"
        "def fail(*arguments, **named):\n    raise RuntimeError('Resource temporarily unavailable')\n"
        "torch.distributed.TCPStore = fail\n"
    )
    with started(*local("well", FOREVER, program=threadless + LOCAL)) as process:
        code, _, errors = end(process)  # when all have closed the pipes
    assert code == 1
    assert "cannot serve the store by which they meet: Resource temporarily unavailable" in errors


def test_no_temporary_directory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    with pytest.raises(BadInput, match="no temporary directory for what ranks report"):
        launch.start_local([RANK], 2)


def test_an_exception_that_cannot_be_recorded_is_told_by_the_rank() -> None:
    with started(*local("raise-unrecorded")) as process:
        code, _, errors = end(process)
    assert code == 1
    assert errors.splitlines() == [
        "fivefold: rank 1: RuntimeError: the loss is a banana and so is the gradient",
        "fivefold: rank 1 ended with exit code 1 and recorded no reason; see its output above",
    ]


@EITHER_WAY
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_ranks_save(program: str, number: signal.Signals) -> None:
    with started("nohup", *local("well", FOREVER, program=program)) as process:
        wait_for(process, "steps")
        process.send_signal(signal.SIGHUP)  # ignored, thanks to nohup
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


@pytest.mark.parametrize(
    "program",
    [
        LOCAL.replace("Path(sys.argv[2])", "imports=['stubborn']"),
        "from fivefold.cli.extras import load_torch\nload_torch('stubborn')",
    ],
    ids=["launcher", "command"],
)
def test_a_signal_ends_an_import_that_ignores_exceptions(program: str, tmp_path: Path) -> None:
    """As some of torch's and numpy's do; in its C++ an exception aborts."""
    (tmp_path / "stubborn.py").write_text(
        "import time\n"
        "print('imports', flush=True)\n"
        "while True:\n    try:\n        time.sleep(60)\n    except BaseException:\n        pass\n"
    )
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "TMPDIR": str(tmp_path)}
    with started(*local("well", program=program), **environment) as process:
        wait_for(process, "imports")
        process.send_signal(signal.SIGINT)
        assert end(process) == (1, "", "fivefold: stopped by SIGINT\n")
    assert not list(tmp_path.glob("fivefold-*"))


@pytest.mark.full
def test_a_save_may_take_longer_than_the_agents_grace() -> None:
    with started(*local("slow", FOREVER)) as process:
        wait_for(process, "steps")
        process.send_signal(signal.SIGTERM)
        code, output, _ = end(process, timeout=120.0)
    assert code == 1
    assert output.count("saved") == 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
@EITHER_WAY
def test_ranks_do_not_outlive_a_killed_launcher(program: str) -> None:
    with started(*local("well", FOREVER, program=program)) as process:
        wait_for(process, "steps")
        process.kill()
        output, _ = process.communicate(timeout=30.0)  # ends when the last rank has closed the pipe
    assert output.count("saved") == 2


def test_what_a_killed_launcher_leaves_the_next_one_removes(tmp_path: Path) -> None:
    def launch() -> None:
        with started(*local("bad"), TMPDIR=str(tmp_path)) as other:
            assert end(other)[0] == 2

    with started(*local("well", FOREVER), TMPDIR=str(tmp_path)) as process:
        wait_for(process, "steps")
        [directory] = tmp_path.glob("fivefold-*")
        os.utime(directory, (0.0, 0.0))
        launch()
        assert directory.exists()  # while its launcher lives
        process.kill()
        process.communicate(timeout=30.0)
    launch()
    assert not list(tmp_path.glob("fivefold-*"))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_a_rank_that_finds_its_launcher_dead_does_not_begin() -> None:
    program = (
        "import os\n"
        "from fivefold.trainer.launch import as_rank\n"
        "from fivefold.trainer.place import place_from\n"
        "with as_rank(place_from(os.environ)):\n"
        "    print('begins')\n"
    )
    ranks = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    gone = (1 << 22) + 1
    for run_id, output in (
        (f"{RUN_ID}-{os.getpid()}", "begins\n"),
        (f"{RUN_ID}-{gone}", ""),
        ("fivefold-1", "begins\n"),
    ):
        environment = os.environ | ranks | {"TORCHELASTIC_RUN_ID": run_id}
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=environment
        )
        assert done.stdout == output, done.stderr
        assert (f"its launcher (process {gone}) has ended" in done.stderr) == (not output)


@pytest.mark.parametrize(("switches", "succeeds"), [(["-P"], True), ([], False)])
def test_the_working_directory_shadows_nothing(switches: list[str], succeeds: bool, tmp_path: Path) -> None:
    """Unless Python was started so that it does."""
    (tmp_path / "sched.py").write_text("raise SystemExit(9)")  # of Python's, and imported by nobody yet
    (tmp_path / "rank.py").write_text("import sched")
    start = [sys.executable, *switches, "-c", LOCAL, "1", "unused", "rank.py"]
    assert (subprocess.run(start, cwd=tmp_path, capture_output=True, timeout=60).returncode == 0) == succeeds


def test_closed_streams_are_no_files_of_ours(tmp_path: Path) -> None:
    """Else what is printed would go into the first file that is opened: a checkpoint, say."""
    program = (
        "import os, sys\n"
        "from fivefold.cli.main import main\n"
        "main(['--version'])\n"
        "opened = open('checkpoint', 'wb')\n"
        "os.system('echo printed; echo printed >&2')\n"
        "print('printed', flush=True)\n"
        "sys.exit(0 if opened.fileno() > 2 and not os.path.getsize('checkpoint') else 1)\n"
    )
    closing = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", program]
    assert subprocess.run(closing, cwd=tmp_path, timeout=60).returncode == 0


# Other launchers, really


def test_a_rank_computes_on_its_share() -> None:
    program = (
        "import os, torch\n"
        "from fivefold.trainer.launch import as_rank\n"
        "from fivefold.trainer.place import place_from\n"
        "with as_rank(place_from(os.environ)):\n"
        "    print(torch.get_num_threads())\n"
    )
    for environment, threads in (
        (SRUN, max(1, usable_cores() // 2)),
        (SRUN | {"OMP_NUM_THREADS": "2"}, 2),
        (SRUN | {"OMP_NUM_THREADS": ""}, max(1, usable_cores() // 2)),
    ):
        clean = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=clean | environment
        )
        assert done.stdout == f"{threads}\n", done.stderr


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


def test_torchrun_ends_with_the_line_about_bad_input() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", RANK, "bad", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    line, rule, *_ = [line for line in done.stderr.splitlines() if line.strip()][-2:]
    assert line.strip().endswith("run.toml:3: batch.global_batch = 5: 2 ranks do not divide it")
    assert set(rule) == {"="}
    assert "as_rank" not in done.stderr  # no traceback of ours


@NEEDS_SHARED_MEMORY
def test_torchrun_names_the_rank_that_failed_and_not_one_that_missed_it() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", RANK, "raise-shm", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    cause = done.stderr.rpartition("Root Cause")[2]
    assert "the loss is a banana" in cause
    assert "has died" not in cause


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_stop_signal_notes_the_first_and_restores(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopSignal() as stop:
        stop.listen()
        assert not stop
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGINT)  # an echo: within two seconds
        assert stop
        assert stop.name == number.name
    assert signal.getsignal(number) is before


def test_stop_signal_leaves_ignored_what_nohup_ignores() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            stop.listen()
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_later_interrupt_ends_the_process() -> None:
    program = (
        "import os, signal, time\n"
        "from fivefold.trainer import stop\n"
        "stop.ECHO_SECONDS = 0.05\n"
        "with stop.StopSignal() as noted:\n    noted.listen()\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(0.1)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"  # Slurm sends one at the end of a grace time: no reason to go
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('alive')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "")
