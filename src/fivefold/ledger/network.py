"""Seconds of a collective on the links it crosses: as measured, else as its backend carries it out.

Gloo's are rings over all ranks and the like (gloo.py). Of the backends of GPUs the fastest algorithm is taken. Inside
a fast domain: ring, double tree, halving-doubling, and the switch's own reduction. Across domains every local rank
drives its own network link, so a hierarchical program moves 1/G of the vector over each; its inner and outer parts
overlap (pieces flow through), so bandwidth costs the slower of the two and latencies add. Shared memory (shm) sums
inside hosts first, too, but one part after the other.
"""

from collections.abc import Mapping
from functools import lru_cache
from math import ceil, log2
from typing import Literal, NamedTuple

from fivefold.ledger import gloo
from fivefold.ledger.hardware import Hardware, Measured
from fivefold.ledger.physics import Physics
from fivefold.ledger.programs import halving, ring, tree
from fivefold.ledger.programs.steps import Fabric, Link, Load, loaded_seconds, loads

Primitive = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "broadcast"]


class Wires(NamedTuple):
    """The two links of one rank, and what carries collectives out on them.

    Attributes:
        in_network: the switch reduces.
        ramp: bytes at which a collective between nodes reaches half of its bandwidth.
        shared: the ranks of a host share its port: `between` is each one's part of it while all use it.
    """

    inside: Link
    between: Link
    in_network: bool
    ramp: float
    backend: str
    shared: bool = False
    measured: tuple[Measured, ...] = ()

    def found(self, primitive: Primitive, local: int, hosts: int) -> Measured | None:
        """What was measured of a collective over a group of that shape."""
        shape = (primitive, local, hosts)
        return next((one for one in self.measured if (one.primitive, one.local, one.hosts) == shape), None)

    def fabric(self, local: int) -> Fabric:
        """The links as the rounds of a program see them, in a group with `local` ranks on each host."""
        return fabric(self.inside, self.between, local, self.shared)


def fabric(inside: Link, between: Link, local: int, shared: bool) -> Fabric:
    """Links of single ranks as those of a group with `local` ranks on each host, whose parts of a shared port it has
    together."""
    if shared:
        latency, bandwidth, knee, far = between
        between = Link(latency, bandwidth * local, knee * local, far * local)
    return Fabric(inside, between, local, shared)


def wires(hardware: Hardware, physics: Physics, backend: str = "nccl") -> Wires:
    """What a rank's messages travel on. The ramp is that of GPU clusters: on CPUs messages of a few MiB fill a link."""
    network, is_cpu = hardware.network, hardware.device.is_cpu
    between = Link(network.latency, network.bandwidth / network.oversubscription)
    inside = Link(hardware.node.latency, hardware.node.bandwidth)
    ramp = 0.0 if is_cpu else physics.collective_ramp
    return Wires(inside, between, hardware.node.in_network, ramp, backend, is_cpu, hardware.measured)


def wire_bytes(primitive: str, size: float, ranks: int) -> float:
    """Bytes one rank sends: 2(n−1)/n of an all-reduce's tensor, (n−1)/n of the rest, all of a message."""
    if primitive == "send":
        return size
    return (2.0 if primitive == "all_reduce" else 1.0) * (ranks - 1) / ranks * size


@lru_cache(maxsize=65536)
def collective_seconds(primitive: Primitive, size: float, local: int, domains: int, on: Wires) -> float:
    """Time of one collective on `size` bytes (as the ledger counts them) over local · domains ranks."""
    if local * domains == 1 or size == 0:
        return 0.0
    if found := on.found(primitive, local, domains):
        return found.link.seconds(size)
    if primitive == "send":
        link = on.between if domains > 1 else on.inside
        return link.latency + size / link.bandwidth
    if on.backend == "gloo":
        return gloo.seconds(primitive, size, local * domains, on.fabric(local) if domains > 1 else on.inside)
    if domains == 1:
        return min(algorithms(primitive, size, local, on).values())
    return _hierarchical(primitive, size, local, domains, on)


def algorithms(primitive: Primitive, size: float, ranks: int, on: Wires) -> Mapping[str, float]:
    """Seconds of every algorithm for a primitive inside one fast domain."""
    link = on.inside
    if on.backend != "shm":
        size += 0.3 * min(size, 64e6)  # GPUs' rates still rise at 64 MiB (azure_a100, azure_h100 curves)
    if primitive == "all_reduce":
        found = {
            "ring": _ring_seconds("all_reduce", ranks, size, link),
            "double-tree": tree.all_reduce_seconds(ranks, size, link),
            "halving-doubling": halving.all_reduce_seconds(ranks, size, link),
        }
        if on.in_network and ranks > 4:
            # One pass up and one down at 1.3 × the ring's rate: busbw 480 against 370 GB/s on eight H100.
            moved = 2 * (ranks - 1) / ranks * size
            found["in-network"] = 8 * link.latency + moved / (1.3 * link.bandwidth)
        return found
    if primitive == "all_to_all":
        return {"pairwise": ceil(log2(ranks)) * link.latency + (ranks - 1) / ranks * size / link.bandwidth}
    return {"ring": _ring_seconds("all_gather", ranks, size, link)}


def _ring_seconds(primitive: Primitive, ranks: int, size: float, link: Link) -> float:
    parts, rounds = _ring_loads(primitive, ranks)
    return loaded_seconds(rounds, size / parts, link)


@lru_cache(maxsize=1024)
def _ring_loads(primitive: Primitive, ranks: int) -> tuple[int, Mapping[Load, int]]:
    """(parts of the vector, rounds by what they load the links with)."""
    program = (ring.all_reduce if primitive == "all_reduce" else ring.all_gather)(ranks)
    return program.parts, loads(program)


def _hierarchical(primitive: Primitive, size: float, local: int, domains: int, on: Wires) -> float:
    passes = 2 if primitive == "all_reduce" else 1
    if primitive == "all_to_all":
        ranks = local * domains
        inside = (local - 1) / ranks * size / on.inside.bandwidth
        between = (ranks - local) / ranks * size / on.between.bandwidth
        return ceil(log2(ranks)) * on.between.latency + _both(inside, between, on)
    inside = passes * (local - 1) / local * size / on.inside.bandwidth
    share = size / local
    between = passes * (domains - 1) / domains * (share + min(on.ramp, share)) / on.between.bandwidth
    hops = domains - 1  # of a ring, which is what shm's rails are
    if on.backend != "shm":
        hops = min(hops, ceil(log2(domains)) * 2)  # or of a tree
    latency = passes * ((local - 1) * on.inside.latency + hops * on.between.latency)
    return latency + _both(inside, between, on)


def _both(inside: float, between: float, on: Wires) -> float:
    """Seconds of the parts inside hosts and between them: shm's one after the other, others' at the same time."""
    return inside + between if on.backend == "shm" else max(inside, between)
