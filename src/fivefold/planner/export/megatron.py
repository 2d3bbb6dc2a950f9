"""Megatron-LM's command-line arguments."""

from fivefold.ledger.job import Job


def emit(job: Job) -> tuple[str, list[str]]:
    """(arguments, what they cannot say)."""
    model = job.model
    batch = job.micro_batch * job.microbatches * job.data_parallel
    words = [
        f"--tensor-model-parallel-size {job.tp}",
        f"--pipeline-model-parallel-size {job.pp}",
        f"--context-parallel-size {job.cp}",
        f"--micro-batch-size {job.micro_batch}",
        f"--global-batch-size {batch}",
        f"--seq-length {job.sequence_length}",
        f"--num-layers {model.layers}",
        f"--hidden-size {model.hidden}",
        f"--ffn-hidden-size {model.ffn}",
        f"--num-attention-heads {model.heads}",
        f"--max-position-embeddings {job.sequence_length}",
    ]
    if model.kv_heads < model.heads:
        words.append(f"--group-query-attention --num-query-groups {model.kv_heads}")
    if model.activation == "swiglu":
        words.append("--swiglu --disable-bias-linear")
    if not model.tied:
        words.append("--untie-embeddings-and-output-weights")
    if model.experts.count:
        words.append(
            f"--num-experts {model.experts.count} --moe-router-topk {model.experts.top_k} "
            f"--moe-ffn-hidden-size {model.experts.ffn} --expert-model-parallel-size {job.ep} --moe-grouped-gemm"
        )
    if job.precision in ("bf16", "fp16"):
        words.append(f"--{job.precision}")
    if job.sequence_parallel:
        words.append("--sequence-parallel")
    if job.zero:
        words.append("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather")
    words += _pipeline(job) + _recompute(job)
    return " \\\n".join(words) + "\n", _missing(job)


def _pipeline(job: Job) -> list[str]:
    if job.pp > 1 and job.schedule == "interleaved":
        return [f"--num-virtual-stages-per-pipeline-rank {job.chunks}"]
    return []


def _recompute(job: Job) -> list[str]:
    activation = " moe_act" if job.model.experts.count else ""  # refused in dense models
    return {
        "none": [],
        "attention": ["--recompute-granularity selective --recompute-modules core_attn"],
        "elementwise": ["--recompute-granularity selective --recompute-modules layernorm" + activation],
        "full": ["--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"],
    }[job.recompute]


def _missing(job: Job) -> list[str]:
    found = []
    if job.pp > 1 and job.schedule not in ("1f1b", "interleaved"):
        found.append(f"schedule {job.schedule}: Megatron-LM runs 1F1B, interleaved with virtual stages")
    if job.zero in (2, 3):
        found.append(f"zero = {job.zero}: the distributed optimizer is zero 1 (Megatron-FSDP is set apart)")
    if job.zero and job.dp_replicate > 1:
        found.append(
            f"dp_replicate = {job.dp_replicate}: --num-distributed-optimizer-instances {job.dp_replicate}"
        )
    if job.recompute == "elementwise":
        found.append("recompute = elementwise: the nearest modules are layernorm and, with experts, moe_act")
    if job.pp > 1 and job.model.layers % job.stages:
        found.append(
            f"{job.model.layers} layers on {job.stages} stages: an uneven split needs --pipeline-model-parallel-layout"
        )
    return found
