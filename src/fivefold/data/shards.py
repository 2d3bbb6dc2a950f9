"""Tokenize the text once into shards that every later run, rank and layout re-uses."""

import fcntl
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from fivefold.config.tree import Data
from fivefold.data.source import DataError, is_text, text_files, text_pieces
from fivefold.data.store import (
    FORMAT,
    MANIFEST,
    TOKENIZER,
    Manifest,
    Shard,
    TokenStore,
    open_store,
    token_dtype,
)
from fivefold.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

BLOCK_BYTES = 1 << 20  # what one checksum covers
SHARD_BLOCKS = 256  # a shard is at most 256 MiB
ENCODE_CHARACTERS = 4 << 20  # tokenized at a time: enough for all cores, little beside the model's memory
LOCK = "lock"

Progress = Callable[[str, float], None]  # (what is being done, how much of it is done: 0 … 1)


def prepare(data: Data, vocab: int, progress: Progress) -> TokenStore:
    """The tokens of `data.path` with `vocab` ids: from the cache, or tokenized now.

    The store is `data.cache_dir`/FINGERPRINT. Call it on one rank, give `store.directory` to the others for
    `open_store`; processes that call it at once are safe too: one works, the others wait. A preparation that
    was cut short, however, leaves no manifest and is done again. Nothing in it is random.

    Raises DataError if there is no text, if tokenizer and `vocab` do not fit, if the cache cannot be written,
    or if a finished store is damaged.
    """
    try:
        files = _source_files(data)
        identity = fingerprint(data, files, vocab)
        directory = Path(data.cache_dir).expanduser() / identity
        if not (directory / MANIFEST).exists():  # asked before locking: a finished cache may be read-only
            directory.mkdir(parents=True, exist_ok=True)
            with _locked(directory / LOCK, progress):
                if not (directory / MANIFEST).exists():
                    _build(directory, identity, data, files, vocab, progress)
    except (OSError, UnicodeDecodeError) as error:  # no space, no permission, a file that vanished or changed
        raise DataError(
            f"cannot tokenize {data.path} into data.cache_dir {data.cache_dir}: {error}"
        ) from error
    return open_store(directory)


def fingerprint(data: Data, files: list[Path], vocab: int) -> str:
    """What the tokens depend on, in 20 hex digits: the files, the tokenizer, `vocab`, the format.

    Files enter by path, size and modification time, not by content: every start of a run asks, and must not
    read a terabyte to learn that nothing changed. The price is that touched files are tokenized again; equal
    text still gives equal tokens, which `Manifest.digest` shows.
    """
    stats = [file.stat() for file in files]
    text = [
        [str(file.absolute()), stat.st_size, stat.st_mtime_ns]
        for file, stat in zip(files, stats, strict=True)
    ]
    # A trained tokenizer is a function of the text and of the library that trains it.
    tokenizer = f"trained by tokenizers {version('tokenizers')}"
    if data.tokenizer:
        try:
            tokenizer = hashlib.sha256(Path(data.tokenizer).expanduser().read_bytes()).hexdigest()
        except OSError as error:
            raise DataError(f"data.tokenizer: cannot read {data.tokenizer}: {error.strerror}") from error
    return hashlib.sha256(json.dumps([FORMAT, vocab, tokenizer, text]).encode()).hexdigest()[:20]


def _source_files(data: Data) -> list[Path]:
    """The files of text, without those that preparing writes itself."""
    cache = Path(data.cache_dir).expanduser().absolute()
    files = [file for file in text_files(data.path) if cache not in file.absolute().parents]
    if not files:
        raise DataError(
            f"data.path: {data.path} holds only data.cache_dir ({cache}); give a directory of text"
        )
    return files


@contextmanager
def _locked(file: Path, progress: Progress) -> Iterator[None]:
    """Hold `file` alone. The kernel lets go of it when the process dies, so a lock cannot be left behind."""
    with file.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that prepares the same data", 0.0)
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _build(
    directory: Path, identity: str, data: Data, listed: list[Path], vocab: int, progress: Progress
) -> None:
    for leftover in directory.iterdir():  # of a preparation that was cut short
        if leftover.name != LOCK:
            leftover.unlink()
    files = _readable(listed, data, progress)
    progress("loading the tokenizer" if data.tokenizer else "training a tokenizer", 0.0)
    if data.tokenizer:
        tokenizer = load_tokenizer(Path(data.tokenizer).expanduser(), vocab)
    else:
        tokenizer = train_tokenizer(files, vocab)
    tokenizer.save(directory / TOKENIZER)
    counts = np.zeros(vocab, dtype=np.int64)
    writer = ShardWriter(directory, vocab)
    for tokens in _encode(files, tokenizer, progress):
        counts += np.bincount(tokens, minlength=vocab)
        writer.write(tokens)
    writer.finish()
    if fingerprint(data, _source_files(data), vocab) != identity:
        raise DataError(f"data.path: files of {data.path} changed while they were tokenized; start again")
    manifest = Manifest(
        format=FORMAT,
        fingerprint=identity,
        source=data.path,
        vocab=vocab,
        dtype=token_dtype(vocab),
        end_of_text=tokenizer.end_of_text,
        tokens=int(counts.sum()),
        documents=int(counts[tokenizer.end_of_text]),
        text_bytes=sum(file.stat().st_size for file in files),
        skipped_files=len(listed) - len(files),
        block_bytes=writer.block_bytes,
        shard_tokens=writer.shard_tokens,
        shards=writer.shards,
        tokenizer_checksum=zlib.crc32((directory / TOKENIZER).read_bytes()),
        counts=counts.tolist(),
    )
    _write_manifest(directory, manifest)


def _readable(listed: list[Path], data: Data, progress: Progress) -> list[Path]:
    """Those of the `listed` files that are UTF-8 text throughout, which only reading them can tell."""
    files = []
    for number, file in enumerate(listed):
        progress("reading text", number / len(listed))
        if is_text(file):
            files.append(file)
    if not any(file.stat().st_size for file in files):
        raise DataError(f"data.path: no text in the {len(listed)} files of {data.path}; give UTF-8 text")
    return files


def _write_manifest(directory: Path, manifest: Manifest) -> None:
    """The last act, the only one that makes the directory a store: all or nothing, even in a power cut."""
    _sync(directory / TOKENIZER)
    unfinished = directory / (MANIFEST + ".unfinished")
    unfinished.write_bytes(msgspec.json.encode(manifest))
    _sync(unfinished)
    unfinished.rename(directory / MANIFEST)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _encode(files: list[Path], tokenizer: Tokenizer, progress: Progress) -> Iterator[NDArray[np.int64]]:
    """Tokens of all documents in order, the end-of-text token after each, a few megabytes of text at a time.

    A file without text is no document.
    """
    total = sum(file.stat().st_size for file in files)
    pending: list[str | None] = []  # pieces of text; None = the document ends here
    characters = done = 0
    for file in files:
        for piece in text_pieces(file):
            pending.append(piece)
            characters += len(piece)
            if characters >= ENCODE_CHARACTERS:
                progress("tokenizing", done / total)
                yield _encode_pieces(pending, tokenizer)
                pending, characters = [], 0
        size = file.stat().st_size
        if size:
            pending.append(None)
        done += size
    yield _encode_pieces(pending, tokenizer)
    progress("tokenizing", 1.0)


def _encode_pieces(pieces: list[str | None], tokenizer: Tokenizer) -> NDArray[np.int64]:
    encoded = iter(tokenizer.encode([piece for piece in pieces if piece is not None]))
    parts = [[tokenizer.end_of_text] if piece is None else next(encoded) for piece in pieces]
    return np.concatenate([np.array(part, dtype=np.int64) for part in parts])


class ShardWriter:
    """Appends tokens to shards of at most SHARD_BLOCKS blocks, with a checksum of each block."""

    def __init__(self, directory: Path, vocab: int) -> None:
        self._directory = directory
        self._dtype = np.dtype(token_dtype(vocab)).newbyteorder("<")
        self.block_bytes = BLOCK_BYTES
        self.shard_tokens = SHARD_BLOCKS * BLOCK_BYTES // self._dtype.itemsize
        self.shards: list[Shard] = []  # what is written
        self._pending = bytearray()  # less than a block

    def write(self, tokens: NDArray[np.int64]) -> None:
        """Append `tokens` [n], each a valid id."""
        self._pending += tokens.astype(self._dtype).tobytes()
        whole = len(self._pending) // self.block_bytes * self.block_bytes
        for start in range(0, whole, self.block_bytes):
            self._write_block(self._pending[start : start + self.block_bytes])
        del self._pending[:whole]

    def finish(self) -> None:
        """Write what is left; all files are safely on the disk afterwards."""
        if self._pending:
            self._write_block(self._pending)
        for shard in self.shards:
            _sync(self._directory / shard.name)

    def _write_block(self, block: bytearray) -> None:
        if not self.shards or len(self.shards[-1].checksums) == SHARD_BLOCKS:
            self.shards.append(Shard(name=f"shard-{len(self.shards):05d}.bin", tokens=0, checksums=[]))
        shard = self.shards[-1]
        with (self._directory / shard.name).open("ab") as stream:
            stream.write(block)
        shard.tokens += len(block) // self._dtype.itemsize
        shard.checksums.append(zlib.crc32(block))
