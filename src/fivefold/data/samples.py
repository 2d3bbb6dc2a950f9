"""Which samples of a source are trained on, in which order, and which are held out."""

import numpy as np
from numpy.typing import NDArray

from fivefold.config.tree import Data
from fivefold.data.permutation import permute
from fivefold.data.rows import Batch, PackedRows, StreamRows
from fivefold.data.source import DataError
from fivefold.data.store import TokenStore

VALIDATION_STRETCHES = 32
_CHUNK = 1024  # samples read at a time where all of a set are counted


class Samples:
    """The samples of a source: which are for training, in which order, and what each holds.

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
        rows = PackedRows if store.manifest.answers_only else StreamRows
        self._rows = rows(store, sequence_length, data.document_mask)
        self.count = total = self._rows.count
        if total < 1:
            raise DataError(
                f"data.path: {store.manifest.source} has {len(store)} tokens, one sample of "
                f"batch.sequence_length {sequence_length} needs {sequence_length + 1}; "
                "give more text or shorter sequences"
            )
        self._stretches, self._stretch = _validation_stretches(total, data.validation_fraction)
        self.validation_count = self._stretches * self._stretch
        self.training_count = total - self.validation_count

    def digest(self) -> str:
        """What the ids stand for: token stream / sequence length / held-out stretches.

        With the same digest and seed a sample counter means the same samples, wherever they were prepared.
        """
        return f"{self._store.manifest.digest()}/{self._length}/{self._stretches}x{self._stretch}"

    def sample_ids(self, consumed: int, count: int) -> NDArray[np.int64]:
        """Ids of the next `count` training samples when `consumed` have been taken, [count]."""
        return self.ids_at(consumed + np.arange(count, dtype=np.int64))

    def ids_at(self, counters: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ids of the training samples that are taken after so many others, for each of `counters` [n].

        Every epoch is another permutation of all training samples.
        """
        epochs, places = np.divmod(counters, self.training_count)
        order = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            order[here] = permute(places[here], self.training_count, self._seed, epoch)
        return self._training_ids(order)

    def validation_ids(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ids of the validation samples with these numbers: one of each stretch in turn, so that a few
        already come from all over the text."""
        if not numbers.size:
            return numbers
        segment = self.count // self._stretches
        place, stretch = np.divmod(numbers, self._stretches)
        return (stretch + 1) * segment - self._stretch + place

    def batch(self, ids: NDArray[np.int64]) -> Batch:
        """The samples `ids` [n], one a row, on the CPU."""
        return self._rows.batch(ids)

    def predicted_counts(self) -> NDArray[np.int64]:
        """How often each id is predicted by the training samples, [vocab]."""
        counts = self._rows.counts()
        for first in range(0, self.validation_count, _CHUNK):
            numbers = np.arange(first, min(first + _CHUNK, self.validation_count), dtype=np.int64)
            predicted = self._rows.predicted(self.validation_ids(numbers))
            counts -= np.bincount(predicted, minlength=counts.size)
        return counts

    def _training_ids(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ids of the training samples with these numbers (0 … training_count-1, in stream order).

        The stream is cut into `_stretches` equal segments, each ending in a validation stretch, and a rest.
        """
        if not self._stretches:
            return numbers
        before = self.count // self._stretches - self._stretch  # training samples of one segment
        ids: NDArray[np.int64] = numbers + np.minimum(numbers // before, self._stretches) * self._stretch
        return ids


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
