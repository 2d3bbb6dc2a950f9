"""The cluster a run is planned for: rates of one device, links inside and between nodes, each with its
source.

`cluster.preset = "16x8 h100"` is 16 nodes of 8 devices of the kind in presets/clusters/h100.toml;
`cluster.path` is a file of the same form (calibration writes one) with `nodes` at its top.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from math import inf
from pathlib import Path

import msgspec
from msgspec import Struct

from fivefold.config.errors import ConfigError, did_you_mean
from fivefold.config.load import preset_names
from fivefold.config.tree import Cluster
from fivefold.ledger.programs.steps import Link


class Device(Struct, frozen=True, forbid_unknown_fields=True):
    """One accelerator (or CPU rank); rates in FLOP/s, by precision."""

    name: str
    memory: int  # bytes a framework can allocate
    bandwidth: float  # bytes/s, datasheet
    peak: Mapping[str, float]
    matmul: Mapping[str, float]
    attention: Mapping[str, float]  # "flash" (FlashAttention-2), "fused" (the vendor's newest), forward

    def __hash__(self) -> int:
        return hash((self.name, self.memory))

    @property
    def is_cpu(self) -> bool:
        return self.name.startswith("CPU")

    def peak_of(self, precision: str) -> float:
        """Dense peak in FLOP/s; fp16 is as bf16, a precision without units runs in the next wider one."""
        return _rate(self.peak, precision)

    def matmul_of(self, precision: str) -> float:
        """Best matmul rate measured in FLOP/s; where none was, the peak scaled as bf16's."""
        if _key(precision) in self.matmul:
            return _rate(self.matmul, precision)
        return self.peak_of(precision) * self.matmul["bf16"] / self.peak["bf16"]


class Node(Struct, frozen=True, forbid_unknown_fields=True):
    """The fast domain. `bandwidth` is what a ring reaches, in bytes/s per device and direction (busbw)."""

    devices: int
    bandwidth: float
    latency: float  # seconds per message
    in_network: bool = False  # the switch reduces (NVLink SHARP)
    domain: int = 0  # devices on one fast fabric where it spans nodes (NVL72); 0 = one node


class Network(Struct, frozen=True, forbid_unknown_fields=True):
    """Between nodes. `bandwidth` in bytes/s per device and direction; oversubscription divides it."""

    bandwidth: float
    latency: float
    oversubscription: float = 1.0


class Measured(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A collective as `fivefold comm calibrate` found it: T = latency + S/bandwidth, S in bytes as the ledger counts
    them; bytes beyond `knee` at `far_bandwidth`. Fitted from `smallest` to `largest` bytes.

    `local` ranks on each of `hosts` hosts take part; `error` is the median relative error on sizes that the
    fit has not seen.
    """

    primitive: str
    backend: str
    local: int
    hosts: int
    latency: float
    bandwidth: float
    smallest: float
    largest: float
    error: float
    knee: float = inf
    far_bandwidth: float = inf

    @property
    def link(self) -> Link:
        return Link(self.latency, self.bandwidth, self.knee, self.far_bandwidth)


def ring_link(found: Sequence[Measured], local: int, hosts: int) -> Link | None:
    """The link that a ring all-reduce of that shape saw: what the cost model of every other shape rests on."""
    for item in found:
        if (item.primitive, item.local, item.hosts) == ("all_reduce", local, hosts):
            ranks = local * hosts
            rate = item.bandwidth if item.knee > item.largest else item.far_bandwidth
            return Link(item.latency / (2 * (ranks - 1)), rate * 2 * (ranks - 1) / ranks)
    return None


class Hardware(Struct, frozen=True, forbid_unknown_fields=True):
    """A cluster of equal nodes."""

    device: Device
    node: Node
    network: Network
    sources: Mapping[str, str] = {}
    nodes: int = 1
    price: float = 0.0  # of one device for one hour
    measured: tuple[Measured, ...] = ()  # where one fits, it stands in place of the model

    def __hash__(self) -> int:
        return hash((self.device, self.node, self.network, self.nodes))

    @property
    def devices(self) -> int:
        return self.nodes * self.node.devices

    def measured_over(self, backend: str) -> "Hardware":
        """Without what was measured over other backends, and with links as this one's ring all-reduces saw them, if
        they were measured; "default" is the backend of the first row."""
        if backend == "default":
            backend = self.measured[0].backend if self.measured else ""
        kept = tuple(item for item in self.measured if item.backend == backend)
        inside, between = ring_link(kept, self.node.devices, 1), ring_link(kept, 1, self.nodes)
        node, network = self.node, self.network
        if inside:
            node = msgspec.structs.replace(node, latency=inside.latency, bandwidth=inside.bandwidth)
        if between:
            network = Network(between.bandwidth, between.latency)
        return msgspec.structs.replace(self, node=node, network=network, measured=kept)

    @property
    def fast_domain(self) -> int:
        """Devices that reach each other over the node's links."""
        return max(self.node.devices, self.node.domain)


_WIDER = {"fp16": "bf16", "float32": "fp32", "float64": "fp64", "nvfp4": "fp4"}
_FALLBACK = {"fp8": "bf16", "fp4": "fp8"}


def _key(precision: str) -> str:
    return _WIDER.get(precision, precision)


def _rate(rates: Mapping[str, float], precision: str) -> float:
    key = _key(precision)
    while key not in rates:
        if key not in _FALLBACK:
            raise ConfigError(f"the cluster file has no rate for {precision}; {did_you_mean(key, rates)}")
        key = _FALLBACK[key]
    return rates[key]


def load_hardware(cluster: Cluster) -> Hardware | None:
    """The hardware a config names, or None if it names none.

    Raises:
        ConfigError: an unknown kind, a malformed preset string or file.
    """
    if cluster.path:
        path = Path(cluster.path)
        if not path.is_file():
            raise ConfigError(f"cluster.path = {cluster.path}: no such file")
        return _convert(path.read_text(encoding="utf-8"), cluster.path)
    return preset(cluster.preset) if cluster.preset else None


def preset(text: str) -> Hardware:
    """Hardware from "16x8 h100" (nodes × devices a node, kind); "8 h100" is one node."""
    found = re.fullmatch(r"\s*(?:(\d+)\s*[x×]\s*)?(\d+)\s+([\w.-]+)\s*", text)
    if not found or int(found[2]) == 0 or found[1] == "0":
        raise ConfigError(f'cluster.preset = "{text}": expected nodes × devices and a kind, e.g. "16x8 h100"')
    hardware = kind(found[3])
    node = msgspec.structs.replace(hardware.node, devices=int(found[2]))
    return msgspec.structs.replace(hardware, nodes=int(found[1] or 1), node=node)


def kind(name: str) -> Hardware:
    """One node of a kind of presets/clusters."""
    names = preset_names("clusters")
    if name not in names:
        raise ConfigError(f'cluster.preset: unknown kind "{name}"; {did_you_mean(name, names)}')
    place = files("fivefold") / "presets" / "clusters" / f"{name}.toml"
    return _convert(place.read_text(encoding="utf-8"), f"preset {name}")


def _convert(text: str, where: str) -> Hardware:
    try:
        found = msgspec.convert(tomllib.loads(text), Hardware)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{where}: not a cluster file: {error}") from None
    for row in found.measured:
        if row.local * row.hosts < 2:
            raise ConfigError(
                f"{where}: a measured {row.primitive} over local × hosts = 1 rank; expected two at least"
            )
    return found
