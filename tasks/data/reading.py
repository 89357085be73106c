"""Rows of a chat file, one by one, with their line numbers.

What a file holds is found by looking at it, not by its name: JSON Lines often stand in files named `.json`. Memory
holds one row (and a buffer) at a time; only a file that is a single JSON object is read whole.
"""

from __future__ import annotations

import codecs
import gzip
import importlib
import io
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from tasks.contract.errors import DataError
from tasks.data.rejection import Rejection, RejectReason
from tasks.data.sources import SourceFile, open_source

Row = tuple[int, "dict[str, Any] | Rejection"]
_CHUNK = 1 << 20
_MESSAGE_KEYS = ({"role", "content"}, {"from", "value"}, {"role", "text"})
_TREE_KEYS = {"replies", "parent_id", "message_id"}  # messages of a tree are not the turns of one conversation


def read_rows(source: SourceFile, on_bytes: Callable[[int], None] | None = None) -> Iterator[Row]:
    """Rows of a file: JSON Lines, a JSON list, one JSON object, or Parquet; plain, `.gz` or `.zst`.

    Args:
        source: the file; its `limit` counts rows, good or bad.
        on_bytes: told, as reading goes on, how many further bytes of the file have been read.

    Yields:
        (line, row) with the line number, from 1 (the item's number in a list or Parquet file). A line that cannot be
        read yields a `Rejection`. A file that is a list of messages, and a JSON Lines file with one message a line,
        is one conversation, hence one row: {"messages": [...]}.

    Raises:
        DataError: if the file as a whole cannot be read (cut off, damaged, changed since it was planned).
    """
    with open_source(source) as path:
        rows = _rows_of_file(path, source["uri"], on_bytes)
        for number, row in enumerate(rows):
            if source["limit"] is not None and number >= source["limit"]:
                return
            yield row


def _rows_of_file(path: Path, uri: str, on_bytes: Callable[[int], None] | None) -> Iterator[Row]:
    if path.name.lower().endswith(".parquet"):
        yield from _parquet_rows(path, uri)
        if on_bytes:
            on_bytes(path.stat().st_size)
        return
    with path.open("rb") as raw:
        stream = _decompressed(cast(BinaryIO, _CountingReader(raw, on_bytes)) if on_bytes else raw, path.name)
        try:
            yield from _merge_messages(_json_rows(stream, uri))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{uri}: damaged or cut off ({error}); transfer the file again") from error
        except OSError as error:
            raise DataError(f"{uri}: cannot be read ({error})") from error


def _json_rows(stream: BinaryIO, uri: str) -> Iterator[Row]:
    reader = io.BufferedReader(cast(Any, stream), _CHUNK)
    line, text = _next_line(reader, 1)
    text = text.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"["):
        # A list may be one line of many GiB, so it is not read to the line's end.
        following = _next_line(reader, line + 1) if text.endswith(b"\n") else (line, b"")
        if not following[1] or isinstance(_decode(text, line)[1], Rejection):
            yield from _list_rows(text + following[1], reader, uri)
            return
    else:
        text += b"" if text.endswith(b"\n") else reader.readline()
        following = _next_line(reader, line + 1, whole=True)
        failed = isinstance(_decode(text, line)[1], Rejection)
        if text.startswith(b"{") and failed and following[1] and not following[1].lstrip().startswith(b"{"):
            yield _decode(text + following[1] + reader.read(), line)  # one object over several lines
            return
    if text:
        yield _decode(text, line)
    line, text = following
    while text:
        text += b"" if text.endswith(b"\n") else reader.readline()
        yield _decode(text, line)
        line, text = _next_line(reader, line + 1, whole=True)


def _next_line(reader: io.BufferedReader, line: int, whole: bool = False) -> tuple[int, bytes]:
    """The next line that is not blank, with its number; b"" at the end. At most `_CHUNK` bytes of it unless `whole`."""
    while data := reader.readline(-1 if whole else _CHUNK):
        if data.removeprefix(b"\xef\xbb\xbf").strip():
            return line, data
        line += 1
    return line, b""


def _decode(data: bytes, line: int) -> Row:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        return line, Rejection(RejectReason.BAD_ENCODING, f"not UTF-8: {error.reason} at byte {error.start}")
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        return line, Rejection(RejectReason.BAD_JSON, str(error) or "nested too deeply")
    return line, _object_or_rejection(row)


def _object_or_rejection(row: Any) -> dict[str, Any] | Rejection:
    if isinstance(row, dict):
        return row
    if isinstance(row, list) and row and all(_is_message(item) for item in row):
        return {"messages": row}
    return Rejection(RejectReason.NOT_AN_OBJECT, f"a JSON {type(row).__name__}, not an object with named fields")


def _list_rows(start: bytes, reader: io.BufferedReader, uri: str) -> Iterator[Row]:
    """Items of a JSON list, decoded one at a time from a growing buffer.

    Raises:
        DataError: at the first place that is not JSON; what follows cannot be told apart any more.
    """
    decoder = json.JSONDecoder()
    incremental = _utf8_decoder(uri)
    buffer = incremental(start, False).lstrip()[1:]
    number = 0
    at_end = False
    while True:
        buffer = buffer.lstrip().removeprefix(",").lstrip() if number else buffer.lstrip()
        if buffer.startswith("]"):
            return
        try:
            item, end = decoder.raw_decode(buffer)
            complete = at_end or buffer[end:].lstrip()[:1] in (",", "]")
        except (ValueError, RecursionError) as error:
            complete = False
            failure: BaseException = error
        else:
            failure = ValueError("the list has no end")
        if complete and not at_end:
            number += 1
            yield number, _object_or_rejection(item)
            buffer = buffer[end:].lstrip()
            continue
        if at_end:
            raise DataError(f"{uri}: not a whole JSON list, item {number + 1}: {failure}; transfer the file again")
        # Reading at least as much again keeps the cost linear where one item spans many chunks.
        data = reader.read(max(_CHUNK, len(buffer)))
        at_end = not data
        buffer += incremental(data, at_end)


def _utf8_decoder(uri: str) -> Callable[[bytes, bool], str]:
    decoder = codecs.getincrementaldecoder("utf-8")()

    def decode(data: bytes, final: bool) -> str:
        try:
            return decoder.decode(data, final)
        except UnicodeDecodeError as error:
            raise DataError(f"{uri}: a JSON list that is not UTF-8 ({error.reason}); convert the file") from error

    return decode


def _merge_messages(rows: Iterator[Row]) -> Iterator[Row]:
    """One row for a file whose rows are the messages of one conversation."""
    first = next(rows, None)
    if first is None:
        return
    if not _is_message(first[1]):
        yield first
        yield from rows
        return
    messages = [first[1]]
    for _, row in rows:
        if isinstance(row, Rejection):
            yield first[0], Rejection(row.reason, f"one of the conversation's messages: {row.detail}")
            return
        messages.append(row)
    yield first[0], {"messages": messages}


def _is_message(row: Any) -> bool:
    return isinstance(row, dict) and any(keys <= set(row) for keys in _MESSAGE_KEYS) and not _TREE_KEYS & set(row)


def _parquet_rows(path: Path, uri: str) -> Iterator[Row]:
    parquet = importlib.import_module("pyarrow.parquet")
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield number, without_nulls(row)
    except (OSError, ValueError, NotImplementedError) as error:  # pyarrow's errors derive from these
        raise DataError(f"{uri}: cannot be read as Parquet at row {number + 1} ({error})") from error


def without_nulls(value: Any) -> Any:
    """Drop fields that are null: a column of structs holds the fields of every row, as nulls where a row has none."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _decompressed(raw: BinaryIO, name: str) -> BinaryIO:
    suffix = Path(name.lower()).suffix
    if suffix == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if suffix == ".zst":
        return cast(BinaryIO, importlib.import_module("zstandard").ZstdDecompressor().stream_reader(raw))
    return raw


class _CountingReader(io.RawIOBase):
    """A raw stream that tells how much of it has been read."""

    def __init__(self, raw: BinaryIO, on_bytes: Callable[[int], None]) -> None:
        self._raw, self._on_bytes = raw, on_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._raw.read(len(buffer))
        buffer[: len(data)] = data
        self._on_bytes(len(data))
        return len(data)
