"""What a step trains on: samples of the token stream, in an order no layout can change.

Sample i is tokens [i·T, i·T + T] of the stream: T inputs and, one place later, T predicted tokens. Two
samples share at most one token, predicted by the first and only read by the second.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fivefold.config.tree import Data
from fivefold.data.permutation import permute
from fivefold.data.source import DataError
from fivefold.data.store import TokenStore

IGNORED = -100  # label that no loss counts; torch's cross_entropy ignores it by default
VALIDATION_STRETCHES = 32
_CHUNK = 1024  # samples read at a time where all of a set are counted


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of the global batch, or some of them: all [rows, T]."""

    tokens: torch.Tensor  # int64: what the model reads
    labels: torch.Tensor  # int64: what it should predict at each place, IGNORED = nothing
    documents: (
        torch.Tensor
    )  # int32: which document of its row a place belongs to, from 0; attention stays inside

    def rows(self, start: int, stop: int) -> "Batch":
        """Rows [start, stop), sharing memory with these."""
        return Batch(self.tokens[start:stop], self.labels[start:stop], self.documents[start:stop])

    def to(self, device: torch.device | str) -> "Batch":
        """The same rows on `device`."""
        return Batch(self.tokens.to(device), self.labels.to(device), self.documents.to(device))

    @property
    def loss_tokens(self) -> int:
        """Labels that count. Waits for the device, so ask before `to`."""
        return int((self.labels != IGNORED).sum())


class Samples:
    """The samples of a store: which are for training, in which order, and what each holds.

    With `document_mask` a row's documents do not see each other, and nothing is predicted across their
    boundary: the place of the end-of-text token belongs to the document it ends and has no label.
    Positions run 0 … T-1 over the whole row either way: rotary and ALiBi only see differences, which are
    right inside a document, and a learned table is so trained on all its rows, not mostly on the first.

    Validation samples are VALIDATION_STRETCHES stretches of neighbouring samples, evenly spread over the
    stream: the end of the stream would be whatever sorts last by name, single samples would lie in
    documents trained on left and right. Which they are depends on nothing but the number of samples.
    """

    def __init__(self, store: TokenStore, data: Data, sequence_length: int, seed: int) -> None:
        """Raises DataError if the stream is shorter than one sample."""
        self._store = store
        self._length = sequence_length
        self._seed = seed
        self._document_mask = data.document_mask
        total = (len(store) - 1) // sequence_length
        if total < 1:
            raise DataError(
                f"data.path: {store.manifest.source} has {len(store)} tokens, one sample of "
                f"batch.sequence_length {sequence_length} needs {sequence_length + 1}; "
                "give more text or shorter sequences"
            )
        self._total = total
        self._stretches, self._stretch = _validation_stretches(total, data.validation_fraction)
        self.validation_count = self._stretches * self._stretch
        self.training_count = total - self.validation_count

    def digest(self) -> str:
        """What the ids stand for: token stream / sequence length / held-out stretches.

        With the same digest and seed a sample counter means the same samples, wherever they were prepared.
        """
        return f"{self._store.manifest.digest()}/{self._length}/{self._stretches}x{self._stretch}"

    def sample_ids(self, consumed: int, count: int) -> NDArray[np.int64]:
        """Ids of the next `count` training samples of a run that has consumed `consumed` of them, [count].

        Every epoch is another permutation of all training samples; a batch may end one and begin the next.
        """
        counters = consumed + np.arange(count, dtype=np.int64)
        epochs, places = np.divmod(counters, self.training_count)
        order = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            order[here] = permute(places[here], self.training_count, self._seed, epoch)
        return self._training_ids(order)

    def batch(self, ids: NDArray[np.int64]) -> Batch:
        """The samples `ids` [n], one a row, on the CPU."""
        window = self._store.read(ids * self._length, self._length + 1)
        tokens, labels = window[:, :-1].copy(), window[:, 1:].copy()
        documents = np.zeros(tokens.shape, dtype=np.int32)
        if self._document_mask:
            ends = tokens == self._store.manifest.end_of_text
            labels[ends] = IGNORED
            documents = (np.cumsum(ends, axis=1) - ends).astype(np.int32)  # an end belongs to what it ends
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(documents))

    def validation_batches(self, batch_size: int, limit: int) -> Iterator[Batch]:
        """Up to `limit` batches of held-out samples, always the same, all of `batch_size` rows.

        A last batch that has too few samples is filled up with rows without any label, which no loss counts.
        Stretches take turns, so a few batches already come from all over the text.
        """
        for start in range(0, min(limit * batch_size, self.validation_count), batch_size):
            numbers = np.arange(start, start + batch_size, dtype=np.int64)
            real = numbers < self.validation_count
            batch = self.batch(self._validation_ids(numbers % self.validation_count))
            batch.labels[torch.from_numpy(~real)] = IGNORED
            yield batch

    def unigram_entropy(self) -> float:
        """Entropy of the tokens that training samples predict, in nats per token: the loss of the best model
        that ignores its input. A model whose loss does not fall below has learnt only frequencies."""
        counts = np.array(self._store.manifest.counts, dtype=np.int64)
        # The manifest counts the whole stream: take away what no training sample predicts.
        used = self._total * self._length + 1
        unused = [np.zeros(1, dtype=np.int64), np.array([used], dtype=np.int64)]
        for start, length in zip(unused, (1, len(self._store) - used), strict=True):
            counts -= np.bincount(self._store.read(start, length)[0], minlength=counts.size)
        for first in range(0, self.validation_count, _CHUNK):
            numbers = np.arange(first, min(first + _CHUNK, self.validation_count), dtype=np.int64)
            predicted = self._store.read(self._validation_ids(numbers) * self._length + 1, self._length)
            counts -= np.bincount(predicted.ravel(), minlength=counts.size)
        frequencies = counts[counts > 0] / counts.sum()
        return float(-(frequencies * np.log(frequencies)).sum())

    def _training_ids(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ids of the training samples with these numbers (0 … training_count-1, in stream order).

        The stream is cut into `_stretches` equal segments, each ending in a validation stretch, and a rest.
        """
        if not self._stretches:
            return numbers
        before = self._total // self._stretches - self._stretch  # training samples of one segment
        ids: NDArray[np.int64] = numbers + np.minimum(numbers // before, self._stretches) * self._stretch
        return ids

    def _validation_ids(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ids of the validation samples with these numbers: one of each stretch in turn."""
        segment = self._total // self._stretches
        place, stretch = np.divmod(numbers, self._stretches)
        return (stretch + 1) * segment - self._stretch + place


def _validation_stretches(total: int, fraction: float) -> tuple[int, int]:
    """(number, samples of each) of the validation stretches among `total` samples.

    At least one sample is held out where `fraction` is not 0, at least one is trained on.
    """
    held_out = min(max(round(total * fraction), int(fraction > 0)), total - 1)
    if held_out == 0:
        return 0, 0
    most = min(VALIDATION_STRETCHES, held_out, total - held_out)  # every segment keeps something to train on
    number = min(range(most, most // 2, -1), key=lambda number: held_out % number)  # closest to `held_out`
    return number, held_out // number
