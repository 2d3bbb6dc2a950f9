"""One rank's share of a global batch, cut into micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.data.mixture import Mixture
from fivefold.data.rows import Batch
from fivefold.nn.attention import Segments
from fivefold.spec.batch import BatchPlan
from fivefold.spec.sequence import Span


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward and backward works on.

    Attributes:
        tokens, labels: `[micro_batch, tokens]`, int64, on the rank's device: of every sequence what this rank holds.
        segments: the documents packed in the whole sequences.
        positions: `[tokens]`, int64, places of these tokens in their sequence.
        loss_tokens: labels that count.
        sample_ids: ids of the rows, for reports.
    """

    tokens: Tensor
    labels: Tensor
    segments: Segments
    positions: Tensor
    loss_tokens: int
    sample_ids: tuple[int, ...] = ()

    @staticmethod
    def of(
        batch: Batch,
        device: torch.device,
        sample_ids: tuple[int, ...] = (),
        spans: Sequence[Span] | None = None,
    ) -> "MicroBatch":
        """`batch` on `device`; everything that needs to look at values is done before it goes there.

        Labels are those of the whole sequences, so none is lost where these are cut.

        Args:
            spans: the stretches of every sequence that this rank holds; None = all of it.
        """
        segments = Segments.from_documents(batch.documents, device)
        positions = torch.arange(batch.tokens.shape[1])
        if spans is not None and len(positions) > sum(stop - start for start, stop in spans):
            positions = torch.cat([positions[start:stop] for start, stop in spans])
            batch = batch.columns(positions)
        counted, moved = batch.loss_tokens, batch.to(device)
        return MicroBatch(moved.tokens, moved.labels, segments, positions.to(device), counted, sample_ids)


def training_share(
    samples: Mixture,
    plan: BatchPlan,
    consumed: int,
    data_rank: int,
    device: torch.device,
    spans: Sequence[Span] | None = None,
) -> list[MicroBatch]:
    """The micro-batches of one replica in the step that begins after `consumed` samples; `spans` as in `of`."""
    ids = samples.sample_ids(consumed, plan.global_batch)
    shares = [ids[plan.rows(micro_step, data_rank)] for micro_step in range(plan.accumulation)]
    return [MicroBatch.of(samples.batch(share), device, tuple(share.tolist()), spans) for share in shares]


def held_out_share(
    batch: Batch,
    plan: BatchPlan,
    data_rank: int,
    device: torch.device,
    spans: Sequence[Span] | None = None,
) -> list[MicroBatch]:
    """The micro-batches of one replica of a held-out global batch; `spans` as in `of`."""
    rows = [plan.rows(micro_step, data_rank) for micro_step in range(plan.accumulation)]
    return [MicroBatch.of(batch.rows(row.start, row.stop), device, spans=spans) for row in rows]
