"""Documents → the numbers that shards hold, with what a manifest counts on the way."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from fivefold.data.conversations import Part
from fivefold.data.documents import File, parts
from fivefold.data.ids import id_chunks
from fivefold.data.tokenizer import Tokenizer

ENCODE_CHARACTERS = 4 << 20  # tokenized at a time: enough for all cores, little beside the model's memory


class Encoder:
    """The stream of one source: each document's tokens, then the end-of-text id.

    With `answers_only` the numbers are 2 · id + 1 where the id is to be learnt, 2 · id where it is not. The
    first id of a document is never learnt: nothing comes before it.

    Attributes:
        counts: how often each id is predicted, `[vocab]`; without `answers_only`, how often it occurs.
        tokens, documents, text_bytes: of the stream so far, end-of-text ids included.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, answers_only: bool) -> None:
        self.counts = np.zeros(vocab, dtype=np.int64)
        self.tokens = self.documents = self.text_bytes = 0
        self._tokenizer = tokenizer
        self._answers_only = answers_only
        self._at_start = True  # of a document

    def stream(self, files: Sequence[File]) -> Iterator[tuple[NDArray[np.int64], int]]:
        """(numbers [n], files that are done) in order, for a few megabytes of text at a time.

        Raises DataError with the place of what cannot be used.
        """
        pending: list[Part | None] = []
        characters = 0
        for number, file in enumerate(files):
            if file.form == "ids":
                yield self._encode(pending), number
                pending, characters = [], 0
                for chunk in id_chunks(file.path, self.counts.size, self._tokenizer.end_of_text):
                    yield self._counted(chunk), number
                continue
            for part in parts(file):
                pending.append(part)
                characters += len(part.text) if part else 0
                if characters >= ENCODE_CHARACTERS:
                    yield self._encode(pending), number
                    pending, characters = [], 0
        yield self._encode(pending), len(files)

    def _encode(self, pieces: Sequence[Part | None]) -> NDArray[np.int64]:
        plain = [piece.text for piece in pieces if piece and not piece.marker]
        self.text_bytes += sum(len(text.encode()) for text in plain)
        encoded = iter(self._tokenizer.encode(plain))
        ids, learnt = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.bool_)]
        for piece in pieces:
            if piece is None:
                part, answer = [self._tokenizer.end_of_text], True
            else:
                part = self._tokenizer.marker(piece.text) if piece.marker else next(encoded)
                answer = piece.answer
            ids.append(np.array(part, dtype=np.int64))
            learnt.append(np.full(len(part), answer))
            if self._at_start and part:
                learnt[-1][0] = False
            self._at_start = piece is None or (self._at_start and not part)
        return self._counted(np.concatenate(ids), np.concatenate(learnt))

    def _counted(self, ids: NDArray[np.int64], learnt: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
        self.tokens += ids.size
        self.documents += int((ids == self._tokenizer.end_of_text).sum())
        if not self._answers_only or learnt is None:
            self.counts += np.bincount(ids, minlength=self.counts.size)
            return ids
        self.counts += np.bincount(ids[learnt], minlength=self.counts.size)
        return 2 * ids + learnt
