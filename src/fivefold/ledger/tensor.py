"""Tensor parallel (and sequence parallel): what one layer's micro-batch moves. Twin of parallel/tensor.py.

Without sequence parallel: 2 all-reduces of the residual stream forward, 2 backward (Shoeybi 2019). With it: the same
bytes as all-gather + reduce-scatter; where only shards of the regions' inputs are kept, backward gathers them again
(Korthikanti 2022). Rows are of a micro-batch, except the gradients': a stage counts its layers,
a step its micro-batches.
"""

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from fivefold.config.model import Model
from fivefold.ledger.job import Job
from fivefold.ledger.operations import loss_chunks
from fivefold.ledger.shards import StageContent, representatives
from fivefold.ledger.traffic import Row, row
from fivefold.spec.layout import gradient_ranks, placements


def layer_rows(job: Job, expert: bool) -> list[Row]:
    """One layer's traffic, forward and backward. Experts owned whole by tp ranks have none of their own.

    Recomputation repeats the layer's communication up to its last matmul, so all but the last sum.
    """
    if job.tp == 1:
        return []
    regions = 1 if expert and job.expert_width_split == 1 and not job.model.experts.shared_ffn else 2
    again = job.stack.reruns_traffic and job.recompute in ("elementwise", "full")
    sums = regions + (regions - 1 if again else 0)
    size = _stream_bytes(job)
    formula = "tokens · hidden · itemsize, per region (attention, feed-forward)"
    if not job.sequence_parallel:
        found = [_row(job, "all_reduce", "forward", regions, size, formula)]
        return [*found, _row(job, "all_reduce", "backward", sums, size, formula)]
    rebuilt = regions if again or not job.stack.keep_gathered else 0
    text = formula + (", and to rebuild its input" if rebuilt else "")
    return [
        _row(job, "all_gather", "forward", regions, size, formula),
        _row(job, "reduce_scatter", "forward", regions, size, formula),
        _row(job, "all_gather", "backward", regions + rebuilt, size, text),
        _row(job, "reduce_scatter", "backward", sums, size, formula),
    ]


def edge_rows(job: Job, first: bool, last: bool) -> list[Row]:
    """The embedding's and the head's traffic of one micro-batch on the stages that hold them."""
    if job.tp == 1:
        return []
    size = _stream_bytes(job)
    found = []
    if first and job.sequence_parallel:
        found.append(_row(job, "reduce_scatter", "forward", 1, size, "embedding rows summed"))
        found.append(_row(job, "all_gather", "backward", 1, size, "embedding gradient"))
    elif first:
        found.append(_row(job, "all_reduce", "forward", 1, size, "embedding rows summed"))
    if last:
        if job.sequence_parallel:
            found.append(_row(job, "all_gather", "forward", 1, size, "head input"))
            found.append(_row(job, "reduce_scatter", "backward", 1, size, "head input gradient"))
        else:
            found.append(_row(job, "all_reduce", "backward", 1, size, "head input gradient"))
        found.append(_loss_row(job))
    return found


def _stream_bytes(job: Job) -> float:
    """The residual stream of a micro-batch; sequence parallel fills its tokens up to a multiple of tp."""
    tokens = -(-job.tokens // job.sequence_split) * job.sequence_split
    return float(tokens * job.model.hidden * job.itemsize)


def _loss_row(job: Job) -> Row:
    """The loss over a sharded vocabulary. With chunks (nn/loss.py) ranks exchange the logarithm of their sum of
    exponentials and the label's logit; otherwise maximum, target and sum are reduced one by one."""
    if not job.stack.chunked_loss:
        return _row(job, "all_reduce", "forward", 3, job.tokens * 4.0, "loss: max, target, sum")
    chunks = loss_chunks(job)
    size = job.tp * 2.0 * job.tokens * max(4, job.itemsize) / chunks
    return _row(job, "all_gather", "forward", chunks, size, "loss: tp · tokens · (log Σ exp, target)")


def gradient_rows(job: Job, contents: Iterable[StageContent]) -> list[Row]:
    """The all-reduces, once per step, of gradients that tp ranks compute in part, after ZeRO has sharded them."""
    if job.tp == 1 or not job.stack.sums_in_part:
        return []
    elements: Counter[int] = Counter()
    kinds = in_part(job.model, job.tp, job.sequence_parallel, job.dp_shard * job.cp if job.zero else 1)
    for content in contents:
        counts = (int(content.first), content.dense_layers, content.expert_layers, int(content.last))
        for count, kind in zip(counts, kinds, strict=True):
            elements.update({ranks: count * numel for ranks, numel in kind})
    return [
        row(
            job,
            "tp",
            "all_reduce",
            "gradient",
            count=1,
            size=float(numel * job.stack.reduce),
            group=job.spread(ranks, 1),
            formula="elements computed in part · itemsize of sums",
        )
        for ranks, numel in elements.items()
        if numel
    ]


class InPart(NamedTuple):
    """(ranks that sum, elements) of the gradients computed in part, of each part of a model."""

    first: tuple[tuple[int, int], ...]
    dense_layer: tuple[tuple[int, int], ...]
    expert_layer: tuple[tuple[int, int], ...]
    last: tuple[tuple[int, int], ...]


@lru_cache(maxsize=4096)
def in_part(model: Model, tp: int, sequence_parallel: bool, shards: int) -> InPart:
    """Elements that the rank with the most rows holds, where ZeRO splits rows over `shards`."""
    kinds: tuple[Counter[int], ...] = (Counter(), Counter(), Counter(), Counter())
    for parameter in representatives(model):
        if (ranks := gradient_ranks(model, parameter.name, tp, sequence_parallel)) == 1:
            continue
        rows, width = parameter.shape[0], parameter.numel // parameter.shape[0]
        if "tp" in placements(model, parameter.name):
            rows //= model.kv_heads  # one head's
        if parameter.layer is None:
            kind = 3 if parameter.name.startswith("norm.") else 0
        else:
            kind = 2 if model.experts.count and parameter.layer >= model.experts.dense_layers else 1
        kinds[kind][ranks] += -(-rows // shards) * width
    return InPart(*(tuple(kind.items()) for kind in kinds))


def _row(job: Job, primitive: str, phase: str, count: int, size: float, formula: str) -> Row:
    return row(
        job,
        "tp",
        primitive,  # type: ignore[arg-type]
        phase,
        count=count,
        size=size,
        group=job.group("tp"),
        formula=formula,
    )
