"""The loss on held-out samples."""

from collections.abc import Iterable, Sequence

import torch

from fivefold.parallel.apply import ParallelModel
from fivefold.trainer.agree import Agreement
from fivefold.trainer.batches import MicroBatch


def evaluate(model: ParallelModel, shares: Iterable[Sequence[MicroBatch]], agreement: Agreement) -> float:
    """Nats per counted token over all shares of all ranks: one sum divided by one count. Collective."""
    loss_sum = counted = 0.0
    with torch.no_grad():
        for micro_batch in (micro_batch for share in shares for micro_batch in share):
            loss = model.module(
                micro_batch.tokens,
                micro_batch.segments,
                micro_batch.labels,
                positions=micro_batch.positions,
            )
            loss_sum += loss.item() * model.counts_results
            counted += micro_batch.loss_tokens * model.counts_tokens
    loss_sum, counted = agreement.sum(loss_sum, counted)
    return loss_sum / max(counted, 1.0)
