"""From a config to a request, from a ranked layout back to a config that trains it."""

from collections.abc import Mapping
from math import prod
from typing import Any

import msgspec

from fivefold.config.errors import ConfigError, nearest
from fivefold.config.tree import Config, Parallel
from fivefold.ledger.job import Job
from fivefold.planner.document import LAYOUT, layout_of
from fivefold.planner.jobs import ITEMSIZES, hardware_of, stack_of
from fivefold.planner.space import Request, check_size, divisors, is_legal
from fivefold.spec.batch import BatchPlan
from fivefold.spec.legal import check_algorithm, check_compression, check_layout, check_model
from fivefold.spec.mesh import AXES, Mesh
from fivefold.spec.ramp import plan_course


def request_of(config: Config, written: frozenset[str]) -> Request:
    """The request of a config. Keys of [parallel] that the file or an override writes (other than -1) are fixed,
    and so is batch.micro_batch; all others are free.

    Raises:
        ConfigError: sizes that contradict each other, a batch that is none, a ramp that does not lead to it.
    """
    check_model(config.model)
    hardware = hardware_of(config)
    batch, length = _global_batch(config, hardware.devices), config.batch.sequence_length
    check_size("devices of the cluster", hardware.devices)
    check_size("batch.global_batch", batch)
    course = plan_course(config.batch.ramp, BatchPlan(batch, 1, batch, 1, length))
    fixed = {
        key: getattr(config.parallel, key)
        for key in LAYOUT
        if f"parallel.{key}" in written and getattr(config.parallel, key) != -1
    }
    if "batch.micro_batch" in written:
        fixed["micro_batch"] = config.batch.micro_batch
    _check_sums(config, fixed)
    _check_degrees(config, fixed, hardware.devices)
    _check_fixed(config, fixed, hardware.devices)
    return Request(
        model=config.model,
        hardware=hardware,
        global_batch=batch,
        sequence_length=length,
        precision=config.precision.dtype,
        itemsize=ITEMSIZES[config.precision.dtype],
        stack=stack_of(config, hardware),
        fixed=fixed,
        context=config.parallel.context,
        smaller=range(config.batch.ramp.start, batch, course.increment) if course.growths else range(0),
    )


def _check_sums(config: Config, fixed: Mapping[str, Any]) -> None:
    """Refuses a program or a compression of gradients that no layout could have."""
    zero = fixed.get("zero", 0)
    mesh = Mesh(dp_replicate=2, dp_shard=2, pp=fixed.get("pp", 1))
    check_algorithm(msgspec.structs.replace(config.parallel, zero=zero), mesh)
    check_compression(
        msgspec.structs.replace(config, parallel=msgspec.structs.replace(config.parallel, zero=zero)), mesh
    )


def _check_degrees(config: Config, fixed: Mapping[str, Any], devices: int) -> None:
    """Refuses degrees that do not divide the cluster, each alone or together. Degrees named instead divide it beside
    those that stay, and the model allows them."""
    degrees = {axis: fixed[axis] for axis in AXES if axis in fixed}
    for axis, degree in degrees.items():
        if degree < 1:
            raise ConfigError(f"parallel.{axis} = {degree}: expected at most {devices}, 1 at least, or -1")
    stay: dict[str, int] = {}
    for axis, degree in degrees.items():
        if devices // prod(stay.values()) % degree == 0:
            stay[axis] = degree
    left = devices // prod(stay.values())
    for axis, degree in degrees.items():
        if devices % degree:
            raise ConfigError(
                f"parallel.{axis} = {degree}: does not divide the cluster's {devices} devices; "
                f"nearest legal: {nearest(degree, _legal(config, axis, left))}"
            )
    if len(stay) < len(degrees):
        named = {axis: degree for axis, degree in degrees.items() if degree > 1}
        for axis, degree in degrees.items():
            if axis not in stay:
                stay[axis] = max(
                    d for d in _legal(config, axis, devices // prod(stay.values())) if d <= degree
                )
        raise ConfigError(
            f"parallel.{' × '.join(named)} = {' × '.join(map(str, named.values()))} = {prod(named.values())}: does "
            f"not divide the cluster's {devices} devices; nearest legal: "
            + " × ".join(str(stay[axis]) for axis in named)
        )


def _legal(config: Config, axis: str, left: int) -> list[int]:
    """Degrees of an axis that divide the `left` devices and that the model allows, with no other axis beside it."""
    plain = Parallel(context=config.parallel.context)

    def allows(degree: int) -> bool:
        if axis == "ep":
            return is_legal(config.model, Mesh(dp_shard=degree), msgspec.structs.replace(plain, ep=degree))
        return is_legal(
            config.model, Mesh(**{axis: degree}), msgspec.structs.replace(plain, **{axis: degree})
        )

    return [degree for degree in divisors(left) if allows(degree)]


def _check_fixed(config: Config, fixed: Mapping[str, Any], devices: int) -> None:
    """Refuses what no layout could have: a sequence longer than the model's positions, a tensor- or expert-parallel
    degree that the model does not divide by."""
    if config.batch.sequence_length > config.model.max_positions:
        raise ConfigError(
            f"batch.sequence_length = {config.batch.sequence_length}: longer than model.max_positions; "
            f"expected at most {config.model.max_positions}"
        )
    tp, ep, cp = fixed.get("tp", 1), fixed.get("ep", 1), fixed.get("cp", 1)
    for axis, layout, mesh in (
        ("tp", Parallel(tp=tp), Mesh(tp=tp)),
        ("ep", Parallel(ep=ep, dp_shard=ep), Mesh(dp_shard=ep)),
    ):
        try:
            check_layout(config.model, layout, mesh)
        except ConfigError as refusal:
            said, near, _ = str(refusal).partition("nearest legal: ")
            others = prod(fixed.get(other, 1) for other in ("pp", "tp") if other != axis)
            legal = nearest(fixed[axis], _legal(config, axis, devices // others)) if near else ""
            raise ConfigError(said + near + legal) from None
    together = dict(fixed)  # keys that may contradict one another, where all of them are fixed
    if "tp" not in fixed:
        together.pop("sequence_parallel", None)
    if not {"dp_shard", "cp"} <= set(fixed) or ep > 1:
        together.pop("zero", None)
    shard = together.get("dp_shard", 1) if "zero" in together else ep
    if "chunks" in fixed:
        together = {"schedule": "interleaved", "pp": 2, **together}
    keys = ("schedule", "chunks", "sequence_parallel", "zero")
    parallel = Parallel(tp=tp, ep=ep, **{key: together[key] for key in keys if key in together})
    check_layout(config.model, parallel, Mesh(pp=together.get("pp", 1), dp_shard=shard, cp=cp, tp=tp))


def _global_batch(config: Config, devices: int) -> int:
    batch = config.batch
    if batch.global_batch and batch.global_batch_tokens:
        raise ConfigError("batch.global_batch and batch.global_batch_tokens: give one of the two")
    if batch.global_batch_tokens:
        if batch.global_batch_tokens % batch.sequence_length:
            raise ConfigError(
                f"batch.global_batch_tokens = {batch.global_batch_tokens}: not a multiple of sequence_length "
                f"{batch.sequence_length}; nearest legal: "
                f"{batch.global_batch_tokens // batch.sequence_length * batch.sequence_length}"
            )
        return batch.global_batch_tokens // batch.sequence_length
    return batch.global_batch or devices * batch.micro_batch


def config_of(config: Config, job: Job) -> Config:
    """`config` with the layout and micro-batch of `job`."""
    parallel = msgspec.structs.replace(config.parallel, **layout_of(job))
    batch = msgspec.structs.replace(
        config.batch,
        micro_batch=job.micro_batch,
        global_batch=job.micro_batch * job.microbatches * job.data_parallel,
        global_batch_tokens=0,
    )
    return msgspec.structs.replace(config, parallel=parallel, batch=batch)
