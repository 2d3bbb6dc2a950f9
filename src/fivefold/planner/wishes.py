"""From a config to a wish, from a ranked layout back to a config that trains it."""

import msgspec

from fivefold.config.errors import ConfigError
from fivefold.config.tree import Config, Parallel
from fivefold.ledger.job import Job
from fivefold.planner.document import LAYOUT, layout_of
from fivefold.planner.jobs import ITEMSIZES, hardware_of, stack_of
from fivefold.planner.space import Wish, nearest_divisors
from fivefold.spec.legal import check_model

FREE_BY_DEFAULT = Parallel()


def wish_of(config: Config, written: frozenset[str]) -> Wish:
    """The wish of a config. Keys of [parallel] that the file or an override writes (other than -1) are fixed,
    and so is batch.micro_batch; all others are free.

    Raises:
        ConfigError: sizes that contradict each other, or no global batch.
    """
    check_model(config.model)
    hardware = hardware_of(config)
    fixed = {
        key: getattr(config.parallel, key)
        for key in LAYOUT
        if f"parallel.{key}" in written and getattr(config.parallel, key) != -1
    }
    if "batch.micro_batch" in written:
        fixed["micro_batch"] = config.batch.micro_batch
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
        degree = fixed.get(axis, 1)
        if isinstance(degree, int) and degree > 0 and hardware.devices % degree:
            near = nearest_divisors(hardware.devices, degree)
            raise ConfigError(
                f"parallel.{axis} = {degree}: does not divide the cluster's {hardware.devices} devices; "
                f"nearest legal: {near}"
            )
    return Wish(
        model=config.model,
        hardware=hardware,
        global_batch=_global_batch(config, hardware.devices),
        sequence_length=config.batch.sequence_length,
        precision=config.precision.dtype,
        itemsize=ITEMSIZES[config.precision.dtype],
        stack=stack_of(config, hardware),
        fixed=fixed,
        context=config.parallel.context,
    )


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
