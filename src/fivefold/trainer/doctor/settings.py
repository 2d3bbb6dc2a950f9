"""Environment variables in force that change how ranks compute and talk, and what each does."""

from collections.abc import Iterator, Mapping

from fivefold.trainer.doctor.finding import Finding
from fivefold.trainer.place import usable_cores

PREFIXES = (
    "NCCL_",
    "GLOO_",
    "OMP_",
    "MKL_",
    "KMP_",
    "GOMP_",
    "TORCH_",
    "PYTORCH_",
    "CUDA_",
    "UCX_",
    "MALLOC_",
)
OTHERS = ("LD_PRELOAD", "TORCHELASTIC_ERROR_FILE")
RANKS = 2  # the least for which threads can be too many

# Settings people forget: (name, value or "" for any value but "0", state, what it does).
KNOWN: tuple[tuple[str, str, str], ...] = (
    (
        "TORCH_DISTRIBUTED_DEBUG",
        "DETAIL",
        "checks every collective on every rank first: slow; unset it when done",
    ),
    ("NCCL_DEBUG", "TRACE", "logs every NCCL call: slow; use INFO or unset it"),
    ("NCCL_P2P_DISABLE", "", "GPUs of a host talk through its memory instead of directly: slow; unset it"),
    ("NCCL_SHM_DISABLE", "", "no shared memory between the ranks of a host: slow; unset it"),
    ("NCCL_IB_DISABLE", "", "NCCL uses TCP even where there is InfiniBand; unset it if there is"),
    ("TORCH_NCCL_BLOCKING_WAIT", "", "the host waits for every collective: nothing overlaps; unset it"),
    ("CUDA_LAUNCH_BLOCKING", "", "the host waits for every kernel: slow; unset it when done debugging"),
    ("TORCH_SHOW_CPP_STACKTRACES", "", "errors carry long C++ stacks; harmless"),
    ("OMP_PROC_BIND", "", "pins threads; if every rank gets the same cores they crowd there; unset it"),
    ("GOMP_CPU_AFFINITY", "", "pins the threads of all ranks to the same cores; unset it"),
    ("KMP_AFFINITY", "", "pins threads; if every rank gets the same cores they crowd there; unset it"),
    ("LD_PRELOAD", "", "a replaced malloc ignores machine.malloc; fine if meant"),
)


def check_settings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """One finding for each setting in force; one if there is none."""
    names = sorted(name for name in environment if name.startswith(PREFIXES) or name in OTHERS)
    for name in names:
        yield _setting(name, environment[name])
    if not names:
        yield Finding("Settings", "environment", "nothing set that matters here", "good")


def _setting(name: str, value: str) -> Finding:
    if name == "OMP_NUM_THREADS":
        return _threads(value)
    for known, trigger, effect in KNOWN:
        if name == known and (value.upper() == trigger if trigger else value not in ("", "0", "false")):
            return Finding("Settings", name, value, "note", effect)
    return Finding("Settings", name, value)


def _threads(value: str) -> Finding:
    cores = usable_cores()
    if not value.isdigit() or int(value) < 1:
        return Finding("Settings", "OMP_NUM_THREADS", value, "problem", "not a number of threads: unset it")
    threads = int(value)
    if threads > cores:
        mend = f"more threads than the {cores} cores, in each rank: unset it, every rank then gets its share"
        return Finding("Settings", "OMP_NUM_THREADS", value, "problem", mend)
    if threads * RANKS > cores:
        mend = (
            f"{RANKS} ranks would run {threads * RANKS} threads on {cores} cores: unset it, "
            "every rank then gets its share"
        )
        return Finding("Settings", "OMP_NUM_THREADS", value, "note", mend)
    return Finding("Settings", "OMP_NUM_THREADS", value, "good")
