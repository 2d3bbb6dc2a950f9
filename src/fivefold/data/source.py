"""What is read: the sources, their files, and the text of a file piece by piece."""

import codecs
import os
import sysconfig
from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import gcd, lcm
from pathlib import Path

from fivefold.config.errors import BadInput, shortened
from fivefold.config.tree import Data, Source

STDLIB = "python:stdlib"
MOST_WEIGHT = 1 << 31  # of all sources together: products of two stay inside 63 bits
PIECE_BYTES = 1 << 20  # a longer document is read and tokenized in pieces of about this size


class DataError(BadInput):
    """The data cannot be used as asked; the message is one line: what, where, what would be right."""


def sources(data: Data) -> tuple[Source, ...]:
    """What is read: the mixture, or the one source that `data.path` names."""
    return data.sources or (
        Source(path=data.path, text_field=data.text_field, answers_only=data.answers_only),
    )


def whole_weights(weights: Sequence[float]) -> list[int]:
    """The weights of a mixture in the smallest whole numbers.

    Raises DataError where their sum is above MOST_WEIGHT.
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]  # 0.1 is a tenth, as it was written
    unit = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * unit) for weight in exact]
    divisor = gcd(*whole)
    if sum(whole) // divisor > MOST_WEIGHT:
        raise DataError(
            f"data.sources: weights {', '.join(map(str, weights))} as whole numbers have a sum above 2^31; "
            "give them with fewer digits"
        )
    return [weight // divisor for weight in whole]


def text_files(path: str) -> list[Path]:
    """The files below `path`, in an order that depends on their names alone.

    `path` is a file, a directory (read recursively; names that start with a dot are left out, linked
    directories are not entered) or "python:stdlib": the *.py files of this Python's standard library.
    Whether a file of no other form really holds text is seen only by reading it: `is_text`.

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
