"""Object paths, and local files that appear whole or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.contract.errors import StorageError

RESERVED = ".store-"  # names that start so belong to the stores: temporary files, locks
TEMPORARY = f"{RESERVED}tmp-"


def check_path(path: str) -> str:
    """The path itself, when it names one object below the root.

    Raises:
        ValueError: if it is empty or absolute, or could lead elsewhere (`..`, a blank part, a backslash, a control
            character), or uses a name that the stores keep for themselves.
    """
    parts = path.split("/")
    if any(part in ("", ".", "..") or part.startswith(RESERVED) for part in parts) or _odd(path):
        raise ValueError(
            f"object path {path!r}: expected names joined by single slashes, none of them '.', '..' or starting "
            f"with {RESERVED!r}, without backslashes and control characters"
        )
    return path


def check_prefix(prefix: str) -> str:
    """The prefix itself, when it is the beginning of an object path, or empty.

    Raises:
        ValueError: as `check_path`.
    """
    folder, _, _ = prefix.rpartition("/")
    if folder:
        check_path(folder)
    if _odd(prefix) or prefix.startswith("/"):
        raise ValueError(f"object prefix {prefix!r}: expected the beginning of a relative path with forward slashes")
    return prefix


def _odd(path: str) -> bool:
    return "\\" in path or any(ord(character) < 32 or ord(character) == 127 for character in path)


@contextmanager
def copied_to(target: Path, root: str, path: str) -> Iterator[Path]:
    """A temporary path beside `target`: renamed to it if the block ends well, removed if not.

    The name is new each time, so that two writers of one target never share a file.

    Raises:
        StorageError: for a local failure (no space, no permission), naming the object and the file.
    """
    temporary = target.parent / f"{TEMPORARY}{uuid.uuid4().hex}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(
            f"{root}: cannot copy {path} to the local file {target}: {error.strerror or error}; "
            "free space there, or make it writable"
        ) from error
