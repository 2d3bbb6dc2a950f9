"""Training over slow links, for real, on one Linux machine: hosts are network namespaces, links are throttled veths.

As root, from the repository:

    python benchmarks/slow_links.py --hosts 4 --rates 1gbit,100mbit --json slow_links.json

Every host is a network namespace with one interface, on a bridge in a namespace of its own, and has a /dev/shm of its
own; `tc tbf` limits both ends of each cable. Ranks meet by torchrun's rendezvous over these links
(GLOO_SOCKET_IFNAME). For each rate, the unlimited one first:

1. `fivefold comm calibrate` across the hosts writes a cluster file;
2. `fivefold comm bench` times all-reduces alone: the backends' own, the flat ring, the hierarchical one;
3. `fivefold train` sums gradients in each way: bytes through the first host's cable in a step (the interface's own
   count; what starting and ending a run sends is taken off by a run of fewer steps), step time measured and
   predicted, loss after the same tokens (of the unlimited link's run: the link changes no bit of it).

Predicted is the step on the unlimited link plus what `fivefold estimate` says it takes longer with the cluster file of
the throttled one.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from fivefold.config.load import load
from fivefold.ledger.total import estimate
from fivefold.planner.jobs import job_of
from fivefold.render.tables import table
from fivefold.render.units import bytes_text, seconds_text

WAYS: dict[str, tuple[str, ...]] = {
    "shm": ("parallel.backend=shm",),
    "gloo": ("parallel.backend=gloo",),
    "ring": ("parallel.backend=gloo", "parallel.algorithm=ring"),
    "hierarchical": ("parallel.backend=shm", "parallel.algorithm=hierarchical"),
} | {
    method: ("parallel.backend=shm", f"parallel.compression={method}")
    for method in ("bf16", "fp16", "int8", "topk", "threshold", "powersgd")
}
WAYS |= {
    f"zero-{zero}": (
        "parallel.backend=gloo",
        "parallel.dp_replicate=1",
        "parallel.dp_shard=-1",
        f"parallel.zero={zero}",
    )
    for zero in (1, 2, 3)
}
"""How gradients are summed: by shared memory in a host and gloo between hosts, by gloo over all ranks, by a flat ring
and a hierarchical program, compressed, or (zero-N) reduce-scattered by gloo, which gathers parameters, too."""
STARTING_STEPS = 2
UNLIMITED = "unlimited"
SWITCH, PORT = "fivefold-switch", 29411
CONFIG = """
[model]
layers = 2
hidden = 128
heads = 4
ffn = 344
vocab = 2048
[parallel]
dp_replicate = {ranks}
[batch]
global_batch = {batch}
micro_batch = 2
sequence_length = 128
[optimizer]
lr = 2e-3
[schedule]
warmup_tokens = 4000
[data]
path = "python:stdlib"
[run]
name = "slow-links"
eval_every = 100000
[checkpoint]
every = 100000
[machine]
matmul = "highest"
malloc = "keep"
peak_flops = 1e11
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2, choices=(2, 4))
    parser.add_argument("--per-host", type=int, default=2, help="ranks a host; default 2")
    parser.add_argument("--rates", default="1gbit,100mbit", help="as tc writes them; default 1gbit,100mbit")
    parser.add_argument("--ways", default=",".join(WAYS), help="default: all")
    parser.add_argument("--steps", type=int, default=60, help="of the run whose loss is told; default 60")
    parser.add_argument(
        "--timed-steps", type=int, default=12, help="of each run on a throttled link; default 12"
    )
    parser.add_argument(
        "--largest", type=int, default=4, help="MiB, of what is calibrated and timed; default 4"
    )
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    if unknown := [way for way in arguments.ways.split(",") if way not in WAYS]:
        parser.error(f"--ways {','.join(unknown)}: expected some of {', '.join(WAYS)}")
    if min(arguments.steps, arguments.timed_steps) < STARTING_STEPS + 2:
        parser.error(f"--steps, --timed-steps: expected at least {STARTING_STEPS + 2}")
    if os.geteuid():
        sys.exit("slow_links: network namespaces need root")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and take the cables away
    with tempfile.TemporaryDirectory(prefix="fivefold-slow-links-") as scratch, cables(arguments.hosts):
        found = Benchmark(arguments.hosts, arguments.per_host, arguments.largest, Path(scratch)).run(
            arguments
        )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1))
    show(found)


@contextmanager
def cables(hosts: int) -> Iterator[None]:
    """The hosts' namespaces, connected through a switch; all gone afterwards."""
    names = [SWITCH, *(host(index) for index in range(hosts))]
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    try:
        for name in names:
            ip("netns", "add", name)
        ip("-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        ip("-n", SWITCH, "link", "set", "bridge", "up")
        for index in range(hosts):
            name = host(index)
            ip("-n", name, "link", "set", "lo", "up")
            peer = ("peer", "name", f"port{index}", "netns", SWITCH)
            ip("link", "add", "cable", "netns", name, "type", "veth", *peer)
            ip("-n", name, "addr", "add", f"{address(index)}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", SWITCH, "link", "set", f"port{index}", "master", "bridge")
            ip("-n", SWITCH, "link", "set", f"port{index}", "up")
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def throttle(hosts: int, rate: str) -> None:
    """Limits both directions of every cable; a burst of 64 KiB, and a queue that holds 50 ms."""
    ends = [(host(index), "cable") for index in range(hosts)]
    ends += [(SWITCH, f"port{index}") for index in range(hosts)]
    for name, device in ends:
        on = ["tc", "-n", name, "qdisc"]
        subprocess.run([*on, "del", "dev", device, "root"], check=False, capture_output=True)
        if rate != UNLIMITED:
            limit = ["tbf", "rate", rate, "burst", "64kb", "latency", "50ms"]
            subprocess.run([*on, "add", "dev", device, "root", *limit], check=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def host(index: int) -> str:
    return f"fivefold-{index}"


def address(index: int) -> str:
    return f"10.77.0.{index + 1}"


def sent_bytes(index: int) -> int:
    """What the host's interface has sent since it was made."""
    read = ["cat", "/sys/class/net/cable/statistics/tx_bytes"]
    done = subprocess.run(
        ["ip", "netns", "exec", host(index), *read], check=True, capture_output=True, text=True
    )
    return int(done.stdout)


@dataclass
class Benchmark:
    """The runs on one set of hosts."""

    hosts: int
    per_host: int
    largest: int  # MiB
    scratch: Path
    starting: dict[str, int] = field(default_factory=dict)  # bytes of a run of STARTING_STEPS, by way

    @property
    def ranks(self) -> int:
        return self.hosts * self.per_host

    @property
    def config(self) -> Path:
        return self.scratch / "slow.toml"

    def run(self, arguments: argparse.Namespace) -> dict[str, Any]:
        self.config.write_text(CONFIG.format(ranks=self.ranks, batch=4 * self.ranks))
        links: list[dict[str, Any]] = []
        rows: list[dict[str, Any]] = []
        on_fast: dict[str, dict[str, Any]] = {}
        for rate in (UNLIMITED, *arguments.rates.split(",")):
            tell(f"{rate}: calibrating")
            throttle(self.hosts, rate)
            self.calibrate(rate)
            links += self.bench(rate)
            for way in arguments.ways.split(","):
                row = self.row(way, rate, arguments.steps if rate == UNLIMITED else arguments.timed_steps)
                fast = on_fast.setdefault(way, row)
                slower = self.estimated(way, rate) - self.estimated(way, UNLIMITED)
                row["predicted_step_seconds"] = fast["step_seconds"] + slower
                row |= {key: fast[key] for key in ("loss", "tokens")}
                rows.append(row)
                predicted = (
                    "" if row is fast else f", predicted {seconds_text(row['predicted_step_seconds'])}"
                )
                tell(f"{rate} {way}: {seconds_text(row['step_seconds'])} a step{predicted}")
        return {"hosts": self.hosts, "ranks": self.ranks, "links": links, "rows": rows}

    def calibrate(self, rate: str) -> None:
        largest = f"{self.largest}M" if rate == UNLIMITED or rate.endswith("gbit") else "1M"
        words = ["comm", "calibrate", "--sizes", f"4K:{largest}"]
        self.everywhere([*words, "--output", str(self.cluster_file(rate))])

    def cluster_file(self, rate: str) -> Path:
        return self.scratch / f"{rate}.toml"

    def bench(self, rate: str) -> list[dict[str, Any]]:
        sizes = ",".join(dict.fromkeys(("64K", "1M", f"{self.largest}M")))
        words = ["comm", "bench", "--primitives", "all_reduce", "--sizes", sizes, "--json"]
        words += ["--cluster", str(self.cluster_file(rate))]
        out = self.everywhere([*words, "--algorithms", "shm,gloo,ring@gloo,hierarchical"])
        return [row | {"rate": rate} for row in json.loads(out)["rows"]]

    def row(self, way: str, rate: str, steps: int) -> dict[str, Any]:
        """Trains; once also for fewer steps, whose bytes are taken off."""
        sent, lines = self.train(way, rate, steps)
        if way not in self.starting:
            self.starting[way], _ = self.train(way, rate, STARTING_STEPS)
        return {
            "way": way,
            "rate": rate,
            "steps": steps,
            "wire_bytes_per_step": (sent - self.starting[way]) / (steps - STARTING_STEPS),  # with TCP's own
            "step_seconds": median(line["step_seconds"] for line in lines[STARTING_STEPS:]),
            "loss": lines[-1]["loss"],
            "tokens": lines[-1]["tokens"],
        }

    def train(self, way: str, rate: str, steps: int) -> tuple[int, list[dict[str, Any]]]:
        """Bytes through the first host's cable, and the run's steps."""
        directory = self.scratch / f"{way}-{rate}-{steps}"
        words = ["train", str(self.config)]
        for each in (*WAYS[way], f"run.steps={steps}", f"run.dir={directory}"):
            words += ["--set", each]
        before = sent_bytes(0)
        self.everywhere(words)
        sent = sent_bytes(0) - before
        lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        return sent, [line for line in lines if "step_seconds" in line]

    def estimated(self, way: str, rate: str) -> float:
        """Seconds of a step as `fivefold estimate` has them with the cluster file of that rate."""
        sets = [*WAYS[way], f"cluster.path={self.cluster_file(rate)}"]
        return estimate(job_of(load(str(self.config), sets))).time.step

    def everywhere(self, words: Sequence[str]) -> str:
        """`fivefold WORDS` on every host by torchrun; what rank 0 prints, wherever it is."""
        started = []
        meeting = f"slow-links-{time.monotonic_ns()}"
        for index in range(self.hosts):
            torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={self.hosts}"]
            torchrun += [f"--nproc-per-node={self.per_host}", f"--node-rank={index}"]
            torchrun += [
                "--rdzv-backend=c10d",
                f"--rdzv-conf=is_host={int(index == 0)}",
                f"--rdzv-endpoint={address(0)}:{PORT}",
            ]
            torchrun += [f"--rdzv-id={meeting}", f"--local-addr={address(index)}"]
            own_memory = ["sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]
            command = ["ip", "netns", "exec", host(index), *own_memory, *torchrun, "-m", "fivefold", *words]
            settings = os.environ | {"GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"}
            files = [(self.scratch / f"host-{index}.{kind}").open("w+") for kind in ("out", "log")]
            process = subprocess.Popen(command, stdout=files[0], stderr=files[1], env=settings)
            started.append((process, *files))
        said = ""
        for process, out, log in started:
            code = process.wait(timeout=1800)
            for file in (out, log):
                file.seek(0)
            said += out.read()
            if code:
                raise RuntimeError(f"{' '.join(words)} ended with {code}:\n{log.read()[-3000:]}")
        return said


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def show(found: dict[str, Any]) -> None:
    print(f"{found['hosts']} hosts, {found['ranks']} ranks\n")
    cells = [
        [
            row["rate"],
            row["algorithm"],
            bytes_text(row["bytes"]),
            seconds_text(row["seconds"]),
            seconds_text(row["predicted_seconds"]) if row["predicted_seconds"] else "",
        ]
        for row in found["links"]
    ]
    print(table(("link", "all-reduce", "size", "measured", "predicted"), cells, left=2) + "\n")
    cells = [
        [
            row["way"],
            row["rate"],
            bytes_text(row["wire_bytes_per_step"]),
            seconds_text(row["step_seconds"]),
            "" if row["rate"] == UNLIMITED else seconds_text(row["predicted_step_seconds"]),
            f"{row['loss']:.3f} after {row['tokens']:,}",
        ]
        for row in found["rows"]
    ]
    head = ("gradients", "link", "sent a step", "step", "predicted", "loss after tokens")
    print(table(head, cells, left=2))


if __name__ == "__main__":
    main()
