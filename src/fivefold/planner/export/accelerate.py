"""An accelerate config (YAML): FSDP2 with its parallelism axes."""

from fivefold.ledger.job import Job


def emit(job: Job) -> tuple[str, list[str]]:
    """(config, what it cannot say)."""
    nodes = job.hardware.nodes
    sharded = job.zero > 0
    lines = [
        "compute_environment: LOCAL_MACHINE",
        "debug: false",
        f"distributed_type: {'FSDP' if sharded else 'MULTI_GPU'}",
        "downcast_bf16: 'no'",
        "machine_rank: 0",
        "main_training_function: main",
        f"mixed_precision: {job.precision if job.precision in ('bf16', 'fp16', 'fp8') else 'no'!r}",
        f"num_machines: {nodes}",
        f"num_processes: {job.world_size}",
        "rdzv_backend: static",
        "same_network: true",
        "use_cpu: false",
    ]
    if sharded:
        lines += [
            "fsdp_config:",
            "  fsdp_version: 2",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            f"  fsdp_reshard_after_forward: {str(job.zero == 3).lower()}",
            f"  fsdp_activation_checkpointing: {str(job.recompute == 'full').lower()}",
            "  fsdp_state_dict_type: SHARDED_STATE_DICT",
        ]
    if job.tp > 1 or job.cp > 1 or (sharded and job.dp_replicate > 1):
        shard = job.dp_shard if sharded else 1
        lines += [
            "parallelism_config:",
            f"  parallelism_config_dp_replicate_size: {job.dp_replicate}",
            f"  parallelism_config_dp_shard_size: {shard}",
            f"  parallelism_config_tp_size: {job.tp}",
            f"  parallelism_config_cp_size: {job.cp}",
        ]
    return "\n".join(lines) + "\n", _missing(job)


def _missing(job: Job) -> list[str]:
    found = [f"micro-batch {job.micro_batch}: the batch size of the script's DataLoader"]
    if job.microbatches > 1:
        found.append(f"accumulation {job.microbatches}: Accelerator(gradient_accumulation_steps=…)")
    if job.pp > 1:
        found.append(f"pp = {job.pp}, schedule {job.schedule}: no pipeline axis")
    if job.ep > 1:
        found.append(f"ep = {job.ep}: no expert axis in the config")
    if job.zero == 1:
        found.append("zero = 1: FSDP2 without resharding splits gradients too (zero 2)")
    if job.sequence_parallel:
        found.append("sequence_parallel: the model's own tp plan decides")
    if job.recompute in ("attention", "elementwise"):
        found.append(f"recompute = {job.recompute}: only all of a layer, or nothing")
    return found
