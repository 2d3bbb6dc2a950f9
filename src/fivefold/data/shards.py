"""Tokenize each source once into shards that every later run, rank and layout re-uses."""

import fcntl
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from fivefold.config.tree import Data, Source
from fivefold.data.check import check_data
from fivefold.data.documents import File, source_files
from fivefold.data.encode import Encoder
from fivefold.data.source import DataError, is_text, sources
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
LOCK = "lock"

Progress = Callable[[str, float], None]  # (what is being done, how much of it is done: 0 … 1)


def prepare(data: Data, vocab: int, progress: Progress) -> tuple[TokenStore, ...]:
    """The tokens of each source of `data` with `vocab` ids: from the cache, or tokenized now.

    A store is `data.cache_dir`/FINGERPRINT, so a source that joins or leaves a mixture changes none of the
    others (unless the tokenizer is trained on them all). Call it on one rank, give each `store.directory` to
    the others for `open_store`; processes that call it at once are safe too: one works, the others wait. A
    preparation that was cut short, however, leaves no manifest and is done again. Nothing in it is random.

    Raises DataError if there is no text, if it cannot be read as it says it is, if tokenizer and `vocab` do
    not fit, if the cache cannot be written, or if a finished store is damaged.
    """
    check_data(data)
    stores: list[TokenStore] = []
    for source in sources(data):
        try:
            files, identity = _identify(data, source, vocab)
            directory = Path(data.cache_dir).expanduser() / identity
            if not (directory / MANIFEST).exists():  # asked before locking: a finished cache may be read-only
                directory.mkdir(parents=True, exist_ok=True)
                with _locked(directory / LOCK, progress):
                    if not (directory / MANIFEST).exists():
                        ready = stores[0].directory / TOKENIZER if stores else None
                        build = _Build(directory, identity, data, source, vocab, progress)
                        build.run(files, ready)
        except (OSError, UnicodeDecodeError) as error:  # no space, no permission, a file vanished or changed
            raise DataError(
                f"cannot tokenize {source.path} into data.cache_dir {data.cache_dir}: {error}"
            ) from error
        stores.append(open_store(directory))
    return tuple(stores)


def prepared(data: Data, vocab: int) -> tuple[TokenStore, ...] | None:
    """What `prepare` returns, if all of it is in the cache; reads no text and writes nothing.

    Raises DataError if a finished store is damaged.
    """
    try:
        found = [_identify(data, source, vocab)[1] for source in sources(data)]
    except OSError:  # `prepare` tells
        return None
    directories = [Path(data.cache_dir).expanduser() / identity for identity in found]
    if not all((directory / MANIFEST).exists() for directory in directories):
        return None
    return tuple(open_store(directory) for directory in directories)


def _identify(data: Data, source: Source, vocab: int) -> tuple[list[File], str]:
    """The files of a source, and what its tokens depend on in 20 hex digits: the files and how they are read,
    the tokenizer, `vocab`, the format.

    Files enter by path, size and modification time, not by content: every start of a run asks, and must not
    read a terabyte to learn that nothing changed. The price is that touched files are tokenized again; equal
    text still gives equal tokens, which `Manifest.digest` shows.
    """
    files = source_files(data, source)
    if data.tokenizer:
        try:
            tokenizer = hashlib.sha256(Path(data.tokenizer).expanduser().read_bytes()).hexdigest()
        except OSError as error:
            raise DataError(f"data.tokenizer: cannot read {data.tokenizer}: {error.strerror}") from error
    else:  # a trained tokenizer is a function of all sources and of the library that trains it
        read = [
            (each.text_field, each.answers_only, _stats(source_files(data, each))) for each in sources(data)
        ]
        tokenizer = json.dumps([version("tokenizers"), read])
    content = [FORMAT, vocab, tokenizer, source.text_field, source.answers_only, _stats(files)]
    return files, hashlib.sha256(json.dumps(content).encode()).hexdigest()[:20]


def _stats(files: list[File]) -> list[tuple[str, int, int]]:
    stats = [(str(file.path.absolute()), file.path.stat()) for file in files]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


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


@dataclass(frozen=True)
class _Build:
    """The making of one store."""

    directory: Path
    identity: str
    data: Data
    source: Source
    vocab: int
    progress: Progress

    def run(self, listed: list[File], ready: Path | None) -> None:
        """Writes the store of the `listed` files; `ready` is the tokenizer another source has trained."""
        for leftover in self.directory.iterdir():  # of a preparation that was cut short
            if leftover.name != LOCK:
                leftover.unlink()
        files = self._readable(listed)
        tokenizer = self._tokenizer(files, ready)
        tokenizer.save(self.directory / TOKENIZER)
        encoder = Encoder(tokenizer, self.vocab, self.source.answers_only)
        writer = ShardWriter(self.directory, self.vocab * (2 if self.source.answers_only else 1))
        done = [0, *accumulate(file.path.stat().st_size for file in files)]
        for numbers, number in encoder.stream(files):
            writer.write(numbers)
            self.progress("tokenizing", done[number] / done[-1])
        writer.finish()
        if not encoder.documents:
            raise DataError(f"data.path: no document with any text in the files of {self.source.path}")
        if _identify(self.data, self.source, self.vocab)[1] != self.identity:
            raise DataError(
                f"data.path: files of {self.source.path} changed while they were tokenized; start again"
            )
        manifest = Manifest(
            format=FORMAT,
            fingerprint=self.identity,
            source=self.source.path,
            vocab=self.vocab,
            answers_only=self.source.answers_only,
            dtype=writer.dtype,
            end_of_text=tokenizer.end_of_text,
            tokens=encoder.tokens,
            documents=encoder.documents,
            text_bytes=encoder.text_bytes,
            skipped_files=len(listed) - len(files),
            block_bytes=writer.block_bytes,
            shard_tokens=writer.shard_tokens,
            shards=writer.shards,
            tokenizer_checksum=zlib.crc32((self.directory / TOKENIZER).read_bytes()),
            counts=encoder.counts.tolist(),
        )
        _write_manifest(self.directory, manifest)

    def _readable(self, listed: list[File]) -> list[File]:
        """The `listed` files without those of text that are not UTF-8 throughout, as only reading tells."""
        files = []
        for number, file in enumerate(listed):
            self.progress("reading text", number / len(listed))
            if file.form != "text" or is_text(file.path):
                files.append(file)
        if not any(file.path.stat().st_size for file in files):
            raise DataError(
                f"data.path: no text in the {len(listed)} files of {self.source.path}; give UTF-8 text"
            )
        return files

    def _tokenizer(self, files: list[File], ready: Path | None) -> Tokenizer:
        given = Path(self.data.tokenizer).expanduser() if self.data.tokenizer else ready
        self.progress("loading the tokenizer" if given else "training a tokenizer", 0.0)
        if given:
            return load_tokenizer(given, self.vocab)
        for other in sources(self.data)[1:]:  # the first source is the first to be built
            files = files + self._readable(source_files(self.data, other))
        return train_tokenizer(files, self.vocab)


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


class ShardWriter:
    """Appends tokens to shards of at most SHARD_BLOCKS blocks, with a checksum of each block."""

    def __init__(self, directory: Path, vocab: int) -> None:
        """For numbers 0 … vocab-1."""
        self._directory = directory
        self.dtype = token_dtype(vocab)
        self._dtype = np.dtype(self.dtype).newbyteorder("<")
        self.block_bytes = BLOCK_BYTES
        self.shard_tokens = SHARD_BLOCKS * BLOCK_BYTES // self._dtype.itemsize
        self.shards: list[Shard] = []  # what is written
        self._pending = bytearray()  # less than a block

    def write(self, tokens: NDArray[np.int64]) -> None:
        """Append `tokens` [n], each below `vocab`."""
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
