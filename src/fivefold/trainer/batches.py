"""One rank's share of a global batch, cut into micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fivefold.data.mixture import Mixture
from fivefold.data.rows import Batch
from fivefold.nn.attention import Segments
from fivefold.nn.inputs import Inputs
from fivefold.spec.batch import BatchPlan
from fivefold.spec.sequence import Span


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one forward and backward.

    Attributes:
        inputs: the decoder's, on the rank's device.
        loss_tokens: labels that the loss counts, of whole sequences.
        sequences: sequences of the step's global batch.
        sample_ids: ids of the rows, for reports.
    """

    inputs: Inputs
    loss_tokens: int
    sequences: int
    sample_ids: tuple[int, ...] = ()

    @staticmethod
    def of(
        batch: Batch,
        device: torch.device,
        *,
        sequences: int,
        first_row: int = 0,
        spans: Sequence[Span] | None = None,
        dropout_key: int | None = None,
        sample_ids: tuple[int, ...] = (),
    ) -> "MicroBatch":
        """`batch` on `device`. Whatever depends on values is computed before it is moved there.

        Labels are shifted before sequences are divided over context-parallel ranks, so none is lost at the boundaries.

        Args:
            sequences: sequences of the step's global batch.
            first_row: number of the first row in the step's global batch.
            spans: the spans of every sequence that this rank holds; None = whole sequences.
            dropout_key: `dropout.step_key` of the step; None = no dropout.
        """
        segments = Segments.from_documents(batch.documents, device)
        positions = torch.arange(batch.tokens.shape[1])
        if spans is not None and len(positions) > sum(stop - start for start, stop in spans):
            positions = torch.cat([positions[start:stop] for start, stop in spans])
            batch = batch.columns(positions)
        rows = torch.arange(first_row, first_row + len(batch.tokens), device=device)
        counted, moved = batch.loss_tokens, batch.to(device)
        inputs = Inputs(moved.tokens, segments, moved.labels, positions.to(device), rows, dropout_key)
        return MicroBatch(inputs, counted, sequences, sample_ids)


def training_share(
    samples: Mixture,
    plan: BatchPlan,
    consumed: int,
    data_rank: int,
    device: torch.device,
    spans: Sequence[Span] | None = None,
    dropout_key: int | None = None,
) -> list[MicroBatch]:
    """The micro-batches of one replica in the step after `consumed` samples; `spans`, `dropout_key`: as in
    `MicroBatch.of`."""
    ids = samples.sample_ids(consumed, plan.global_batch)
    return [
        MicroBatch.of(
            samples.batch(ids[rows]),
            device,
            sequences=plan.global_batch,
            first_row=rows.start,
            spans=spans,
            dropout_key=dropout_key,
            sample_ids=tuple(ids[rows].tolist()),
        )
        for rows in _rows(plan, data_rank)
    ]


def held_out_share(
    batch: Batch,
    plan: BatchPlan,
    data_rank: int,
    device: torch.device,
    spans: Sequence[Span] | None = None,
    dropout_key: int | None = None,
) -> list[MicroBatch]:
    """The micro-batches of one replica of a given global batch; arguments as in `MicroBatch.of`."""
    return [
        MicroBatch.of(
            batch.rows(rows.start, rows.stop),
            device,
            sequences=plan.global_batch,
            first_row=rows.start,
            spans=spans,
            dropout_key=dropout_key,
        )
        for rows in _rows(plan, data_rank)
    ]


def _rows(plan: BatchPlan, data_rank: int) -> list[slice]:
    return [plan.rows(micro_step, data_rank) for micro_step in range(plan.accumulation)]
