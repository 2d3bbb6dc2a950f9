"""From a config to a wish, from a ranked layout back to a config that trains it."""

from collections.abc import Mapping
from math import prod
from typing import Any

import msgspec

from fivefold.config.errors import ConfigError
from fivefold.config.tree import Config, Parallel
from fivefold.ledger.job import Job
from fivefold.planner.document import LAYOUT, layout_of
from fivefold.planner.jobs import ITEMSIZES, hardware_of, stack_of
from fivefold.planner.space import Wish, nearest_divisors
from fivefold.spec.batch import BatchPlan
from fivefold.spec.legal import check_layout, check_model
from fivefold.spec.mesh import Mesh
from fivefold.spec.ramp import plan_course

FREE_BY_DEFAULT = Parallel()


def wish_of(config: Config, written: frozenset[str]) -> Wish:
    """The wish of a config. Keys of [parallel] that the file or an override writes (other than -1) are fixed,
    and so is batch.micro_batch; all others are free.

    Raises:
        ConfigError: sizes that contradict each other, a batch that is none, a ramp that does not lead to it.
    """
    check_model(config.model)
    hardware = hardware_of(config)
    batch, length = _global_batch(config, hardware.devices), config.batch.sequence_length
    course = plan_course(config.batch.ramp, BatchPlan(batch, 1, batch, 1, length))
    fixed = {
        key: getattr(config.parallel, key)
        for key in LAYOUT
        if f"parallel.{key}" in written and getattr(config.parallel, key) != -1
    }
    if "batch.micro_batch" in written:
        fixed["micro_batch"] = config.batch.micro_batch
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
        degree = fixed.get(axis, 1)
        if degree < 1:
            raise ConfigError(
                f"parallel.{axis} = {degree}: expected at most {hardware.devices}, 1 at least, or -1"
            )
        if hardware.devices % degree:
            near = nearest_divisors(hardware.devices, degree)
            raise ConfigError(
                f"parallel.{axis} = {degree}: does not divide the cluster's {hardware.devices} devices; "
                f"nearest legal: {near}"
            )
    _check_product(fixed, hardware.devices)
    _check_fixed(config, fixed)
    return Wish(
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


def _check_product(fixed: Mapping[str, Any], devices: int) -> None:
    """Refuses degrees that together do not divide the cluster."""
    degrees = {
        axis: fixed[axis] for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp") if fixed.get(axis, 1) > 1
    }
    product = prod(degrees.values())
    if devices % product:
        raise ConfigError(
            f"parallel.{' × '.join(degrees)} = {' × '.join(map(str, degrees.values()))} = {product}: does not divide "
            f"the cluster's {devices} devices; nearest legal: {nearest_divisors(devices, product)}"
        )


def _check_fixed(config: Config, fixed: Mapping[str, Any]) -> None:
    """Refuses what no layout could have: a sequence longer than the model's positions, a tensor- or expert-parallel
    degree that the model does not divide by."""
    if config.batch.sequence_length > config.model.max_positions:
        raise ConfigError(
            f"batch.sequence_length = {config.batch.sequence_length}: longer than model.max_positions; "
            f"expected at most {config.model.max_positions}"
        )
    tp, ep, cp = fixed.get("tp", 1), fixed.get("ep", 1), fixed.get("cp", 1)
    check_layout(config.model, Parallel(tp=tp, ep=ep, dp_shard=ep), Mesh(tp=tp, dp_shard=ep))
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
