"""Artifacts: objects plus the receipt that makes them one.

Objects go under a folder of the attempt, then the receipt is created if there is none. So of several live attempts
exactly one wins, nothing is overwritten, and a crash at any point leaves objects that no receipt names.
"""

from __future__ import annotations

import hashlib
import logging
import os
import uuid
from pathlib import Path

from pydantic import ValidationError

from tasks.contract.errors import IntegrityError
from tasks.contract.layout import artifact_prefix, object_path, receipt_path
from tasks.contract.receipt import SCHEMA_VERSION, Receipt, StoredObject
from tasks.storage.base import Store
from tasks.storage.paths import TEMPORARY, check_path

log = logging.getLogger("tasks")

_COMMIT_ATTEMPTS = 5


class ArtifactWriter:
    """Writes one attempt at one artifact. `commit` or `discard` ends it."""

    def __init__(self, store: Store, kind: str, key: str, attempt: str) -> None:
        self.store, self.kind, self.key, self.attempt = store, kind, key, attempt
        self._objects: list[StoredObject] = []
        self._written: list[str] = []  # also the object whose write failed half-way
        self._outcome_unknown = False

    @property
    def objects(self) -> list[StoredObject]:
        """What was added, in that order."""
        return list(self._objects)

    def add(self, name: str, data: Path | bytes) -> StoredObject:
        """Write one object of the artifact.

        Args:
            name: inside the artifact; may have slashes (`drafter/config.json`).
            data: content, or a local file that nobody writes any more.

        Raises:
            ValueError: if the name is taken or not a path.
            IntegrityError: if the file changed while it was read.
            StorageError: if the store fails.
        """
        check_path(name)
        if any(stored.name == name for stored in self._objects):
            raise ValueError(f"{self.kind}/{self.key} already has an object {name!r}")
        path = object_path(self.kind, self.key, self.attempt, name)
        self._written.append(path)
        if isinstance(data, bytes):
            stored = StoredObject(name=name, path=path, size=len(data), sha256=hashlib.sha256(data).hexdigest())
            self.store.write(path, data)
        else:
            before = data.stat()
            stored = StoredObject(name=name, path=path, size=before.st_size, sha256=_file_sha256(data))
            self.store.write(path, data)
            after = data.stat()
            if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                raise IntegrityError(
                    f"object {name!r} of {self.kind}/{self.key}: {data} changed while it was stored "
                    f"({before.st_size:,} bytes, then {after.st_size:,}); close it before adding it"
                )
        self._objects.append(stored)
        return stored

    def commit(self, receipt: Receipt) -> Receipt:
        """Write the receipt, last.

        Returns:
            The receipt in the store: this one, or that of an attempt that was faster. In that case what this attempt
            wrote is removed.

        Raises:
            ValueError: if the receipt is not of this attempt or does not name exactly what was added.
            StorageError: if the store fails; nothing is removed then, as the receipt may have arrived.
        """
        self._check(receipt)
        path = receipt_path(self.kind, self.key)
        self._outcome_unknown = True
        for _ in range(_COMMIT_ATTEMPTS):
            if self.store.create(path, receipt.to_bytes()):
                return receipt
            winner = find_receipt(self.store, self.kind, self.key)
            if winner is None:  # removed since, for repair
                continue
            if winner.attempt == self.attempt:  # ours: an answer to an earlier try of `create` was lost
                return winner
            self._outcome_unknown = False
            log.info("%s: another attempt (%s) was faster; its result is used", path, winner.attempt)
            self.discard()
            return winner
        raise IntegrityError(f"{self.store.root}: {path} comes and goes: something else removes it; stop that first")

    def discard(self) -> None:
        """Remove what this attempt added, and nothing else.

        After a `commit` that succeeded, or whose outcome is unknown, nothing is removed: a receipt may name it.
        """
        if self._outcome_unknown:
            log.warning("%s/%s: objects of attempt %s are kept", self.kind, self.key, self.attempt)
            return
        while self._written:
            self.store.delete(self._written[-1])
            self._written.pop()
        self._objects.clear()

    def _check(self, receipt: Receipt) -> None:
        found = (receipt.kind, receipt.key, receipt.attempt)
        expected = (self.kind, self.key, self.attempt)
        if found != expected:
            raise ValueError(f"receipt of (kind, key, attempt) {found}, expected {expected}")
        if receipt.objects != self._objects:
            raise ValueError(
                f"receipt of {self.kind}/{self.key} names {[o.name for o in receipt.objects]}, expected what was "
                f"added: {[o.name for o in self._objects]}"
            )


def read_receipt(store: Store, kind: str, key: str) -> Receipt:
    """The receipt of an artifact.

    Raises:
        FileNotFoundError: if there is none, so no artifact.
        IntegrityError: if it cannot be read as a receipt of this artifact.
    """
    path = receipt_path(kind, key)
    data = store.read(path)
    advice = f"remove {path} from {store.root} to have the artifact made again"
    try:
        receipt = Receipt.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "document"
        raise IntegrityError(f"receipt {path}, {len(data):,} bytes: {where}: {first['msg']}; {advice}") from error
    if receipt.schema_version > SCHEMA_VERSION:
        raise IntegrityError(
            f"receipt {path}: schema_version {receipt.schema_version}, this version of the pipeline reads up to "
            f"{SCHEMA_VERSION}; update it"
        )
    if (receipt.kind, receipt.key) != (kind, key):
        raise IntegrityError(f"receipt {path} is of {receipt.kind}/{receipt.key}; {advice}")
    return receipt


def find_receipt(store: Store, kind: str, key: str) -> Receipt | None:
    """The receipt of an artifact, or None if there is none. Raises IntegrityError as `read_receipt` does."""
    try:
        return read_receipt(store, kind, key)
    except FileNotFoundError:
        return None


def remove_artifact(store: Store, kind: str, key: str) -> int:
    """Remove an artifact, for repair or retention: the receipt first, so that nobody starts from it, then its objects.

    Objects of other attempts are left alone: one of them may be live. `remove_unreferenced` takes them.

    Returns:
        How many objects were removed, the receipt not counted.
    """
    path = receipt_path(kind, key)
    try:
        receipt = find_receipt(store, kind, key)
    except IntegrityError as error:
        log.warning("%s; it is removed without its objects, which are unreferenced then", error)
        store.delete(path)
        return 0
    if receipt is None:
        return 0
    store.delete(path)
    # A damaged receipt must not lead elsewhere.
    own = [o for o in receipt.objects if o.path.startswith(f"{artifact_prefix(kind, key)}/")]
    for stored in own:
        store.delete(stored.path)
    return len(own)


def remove_unreferenced(store: Store, kind: str, key: str, before: float) -> int:
    """Remove what crashed attempts left of an artifact: objects that its receipt, if any, does not name.

    Args:
        store: where.
        kind: of the artifact.
        key: of the artifact.
        before: seconds since the epoch; younger objects may belong to a live attempt and stay. So do all objects of
            an attempt that has a younger one.

    Returns:
        How many objects were removed.
    """
    prefix = f"{artifact_prefix(kind, key)}/"
    found = list(store.list(prefix))
    receipt = find_receipt(store, kind, key)  # after the listing: a receipt written in between protects its objects
    kept = {stored.path for stored in receipt.objects} if receipt else set()
    live = {_attempt(info.path, prefix) for info in found if info.modified >= before}
    removed = 0
    for info in found:
        attempt = _attempt(info.path, prefix)
        if attempt and attempt not in live and info.path not in kept:
            store.delete(info.path)
            removed += 1
    return removed


def _attempt(path: str, prefix: str) -> str:
    """Folder of the attempt, or "" for what stands beside the attempts (receipt, training's pointer)."""
    return path.removeprefix(prefix).rpartition("/")[0].partition("/")[0]


# ---- local copies ---------------------------------------------------------------------------------------------------

_verified: dict[Path, tuple[int, int, int]] = {}  # size, time and inode of the files this process has verified


def fetch_object(store: Store, receipt: Receipt, name: str, cache: Path) -> Path:
    """Local copy of one object, with the size and SHA-256 that its receipt states.

    The file is named by its SHA-256 and must not be changed. Processes may share the folder: each downloads to a name
    of its own and renames. A cached file is read and verified once by each process, and again if it changed; a damaged
    one is fetched again.

    Raises:
        KeyError: if the artifact has no object of that name.
        IntegrityError: if the object is missing or is not what the receipt states.
        StorageError: if the store fails.
    """
    stored = receipt.object(name)
    final = (cache / stored.sha256).absolute()
    if final.exists():
        if _is_whole(final, stored):
            return final
        log.warning("%s: the cached copy of %s is damaged; fetching it again", final, stored.path)
    cache.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
    try:
        store.download(stored.path, temporary)
        size, digest = temporary.stat().st_size, _file_sha256(temporary)
        if (size, digest) != (stored.size, stored.sha256):
            raise _damaged(receipt, stored, f"found {size:,} bytes with SHA-256 {digest}")
        os.replace(temporary, final)
    except FileNotFoundError as error:
        raise _damaged(receipt, stored, "found nothing there") from error
    finally:
        temporary.unlink(missing_ok=True)
    _verified[final] = _fingerprint(final)
    return final


def _is_whole(file: Path, stored: StoredObject) -> bool:
    fingerprint = _fingerprint(file)
    if _verified.get(file) == fingerprint:
        return True
    if file.stat().st_size != stored.size or _file_sha256(file) != stored.sha256:
        return False
    _verified[file] = fingerprint
    return True


def _damaged(receipt: Receipt, stored: StoredObject, found: str) -> IntegrityError:
    return IntegrityError(
        f"artifact {receipt.kind}/{receipt.key}, object {stored.name} ({stored.path}): {found}; its receipt states "
        f"{stored.size:,} bytes with SHA-256 {stored.sha256}. Remove the artifact to have it made again"
    )


def _fingerprint(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def _file_sha256(file: Path) -> str:
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
