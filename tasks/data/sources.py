"""Source strings of the spec to the files they mean.

A source is `PATH[#slice=NAME][,limit=N]`: a local file, folder or glob (`**` too), `s3://bucket/key` or a glob of keys,
or `sample:NAME`, a file shipped with the project. `plan` resolves them once; what a file held then is part of the
tokenize stage's key, and `open_source` refuses a file that has changed since.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NotRequired, TypedDict

from tasks.contract.errors import ConfigurationError, DataError, Problem
from tasks.storage import open_store
from tasks.storage.base import ObjectInfo

SAMPLE_DATA = Path(__file__).resolve().parent.parent / "sample_data"
DEFAULT_SLICE = "default"
CHAT_SUFFIXES = (".jsonl", ".ndjson", ".json", ".traj", ".parquet")
COMPRESSIONS = {".gz": None, ".zst": "zstandard"}  # suffix: the package it needs beyond the standard library
_OPTIONS = re.compile(r"#([a-z_]+=[^#]*)$")
_GLOB = re.compile(r"[*?[]")


class SourceFile(TypedDict):
    """One file to tokenize: JSON, so that it travels as an argument of the stage and goes into its key."""

    uri: str  # local path, s3://bucket/key, or sample:NAME
    size: int  # bytes
    sha256: NotRequired[str]  # local files
    tag: NotRequired[str]  # objects in S3: changes whenever the content changes
    slice: str
    limit: int | None  # rows to take from the start of this file; None: all
    order: int  # position among all files; of equal samples the earliest is kept


@dataclass(frozen=True)
class Source:
    """One source string, taken apart."""

    location: str
    slice: str
    limit: int | None


def parse_source(text: str) -> Source:
    """Take a source string apart.

    Raises:
        ConfigurationError: naming the option that is unknown or wrong.
    """
    match = _OPTIONS.search(text)
    location = text[: match.start()] if match else text
    options: dict[str, str] = {}
    for part in match[1].split(",") if match else []:
        name, _, value = part.partition("=")
        if name not in ("slice", "limit") or not value or name in options:
            raise _refuse(text, f"after # only slice=NAME and limit=N, each once; {part!r} is neither")
        options[name] = value
    limit = None
    if "limit" in options:
        if not re.fullmatch(r"[1-9][0-9]*", options["limit"]):
            raise _refuse(text, "limit=N with a whole number from 1")
        limit = int(options["limit"])
    if not location.strip():
        raise _refuse(text, "a path, s3://bucket/key or sample:NAME before the #")
    return Source(location.strip(), options.get("slice", DEFAULT_SLICE), limit)


def resolve_sources(sources: Sequence[str]) -> list[SourceFile]:
    """The files that the source strings mean, in order; those of a glob or folder in the order of their names.

    A file named by several sources is taken once, by the first. A limit counts over all files of its source.

    Raises:
        ConfigurationError: one problem of field `sources` for each string that matches nothing, or an empty or
            unreadable file, or a file of a kind that cannot be read here.
    """
    files: list[SourceFile] = []
    problems: list[Problem] = []
    seen: set[str] = set()
    for text in sources:
        try:
            source = parse_source(text)
            found = [file for file in _files_of(text, source) if file["uri"] not in seen]
            if source.limit is not None:
                found = _limited(found, source.limit)
        except ConfigurationError as error:
            problems.extend(error.problems)
            continue
        except DataError as error:  # a limited source is counted, hence read
            problems.append(Problem("sources", text, f"a readable file: {error}"))
            continue
        seen.update(file["uri"] for file in found)
        files.extend(found)
    if problems:
        raise ConfigurationError(problems)
    if not files:
        raise ConfigurationError(Problem("sources", list(sources), "at least one file of chat data"))
    return [{**file, "order": order} for order, file in enumerate(files)]


def file_groups(files: Sequence[SourceFile], n: int) -> list[list[SourceFile]]:
    """At most `n` runs of neighbouring files, of about equal size: one tokenize task each, source order kept."""
    total = sum(file["size"] for file in files)
    groups: list[list[SourceFile]] = []
    done, group = 0, -1
    for file in files:
        middle = done + file["size"] / 2
        index = min(n - 1, int(middle * n / total))
        if index > group:
            groups.append([])
            group = index
        groups[-1].append(file)
        done += file["size"]
    return groups


@contextmanager
def open_source(source: SourceFile) -> Iterator[Path]:
    """A local path of the file, for as long as the context lasts.

    Raises:
        DataError: if the file is gone, or is not what it was when `plan` looked at it.
    """
    uri = source["uri"]
    if uri.startswith("s3://"):
        root, key = _split_s3(uri)
        store = open_store(root)
        with TemporaryDirectory(prefix="drafter-source-") as folder:
            path = Path(folder) / (key.rpartition("/")[2] or "source")
            try:
                store.download(key, path)
                _check_unchanged(source, path.stat().st_size, "tag", store.stat(key).tag)
            except FileNotFoundError as error:
                raise DataError(f"{uri}: gone since the run was planned; trigger the run again") from error
            yield path
        return
    path = _local(uri)
    try:
        _check_unchanged(source, path.stat().st_size, "sha256", file_sha256(path))
    except OSError as error:
        raise DataError(f"{uri}: cannot be read here ({error}); it must be visible to every tokenize task") from error
    yield path


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_unchanged(source: SourceFile, size: int, field: str, found: str) -> None:
    expected = source.get(field)
    if size != source["size"] or (expected is not None and found != expected):
        raise DataError(
            f"{source['uri']}: changed since the run was planned ({field} {found}, {size} bytes; "
            f"planned {expected}, {source['size']} bytes); trigger the run again"
        )


def _files_of(text: str, source: Source) -> list[SourceFile]:
    location = source.location
    if location.startswith("s3://"):
        found = [_s3_file(text, source, root, info) for root, info in _s3_matches(text, location)]
    else:
        found = [_local_file(text, source, uri) for uri in _local_matches(text, location)]
    return found


def _local_matches(text: str, location: str) -> list[str]:
    path = _local(location)
    if path.is_file():
        return [location if location.startswith("sample:") else str(path)]
    if path.is_dir():
        matches = sorted(str(p) for p in path.rglob("*") if p.is_file() and _format_suffix(p.name) in CHAT_SUFFIXES)
        if not matches:
            raise _refuse(text, f"a folder that holds files named {', '.join(CHAT_SUFFIXES)} (or these with .gz, .zst)")
        return matches
    if location.startswith("sample:"):
        shipped = sorted(p.name for p in SAMPLE_DATA.glob("*") if _format_suffix(p.name) in CHAT_SUFFIXES)
        raise _refuse(text, f"one of the shipped files {shipped}")
    if not _GLOB.search(location):
        raise _refuse(text, "an existing file, folder or glob (paths count from the working folder)")
    matches = sorted(m for m in glob.glob(str(path), recursive=True) if Path(m).is_file())
    if not matches:
        raise _refuse(text, "a glob that matches at least one file")
    return matches


def _s3_matches(text: str, location: str) -> list[tuple[str, ObjectInfo]]:
    root, key = _split_s3(location)
    if not key:
        raise _refuse(text, "s3://bucket/key, with a key or a glob of keys")
    store = open_store(root)
    if not _GLOB.search(key):
        try:
            return [(root, store.stat(key))]
        except FileNotFoundError:
            raise _refuse(text, "an existing object (or a glob of keys)") from None
    prefix = key[: _GLOB.search(key).start()]  # type: ignore[union-attr]
    pattern = re.compile(_glob_pattern(key))
    matches = [(root, info) for info in store.list(prefix) if pattern.fullmatch(info.path)]
    if not matches:
        raise _refuse(text, "a glob that matches at least one object")
    return matches


def _glob_pattern(key: str) -> str:
    """Regular expression of a glob over keys: `*` and `?` stay within one level, `**` does not."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", key)
    special = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(
        special.get(p, p.replace("[!", "[^", 1) if p.startswith("[") and p.endswith("]") else re.escape(p))
        for p in parts
    )


def _local_file(text: str, source: Source, uri: str) -> SourceFile:
    path = _local(uri)
    _check_kind(text, path.name)
    try:
        size, digest = path.stat().st_size, file_sha256(path)
    except OSError as error:
        raise _refuse(text, f"a readable file ({error})") from error
    if not size:
        raise _refuse(text, f"files with content; {uri} is empty")
    return {"uri": uri, "size": size, "sha256": digest, "slice": source.slice, "limit": None, "order": 0}


def _s3_file(text: str, source: Source, root: str, info: ObjectInfo) -> SourceFile:
    uri = f"{root}/{info.path}"
    _check_kind(text, info.path)
    if not info.size:
        raise _refuse(text, f"objects with content; {uri} is empty")
    return {"uri": uri, "size": info.size, "tag": info.tag, "slice": source.slice, "limit": None, "order": 0}


def _limited(files: list[SourceFile], limit: int) -> list[SourceFile]:
    """The first files, with limits of their own that add up to `limit` rows. Only so many rows are read."""
    from tasks.data.reading import read_rows

    if len(files) == 1:
        return [{**files[0], "limit": limit}]
    taken: list[SourceFile] = []
    for file in files:
        rows = sum(1 for _ in read_rows({**file, "limit": limit}))
        taken.append({**file, "limit": limit if rows >= limit else None})
        limit -= rows
        if limit <= 0:
            break
    return taken


def _check_kind(text: str, name: str) -> None:
    suffix = _format_suffix(name)
    if suffix not in CHAT_SUFFIXES:
        hint = " (a CSV file: write each line as a JSON object first)" if suffix in (".csv", ".tsv") else ""
        raise _refuse(text, f"files named {', '.join(CHAT_SUFFIXES)}, or these with .gz or .zst; {name!r} is not{hint}")
    compression = Path(name).suffix
    needed = "pyarrow" if suffix == ".parquet" else COMPRESSIONS.get(compression)
    if needed and importlib.util.find_spec(needed) is None:
        raise _refuse(text, f"the Python package {needed}, which reading {name!r} needs, installed for the tasks")


def _format_suffix(name: str) -> str:
    path = Path(name.lower())
    return (path.with_suffix("") if path.suffix in COMPRESSIONS else path).suffix


def _local(uri: str) -> Path:
    if uri.startswith("sample:"):
        return SAMPLE_DATA / Path(uri.removeprefix("sample:")).name
    return Path(uri).expanduser()


def _split_s3(uri: str) -> tuple[str, str]:
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return f"s3://{bucket}", key


def _refuse(text: str, expected: str) -> ConfigurationError:
    return ConfigurationError(Problem("sources", text, expected))
