"""How the stream of a source is cut into samples of T tokens, and what each holds."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fivefold.data.store import TokenStore
from fivefold.nn.loss import IGNORED

OPEN_ROWS = 256  # that the next conversation may join: some 98 % of all places are filled then
_CHUNK = 1 << 22  # numbers read at a time where all of a stream are looked at


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of the global batch, or some of them: all [rows, T]."""

    tokens: torch.Tensor  # int64: what the model reads
    labels: torch.Tensor  # int64: what it should predict at each place, IGNORED = nothing
    documents: torch.Tensor  # int32: which document of its row a place belongs to, from 0

    def rows(self, start: int, stop: int) -> "Batch":
        """Rows [start, stop), sharing memory with these."""
        return Batch(self.tokens[start:stop], self.labels[start:stop], self.documents[start:stop])

    def columns(self, places: torch.Tensor) -> "Batch":
        """The `places` [n] of every row."""
        return Batch(self.tokens[:, places], self.labels[:, places], self.documents[:, places])

    def to(self, device: torch.device | str) -> "Batch":
        """The same rows on `device`."""
        return Batch(self.tokens.to(device), self.labels.to(device), self.documents.to(device))

    @property
    def loss_tokens(self) -> int:
        """Labels that count. Waits for the device, so ask before `to`."""
        return int((self.labels != IGNORED).sum())


class StreamRows:
    """Row i is tokens [i·T, i·T + T] of the stream: T inputs and, one place later, T predicted tokens. Two
    rows share at most one token, predicted by the first and only read by the second."""

    def __init__(self, store: TokenStore, length: int, document_mask: bool) -> None:
        self._store = store
        self._length = length
        self._document_mask = document_mask
        self.count = (len(store) - 1) // length

    def batch(self, rows: NDArray[np.int64]) -> Batch:
        """The rows with these numbers [n], on the CPU."""
        window = self._store.read(rows * self._length, self._length + 1)
        tokens, labels = window[:, :-1].copy(), window[:, 1:].copy()
        documents = np.zeros(tokens.shape, dtype=np.int32)
        if self._document_mask:
            ends = tokens == self._store.manifest.end_of_text
            labels[ends] = IGNORED
            documents = (np.cumsum(ends, axis=1) - ends).astype(np.int32)  # an end belongs to what it ends
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(documents))

    def predicted(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens that these rows predict, those after an end-of-text token included, [m]."""
        return self._store.read(rows * self._length + 1, self._length).ravel()

    def counts(self) -> NDArray[np.int64]:
        """How often each id is predicted by all rows, [vocab]."""
        counts = np.array(self._store.manifest.counts, dtype=np.int64)
        used = self.count * self._length + 1
        # The manifest counts the whole stream: take away what no row predicts.
        for start, length in ((0, 1), (used, len(self._store) - used)):
            numbers = self._store.read(np.array([start], dtype=np.int64), length)[0]
            counts -= np.bincount(numbers, minlength=counts.size)
        return counts


class PackedRows:
    """Rows of whole conversations, as many as fit, then end-of-text tokens that no loss counts.

    A conversation that is longer than a row is cut into parts, full rows and a rest (each only sees itself);
    parts in which nothing is learnt are left out. So every token to be learnt is learnt once an epoch. Which
    conversations share a row depends on nothing but the stream and T.
    """

    def __init__(self, store: TokenStore, length: int, document_mask: bool) -> None:
        self._store = store
        self._length = length
        self._document_mask = document_mask
        starts, sizes = self._parts()
        row_of = np.array(_best_fit(sizes, length + 1), dtype=np.int64)
        order = np.argsort(row_of, kind="stable")
        self._starts, self._sizes = np.array(starts, dtype=np.int64)[order], np.array(sizes, np.int64)[order]
        self._firsts = np.cumsum([0, *np.bincount(row_of)])  # row i holds the parts firsts[i] … firsts[i+1]
        self.count = self._firsts.size - 1

    def batch(self, rows: NDArray[np.int64]) -> Batch:
        """The rows with these numbers [n], on the CPU."""
        shape = rows.size, self._length + 1
        window = np.full(shape, self._store.manifest.end_of_text, dtype=np.int64)
        learnt = np.zeros(shape, dtype=np.bool_)
        documents = np.zeros(shape, dtype=np.int32)
        for row, number in enumerate(rows.tolist()):
            place, document = 0, 0
            for document, part in enumerate(range(self._firsts[number], self._firsts[number + 1])):
                size = int(self._sizes[part])
                numbers = self._store.read(self._starts[part : part + 1], size)[0]
                here = slice(place, place + size)
                window[row, here], documents[row, here] = numbers >> 1, document
                learnt[row, place + 1 : place + size] = numbers[1:] & 1  # nothing before a part predicts it
                place += size
            documents[row, place:] = document + 1
        tokens, labels = window[:, :-1].copy(), np.where(learnt[:, 1:], window[:, 1:], IGNORED)
        within = documents[:, :-1].copy() if self._document_mask else np.zeros(tokens.shape, dtype=np.int32)
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(within))

    def predicted(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens that these rows predict, [m]."""
        labels: NDArray[np.int64] = self.batch(rows).labels.numpy()
        learnt: NDArray[np.int64] = labels[labels != IGNORED]
        return learnt

    def counts(self) -> NDArray[np.int64]:
        """How often each id is predicted by all rows, [vocab]."""
        return np.array(self._store.manifest.counts, dtype=np.int64)

    def _parts(self) -> tuple[list[int], list[int]]:
        """First place in the stream, and size, of every conversation; of each part of a long one.

        Parts overlap by one token, predicted by the first and only read by the second, as rows of a stream.
        """
        starts, sizes = list[int](), list[int]()
        first = 0
        for end in self._ends():
            whole = end - first <= self._length  # it fits, and the end of it is learnt
            for start in range(first, end, self._length):
                size = min(self._length + 1, end + 1 - start)
                if whole or (self._store.read(np.array([start], dtype=np.int64), size)[0, 1:] & 1).any():
                    starts.append(start)
                    sizes.append(size)
            first = end + 1
        return starts, sizes

    def _ends(self) -> list[int]:
        """Places of the end-of-text tokens."""
        ends = list[int]()
        for start in range(0, len(self._store), _CHUNK):
            size = min(_CHUNK, len(self._store) - start)
            ids = self._store.read(np.array([start], dtype=np.int64), size)[0] >> 1
            ends += (start + np.flatnonzero(ids == self._store.manifest.end_of_text)).tolist()
        return ends


def _best_fit(sizes: Sequence[int], room: int) -> list[int]:
    """The row that each part goes to: of the open ones that with the least room that is enough, else a new
    one, for which the fullest is closed."""
    rows, count = list[int](), 0
    open_rows = list[tuple[int, int]]()  # (room that is left, row), least room first
    for size in sizes:
        fits = bisect_left(open_rows, (size, 0))
        if fits < len(open_rows):
            left, row = open_rows.pop(fits)
        else:
            left, row, count = room, count, count + 1
            if len(open_rows) == OPEN_ROWS:
                del open_rows[0]
        rows.append(row)
        insort(open_rows, (left - size, row))
    return rows
