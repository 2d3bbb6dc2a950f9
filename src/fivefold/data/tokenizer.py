"""Text ↔ token ids: a byte-level byte-pair tokenizer trained on the data, or any tokenizer.json."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from fivefold.data.documents import File, parts, sample
from fivefold.data.source import DataError

END_OF_TEXT = "<|endoftext|>"
# What published tokenizers call the token that ends a document, most specific first.
END_OF_TEXT_NAMES = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "<|eos|>",
    "<eos>",
    "</s>",
    "[EOS]",
)
SMALLEST_VOCAB = 257  # every byte, and the end of a text

# Training text: measured on 31 MB of Python with 4096 entries, 8 MiB take 2 s and need 0.3 % more tokens than
# training on all of it (8 s); 4 MiB need 0.7 % more. Larger vocabularies need more text to fill well.
SAMPLE_BYTES = 8 << 20
BLOCK_BYTES = 4096  # read at one of the places the sample comes from
SAMPLE_BYTES_PER_ENTRY = 2 << 10


class Tokenizer:
    """A tokenizer as the data and the samples need it.

    `end_of_text` is the id that ends every document, `size` the highest id plus one (ids may have gaps).
    """

    def __init__(self, backend: Backend, origin: str) -> None:
        """`origin` is only for messages. Raises DataError if no token ends a text."""
        # A tokenizer.json often carries the settings of its model's inference: they would cut documents.
        backend.no_truncation()
        backend.no_padding()
        # "<|endoftext|>" written out in a document is text: only a real end may become the end-of-text id.
        backend.encode_special_tokens = True
        ids = backend.get_vocab(with_added_tokens=True)
        ends = [ids[name] for name in END_OF_TEXT_NAMES if name in ids]
        if not ends:
            names = ", ".join(END_OF_TEXT_NAMES)
            raise DataError(f"data.tokenizer: {origin} has no end-of-text token; add one of {names}")
        self.end_of_text = ends[0]
        self.size = max(ids.values()) + 1
        self._backend = backend

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, on all cores; nothing is added at its start or end."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def marker(self, name: str) -> list[int]:
        """The one id of a token called `name`; its text's ids, where there is no such token."""
        found = self._backend.token_to_id(name)
        return self.encode([name])[0] if found is None else [found]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens written out."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def save(self, path: Path) -> None:
        """Write a tokenizer.json."""
        path.write_text(self._backend.to_str(), encoding="utf-8")


def load_tokenizer(path: Path, vocab: int) -> Tokenizer:
    """The tokenizer.json at `path`.

    Raises DataError if it cannot be read, has no end-of-text token, or has ids of `vocab` and above.
    """
    try:
        backend = Backend.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception for whatever it cannot parse
        raise DataError(f"data.tokenizer: {path} is not a readable tokenizer.json: {error}") from error
    tokenizer = Tokenizer(backend, str(path))
    if tokenizer.size > vocab:
        raise DataError(
            f"data.tokenizer: {path} has ids up to {tokenizer.size - 1}, model.vocab is {vocab}; "
            f"set model.vocab to {tokenizer.size} or more"
        )
    return tokenizer


def train_tokenizer(files: Sequence[File], vocab: int) -> Tokenizer:
    """A byte-level byte-pair tokenizer of exactly `vocab` entries; id 0 ends a text.

    It is trained on an evenly spread sample of `files` (none of ids) and depends on nothing else.
    Raises DataError if `vocab` is below 257, or if the text has too few different pairs.
    """
    if vocab < SMALLEST_VOCAB:
        raise DataError(
            f"model.vocab is {vocab}, but a byte-level tokenizer has at least {SMALLEST_VOCAB} entries: "
            "the 256 bytes and the end of a text; raise model.vocab or give data.tokenizer"
        )
    text_bytes = sum(file.path.stat().st_size for file in files)
    budget = max(SAMPLE_BYTES, vocab * SAMPLE_BYTES_PER_ENTRY)
    backend = _train(files, vocab, budget)
    while backend.get_vocab_size() < vocab and budget < text_bytes:  # a repetitive sample: try a larger one
        budget *= 4
        backend = _train(files, vocab, budget)
    if backend.get_vocab_size() < vocab:
        raise DataError(
            f"model.vocab is {vocab}, but the {text_bytes} bytes of text of data.path make only "
            f"{backend.get_vocab_size()} entries; set model.vocab to that, give more text, or data.tokenizer"
        )
    return Tokenizer(backend, "the trained tokenizer")


def spread_sample(files: Sequence[File], budget: int) -> Iterator[str]:
    """About `budget` bytes of the text of `files`: whole lines or documents at evenly spaced places, always
    the same ones.

    Reads only what it returns, so it costs the same for a gigabyte as for a terabyte. Files no longer than
    `budget` together are returned whole.
    """
    sizes = [file.path.stat().st_size for file in files]
    ends = list(accumulate(sizes))
    if not ends or ends[-1] <= budget:
        for file in files:
            yield from (part.text for part in parts(file) if part and not part.marker)
        return
    blocks = max(1, budget // BLOCK_BYTES)
    for block in range(blocks):
        offset = block * ends[-1] // blocks
        index = bisect_right(ends, offset)
        yield from sample(files[index], offset - (ends[index] - sizes[index]), BLOCK_BYTES)


def _train(files: Sequence[File], vocab: int, budget: int) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # GPT-2's words
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(spread_sample(files, budget), trainer)
    return backend
