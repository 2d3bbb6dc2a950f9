"""Device-specific code, and the settings chosen by measurement at start-up."""

import ctypes
import mmap
import platform
import resource
import sys
import time
from pathlib import Path
from typing import Literal

import msgspec
import torch
import torch.distributed as dist

from fivefold.collectives.shared_memory.transport import SHARED_MEMORY
from fivefold.config.errors import BadInput
from fivefold.config.tree import Machine

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# (rows, inner, columns) of the products timed. CPU: one layer of a small and of a wider model, 2048 tokens;
# an accelerator needs far more to fill it.
CPU_SHAPES = ((2048, 256, 688), (2048, 512, 1376))
ACCELERATOR_SHAPES = ((8192, 4096, 4096), (8192, 8192, 8192))
# float32 products of these widths are off by 2 to 5e-7; a path through bf16 or TF32 by 1e-4 or more.
ERROR_BOUND = 1e-6
BUDGET_SECONDS = 0.15  # for each setting timed
CHECKED_ROWS = 64  # of each product, against float64


def device(local_rank: int = 0) -> torch.device:
    """The device of this process, made current: the local rank's accelerator, or the CPU where there is none.

    Raises:
        BadInput: more local ranks than accelerators.
    """
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    # srun and others may show each rank only its own device, which then has index 0.
    index = 0 if count == 1 else local_rank
    if index >= count:
        raise BadInput(
            f"local rank {local_rank}: this node has {count} {kind.type} devices; "
            f"start at most {count} ranks per node"
        )
    torch.accelerator.set_device_index(index)
    return torch.device(kind.type, index)


def default_backend(device: torch.device) -> str:
    """The collective backend for `parallel.backend = "default"`: shm or gloo on CPUs, nccl on NVIDIA GPUs."""
    if device.type == "cpu" and shares_memory():
        return "shm"
    return dist.get_default_backend_for_device(device)


def backends(device: torch.device) -> tuple[str, ...]:
    """What `parallel.backend` can be for ranks on such devices, the default first."""
    kinds = (default_backend(device), "gloo") if device.type == "cpu" else (default_backend(device),)
    return tuple(dict.fromkeys(kinds))


def shares_memory() -> bool:
    """Whether ranks can communicate through memory: shm relies on how x86-64 orders stores, and on Linux."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and SHARED_MEMORY.is_dir()


def synchronize(device: torch.device) -> None:
    """Waits for all work on the device, so that a time measured next is correct."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def memory_bytes(device: torch.device) -> int:
    """Peak memory of this process in bytes: the allocator's on an accelerator, resident memory on a CPU."""
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    # getrusage is the fallback: on Linux its peak survives exec, so a rank would inherit its launcher's.
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def measure(machine: Machine, dtype: str, device: torch.device) -> tuple[Machine, str]:
    """Resolves every "measure" of the [machine] section, in under a second, and says why.

    For rank 0 alone: the caller broadcasts the result and writes it into the run's config. The thread count
    must be the one the run will have. Leaves torch's settings as they were; `apply` sets them.

    Args:
        machine: the section as configured.
        dtype: `precision.dtype`.
        device: where the run computes.

    Returns:
        The section with matmul, malloc and peak_flops filled in, and the reasons in one line.
    """
    reasons = []
    matmul, malloc, peak = machine.matmul, machine.malloc, machine.peak_flops
    before = torch.get_float32_matmul_precision()
    try:
        if matmul == "measure":
            matmul, reason = _choose_matmul(dtype, device)
            reasons.append(f"matmul {reason}")
        if malloc == "measure":
            keep = device.type == "cpu" and _is_glibc()
            malloc = "keep" if keep else "default"
            reasons.append("malloc keep: glibc" if keep else "malloc default: no glibc activations here")
        if peak == 0.0:
            torch.set_float32_matmul_precision(matmul)
            peak = _peak_rate(_products(DTYPES[dtype], device))
            reasons.append(f"peak {_flops(peak)} in {dtype}")
    finally:
        torch.set_float32_matmul_precision(before)
    return msgspec.structs.replace(machine, matmul=matmul, malloc=malloc, peak_flops=peak), "; ".join(reasons)


def apply(machine: Machine) -> str:
    """Applies the resolved settings in this process; call it before the model is built.

    Returns:
        A note on what could not be done, or "".
    """
    if "measure" in (machine.matmul, machine.malloc):
        raise ValueError("apply() takes a resolved [machine] section: call measure() on rank 0 first")
    torch.set_float32_matmul_precision(machine.matmul)
    torch.backends.cudnn.allow_tf32 = machine.matmul != "highest"  # torch's own default is yes
    torch.backends.cudnn.benchmark = machine.cudnn_autotune
    if machine.malloc == "default":
        return ""
    return _keep_freed_memory()


def settings_text(machine: Machine, device: torch.device) -> str:
    """What computes, and how, for the start page; `machine` is resolved and in force."""
    if device.type == "cpu":
        threads = torch.get_num_threads()
        found = f"CPU, {threads} thread{'s' * (threads > 1)} a rank"
    else:
        products = "float32" if machine.matmul == "highest" else "TF32"
        autotuning = "on" if machine.cudnn_autotune else "off"
        found = f"{device}, float32 products in {products}, cuDNN autotuning {autotuning}"
    return found + ", layers compiled" * machine.compile


class Product:
    """One matrix product a layer makes, with its operands."""

    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.left, self.right = left, right
        self.flops = 2.0 * left.shape[0] * left.shape[1] * right.shape[1]

    def __call__(self) -> torch.Tensor:
        return self.left @ self.right

    def error(self) -> float:
        """Relative Frobenius error of the first rows against float64."""
        exact = self.left[:CHECKED_ROWS].double() @ self.right.double()
        return float((self()[:CHECKED_ROWS].double() - exact).norm() / exact.norm())


def _products(dtype: torch.dtype, device: torch.device) -> list[Product]:
    """The forward product of each shape, and the two of its backward, laid out as autograd lays them out."""
    generator = torch.Generator().manual_seed(0)  # the global generator belongs to the run

    def draw(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).to(device, dtype)

    products = []
    for rows, inner, columns in CPU_SHAPES if device.type == "cpu" else ACCELERATOR_SHAPES:
        inputs, weight, gradient = draw(rows, inner), draw(columns, inner), draw(rows, columns)
        products += [
            Product(inputs, weight.T),  # output
            Product(gradient, weight),  # gradient of the inputs
            Product(gradient.T, inputs),  # gradient of the weight
        ]
    return products


def _choose_matmul(dtype: str, device: torch.device) -> tuple[Literal["highest", "medium"], str]:
    """The faster of torch's two float32 paths, if "medium" still computes in float32 on this device."""
    if dtype == "float64":
        return "highest", "highest: the only path for float64"
    products = _products(torch.float32, device)
    torch.set_float32_matmul_precision("medium")
    error = max(product.error() for product in products)
    if not error < ERROR_BOUND:
        return "highest", f"highest: medium is not float32 on this device (error {error:.1e})"
    highest, medium = _layer_rates(products, ("highest", "medium"))
    if medium > highest:
        return "medium", f"medium: {_flops(medium)} against {_flops(highest)} for highest, error {error:.1e}"
    return "highest", f"highest: {_flops(highest)} against {_flops(medium)} for medium"


def _layer_rates(products: list[Product], precisions: tuple[str, ...]) -> list[float]:
    """FLOP/s of one pass through all products under each precision, timed in turn: machines drift."""
    seconds = dict.fromkeys(precisions, 0.0)
    for product in products:
        for precision in precisions:
            torch.set_float32_matmul_precision(precision)
            seconds[precision] += product.flops / _rate(product, BUDGET_SECONDS / len(products))
    return [sum(product.flops for product in products) / total for total in seconds.values()]


def _peak_rate(products: list[Product]) -> float:
    """FLOP/s of the fastest product; stops when the budget is spent, for fp16 crawls on most CPUs."""
    started, best = time.perf_counter(), 0.0
    for product in products:
        best = max(best, _rate(product, BUDGET_SECONDS / len(products)))
        if time.perf_counter() - started > BUDGET_SECONDS:
            break
    return best


def _rate(product: Product, seconds: float) -> float:
    """FLOP/s of the fastest of the repeats that fit into `seconds`; the first, a warm-up, counts if alone."""
    device = product.left.device
    best, started = float("inf"), time.perf_counter()
    while True:
        synchronize(device)
        before = time.perf_counter()
        product()
        synchronize(device)
        now = time.perf_counter()
        best = min(best, now - before)
        if now - started + (now - before) > seconds:
            return product.flops / best


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.0f} GFLOP/s"


def _is_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"


def _keep_freed_memory() -> str:
    """Makes glibc keep big freed blocks. By default it returns them to the kernel, which costs a page fault
    per 4 KiB when the next step asks for its activations again: 80,000 a step for an 8 M parameter model.
    """
    if not _is_glibc():
        return "malloc = keep: only glibc can, left as it is"
    # From malloc.h: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD.
    settings = {-3: 1 << 30, -1: 2**31 - 1, -2: 1 << 26}
    libc = ctypes.CDLL("libc.so.6")
    refused = [str(name) for name, value in settings.items() if libc.mallopt(name, value) != 1]
    if not refused:
        _ask_for_huge_pages(libc)
    return f"malloc = keep: glibc refused mallopt {', '.join(refused)}" if refused else ""


def _ask_for_huge_pages(libc: ctypes.CDLL) -> None:
    """Lets the kernel back the heap with pages of 2 MiB where it gives them to those who ask: fewer misses of the
    translation cache in matmuls. Only address space is taken here; a kernel that refuses changes nothing.
    """
    huge_page_advice = 14  # MADV_HUGEPAGE
    # Below the threshold set above, so it comes from the heap and goes back to it.
    size = (1 << 30) - (1 << 20)
    libc.malloc.restype = ctypes.c_void_p
    block = libc.malloc(ctypes.c_size_t(size))
    if block:
        start = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (block + size - start) // mmap.PAGESIZE * mmap.PAGESIZE
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), huge_page_advice)
        libc.free(ctypes.c_void_p(block))
