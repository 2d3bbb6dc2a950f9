"""The files of one checkpoint: how they are written and checked.

    step-20/
        __0_0.distcp …   tensors: one file per rank that saved, in torch.distributed.checkpoint's format
        .metadata        torch's index of them: tools that read such checkpoints can read this directory
        config.toml      the run
        manifest.json    format version, step, counters; shape and dtype of each tensor; size of each file
        SHA256SUMS       checksums of all of the above: `sha256sum -c SHA256SUMS` works

Every byte of every file is guarded, those of SHA256SUMS by there being no other text it could hold.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import re
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fivefold.parallel.local import Piece
from fivefold.trainer import checkpoint_directory
from fivefold.trainer.checkpoint_directory import MANIFEST, SUMS, CheckpointError

FORMAT = 1  # raised when a reader of today could misread what is written
CONFIG = "config.toml"


@dataclass(frozen=True)
class WrittenFile:
    """A file as it was handed to the operating system."""

    name: str
    size: int  # bytes
    sha256: str


class _HashedFile:
    """A binary file that remembers the checksum of what was meant to be in it, and the first error."""

    def __init__(self, raw: io.BufferedWriter) -> None:
        self.raw = raw
        self.size = 0
        self.hash = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        with self._remember_error():
            self.raw.write(data)
        self.hash.update(data)
        count = memoryview(data).nbytes
        self.size += count
        return count

    def flush(self) -> None:
        with self._remember_error():
            self.raw.flush()

    def tell(self) -> int:
        return self.size

    def fileno(self) -> int:
        return self.raw.fileno()

    def close(self) -> None:
        with self._remember_error():
            self.raw.close()

    @contextmanager
    def _remember_error(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            self.error = self.error or error
            raise


class _HashedFiles(FileSystem):
    """torch's file system, with the checksum of everything written through it."""

    def __init__(self) -> None:
        self.written: dict[str, WrittenFile] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase]:
        file = _HashedFile(cast(io.BufferedWriter, Path(path).open(mode)))  # noqa: SIM115 (closed below, always)
        try:
            yield cast(io.IOBase, file)
            file.close()
        except BaseException:
            with suppress(OSError):
                file.raw.close()
            if file.error is not None:
                # torch.save turns a full disk into "PytorchStreamWriter failed writing file data/0".
                raise OSError(file.error.errno, os.strerror(file.error.errno or 0), str(path)) from None
            raise
        name = Path(path).name
        self.written[name] = WrittenFile(name, file.size, file.hash.hexdigest())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        old = self.written.pop(Path(path).name)
        name = Path(new_path).name
        self.written[name] = WrittenFile(name, old.size, old.sha256)


class CheckpointWriter(FileSystemWriter):
    """Writes one checkpoint into `partial` and commits it to `final`.

    torch calls `write_data` on every rank and `finish` on one, only when every rank's results have arrived:
    so the commit happens if and only if every rank has written, and synced, everything.
    """

    def __init__(
        self, partial: Path, final: Path, step: int, counters: dict[str, Any], config_text: str
    ) -> None:
        # Tensors come from host memory, one by one: nothing to copy ahead.
        super().__init__(partial, per_thread_copy_ahead=0)
        self.fs: _HashedFiles = _HashedFiles()
        self._partial, self._final = partial, final
        self._step, self._config_text = step, config_text
        self._counters = copy.deepcopy(counters)  # the trainer counts on while this is written

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Makes the directory, on one rank only: the one that would have to remove it."""
        if self._is_coordinator:
            self._partial.mkdir()
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Adds to torch's results, which name tensors, one per file: its size and checksum."""
        results = super().write_data(plan, planner).value()
        results += [
            WriteResult(MetadataIndex(file.name), file.size, file) for file in self.fs.written.values()
        ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Index, manifest, checksums, commit."""
        files = [r.storage_data for of_rank in results for r in of_rank]
        self.fs.written.update({file.name: file for file in files if isinstance(file, WrittenFile)})
        tensors = [[r for r in of_rank if not isinstance(r.storage_data, WrittenFile)] for of_rank in results]
        super().finish(metadata, tensors)
        self._write(CONFIG, self._config_text)
        self._write(MANIFEST, json.dumps(self._manifest(metadata), indent=1))
        lines = [f"{file.sha256}  {file.name}\n" for _, file in sorted(self.fs.written.items())]
        self._write(SUMS, "".join(lines))
        checkpoint_directory.commit(self._partial, self._final)

    def _manifest(self, metadata: Metadata) -> dict[str, Any]:
        tensors = {}
        for key, stored in sorted(metadata.state_dict_metadata.items()):
            assert isinstance(stored, TensorStorageMetadata), key
            tensors[key] = {"shape": list(stored.size), "dtype": dtype_name(stored.properties.dtype)}
        return {
            "format": FORMAT,
            "step": self._step,
            "counters": self._counters,
            "torch": torch.__version__,
            "files": {file.name: file.size for _, file in sorted(self.fs.written.items())},
            "tensors": tensors,
        }

    def _write(self, name: str, text: str) -> None:
        with self.fs.create_stream(self._partial / name, "wb") as stream:
            file = cast(_HashedFile, stream)
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 → "float32"."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Stored:
    """A checkpoint on disk, as its manifest describes it."""

    path: Path
    fingerprint: str  # checksum of the checksums: equal for equal checkpoints
    counters: dict[str, Any]
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
    sizes: dict[str, int]  # bytes of every file but MANIFEST and SUMS
    sums: dict[str, str]  # SHA-256 of every file but SUMS

    @classmethod
    def read(cls, path: Path) -> Stored:
        """Reads and checks the two small files that describe the rest. Raises CheckpointError."""
        text = _read(path / SUMS)
        sums = parse_sums(path / SUMS, text.decode(errors="replace"))
        manifest = _read(path / MANIFEST)
        if hashlib.sha256(manifest).hexdigest() != sums[MANIFEST]:
            raise CheckpointError(f"{path / MANIFEST} is damaged: it does not have the checksum in {SUMS}")
        content = json.loads(manifest)
        if content["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has checkpoint format {content['format']}, this version of Fivefold reads {FORMAT}"
            )
        unlisted = sums.keys() ^ content["files"].keys() ^ {MANIFEST}
        if unlisted:
            raise CheckpointError(
                f"{path / SUMS} is damaged: it and {MANIFEST} disagree on {sorted(unlisted)}"
            )
        tensors = {
            key: (tuple(value["shape"]), getattr(torch, value["dtype"]))
            for key, value in content["tensors"].items()
        }
        fingerprint = hashlib.sha256(text).hexdigest()
        return cls(path, fingerprint, content["counters"], tensors, content["files"], sums)

    def share(self, rank: int, world_size: int) -> list[str]:
        """The files this rank should check so that the ranks together check all, about evenly by bytes."""
        load = [0] * world_size
        mine = []
        for name in sorted(self.sizes, key=lambda name: (-self.sizes[name], name)):
            least = load.index(min(load))
            load[least] += self.sizes[name]
            if least == rank:
                mine.append(name)
        return mine

    def damage(self, names: Iterable[str]) -> list[str]:
        """One line for each of these files that is not what was written."""
        problems = []
        for name in names:
            path, size = self.path / name, self.sizes[name]
            try:
                with path.open("rb") as file:
                    found = os.fstat(file.fileno()).st_size
                    if found != size:
                        problems.append(f"{path} has {found} bytes, not the {size} that were written")
                    elif hashlib.file_digest(file, "sha256").hexdigest() != self.sums[name]:
                        problems.append(f"{path} is damaged: it does not have the checksum in {SUMS}")
            except OSError as error:
                problems.append(f"{path} cannot be read: {error.strerror}")
        return problems

    def differences(self, state: Mapping[str, Tensor | Piece], unasked: list[str]) -> list[str]:
        """One line for each tensor that is not both stored and asked for, with the same shape and dtype."""
        problems = [f"{self.path} holds {name}, which this run does not have" for name in unasked]
        for name, tensor in state.items():
            asked = kind(tensor.shape, tensor.dtype)
            if name not in self.tensors:
                problems.append(f"{self.path} does not hold {name}, which this run needs")
            elif kind(*self.tensors[name]) != asked:
                found = kind(*self.tensors[name])
                problems.append(f"{self.path} holds {name} as {found}, this run needs {asked}")
            elif tensor.is_meta:
                problems.append(f"{name} has no memory to be loaded into (it is on the meta device)")
        return problems


def kind(shape: Iterable[int], dtype: torch.dtype) -> str:
    """A tensor's type for people: "float32 [4, 8]"."""
    return f"{dtype_name(dtype)} {list(shape)}"


def parse_sums(path: Path, text: str) -> dict[str, str]:
    """Name → checksum, from a file in the format of sha256sum. Strict, since nothing guards it but this."""
    if not text.endswith("\n"):
        raise CheckpointError(f"{path} is damaged: it does not end with a line end")
    sums = {}
    for line in text[:-1].split("\n"):
        match = re.fullmatch(r"([0-9a-f]{64})  ([^/]+)", line)
        if match is None:
            raise CheckpointError(f"{path} is damaged: {line!r} is not a checksum and a file name")
        sums[match[2]] = match[1]
    if MANIFEST not in sums:
        raise CheckpointError(f"{path} is damaged: it does not list {MANIFEST}")
    return sums


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
