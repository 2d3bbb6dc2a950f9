"""A DeepSpeed config (JSON): ZeRO stage, batches, precision; tensor parallel by AutoTP, sequence by Ulysses."""

import json
from typing import Any

from fivefold.ledger.job import Job


def emit(job: Job) -> tuple[str, list[str]]:
    """(config, what it cannot say)."""
    batch = job.micro_batch * job.microbatches * job.data_parallel
    found: dict[str, Any] = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_accumulation_steps": job.microbatches,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": job.zero, "overlap_comm": True, "contiguous_gradients": True},
    }
    if job.precision in ("bf16", "fp16"):
        found[job.precision] = {"enabled": True}
    if job.tp > 1:
        found["tensor_parallel"] = {"autotp_size": job.tp}
    return json.dumps(found, indent=2) + "\n", _missing(job)


def _missing(job: Job) -> list[str]:
    found = []
    if job.pp > 1:
        found.append(f"pp = {job.pp}, schedule {job.schedule}: build a PipelineModule in code (1F1B only)")
        if job.zero > 1:
            found.append(f"zero = {job.zero} with a pipeline: DeepSpeed pipelines take stages 0 and 1")
    if job.cp > 1:
        found.append(f"cp = {job.cp}: sequence_parallel_size is given in code (Ulysses), not in this file")
    if job.ep > 1:
        found.append(f"ep = {job.ep}: ep_size is an argument of the MoE layer")
    if job.dp_replicate > 1 and job.zero:
        found.append(
            f"dp_replicate = {job.dp_replicate}: shards are over all ranks (or MiCS / hpZ, set apart)"
        )
    if job.sequence_parallel:
        found.append("sequence_parallel: AutoTP has none")
    if job.recompute != "none":
        found.append(
            f"recompute = {job.recompute}: activation checkpointing is switched on in the model's code"
        )
    return found
