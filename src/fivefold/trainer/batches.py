"""One rank's share of a global batch, cut into micro-batches."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.data.mixture import Mixture
from fivefold.data.rows import Batch
from fivefold.nn.attention import Segments
from fivefold.spec.batch import BatchPlan


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward and backward works on.

    Attributes:
        tokens, labels: `[micro_batch, sequence]`, int64, on the rank's device.
        segments: the documents packed in them.
        loss_tokens: labels that count.
        sample_ids: ids of the rows, for reports.
    """

    tokens: Tensor
    labels: Tensor
    segments: Segments
    loss_tokens: int
    sample_ids: tuple[int, ...] = ()

    @staticmethod
    def of(batch: Batch, device: torch.device, sample_ids: tuple[int, ...] = ()) -> "MicroBatch":
        """`batch` on `device`; everything that needs to look at values is done before it goes there."""
        segments, counted = Segments.from_documents(batch.documents, device), batch.loss_tokens
        moved = batch.to(device)
        return MicroBatch(moved.tokens, moved.labels, segments, counted, sample_ids)


def training_share(
    samples: Mixture, plan: BatchPlan, consumed: int, data_rank: int, device: torch.device
) -> list[MicroBatch]:
    """The micro-batches of one replica in the step that begins after `consumed` samples."""
    ids = samples.sample_ids(consumed, plan.global_batch)
    shares = [ids[plan.rows(micro_step, data_rank)] for micro_step in range(plan.accumulation)]
    return [MicroBatch.of(samples.batch(share), device, tuple(share.tolist())) for share in shares]


def held_out_share(batch: Batch, plan: BatchPlan, data_rank: int, device: torch.device) -> list[MicroBatch]:
    """The micro-batches of one replica of a held-out global batch."""
    rows = [plan.rows(micro_step, data_rank) for micro_step in range(plan.accumulation)]
    return [MicroBatch.of(batch.rows(row.start, row.stop), device) for row in rows]
