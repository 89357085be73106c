"""A store over another: reads fall through, writes stay in the upper one. The base is never changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tasks.storage.base import ObjectInfo, Store


class OverlayStore:
    """What the smoke stage works in: it sees the run's artifacts and leaves nothing behind in their store."""

    def __init__(self, upper: Store, base: Store) -> None:
        self._upper, self._base = upper, base

    @property
    def root(self) -> str:
        """Root of the upper store, where everything is written."""
        return self._upper.root

    def _holder(self, path: str) -> Store:
        return self._upper if self._upper.exists(path) else self._base

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """Read from the upper store, else from the base."""
        return self._holder(path).read(path, start, length)

    def read_with_tag(self, path: str) -> tuple[bytes, str]:
        """Read with tag from the upper store, else from the base."""
        return self._holder(path).read_with_tag(path)

    def download(self, path: str, target: Path) -> None:
        """Download from the upper store, else from the base."""
        self._holder(path).download(path, target)

    def write(self, path: str, data: bytes | Path) -> None:
        """Write to the upper store."""
        self._upper.write(path, data)

    def create(self, path: str, data: bytes) -> bool:
        """Create in the upper store unless either has it."""
        return not self._base.exists(path) and self._upper.create(path, data)

    def replace(self, path: str, data: bytes, tag: str) -> bool:
        """Replace in the upper store; what only the base has can't be replaced."""
        return self._upper.replace(path, data, tag)

    def stat(self, path: str) -> ObjectInfo:
        """Of the upper store's object, else the base's."""
        return self._holder(path).stat(path)

    def exists(self, path: str) -> bool:
        """Whether either has it."""
        return self._upper.exists(path) or self._base.exists(path)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects of both, the upper one's where both have a path."""
        merged = {info.path: info for info in self._base.list(prefix)}
        merged.update({info.path: info for info in self._upper.list(prefix)})
        yield from (merged[path] for path in sorted(merged))

    def delete(self, path: str) -> None:
        """Delete from the upper store only."""
        self._upper.delete(path)

    def probe(self) -> Sequence[str]:
        """Probe the upper store."""
        return self._upper.probe()
