"""A finished set of token shards: its manifest, its checks, and reading tokens from it.

DIRECTORY/manifest.json      written last: a directory without it is not a store
DIRECTORY/tokenizer.json     what the tokens mean
DIRECTORY/shard-00000.bin …  the stream of numbers (`encode`), little-endian uint16 or uint32, cut at fixed places
"""

import hashlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from fivefold.data.source import DataError
from fivefold.data.tokenizer import Tokenizer, load_tokenizer

FORMAT = 2  # raise it whenever the same text would give other tokens or other files
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
CHECKED_BLOCKS = 64  # read when a store is opened: 64 MiB, some 30 ms; a smaller store is checked whole


class Shard(msgspec.Struct):
    """One file of tokens. `checksums`: CRC-32 of each `block_bytes` of it, the last block may be shorter."""

    name: str
    tokens: int
    checksums: list[int]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is in a store. All counts are over the whole stream, validation samples included."""

    format: int
    fingerprint: str  # of what went in: see `shards.fingerprint`
    source: str  # path of the source, for people
    vocab: int
    answers_only: bool  # whether shards hold 2 · id + (1 where it is to be learnt), or the id alone
    dtype: Literal["uint16", "uint32"]
    end_of_text: int
    tokens: int  # end-of-text tokens included
    documents: int
    text_bytes: int
    skipped_files: int  # not UTF-8 text
    block_bytes: int
    shard_tokens: int  # tokens of every shard but the last
    shards: list[Shard]
    tokenizer_checksum: int  # CRC-32 of tokenizer.json
    counts: list[int]  # how often each id occurs (answers_only: is to be learnt), [vocab]

    def digest(self) -> str:
        """Identity of the token stream itself, wherever and whenever it was prepared (40 hex digits).

        Kept with a checkpoint, it tells on resume whether the samples are still the same.
        """
        content = [self.vocab, self.dtype, self.end_of_text, self.tokens, self.block_bytes]
        checksums = [shard.checksums for shard in self.shards]
        return hashlib.sha256(json.dumps([content, checksums]).encode()).hexdigest()[:40]


def token_dtype(vocab: int) -> Literal["uint16", "uint32"]:
    """The narrowest type that holds ids 0 … vocab-1."""
    return "uint16" if vocab <= 1 << 16 else "uint32"


class TokenStore:
    """The stream of all documents' tokens, each document followed by one end-of-text token."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        """Maps the shards; use `open_store`, which checks them first."""
        self.directory = directory
        self.manifest = manifest
        dtype = np.dtype(manifest.dtype).newbyteorder("<")
        # Every mapped shard keeps a file open: 1024 of them, a usual limit, are 128 billion uint16 tokens.
        self._shards = [np.memmap(directory / shard.name, dtype=dtype, mode="r") for shard in manifest.shards]

    def __len__(self) -> int:
        """Tokens in the stream."""
        return self.manifest.tokens

    def read(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Numbers [start, start + length) of the stream for each of `starts` [n], which may cross shards.

        They are ids, or with `answers_only` 2 · id + (1 where it is to be learnt). Returns an own copy [n, length].
        """
        assert starts.size == 0 or (starts.min() >= 0 and starts.max() + length <= len(self))
        tokens = np.empty((starts.size, length), dtype=np.int64)
        for row, start in zip(tokens, starts.tolist(), strict=True):
            index, offset = divmod(start, self.manifest.shard_tokens)
            filled = 0
            while filled < length:
                part = self._shards[index][offset : offset + length - filled]
                row[filled : filled + part.size] = part
                filled, index, offset = filled + part.size, index + 1, 0
        return tokens

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens."""
        return load_tokenizer(self.directory / TOKENIZER, self.manifest.vocab)

    def verify(self) -> None:
        """Read every byte and compare checksums (some 1 GB/s). Raises DataError at the first difference."""
        _check_blocks(self.directory, self.manifest, every=1)


def open_store(directory: Path) -> TokenStore:
    """The finished store in `directory`, checked: manifest, tokenizer, the size of every shard, and the
    checksums of at most CHECKED_BLOCKS blocks spread over the shards (`TokenStore.verify` checks all).

    Raises DataError if there is none, if it is damaged, or if another version of Fivefold wrote it.
    """
    file = directory / MANIFEST
    try:
        manifest = _read_manifest(file)
        checksum = zlib.crc32((directory / TOKENIZER).read_bytes())
        sizes = [(directory / shard.name).stat().st_size for shard in manifest.shards]
    except FileNotFoundError as error:
        if Path(error.filename) == file:
            raise DataError(f"{directory} holds no finished token store (no {MANIFEST})") from error
        raise _damaged(directory, f"{Path(error.filename).name} is missing") from error
    except OSError as error:
        raise DataError(f"cannot open token store {directory}: {error}") from error
    if checksum != manifest.tokenizer_checksum:
        raise _damaged(directory, f"{TOKENIZER} has changed since the shards were written")
    itemsize = np.dtype(manifest.dtype).itemsize
    for shard, size in zip(manifest.shards, sizes, strict=True):
        if size != shard.tokens * itemsize:
            raise _damaged(directory, f"{shard.name} has {size} bytes instead of {shard.tokens * itemsize}")
    blocks = sum(len(shard.checksums) for shard in manifest.shards)
    _check_blocks(directory, manifest, every=-(-blocks // CHECKED_BLOCKS))
    return TokenStore(directory, manifest)


def _read_manifest(file: Path) -> Manifest:
    try:
        content = msgspec.json.decode(file.read_bytes())
        if isinstance(content, dict) and content.get("format", FORMAT) != FORMAT:
            raise DataError(
                f"{file.parent} was written in format {content['format']}, this Fivefold reads {FORMAT}; "
                "delete the directory and it is prepared again"
            )
        return msgspec.convert(content, Manifest)
    except msgspec.MsgspecError as error:
        raise _damaged(file.parent, f"{MANIFEST} cannot be read: {error}") from error


def _check_blocks(directory: Path, manifest: Manifest, every: int) -> None:
    """Compare the checksum of every `every`-th block, counted over all shards."""
    for number, (shard, index, expected) in enumerate(_blocks(manifest)):
        if number % every == 0:
            with (directory / shard.name).open("rb") as stream:
                stream.seek(index * manifest.block_bytes)
                block = stream.read(manifest.block_bytes)
            if zlib.crc32(block) != expected:
                first = index * manifest.block_bytes
                raise _damaged(directory, f"{shard.name}: bytes {first} to {first + len(block)} have changed")


def _blocks(manifest: Manifest) -> Iterator[tuple[Shard, int, int]]:
    for shard in manifest.shards:
        for index, checksum in enumerate(shard.checksums):
            yield shard, index, checksum


def _damaged(directory: Path, what: str) -> DataError:
    return DataError(
        f"token store {directory} is damaged: {what}; delete the directory and it is prepared again"
    )
