"""Start-up choices: measured, checked, put into force; and what a process is told about its device and memory."""

import platform
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
from msgspec.structs import replace

from fivefold.collectives.record import Recorder
from fivefold.config.errors import BadInput
from fivefold.config.tree import Machine
from fivefold.trainer import machine
from fivefold.trainer.session import torch_backend

CPU = torch.device("cpu")
RESOLVED = Machine(matmul="high", malloc="default", peak_flops=1e9)
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, or needs glibc")


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_measure_resolves_everything_and_says_why() -> None:
    before = torch.get_float32_matmul_precision()
    chosen, reason = machine.measure(Machine(), "float32", CPU)
    assert chosen.matmul in ("highest", "medium")
    assert chosen.malloc in ("default", "keep")
    assert chosen.peak_flops > 1e8
    assert "\n" not in reason
    assert f"matmul {chosen.matmul}" in reason
    assert f"malloc {chosen.malloc}" in reason
    assert "FLOP/s in float32" in reason
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("dtype", ["float64", "bf16"])
def test_peak_is_of_the_runs_dtype(dtype: str) -> None:
    chosen, reason = machine.measure(Machine(matmul="highest", malloc="default"), dtype, CPU)
    assert reason.endswith(f"in {dtype}")
    assert chosen.peak_flops > 1e8


def test_what_is_chosen_stays_chosen() -> None:
    assert machine.measure(RESOLVED, "float32", CPU) == (RESOLVED, "")


def test_a_path_that_is_not_float32_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where torch's "medium" means bf16: here every path is refused, by a bound that none can meet."""
    monkeypatch.setattr(machine, "ERROR_BOUND", 1e-12)
    chosen, reason = machine.measure(Machine(), "float32", CPU)
    assert chosen.matmul == "highest"
    assert "medium is not float32 on this device (error " in reason


def test_the_error_check_knows_bf16() -> None:
    left, right = torch.randn(128, 512), torch.randn(512, 128)
    assert machine.Product(left, right).error() < machine.ERROR_BOUND
    assert machine.Product(left.bfloat16(), right.bfloat16()).error() > 1e-4  # its output is rounded to bf16


def test_apply_wants_a_resolved_section() -> None:
    with pytest.raises(ValueError, match="measure"):
        machine.apply(Machine(matmul="highest"))


def test_apply_sets_the_precision() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        assert machine.apply(RESOLVED) == ""
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.allow_tf32
        assert not torch.backends.cudnn.benchmark
        machine.apply(replace(RESOLVED, matmul="highest", cudnn_autotune=True))
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cudnn.allow_tf32
        assert torch.backends.cudnn.benchmark
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.allow_tf32 = True


def test_the_start_page_tells_what_is_in_force() -> None:
    gpu = torch.device("cuda", 1)
    tuned = replace(RESOLVED, cudnn_autotune=True, compile=True)
    exact = replace(RESOLVED, matmul="highest")
    assert machine.settings_text(tuned, gpu) == (
        "cuda:1, float32 products in TF32, cuDNN autotuning on, layers compiled"
    )
    assert machine.settings_text(exact, gpu) == "cuda:1, float32 products in float32, cuDNN autotuning off"
    assert machine.settings_text(exact, CPU).startswith("CPU, ")


@linux
def test_kept_memory_costs_no_page_faults() -> None:
    faults = {}
    for malloc in ("default", "keep"):
        faults[malloc] = int(
            run(
                "import resource, torch\n"
                "from fivefold.trainer import machine\n"
                f"note = machine.apply(machine.Machine(matmul='highest', malloc={malloc!r}))\n"
                "assert not note, note\n"
                "def use():\n"
                "    for _ in range(10):\n"
                "        torch.ones(16 << 20)\n"
                "use(); use()\n"  # the heap grows for a few of them before a hole fits
                "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
                "use()\n"
                "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
            )
        )
    assert faults["default"] > 100_000  # 64 MiB in pages of 4 KiB, ten times
    assert faults["keep"] < faults["default"] / 10


@linux
def test_memory_is_this_process_s_own_peak() -> None:
    """getrusage's peak would be the parent's here: it survives the start of another program."""
    child = (
        "import torch; from fivefold.trainer import machine; print(machine.memory_bytes(torch.device('cpu')))"
    )
    program = (
        "import subprocess, sys\n"
        "ballast = bytearray(2 << 30)\n"
        f"print(subprocess.run([sys.executable, '-c', {child!r}], capture_output=True, text=True).stdout)\n"
    )
    assert 50e6 < int(run(program)) < 1.5e9


def test_memory_counts_what_was_freed() -> None:
    held = torch.ones(64 << 20)
    peak = machine.memory_bytes(CPU)
    assert peak > held.nbytes
    del held
    assert machine.memory_bytes(CPU) >= peak - (1 << 20)  # the kernel's count is off by some pages


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_a_machine_without_accelerator() -> None:
    assert machine.device(local_rank=3) == CPU
    assert machine.default_backend(CPU) == ("shm" if machine.shares_memory() else "gloo")
    machine.synchronize(CPU)


def test_processors_that_order_stores_in_another_way_use_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert machine.backends(CPU) == ("gloo",)
    with pytest.raises(BadInput, match="backend = shm: for CPUs, on Linux and x86-64; set default"):
        torch_backend("shm", CPU, Recorder(), timedelta(seconds=1))


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_a_machine_with_an_accelerator() -> None:
    device = machine.device()
    assert device.index == torch.accelerator.current_device_index() == 0
    chosen, reason = machine.measure(Machine(), "bf16", device)
    assert chosen.malloc == "default"
    assert chosen.peak_flops > 1e12, reason
    tensor = torch.ones(1 << 20, device=device)
    machine.synchronize(device)
    assert machine.memory_bytes(device) >= tensor.nbytes
