"""Files of token ids that another program made.

.npy         one dimension, any type of whole numbers
.uint16.bin  nothing but little-endian ids of that type: the name says how wide they are
.uint32.bin

Each end-of-text id (of data.tokenizer) ends a document, and so does the end of a file.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.data.source import DataError

CHUNK = 1 << 20  # ids at a time


def open_ids(path: Path) -> NDArray[Any]:
    """The ids of a file, mapped, not read. Raises DataError if it does not hold a list of whole numbers."""
    try:
        if path.suffix == ".npy":
            ids: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            dtype = np.dtype(path.name.split(".")[-2]).newbyteorder("<")
            size = path.stat().st_size
            if size % dtype.itemsize:
                raise DataError(
                    f"data.path: {path} has {size} bytes, not a multiple of the {dtype.itemsize} of one id"
                )
            ids = np.memmap(path, dtype=dtype, mode="r") if size else np.empty(0, dtype=dtype)
    except DataError:
        raise
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"data.path: {path} is not a readable file of token ids: {error}") from error
    if ids.ndim != 1 or ids.dtype.kind not in "ui":
        raise DataError(
            f"data.path: {path} holds {ids.dtype} of shape {list(ids.shape)}; "
            "token ids are whole numbers in one dimension"
        )
    return ids


def id_chunks(path: Path, vocab: int, end_of_text: int) -> Iterator[NDArray[np.int64]]:
    """All ids of a file, some at a time, an end-of-text id after the last if there is none.

    Raises DataError at the first id that is not 0 … vocab-1.
    """
    ids = open_ids(path)
    for start in range(0, ids.size, CHUNK):
        chunk = ids[start : start + CHUNK]
        wrong = np.flatnonzero((chunk < 0) | (chunk >= vocab))
        if wrong.size:
            place = int(wrong[0])
            raise DataError(
                f"data.path: {path} holds the id {int(chunk[place])} (number {start + place}), model.vocab "
                f"is {vocab}; set model.vocab to at least the highest id plus one, or check the type of the ids"
            )
        yield chunk.astype(np.int64)
    if ids.size and ids[-1] != end_of_text:
        yield np.array([end_of_text], dtype=np.int64)
