"""Published runs as jobs: a row of columns (as in validation/runs.tsv) becomes what the ledger estimates."""

import csv
import re
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import NamedTuple

import msgspec

from fivefold.config.errors import BadInput
from fivefold.config.model import Experts, LatentAttention, Model
from fivefold.ledger import hardware
from fivefold.ledger.hardware import Hardware
from fivefold.ledger.job import Job, Recompute
from fivefold.ledger.physics import Physics
from fivefold.planner import stacks
from fivefold.planner.stacks import says
from fivefold.spec import schedules
from fivefold.spec.parameters import total

Row = Mapping[str, str]


class Missing(ValueError):  # noqa: N818 - it names the column
    """A column the ledger needs is empty."""


class Sizes(NamedTuple):
    """Degrees of a row's layout."""

    world: int
    tp: int
    pp: int
    cp: int
    ep: int
    dp: int
    chunks: int


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a tab-separated file with a header line. A line whose quotes do not close is taken as it stands.

    Raises:
        BadInput: the file cannot be read, or lacks the columns that name a row.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").replace("\r\n", "\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from None
    head, *rows = [_cells(line) for line in lines if line.strip()] or [[]]
    if missing := [column for column in ("id", "source") if column not in head]:
        raise BadInput(
            f"{path}: no column {' and no '.join(missing)}; expected a line of tab-separated column names as in "
            "validation/README.md (id, source, gpu, …), then a row a line"
        )
    return [dict.fromkeys(head, "") | dict(zip(head, row, strict=False)) for row in rows]


def _cells(line: str) -> list[str]:
    if line.count('"') % 2:
        return line.split("\t")
    return next(csv.reader([line], delimiter="\t"), [])


LARGEST = {
    "layers": 10_000,
    "heads": 65_536,
    "kv_heads": 65_536,
    "moe_experts": 65_536,
    "moe_topk": 65_536,
    "pp": 10_000,
    "vpp": 1000,
}
"""As the config allows; of other columns a number that no run has, which is none."""


def number(row: Row, column: str) -> float | None:
    """A column's number, or None where it has none ("12 (README)" is 12, "1,024" is 1024)."""
    digits = r"\s*[>~]?=?\s*((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(e[+-]?\d+)?"
    found = re.match(digits, row.get(column, "") or "", re.IGNORECASE)
    value = float(found[1].replace(",", "") + (found[2] or "")) if found else inf
    return value if value <= LARGEST.get(column, 1 << 40) else None


def _need(row: Row, column: str) -> int:
    if not (value := int(number(row, column) or 0)):  # nor is any of them 0
        raise Missing(column)
    return value


def _or(row: Row, column: str, default: int) -> int:
    return int(number(row, column) or 0) or default


def model_of(row: Row) -> Model:
    """The model a row describes; gate and tied head are whichever come nearest the stated parameter count."""
    layers, hidden = _need(row, "layers"), _need(row, "hidden")
    latent = _latent(row.get("head_dim", ""))
    experts = _or(row, "moe_experts", 0)
    ffn = _or(row, "ffn_hidden", 0)
    if not ffn and not experts:
        raise Missing("ffn_hidden")
    heads = _need(row, "heads")
    model = Model(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_or(row, "kv_heads", heads) or heads,
        head_dim=0 if latent else _or(row, "head_dim", 0),
        ffn=ffn or hidden,
        vocab=_or(row, "vocab", 51200),
        max_positions=max(2048, _need(row, "seq_len")),
        experts=_experts(row, experts, ffn, layers) if experts else Experts(),
        latent=latent or LatentAttention(),
        qk_norm=says(row, "Qwen3"),
    )
    return _nearest_in_size(row, model)


def _latent(text: str) -> LatentAttention | None:
    found = {name: int(value) for name, value in re.findall(r"(q_lora|kv_lora|nope|rope|v)\s*(\d+)", text)}
    if "kv_lora" not in found:
        return None
    return LatentAttention(
        q_rank=found.get("q_lora", 0),
        kv_rank=found["kv_lora"],
        nope_dim=found.get("nope", 128),
        rope_dim=found.get("rope", 64),
        value_dim=found.get("v", 128),
    )


def _experts(row: Row, count: int, ffn: int, layers: int) -> Experts:
    width = _or(row, "moe_ffn_hidden", 0) or ffn
    if not width:
        raise Missing("moe_ffn_hidden")
    if stacks.gelu(row):
        width = width * 2 // 3  # ungated experts have two matrices where the model's have three
    shared = _or(row, "shared_experts", 1 if row.get("shared_experts", "") == "yes" else 0)
    group_limited = count == 256 and re.search("deepseek", row.get("model", ""), re.IGNORECASE) is not None
    dense = 3 if count == 256 else 1 if count == 64 and "kv_lora" in row.get("head_dim", "") else 0
    return Experts(
        count=count,
        top_k=_or(row, "moe_topk", 2),
        ffn=width,
        shared_ffn=shared * width,
        dense_layers=min(dense, layers - 1),
        groups=8 if group_limited else 1,
        top_groups=4 if group_limited else 1,
    )


def _nearest_in_size(row: Row, model: Model) -> Model:
    plain = stacks.gelu(row)
    billions = number(row, "params_b")
    candidates = []
    for gated in (False, True):
        for tied in (True, False):
            changes = {
                "activation": "swiglu" if gated else "gelu",
                "tied": tied,
                "norm": "layernorm" if plain and not gated else "rmsnorm",
                "positions": "learned" if plain and not gated else "rotary",
            }
            candidates.append((gated == plain, msgspec.structs.replace(model, **changes)))
    if not billions or model.experts.count:
        untied = says(row, r"untie") or not plain
        return next(m for odd, m in candidates if not odd and m.tied != untied)
    odds = {id(m): abs(total(m) / 1e9 - billions) / billions + (0.01 if odd else 0) for odd, m in candidates}
    return min((m for _, m in candidates), key=lambda m: odds[id(m)])


_KINDS = (
    (r"A100.*40", "a100-40"),
    (r"A100", "a100"),
    (r"A800", "a100"),
    (r"H100.*96|Grand Teton", "h100-96"),
    (r"H100", "h100"),
    (r"H200|GH200", "h200"),
    (r"H800", "h800"),
    (r"GB300", "gb300"),
    (r"GB200", "gb200"),
    (r"B300", "b300"),
    (r"B200", "b200"),
    (r"V100", "v100"),
    (r"L40S", "l40s"),
    (r"4090", "rtx4090"),
    (r"MI300X", "mi300x"),
)


def hardware_of(row: Row, world: int) -> Hardware:
    """The cluster of a row; network links as its text states them ("4x100Gb" a node), else the preset's."""
    gpu = row.get("gpu", "")
    kind = next((name for pattern, name in _KINDS if re.search(pattern, gpu)), None)
    if kind is None:
        raise Missing(f"gpu (no preset for {gpu!r})" if gpu else "gpu")
    found = hardware.kind(kind)
    devices = _or(row, "gpus_per_node", found.node.devices)
    node = msgspec.structs.replace(found.node, devices=devices)
    if "A800" in gpu:
        node = msgspec.structs.replace(node, bandwidth=node.bandwidth * 2 / 3)
    nics = re.search(r"(\d+)\s*x\s*(\d+)\s*Gb", stacks.text_of(row))
    network = found.network
    if nics:
        rate = int(nics[1]) * int(nics[2]) / 8 * 1e9 / devices * 0.92
        network = msgspec.structs.replace(network, bandwidth=rate)
    return msgspec.structs.replace(found, nodes=max(1, -(-world // devices)), node=node, network=network)


def sizes_of(row: Row) -> Sizes:
    """World size and degrees; data parallel is what is left."""
    tp, pp, cp, ep = (_or(row, column, 1) or 1 for column in ("tp", "pp", "cp", "ep"))
    world, dp = number(row, "n_gpus"), number(row, "dp")
    if world is None and dp is None:
        raise Missing("n_gpus, dp")
    ranks = int(world or 0) or _or(row, "dp", 1) * tp * pp * cp
    replicas = max(1, ranks // (tp * pp * cp))
    return Sizes(ranks, tp, pp, cp, ep, replicas, _or(row, "vpp", 1) or 1)


def zero_of(row: Row, dp: int) -> tuple[int, int]:
    """(zero stage, ranks in a shard group; 0 = all data-parallel ranks)."""
    text = row.get("zero_stage_or_fsdp", "")
    if dp == 1 and not re.search("FSDP", text):
        return 0, 0
    group = re.search(r"(?:over|group|FSDP) (?:dp\*cp=)?(\d+)", text)
    size = int(group[1]) if group else 0
    if re.search(r"ZeRO-1|ptim_?izer|optim|Adam", text) and not re.search("FSDP", text):
        return (0, 0) if re.match(r"0\b|ZeRO-0", text) else (1, size)
    if re.search(r"ZeRO-2|SHARD_GRAD_OP", text):
        return 2, size
    if re.search(r"ZeRO-3|FULL_SHARD|FSDP", text):
        return 3, size
    return 0, 0


def recompute_of(row: Row) -> Recompute:
    """The nearest recompute mode: "per-op" and kernel lists keep matmul outputs."""
    text = row.get("recompute", "").lower()
    if text.startswith("full"):
        return "full"
    if re.search(r"core_attn|attention core|selective \(yaml\)|^selective$", text):
        return "attention"
    if re.search(r"per-op|act|layernorm|save_dot|selective", text):
        return "elementwise"
    return "none"


def precision_of(row: Row) -> str:
    """What matmuls run in."""
    text = row.get("precision", "").lower()
    if "nvfp4" in text or "fp4" in text:
        return "fp4"
    if re.search(r"fp8|float8", text):
        return "fp8"
    return "bf16"


def job_of(row: Row, physics: Physics) -> Job:
    """The job of a row. Raises Missing with the name of the column that lacks."""
    sizes = sizes_of(row)
    zero, group = zero_of(row, sizes.dp * sizes.cp)
    batch = _or(row, "global_batch_seqs", 0)
    if not batch:
        raise Missing("global_batch_seqs")
    micro = _micro_batch(row, batch, sizes)
    shard = min(sizes.dp, max(1, (group or sizes.dp * sizes.cp) // sizes.cp)) if zero else 1
    while sizes.dp % shard:
        shard -= 1
    model = model_of(row)
    expert_tp = 1 if model.experts.count and sizes.tp > 1 and stacks.megatron(row) else sizes.tp
    return Job(
        model=model,
        hardware=hardware_of(row, sizes.world),
        micro_batch=micro,
        microbatches=_accumulation(sizes, max(1, round(batch / sizes.dp / micro))),
        sequence_length=_need(row, "seq_len"),
        pp=sizes.pp,
        dp_replicate=sizes.dp // shard,
        dp_shard=shard,
        cp=sizes.cp,
        tp=sizes.tp,
        ep=sizes.ep,
        expert_tp=expert_tp,
        zero=zero,
        sequence_parallel=(row.get("sequence_parallel", "").startswith("yes") and sizes.tp > 1)
        or (sizes.tp > 1 and "required for tp-comm" in row.get("sequence_parallel", "")),
        schedule="interleaved" if sizes.chunks > 1 and sizes.pp > 1 else "1f1b",
        chunks=sizes.chunks if sizes.pp > 1 else 1,
        recompute=recompute_of(row),
        even_layers=not says(row, r"redistributed"),
        head_split=sizes.pp if says(row, r"vocab parallel|TP-style vocab") else 1,
        precision=precision_of(row),
        stack=stacks.stack_of(row),
        physics=physics,
    )


def rounding(row: Row, job: Job) -> float:
    """Sequences of the job's batch over those of the row's: other than 1 where that does not divide into micro-batches,
    or is no number of them that its schedule has."""
    return job.micro_batch * job.microbatches * job.data_parallel / _need(row, "global_batch_seqs")


def _accumulation(sizes: Sizes, count: int) -> int:
    """Micro-batches of a replica; where an interleaved schedule has no such number, the nearest it has."""
    if sizes.pp == 1 or sizes.chunks == 1:
        return count
    return min(schedules.nearest_legal("interleaved", sizes.pp, count), key=lambda legal: abs(legal - count))


def _micro_batch(row: Row, batch: int, sizes: Sizes) -> int:
    """Stated; else Megatron's smallest, elsewhere a replica's share in as many pieces as pipeline ranks."""
    if stated := _or(row, "micro_batch", 0):
        return stated
    if stacks.megatron(row):
        return 1
    return max(1, batch // sizes.dp // sizes.pp)
