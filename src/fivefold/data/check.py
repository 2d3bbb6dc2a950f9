"""Checks of the data before any process starts, without reading all of it."""

import os

from fivefold.config.errors import shortened
from fivefold.config.tree import Data
from fivefold.data.documents import File, check_parquet, first_document, source_files
from fivefold.data.source import DataError, sources


def check_data(data: Data) -> None:
    """Raises DataError if a source or the tokenizer names nothing that can be read, or if they do not fit.

    Of files only names are looked at, the head of each file of ids, and a source's first record.
    """
    found = sources(data)
    if len(found) > 1:
        from fivefold.data.turns import Turns  # numpy, which a refusal of plain text need not wait for

        Turns([source.weight for source in found], seed=0)
    for source in found:
        _check_files(source_files(data, source), data)
    if data.tokenizer and not os.path.isfile(os.path.expanduser(data.tokenizer)):
        path = shortened(data.tokenizer)
        raise DataError(f"data.tokenizer: {path} is not a file; give the path of a tokenizer.json")


def _check_files(files: list[File], data: Data) -> None:
    looked_into = False
    for file in files:
        if file.source.answers_only and file.form in ("text", "ids"):
            raise DataError(
                f"data.answers_only: {file.path} holds no conversations; they come in .jsonl or .parquet"
            )
        if file.form == "ids":
            from fivefold.data.ids import open_ids

            open_ids(file.path)
            if not data.tokenizer:
                raise DataError(
                    f"data.path: {file.path} is tokenized already; set data.tokenizer to the tokenizer.json "
                    "that made it"
                )
        elif file.form == "text" and len(files) == 1 and file.path.suffix == ".bin":
            raise DataError(
                f"data.path: {file.path}: name token ids by their type, .uint16.bin or .uint32.bin"
            )
        elif file.form in ("jsonl", "parquet"):
            check_parquet(file)
            if not looked_into:
                first_document(file)
            looked_into = True
