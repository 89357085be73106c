"""SHA-256 of files, remembered by path, size and time of change: hashing 55 GB takes minutes, once is enough."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path


def sha256_of(path: Path, cache: Path | None = None) -> str:
    """SHA-256 of a file's bytes, in hexadecimal.

    Args:
        path: the file.
        cache: folder of remembered digests; None: always read.
    """
    stat = path.stat()
    entry: Path | None = None
    if cache is not None:
        identity = json.dumps([str(path.resolve()), stat.st_size, stat.st_mtime_ns])
        entry = cache / "digests" / hashlib.sha256(identity.encode()).hexdigest()
        if entry.is_file():
            return entry.read_text()
    digest = hash_file(path)
    if entry is not None:
        entry.parent.mkdir(parents=True, exist_ok=True)
        temporary = entry.with_name(f"{entry.name}.{secrets.token_hex(4)}")
        temporary.write_text(digest)
        os.replace(temporary, entry)
    return digest


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes, read once."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
