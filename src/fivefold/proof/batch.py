"""Batches that expose faults: packed documents, very unevenly masked labels, rows without any label."""

import torch

from fivefold.config.tree import Config
from fivefold.data.rows import Batch
from fivefold.nn.loss import IGNORED


def uneven_batch(config: Config, step: int) -> Batch:
    """The whole batch of a step, the same for every layout."""
    rows, length, vocab = config.batch.global_batch, config.batch.sequence_length, config.model.vocab
    generator = torch.Generator().manual_seed(config.run.seed * 1000 + step)
    tokens = torch.randint(vocab, (rows, length), generator=generator)
    labels = torch.randint(vocab, (rows, length), generator=generator)
    counted = torch.randint(length + 1, (rows, 1), generator=generator)
    counted[step % rows], counted[(step + 1) % rows] = 0, length
    place = torch.arange(length)
    labels[place >= counted] = IGNORED
    documents = torch.zeros(rows, length, dtype=torch.int32)
    if config.data.document_mask and length > 1:
        boundary = torch.randint(1, length, (rows, 1), generator=generator)
        packed = torch.arange(rows).unsqueeze(1) % 3 > 0
        documents = ((place >= boundary) & packed).int()
    return Batch(tokens, labels, documents)
