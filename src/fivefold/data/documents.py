"""Files → documents: text, JSON lines and Parquet, each told by its suffix.

.jsonl    one JSON object a line, blank lines left out; a document is its `text_field`, or its conversation
.parquet  one document a row, in the same fields; needs pyarrow (the extra fivefold[parquet])
else      the whole file is one document, if it is UTF-8 text

Files of token ids (.npy, .uint16.bin, .uint32.bin) are read by `ids`.
"""

import codecs
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from fivefold.config.errors import shortened
from fivefold.config.tree import Data, Source
from fivefold.data.conversations import FIELDS, Part, conversation
from fivefold.data.source import DataError, text_files, text_pieces

Form = Literal["text", "jsonl", "parquet", "ids"]
SUFFIXES: dict[str, Form] = {
    ".jsonl": "jsonl",
    ".parquet": "parquet",
    ".npy": "ids",
    ".uint16.bin": "ids",
    ".uint32.bin": "ids",
}
ROWS = 256  # of a Parquet file decoded at a time


class File(NamedTuple):
    """A file and the source it belongs to, which says how it is read."""

    path: Path
    source: Source

    @property
    def form(self) -> Form:
        name = self.path.name
        return next((form for suffix, form in SUFFIXES.items() if name.endswith(suffix)), "text")


def source_files(data: Data, source: Source) -> list[File]:
    """The files of a source, without those that preparing writes itself. Raises DataError if there is none."""
    cache = Path(data.cache_dir).expanduser().absolute()
    paths = [path for path in text_files(source.path) if cache not in path.absolute().parents]
    if not paths:
        raise DataError(
            f"data.path: {source.path} holds only data.cache_dir ({cache}); give a directory of text"
        )
    return [File(path, source) for path in paths]


def parts(file: File) -> Iterator[Part | None]:
    """The documents of a file that is not of ids, part after part; None ends a document.

    A document without any text is left out. Raises DataError with the place of whatever cannot be used.
    """
    if file.form == "text":
        for piece in text_pieces(file.path):
            yield Part(piece)
        if file.path.stat().st_size:
            yield None
        return
    for place, record in _records(file):
        if found := _document(file.source, place, record):
            yield from found
            yield None


def first_document(file: File) -> None:
    """Raises DataError if the first document of a .jsonl or .parquet file cannot be used."""
    for place, record in _records(file):
        _document(file.source, place, record)
        return


def sample(file: File, offset: int, size: int) -> Iterator[str]:
    """About `size` bytes of text from the place `offset` of a file on, whole lines or documents.

    What cannot be read there is left out: preparing reads it again and says where it is.
    """
    if file.form == "parquet":
        yield from _sample_rows(file, offset, size)
        return
    with file.path.open("rb") as stream:
        if offset:  # step to the start of a line: at `offset` already, if the byte before ends one
            stream.seek(offset - 1)
            stream.readline(size if file.form == "text" else -1)
        if file.form == "text":
            lines = stream.read(size) + stream.readline(size)
            yield lines.decode("utf-8", errors="ignore")  # a long line may be cut in a character
            return
        end = stream.tell() + size
        while stream.tell() < end and (line := stream.readline()):
            try:
                found = _document(file.source, "", _object("", line)) if line.strip() else []
            except DataError:
                continue
            yield "".join(part.text for part in found if not part.marker)


def check_parquet(file: File) -> None:
    """Raises DataError if `file` is Parquet and nothing here can read it."""
    if file.form == "parquet" and find_spec("pyarrow") is None:
        raise DataError(
            f"data.path: {file.path} is a Parquet file, and pyarrow is not installed; "
            "pip install 'fivefold[parquet]', or give .jsonl"
        )


def _document(source: Source, place: str, record: dict[str, Any]) -> list[Part]:
    """The parts of one record; none, if its text is empty."""
    if source.answers_only:
        return conversation(place, record)
    text = record.get(source.text_field)
    if isinstance(text, str):
        return [Part(text)] if text else []
    if source.text_field in record:
        raise DataError(f'{place}: field "{source.text_field}" holds no text; give each document as a string')
    known = ", ".join(record) or "none"
    hint = (
        " or data.answers_only = true"
        if any(all(name in record for name in names) for names in FIELDS)
        else ""
    )
    raise DataError(
        f'{place}: no field "{shortened(source.text_field)}" (fields here: {shortened(known)}); '
        f"set data.text_field{hint}"
    )


def _records(file: File) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place for messages, record) of every line or row."""
    yield from (_lines if file.form == "jsonl" else _rows)(file)


def _lines(file: File) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with file.path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    yield (place := f"{file.path}:{number}"), _object(place, line)
    except OSError as error:
        raise DataError(f"data.path: cannot read {file.path}: {error.strerror}") from error


def _object(place: str, line: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise DataError(f"{place}: not a line of JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f'{place}: expected a JSON object, one a line, e.g. {{"text": "…"}}')
    return value


def _rows(file: File) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    for batch in _batches(file, None):
        for record in batch:
            number += 1
            yield f"{file.path}, row {number}", record


def _batches(file: File, at: float | None) -> Iterator[list[dict[str, Any]]]:
    """Rows of a Parquet file, or of the one row group at a place (0 … 1) of it, only the columns needed."""
    check_parquet(file)
    parquet = import_module("pyarrow.parquet")
    source = file.source
    wanted = {name for names in FIELDS for name in names} if source.answers_only else {source.text_field}
    try:
        with parquet.ParquetFile(file.path) as content:
            names = content.schema_arrow.names
            columns = [name for name in names if name in wanted] or names  # none: the message lists all
            count = content.num_row_groups
            groups = None if at is None or not count else [int(at * count)]
            for batch in content.iter_batches(ROWS, row_groups=groups, columns=columns):
                yield batch.to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are of these two kinds
        if isinstance(error, DataError):
            raise
        problem = str(error).partition("\n")[0]
        raise DataError(f"data.path: {file.path} is not a readable Parquet file: {problem}") from error


def _sample_rows(file: File, offset: int, size: int) -> Iterator[str]:
    """The first documents of the row group at `offset`: pages after them are never decoded."""
    taken = 0
    for batch in _batches(file, offset / file.path.stat().st_size):
        for record in batch:
            try:
                text = "".join(part.text for part in _document(file.source, "", record) if not part.marker)
            except DataError:
                continue
            yield text
            taken += len(text)
            if taken >= size:
                return
