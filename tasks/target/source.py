"""The target as the run specification names it: what it is, and a cheap fingerprint of it.

`plan` puts the fingerprint into the arguments of stage `target`, so that a changed checkpoint gives a new key.
"""

from __future__ import annotations

import hashlib
from typing import Any

from tasks.contract.spec import RunSpec
from tasks.target.digests import hash_file
from tasks.target.facts import TargetFacts, read_target_facts
from tasks.target.location import (
    CONFIG_FILES,
    INDEX_FILE,
    TOKENIZER_FILES,
    TargetFile,
    TargetSource,
    check_files,
    hub_snapshot,
    list_files,
    parse_target,
)

__all__ = ["TargetFacts", "TargetSource", "parse_target", "read_target_facts", "target_fingerprint"]

_HASHED_BYTES = 256 * 1024**2  # up to this size a local file is read; above it, size and time of change must do


def target_fingerprint(spec: RunSpec) -> dict[str, Any]:
    """What stage `target` will import, in a few kilobytes of JSON; changes whenever the checkpoint does.

    Local files: SHA-256 up to 256 MiB, else size and time of change. S3: the objects' tags. Hub: the commit.

    Raises:
        ConfigurationError: field `target`, if there is no complete checkpoint.
        StorageError: if the store or the hub does not answer.
    """
    source = parse_target(spec)
    if source.kind == "hub":
        return {"kind": "hub", "id": source.location, "commit": hub_snapshot(source).commit}
    files = list_files(source)
    if source.kind == "gguf":
        return {"kind": "gguf", "file": _mark(next(iter(files.values())))}
    weights = check_files(files, lambda: _read(source, INDEX_FILE), source.location)
    wanted = [n for n in (*CONFIG_FILES, *TOKENIZER_FILES, INDEX_FILE) if n in files] + weights
    return {"kind": source.kind, "files": {name: _mark(files[name]) for name in sorted(set(wanted))}}


def _mark(file: TargetFile) -> str:
    if file.local is not None and file.size <= _HASHED_BYTES:
        return hash_file(file.local)
    return hashlib.sha256(f"{file.size} {file.tag}".encode()).hexdigest()


def _read(source: TargetSource, name: str) -> bytes:
    if source.kind == "folder":
        return (source.path / name).read_bytes()
    from tasks.storage import open_store

    return open_store(source.location).read(name)
