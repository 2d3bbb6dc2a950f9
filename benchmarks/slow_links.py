"""Training over slow links, for real, on one Linux machine: hosts are network namespaces, links are throttled veths.

As root, from the repository:

    python benchmarks/slow_links.py --hosts 2 --rates 1gbit,100mbit --json slow_links.json

Every host is a namespace with one interface, on a bridge in a namespace of its own; `tc tbf` limits both ends of each
cable. Ranks meet by torchrun's rendezvous over these links (GLOO_SOCKET_IFNAME). For each rate, in this order:

1. `fivefold comm calibrate` across the hosts writes a cluster file;
2. `fivefold comm bench` compares the backend's own all-reduce with the flat ring and the hierarchical one;
3. `fivefold train` trains with each compression method: bytes through the first host's cable (the interface's own
   count), step time measured and predicted, loss after the same tokens.

Predicted is the step on an unthrottled link plus what the method's messages take longer by the two cluster files, none
of it hidden behind compute: an upper bound where reductions overlap with backward.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from fivefold.config.load import load
from fivefold.config.tree import Cluster
from fivefold.ledger.compression import Compression, compression_of, messages
from fivefold.ledger.hardware import Hardware, load_hardware
from fivefold.ledger.network import collective_seconds, wires
from fivefold.ledger.physics import Physics
from fivefold.render.tables import table
from fivefold.render.units import bytes_text, seconds_text
from fivefold.spec.parameters import parameters

METHODS = ("none", "bf16", "int8", "topk", "threshold", "powersgd")
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
    parser.add_argument("--per-host", type=int, default=1, help="ranks a host")
    parser.add_argument("--rates", default="1gbit,100mbit", help="as tc writes them")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--steps", type=int, default=60, help="of the run whose loss is told")
    parser.add_argument("--timed-steps", type=int, default=10, help="of each run that is timed")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    if os.geteuid():
        sys.exit("slow_links: network namespaces need root")
    with tempfile.TemporaryDirectory(prefix="fivefold-slow-links-") as scratch, cables(arguments.hosts):
        found = Benchmark(arguments.hosts, arguments.per_host, Path(scratch)).run(arguments)
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
    scratch: Path

    @property
    def ranks(self) -> int:
        return self.hosts * self.per_host

    def run(self, arguments: argparse.Namespace) -> dict[str, Any]:
        config = self.scratch / "slow.toml"
        config.write_text(CONFIG.format(ranks=self.ranks, batch=4 * self.ranks))
        rates = [UNLIMITED, *arguments.rates.split(",")]
        links: list[dict[str, Any]] = []
        rows: list[dict[str, Any]] = []
        files: dict[str, Hardware] = {}
        fast: dict[str, float] = {}
        for rate in rates:
            throttle(self.hosts, rate)
            files[rate] = self.calibrate(rate)
            links += self.bench(rate)
            for method in arguments.methods.split(","):
                steps = arguments.steps if rate == UNLIMITED else arguments.timed_steps
                row = self.train(config, method, rate, steps)
                how = compression_of(load(str(config), [f"parallel.compression={method}"]).parallel)
                fast.setdefault(method, row["step_seconds"])
                slower = self.wire_seconds(config, how, files[rate])
                slower -= self.wire_seconds(config, how, files[UNLIMITED])
                row["predicted_step_seconds"] = fast[method] + max(0.0, slower)
                rows.append(row)
                print(
                    f"{rate} {method}: {seconds_text(row['step_seconds'])} a step",
                    file=sys.stderr,
                    flush=True,
                )
        return {"hosts": self.hosts, "ranks": self.ranks, "links": links, "rows": rows}

    def calibrate(self, rate: str) -> Hardware:
        file = self.scratch / f"{rate}.toml"
        sizes = "4K:4M" if rate.endswith("gbit") or rate == UNLIMITED else "4K:1M"
        self.everywhere(["comm", "calibrate", "--sizes", sizes, "--output", str(file)])
        found = load_hardware(Cluster(path=str(file)))
        assert found is not None
        return found

    def bench(self, rate: str) -> list[dict[str, Any]]:
        words = ["comm", "bench", "--primitives", "all_reduce", "--sizes", "64K,1M,4M", "--json"]
        out = self.everywhere([*words, "--algorithms", "gloo,ring,hierarchical"])
        return [row | {"rate": rate} for row in json.loads(out)["rows"]]

    def train(self, config: Path, method: str, rate: str, steps: int) -> dict[str, Any]:
        directory = self.scratch / f"{method}-{rate}"
        sets = {"run.steps": steps, "run.dir": directory, "parallel.compression": method}
        words = ["train", str(config)]
        for key, value in sets.items():
            words += ["--set", f"{key}={value}"]
        before = sent_bytes(0)
        self.everywhere(words)
        sent = sent_bytes(0) - before
        lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        lines = [line for line in lines if "step_seconds" in line]
        return {
            "method": method,
            "rate": rate,
            "steps": steps,
            "wire_bytes_per_step": sent / steps,  # with what starting, saving and TCP itself add
            "step_seconds": median(line["step_seconds"] for line in lines[2:]),
            "loss": lines[-1]["loss"],
            "tokens": lines[-1]["tokens"],
        }

    def wire_seconds(self, config: Path, how: Compression, hardware: Hardware) -> float:
        """Seconds of one step's gradient messages by a cluster file; buckets as parallel/data.py has them."""
        model = load(str(config)).model
        buckets: dict[str, list[tuple[int, ...]]] = {}
        for spec in parameters(model):
            bucket = spec.name.split(".")[1] if spec.name.startswith("layers.") else ""
            buckets.setdefault(bucket, []).append(spec.shape)
        on = wires(hardware, Physics())
        return sum(
            collective_seconds(primitive, size, self.per_host, self.hosts, on)
            for shapes in buckets.values()
            for primitive, size in messages(how, shapes, 4, self.ranks)
        )

    def everywhere(self, words: Sequence[str]) -> str:
        """`fivefold WORDS` on every host by torchrun; what rank 0 prints, wherever it is."""
        started = []
        for index in range(self.hosts):
            torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={self.hosts}"]
            torchrun += [f"--nproc-per-node={self.per_host}", f"--node-rank={index}"]
            torchrun += [
                "--rdzv-backend=c10d",
                f"--rdzv-conf=is_host={int(index == 0)}",
                f"--rdzv-endpoint={address(0)}:{PORT}",
            ]
            torchrun += [
                f"--rdzv-id=slow-links-{time.monotonic_ns() // 10**10}",
                f"--local-addr={address(index)}",
            ]
            command = ["ip", "netns", "exec", host(index), *torchrun, "-m", "fivefold", *words]
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


def show(found: dict[str, Any]) -> None:
    print(f"{found['hosts']} hosts, {found['ranks']} ranks\n")
    cells = [
        [
            row["rate"],
            row["algorithm"],
            bytes_text(row["bytes"]),
            seconds_text(row["seconds"]),
            seconds_text(row["predicted_seconds"]),
        ]
        for row in found["links"]
    ]
    print(table(("link", "all-reduce", "size", "measured", "predicted"), cells, left=2) + "\n")
    cells = [
        [
            row["method"],
            row["rate"],
            bytes_text(row["wire_bytes_per_step"]),
            seconds_text(row["step_seconds"]),
            seconds_text(row["predicted_step_seconds"]),
            f"{row['loss']:.3f} after {row['tokens']:,}",
        ]
        for row in found["rows"]
    ]
    head = ("compression", "link", "sent a step", "step", "predicted", "loss after tokens")
    print(table(head, cells, left=2))


if __name__ == "__main__":
    main()
