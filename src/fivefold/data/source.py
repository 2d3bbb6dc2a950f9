"""Which files are the text, and how they are read: whole, piece by piece, or as an evenly spread sample."""

import codecs
import os
import sysconfig
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from fivefold.config.errors import BadInput, shortened
from fivefold.config.tree import Data

STDLIB = "python:stdlib"
PIECE_BYTES = 1 << 20  # a longer document is read and tokenized in pieces of about this size
SAMPLE_BYTES = 4096  # one block of `spread_sample`


class DataError(BadInput):
    """The data cannot be used as asked; the message is one line: what, where, what would be right."""


def text_files(path: str) -> list[Path]:
    """The files below `path`, in an order that depends on their names alone; each is one document.

    `path` is a file, a directory (read recursively; names that start with a dot are left out, linked
    directories are not entered) or "python:stdlib": the *.py files of this Python's standard library.
    Whether a file really holds text is seen only by reading it: `is_text`.

    Raises DataError if `path` does not exist or holds no file.
    """
    if path == STDLIB:
        root, suffix, skipped = Path(sysconfig.get_path("stdlib")), ".py", {"site-packages", "dist-packages"}
    else:
        root, suffix, skipped = Path(os.path.expanduser(path)), "", set[str]()
        if os.path.isfile(root):
            return [root]
    if not os.path.isdir(root):  # os.path: also where a path is too long to be one
        raise DataError(f'data.path: no file or directory {shortened(str(root))}; give one, or "{STDLIB}"')
    files = sorted(_walk(root, suffix, skipped | {"__pycache__"}), key=lambda file: file.as_posix())
    if not files:
        raise DataError(
            f"data.path: {root} holds no{suffix and ' ' + suffix} files; give a directory of text"
        )
    return files


def check_paths(data: Data) -> None:
    """Raises DataError if `data.path` or `data.tokenizer` names nothing that can be read; reads no text."""
    text_files(data.path)
    if data.tokenizer and not os.path.isfile(os.path.expanduser(data.tokenizer)):
        path = shortened(data.tokenizer)
        raise DataError(f"data.tokenizer: {path} is not a file; give the path of a tokenizer.json")


def _walk(root: Path, suffix: str, skipped: set[str]) -> Iterator[Path]:
    def refuse(error: OSError) -> None:  # a directory left out silently would be data left out silently
        raise DataError(f"data.path: cannot list {error.filename}: {error.strerror}") from error

    for directory, subdirectories, names in os.walk(root, onerror=refuse):
        subdirectories[:] = [name for name in subdirectories if name not in skipped and name[0] != "."]
        for name in names:
            file = Path(directory, name)
            if name[0] != "." and name.endswith(suffix) and file.is_file():
                yield file


def text_pieces(file: Path) -> Iterator[str]:
    """The text of `file` in order: pieces of about PIECE_BYTES, cut at line ends where there are any.

    Joined they are the file exactly: line endings are kept as they are. An empty file has no pieces.
    Raises UnicodeDecodeError where the file is not UTF-8 or holds a NUL byte, DataError if it cannot be read.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with file.open("rb") as stream:
            while chunk := stream.read(PIECE_BYTES):
                if len(chunk) == PIECE_BYTES:
                    chunk += stream.readline(PIECE_BYTES)
                nul = chunk.find(b"\0")
                if nul >= 0:
                    raise UnicodeDecodeError("utf-8", chunk, nul, nul + 1, "NUL byte: not a text file")
                yield decoder.decode(chunk)
            decoder.decode(b"", final=True)
    except OSError as error:
        raise DataError(f"data.path: cannot read {file}: {error.strerror}") from error


def is_text(file: Path) -> bool:
    """Whether the whole of `file` is UTF-8 without NUL bytes. It is read once, some 1 GB/s."""
    try:
        for _ in text_pieces(file):
            pass
    except UnicodeDecodeError:
        return False
    return True


def spread_sample(files: Sequence[Path], budget: int) -> Iterator[str]:
    """About `budget` bytes of the text of `files`: whole lines at evenly spaced places, always the same ones.

    Reads only what it returns, so it costs the same for a gigabyte as for a terabyte. Text no longer than
    `budget` is returned whole.
    """
    sizes = [file.stat().st_size for file in files]
    ends = list(accumulate(sizes))
    if not ends or ends[-1] <= budget:
        for file in files:
            yield from text_pieces(file)
        return
    blocks = max(1, budget // SAMPLE_BYTES)
    for block in range(blocks):
        offset = block * ends[-1] // blocks
        index = bisect_right(ends, offset)
        within = offset - (ends[index] - sizes[index])
        with files[index].open("rb") as stream:
            if within:  # step to the start of a line: at `within` already, if the byte before ends one
                stream.seek(within - 1)
                stream.readline(SAMPLE_BYTES)
            lines = stream.read(SAMPLE_BYTES) + stream.readline(SAMPLE_BYTES)
        yield lines.decode("utf-8", errors="ignore")  # a line longer than a block may be cut in a character
