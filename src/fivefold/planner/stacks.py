"""What a published run's own columns declare about its software: the features a ledger depends on.

Features are of the software, never of a row or a source: attention kernel, fused or not, what overlaps, which
precisions are kept. Where a column is silent the rule of the time and framework named in the row holds, and
it is written here once for all rows.
"""

import re
from collections.abc import Mapping

from fivefold.ledger.job import Attention, Stack

Columns = Mapping[str, str]

_TEXT = ("source", "where", "overlap_notes", "notes", "zero_stage_or_fsdp", "recompute", "model", "precision")


def text_of(row: Columns) -> str:
    """All free text of a row."""
    return " | ".join(row.get(column, "") or "" for column in _TEXT)


def says(row: Columns, pattern: str) -> bool:
    """Whether the row's text matches."""
    return re.search(pattern, text_of(row), re.IGNORECASE) is not None


def is_hopper_or_newer(row: Columns) -> bool:
    return re.search(r"H100|H200|H800|B200|B300|MI3|GH200", row.get("gpu", "")) is not None


def attention(row: Columns) -> Attention:
    """Declared, or by generation: before flash attention (2022, V100 and A100 Megatron) scores were stored;
    Megatron, NeMo, MaxText on Hopper and newer use the vendor's kernel; torch stacks FlashAttention-2."""
    if says(row, r"no flash|attention-backend=unfused"):
        return "unfused"
    if says(row, r"transformer-impl=local") and not says(row, r"flash"):
        return "unfused"
    if not is_hopper_or_newer(row):
        return "flash" if says(row, r"flash|FSDP|transformer_engine|NeMo") else "unfused"
    return "fused" if megatron(row) or says(row, r"MaxText") else "flash"


def megatron(row: Columns) -> bool:
    """Megatron and what is built on it keep bf16 parameters, float32 gradients and a float32 master copy."""
    return says(
        row,
        r"Megatron|VocabularyParallel|NeMo|mcore|SC21|Korthikanti|BLOOM|dgxc|vocab parallel|DDP-impl|Llama 3 Herd"
        r"|NeoX|MT-NLG|Turing|MegaScale|Nemotron|Primus|InternEvo|metaseq|\bOPT\b",
    )


def fsdp(row: Columns) -> bool:
    return says(row, r"FSDP|ZeRO-3|zero3")


def gelu(row: Columns) -> bool:
    """Whether the feed-forward has no gate, where the parameter count does not tell."""
    named = f"{row.get('model', '')} {row.get('source', '')}"
    plain = re.search(r"GPT|MPT|BLOOM|Turing|MT-NLG|\bOPT\b|Nemotron-4|NeoX", named)
    return plain is not None and not says(row, r"swiglu|GPT-OSS")


def dropout(row: Columns) -> bool:
    """GPT-style training before flash attention kept dropout 0.1; BLOOM and later models have none."""
    if says(row, r"dropout 0\b|BLOOM|disable.*dropout"):
        return False
    return attention(row) == "unfused" and gelu(row)


def stack_of(row: Columns) -> Stack:
    """The stack of a row."""
    old = not is_hopper_or_newer(row) and megatron(row) and not says(row, r"transformer_engine|flash")
    pure = says(row, r"bf16 PURE")
    if megatron(row):
        half = (old or says(row, r"\bfp16\b|bf16 gradients")) and not says(row, r"fp32 grad")
        gradient, copy, master = (2 if half else 4), 2, 4
    elif fsdp(row):
        gradient, copy, master = (2 if pure else 4), 2, (2 if pure else 4)
    else:
        gradient, copy, master = 4, 2, 4
    if says(row, r"fp32 grad") and says(row, r"DeepSpeed|BLOOM|nanotron"):
        gradient = 6  # the 16-bit gradient, and the float32 sum
    compiled = row.get("compiled", "") in ("yes", "XLA")
    overlapped = says(row, r"overlap.?grad|grad all-reduce overlaps|FSDP|MaxText") and not says(
        row, r"NOT overlapped|exposed at end"
    )
    return Stack(
        attention=attention(row),
        fused=megatron(row) or says(row, r"nanotron|fused (layer ?norm|dropout|kernels)"),
        compiled=compiled,
        dropout=dropout(row),
        compute_copy=copy,
        master=master,
        gradient=gradient,
        reduce=2 if half_reduce(row, gradient) else 4,
        moments=4 if pure else 8,
        overlap_gradients=overlapped or (is_hopper_or_newer(row) and megatron(row)),
        overlap_parameters=is_hopper_or_newer(row) or (fsdp(row) and not says(row, "DeepSpeed")),
        overlap_tensor=says(row, r"userbuffer|tp-comm-overlap|async ?TP")
        and not says(row, r"tp_comm_overlap (off|False)|vanilla TP"),
        overlap_tensor_backward=is_hopper_or_newer(row) and megatron(row),
        overlap_experts=says(
            row, r"DualPipe|overlap-moe-expert-parallel-comm|(a2a|all-to-all|dispatch)[ -](is |are )?overlap"
        ),
        dispatch_once=says(row, r"Megatron-Bridge|DeepEP|HybridEP"),
        overlap_pipeline=not says(row, "DeepSpeed"),
        fused_loss=says(row, r"cross-entropy-loss-fusion|Bridge|(fused|apex) cross-?entropy|fused classifier")
        or compiled,
        loss_bytes=6.0 if megatron(row) else 12.0 if compiled else 14.0,
        early_stop=says(row, r"torchtitan"),
        returns_logits=says(row, r"torchtitan"),
        keep_gathered=says(row, r"async TP linear"),
        keep_every=2 if says(row, r"per-op SAC") else 1,
        bucket_bytes=2e9 if says(row, r"DeepSpeed") else 0.0,
        graphs=graphs(row),
        scatter_messages=megatron(row) and not says(row, r"DeepSpeed"),
        fused_softmax=4 if old else 1 if megatron(row) or compiled else 0,
    )


def graphs(row: Columns) -> bool:
    """Whether launches are recorded: NVIDIA's recipes do so on NVL72 machines; elsewhere only "in some"."""
    return says(row, r"Megatron-Bridge") and row.get("gpu", "").startswith("GB")


def half_reduce(row: Columns, gradient: int) -> bool:
    """Whether gradients cross the wire in 16 bits."""
    return gradient == 2 or says(row, r"bf16 grad sync|amp_bf16|grad_reduce_in_bf16")
