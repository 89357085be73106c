"""The artifact store's interface: a flat space of objects below one root, in S3 or in a plain folder.

Paths are relative, with forward slashes. Objects are immutable once a receipt names them; the two conditional writes
below are the only means by which attempts that race agree on one winner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class ObjectInfo:
    """What a listing or a `stat` says of one object."""

    path: str
    size: int  # bytes
    tag: str  # opaque; changes whenever the content changes (S3: the ETag). Never compared with an MD5.
    modified: float  # seconds since the epoch


class Store(Protocol):
    """Objects under one root. Every method raises `tasks.contract.errors.StorageError` when the store itself fails
    (unreachable, refused, out of space), with the root and path in the message, and `FileNotFoundError` when the
    object does not exist."""

    @property
    def root(self) -> str:
        """As given to `open_store`: `s3://bucket/prefix` or an absolute folder."""

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes from `start`, at most `length`; fewer, or none, at the end of the object."""

    def read_with_tag(self, path: str) -> tuple[bytes, str]:
        """Content and tag of the same version, for a later `replace`."""

    def download(self, path: str, target: Path) -> None:
        """Copy to a local file, written under a temporary name and renamed. Length is checked against the store's."""

    def write(self, path: str, data: bytes | Path) -> None:
        """Write an object, whole or not at all. Existing content is replaced: only for unshared paths."""

    def create(self, path: str, data: bytes) -> bool:
        """Write only if nothing is there (`If-None-Match: *`). False if something is: nothing is written then."""

    def replace(self, path: str, data: bytes, tag: str) -> bool:
        """Write only if the object still has this tag (`If-Match`). False otherwise."""

    def stat(self, path: str) -> ObjectInfo:
        """Size, tag and time of one object."""

    def exists(self, path: str) -> bool:
        """Whether an object of that path is there."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects whose path starts with `prefix`, in path order, however many (paged)."""

    def delete(self, path: str) -> None:
        """Remove; no error if it is gone already."""

    def probe(self) -> Sequence[str]:
        """Check on a scratch path that the store reads back what was written, byte for byte, refuses a second
        `create`, refuses a `replace` with a stale tag, and lists. Returns what does not hold, in words."""
