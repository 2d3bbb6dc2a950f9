"""Batch and learning-rate arithmetic for a change of the global batch: what is legal, what follows from it."""

from dataclasses import dataclass, replace
from math import prod, sqrt

import msgspec

from fivefold.config.errors import ConfigError, nearest_multiples
from fivefold.config.tree import Config
from fivefold.ledger.hardware import Hardware
from fivefold.planner.search import search
from fivefold.planner.space import Request, check_size, divisors
from fivefold.spec.mesh import AXES, resolve


@dataclass(frozen=True)
class Split:
    """One way to carry a global batch: data_parallel · micro_batch · accumulation sequences."""

    data_parallel: int
    micro_batch: int
    accumulation: int


@dataclass(frozen=True)
class Rate:
    """A learning-rate rule at the new batch."""

    rule: str
    lr: float
    note: str


def sequences(tokens: int, length: int) -> int:
    """Sequences in a batch of `tokens`. Raises ConfigError with the two nearest legal values."""
    count, rest = divmod(tokens, length)
    if rest or not count:
        legal = [n * length for n in (count, count + 1) if n]
        raise ConfigError(
            f"batch of {tokens} tokens: not a multiple of sequence_length {length}; nearest legal: "
            + " or ".join(map(str, legal))
        )
    check_size("sequences of the batch", count)
    return count


def splits(global_batch: int, degrees: list[int], largest: int = 64) -> list[Split]:
    """Every legal split for the data-parallel degrees at hand, micro-batches up to `largest`."""
    return [
        Split(degree, micro, global_batch // degree // micro)
        for degree in degrees
        if global_batch % degree == 0
        for micro in divisors(global_batch // degree)
        if micro <= largest
    ]


def on_devices(cluster: Hardware, count: int) -> Hardware:
    """The cluster with another number of devices: whole nodes, or a part of one. Raises ConfigError else."""
    check_size("--devices", count)
    own = cluster.node.devices
    if count < own:
        return msgspec.structs.replace(
            cluster, nodes=1, node=msgspec.structs.replace(cluster.node, devices=count)
        )
    if count % own:
        raise ConfigError(
            f"--devices {count}: not a multiple of a node's {own} devices; "
            f"nearest legal: {nearest_multiples(count, own)}"
        )
    return msgspec.structs.replace(cluster, nodes=count // own)


def degrees(config: Config, written: frozenset[str], devices: int) -> list[int]:
    """Data-parallel degrees `devices` can have: the one the config fixes, or all that divide what is left for it. As in
    a plan, an axis written as -1 is free."""
    parallel = config.parallel
    fixed = {
        axis: getattr(parallel, axis)
        for axis in AXES
        if f"parallel.{axis}" in written and getattr(parallel, axis) != -1
    }
    cuts = [axis for axis in ("pp", "cp", "tp") if f"parallel.{axis}" in written]
    if cuts and all(axis in fixed for axis in cuts):
        return [resolve(parallel, devices).data_parallel]
    left = devices // prod(fixed.get(axis, 1) for axis in cuts)
    least = fixed.get("dp_replicate", 1) * fixed.get("dp_shard", 1)
    return [degree for degree in divisors(left) if degree % least == 0]


def rates(config: Config, reference: int, target: int) -> list[Rate]:
    """Learning rates at `target` sequences for a rate tuned at `reference`.

    linear: SGD, Goyal 2017 (holds to 8k images there); sqrt: adaptive methods, Malladi 2022.
    """
    ratio, lr, name = target / reference, config.optimizer.lr, config.optimizer.name
    linear = "for SGD (Goyal 2017)"
    if name == "adamw":
        linear = "known to break: AdamW's noise scales with the square root (Malladi 2022); use sqrt"
    elif ratio > 8:
        linear = f"a factor of {ratio:g}: beyond 8× the linear rule needs long warmup or fails (Goyal 2017)"
    return [
        Rate("none", lr, "safe; leaves speed unused when the batch grows"),
        Rate("linear", lr * ratio, linear),
        Rate(
            "sqrt", lr * sqrt(ratio), "for adaptive methods (Malladi 2022)" if name == "adamw" else "cautious"
        ),
    ]


def warnings(config: Config, reference: int, target: int) -> list[str]:
    """What to look out for, each with its number."""
    found = []
    ratio = target / reference
    if config.optimizer.lr_scaling == "linear" and (config.optimizer.name == "adamw" or ratio > 8):
        found.append(f"optimizer.lr_scaling = linear at {ratio:g} × the reference batch is known to break")
    if ratio > 1:
        found.append(
            f"the same tokens are {ratio:g} × fewer steps; beyond the critical batch (McCandlish 2018) a larger "
            "one needs more tokens for the same loss"
        )
    length = config.batch.sequence_length
    warmup = config.schedule.warmup_tokens or config.schedule.warmup_steps * reference * length
    if warmup and warmup < 10 * target * length:
        found.append(f"warmup of {warmup} tokens is {warmup / (target * length):.1f} steps at the new batch")
    return found


def step_seconds(request: Request, global_batch: int) -> float | None:
    """Seconds of the best layout's step at a batch that does not grow; None where nothing fits."""
    found = search(replace(request, global_batch=global_batch, smaller=range(0)), keep=1)
    return found.ranking[0].seconds if found.ranking else None
