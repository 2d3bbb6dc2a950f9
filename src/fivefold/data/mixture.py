"""What a step trains on: samples of one source, or of several by weight, in an order independent of the layout."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fivefold.config.tree import Data
from fivefold.data.rows import Batch
from fivefold.data.samples import Samples
from fivefold.data.shards import prepared
from fivefold.data.source import sources
from fivefold.data.store import TokenStore
from fivefold.data.turns import Turns
from fivefold.nn.loss import IGNORED

SEEDS_APART = 0x9E3779B97F4A7C15  # odd, from the golden ratio: sources of one size go through it differently


class Mixture:
    """The samples of all sources under one numbering.

    The one counter of consumed samples says everything: `Turns` tells which source each comes from and how
    many that source has given before, which is its own counter, with epochs and an order of its own. With a
    single source the counters are the same.
    """

    def __init__(self, stores: Sequence[TokenStore], data: Data, sequence_length: int, seed: int) -> None:
        """Raises DataError if a source is shorter than one sample."""
        self._samples = [
            Samples(store, data, sequence_length, seed + SEEDS_APART * number)
            for number, store in enumerate(stores)
        ]
        self._turns = Turns([source.weight for source in sources(data)], seed)
        self._firsts = np.cumsum([0, *(samples.count for samples in self._samples)])  # id of each one's first
        self.validation_count = sum(samples.validation_count for samples in self._samples)

    def digest(self) -> str:
        """What ids and counters stand for; with the same digest and seed they mean the same samples."""
        if len(self._samples) == 1:
            return self._samples[0].digest()
        pairs = zip(self._turns.weights, self._samples, strict=True)
        return " + ".join(f"{weight} × {samples.digest()}" for weight, samples in pairs)

    def sample_ids(self, consumed: int, count: int) -> NDArray[np.int64]:
        """Ids of the next `count` training samples of a run that has consumed `consumed` of them, [count]."""
        numbers, places = self._turns.at(consumed + np.arange(count, dtype=np.int64))
        ids = np.empty(count, dtype=np.int64)
        for number, samples in enumerate(self._samples):
            mine = numbers == number
            ids[mine] = self._firsts[number] + samples.ids_at(places[mine])
        return ids

    def batch(self, ids: NDArray[np.int64]) -> Batch:
        """The samples `ids` [n], one a row, on the CPU."""
        numbers = np.searchsorted(self._firsts, ids, side="right") - 1
        found = [np.flatnonzero(numbers == number) for number in range(len(self._samples))]
        batches = [
            samples.batch(ids[rows] - self._firsts[number])
            for number, (samples, rows) in enumerate(zip(self._samples, found, strict=True))
        ]
        back = torch.from_numpy(np.argsort(np.concatenate(found)))
        tokens, labels, documents = (
            torch.cat([getattr(batch, name) for batch in batches])[back]
            for name in ("tokens", "labels", "documents")
        )
        return Batch(tokens, labels, documents)

    def validation_batches(self, batch_size: int, limit: int) -> Iterator[Batch]:
        """Up to `limit` batches of held-out samples, always the same, all of `batch_size` rows.

        Sources take turns by weight while they have any. A last batch that has too few samples is filled up
        with rows without any label, which no loss counts.
        """
        ids = self._held_out(limit * batch_size)
        for start in range(0, ids.size, batch_size):
            real = ids[start : start + batch_size]
            batch = self.batch(np.resize(real, batch_size))
            batch.labels[real.size :] = IGNORED
            yield batch

    def unigram_entropy(self) -> float:
        """Entropy of the tokens that training samples predict, sources by weight, in nats per token: the loss
        of the best model that ignores its input. A model whose loss does not fall below has learnt only
        frequencies."""
        if len(self._samples) == 1:
            counts = self._samples[0].predicted_counts().astype(np.float64)
        else:
            pairs = zip(self._turns.weights, self._samples, strict=True)
            counts = sum(
                (weight * samples.predicted_counts() / samples.training_count for weight, samples in pairs),
                np.zeros(1),
            )
        frequencies = counts[counts > 0] / counts.sum()
        return float(-(frequencies * np.log(frequencies)).sum())

    def passes(self, consumed: int) -> list[float]:
        """How often the first `consumed` samples go through the training samples of each source."""
        pairs = zip(self._turns.given(consumed), self._samples, strict=True)
        return [given / samples.training_count for given, samples in pairs]

    @property
    def shares(self) -> list[float]:
        """Each source's share of the samples."""
        return [weight / sum(self._turns.weights) for weight in self._turns.weights]

    def _held_out(self, most: int) -> NDArray[np.int64]:
        """Ids of at most `most` held-out samples, the k-th of a source at place (k + ½) / weight."""
        ids, places = [], []
        for number, samples in enumerate(self._samples):
            mine = np.arange(min(most, samples.validation_count), dtype=np.int64)
            ids.append(self._firsts[number] + samples.validation_ids(mine))
            places.append((mine + 0.5) / self._turns.weights[number])
        return np.concatenate(ids)[np.argsort(np.concatenate(places), kind="stable")[:most]]


def prepared_digest(data: Data, vocab: int, sequence_length: int, seed: int) -> str | None:
    """`Mixture.digest` of a run, if its data are prepared already."""
    stores = prepared(data, vocab)
    return None if stores is None else Mixture(stores, data, sequence_length, seed).digest()
