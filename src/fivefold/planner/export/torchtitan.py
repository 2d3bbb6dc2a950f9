"""torchtitan's command-line flags (0.3): its training and parallelism configs."""

from fivefold.ledger.job import Job

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb_h1": "InterleavedZeroBubble",
    "interleaved_zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


def emit(job: Job) -> tuple[str, list[str]]:
    """(flags, what they cannot say)."""
    flags: dict[str, object] = {
        "training.local_batch_size": job.micro_batch * (job.microbatches if job.pp > 1 else 1),
        "training.global_batch_size": job.micro_batch * job.microbatches * job.data_parallel,
        "training.seq_len": job.sequence_length,
        "training.mixed_precision_param": "bfloat16" if job.precision == "bf16" else "float32",
        "training.mixed_precision_reduce": "float32",
        "parallelism.data_parallel_replicate_degree": job.dp_replicate,
        "parallelism.data_parallel_shard_degree": job.dp_shard if job.zero else 1,
        "parallelism.fsdp_reshard_after_forward": "always" if job.zero == 3 and job.pp == 1 else "never",
        "parallelism.tensor_parallel_degree": job.tp,
        "parallelism.context_parallel_degree": job.cp,
        "parallelism.expert_parallel_degree": job.ep,
        "parallelism.pipeline_parallel_degree": job.pp,
    }
    if job.pp > 1:
        flags["parallelism.pipeline_parallel_schedule"] = SCHEDULES[job.schedule]
        flags["parallelism.pipeline_parallel_microbatch_size"] = job.micro_batch
        flags["parallelism.pipeline_parallel_layers_per_stage"] = -(-job.model.layers // job.stages)
    words = [f"--{name} {value}" for name, value in flags.items()]
    if job.tp > 1:
        words.append(f"--parallelism.{'' if job.sequence_parallel else 'no-'}enable_sequence_parallel")
    return " \\\n".join(words) + "\n", _missing(job)


def _missing(job: Job) -> list[str]:
    found = []
    if job.zero in (1, 2):
        found.append(f"zero = {job.zero}: FSDP2 splits gradients and optimizer state together (zero 2)")
    if job.recompute == "full":
        found.append(
            "recompute = full by a flag: set activation_checkpoint=FullAC.Config() in the model's config"
        )
    if job.recompute in ("attention", "elementwise"):
        found.append(
            f"recompute = {job.recompute}: the nearest is SelectiveAC.Config() in the model's config, which keeps "
            "every second matmul's output"
        )
    if job.context == "ulysses" and job.cp > 1:
        found.append("context = ulysses: torchtitan's context parallel is a ring")
    return found
