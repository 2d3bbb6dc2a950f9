"""The loss on held-out samples."""

from collections.abc import Iterable, Sequence

from fivefold.parallel.apply import ParallelModel
from fivefold.trainer.agreement import Agreement
from fivefold.trainer.batches import MicroBatch


def evaluate(model: ParallelModel, shares: Iterable[Sequence[MicroBatch]], agreement: Agreement) -> float:
    """The loss in nats per counted token over all ranks: one sum divided by one count. Collective."""
    loss_sum = counted = 0.0
    for share in shares:
        loss_sum += model.evaluate(share) * model.counts_results
        counted += sum(micro_batch.loss_tokens for micro_batch in share) * model.counts_tokens
    loss_sum, counted = agreement.sum(loss_sum, counted)
    return loss_sum / max(counted, 1.0)
