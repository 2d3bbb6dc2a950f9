"""A config on a cluster as a job for the ledger: what Fivefold's own trainer does with it."""

import msgspec

from fivefold.config.tree import Config
from fivefold.ledger import hardware
from fivefold.ledger.compression import compression_of, corrected_momentum
from fivefold.ledger.hardware import Hardware
from fivefold.ledger.job import Job, Stack
from fivefold.spec import schedules
from fivefold.spec.legal import resolve_config
from fivefold.spec.mesh import resolve
from fivefold.spec.sequence import keeps_probabilities, most_tokens

ITEMSIZES = {"float64": 8, "float32": 4, "bf16": 2, "fp16": 2}


def stack_of(config: Config, on: Hardware) -> Stack:
    """Fivefold's trainer: a master copy in float32 (float64), and a copy of it in the compute type where that is
    another; flash attention; norms and activations eager, by hand (on CPUs) or compiled; a loss whose logits never
    exist whole."""
    item = ITEMSIZES[config.precision.dtype]
    exact = max(4, item)
    moments = {"adamw": 2, "muon": 2, "sgd": 1 if config.optimizer.momentum else 0}[config.optimizer.name]
    by_hand = on.device.is_cpu and item >= 4  # as nn/manual_backward.py has it
    length, cp = config.batch.sequence_length, max(1, config.parallel.cp)
    seen = most_tokens(length, cp) if config.parallel.context == "ring" else length
    blocked = by_hand and keeps_probabilities(length, seen) and not config.model.latent.kv_rank
    return Stack(
        attention="blocked" if blocked else "flash",
        manual_backward=by_hand or config.machine.compile,
        dropout=config.model.dropout > 0,
        compiled_chains=config.machine.compile,
        compute_copy=item if item != exact else 0,
        shard_apart=True,
        master=exact,
        gather=item,
        gradient=exact,
        reduce=exact,
        moments=moments * exact,
        muon=config.optimizer.name == "muon",
        chunked_loss=True,
        fused_loss=True,
        early_stop=True,
        keep_gathered=True,
        reruns_traffic=True,
        sums_in_part=True,
        ring_gradient=exact,
        overlap_gradients=True,
        overlap_parameters=True,
        corrects_momentum=corrected_momentum(config) > 0,
        compression=compression_of(config.parallel),
        algorithm=config.parallel.algorithm,
        backend=backend_of(config, on),
    )


def backend_of(config: Config, on: Hardware) -> str:
    """What `parallel.backend` stands for on a cluster: by default what its file was measured over first; without
    measurements what training takes on Linux and x86-64, or on GPUs."""
    if config.parallel.backend != "default":
        return config.parallel.backend
    if on.measured:
        return on.measured[0].backend
    return "shm" if on.device.is_cpu else "nccl"


def hardware_of(config: Config) -> Hardware:
    """The config's cluster, as measured over its backend; without one, as many CPU ranks as the layout names."""
    found = hardware.load_hardware(config.cluster)
    if found is not None:
        return found.measured_over(config.parallel.backend)
    ranks = resolve(config.parallel, config.run.ranks).world_size
    cpu = hardware.kind("cpu")
    return msgspec.structs.replace(cpu, node=msgspec.structs.replace(cpu.node, devices=ranks))


def job_of(config: Config) -> Job:
    """The job of a config. Raises ConfigError: an illegal layout, batch or number of micro-batches."""
    on = hardware_of(config)
    resolved = resolve_config(config, on.devices)
    parallel, batch = config.parallel, resolved.batch
    return Job(
        model=config.model,
        hardware=on,
        micro_batch=batch.micro_batch,
        microbatches=batch.accumulation,
        sequence_length=batch.sequence_length,
        ep=parallel.ep,
        zero=parallel.zero,
        sequence_parallel=parallel.sequence_parallel,
        context=parallel.context,
        schedule=parallel.schedule if resolved.mesh.pp > 1 else "1f1b",
        chunks=schedules.chunks_of(parallel.schedule, parallel.chunks) if resolved.mesh.pp > 1 else 1,
        recompute=parallel.recompute,
        precision=config.precision.dtype,
        itemsize=ITEMSIZES[config.precision.dtype],
        stack=stack_of(config, on),
        imbalance=1.2 if parallel.ep > 1 else 1.0,
        pp=resolved.mesh.pp,
        dp_replicate=resolved.mesh.dp_replicate,
        dp_shard=resolved.mesh.dp_shard,
        cp=resolved.mesh.cp,
        tp=resolved.mesh.tp,
    )
