"""The round trip that shows, before any GPU work, whether a store keeps what the pipeline relies on."""

from __future__ import annotations

import uuid

from tasks.contract.errors import StorageError
from tasks.storage.base import Store

_CONTENT = b"hello\n"
_RACE = (
    "two live attempts of one task could overwrite each other's result. Use a store with conditional writes "
    "(Amazon S3, SeaweedFS 4 or newer, MinIO, Ceph Squid or newer; or a folder)"
)


def probe_store(store: Store) -> list[str]:
    """Try each promise of `Store` on a scratch path, which is removed afterwards.

    Returns:
        What does not hold, a sentence each; empty if all is well.

    Raises:
        StorageError: if the store is unreachable or refuses a plain write, read or listing.
    """
    folder = f"probe/{uuid.uuid4().hex}"
    plain, guarded = f"{folder}/plain", f"{folder}/guarded"
    try:
        store.write(plain, _CONTENT)
        return [*_round_trip(store, folder, plain), *_conditional(store, guarded)]
    finally:
        for path in (plain, guarded):
            store.delete(path)


def _round_trip(store: Store, folder: str, path: str) -> list[str]:
    faults = []
    found = store.read(path)
    if found != _CONTENT:
        faults.append(
            f"{store.root}: wrote {_CONTENT!r} and read back {found!r}: the store keeps the client's checksum framing "
            "as content. Set AWS_REQUEST_CHECKSUM_CALCULATION=when_required and "
            "AWS_RESPONSE_CHECKSUM_VALIDATION=when_required"
        )
    if found == _CONTENT and (part := store.read(path, 1, 3)) != _CONTENT[1:4]:
        faults.append(f"{store.root}: bytes 1 to 3 of {_CONTENT!r} read as {part!r}: ranged reads do not work")
    listed = [info.path for info in store.list(f"{folder}/")]
    if listed != [path]:
        faults.append(f"{store.root}: an object just written is not listed: found {listed}, expected {[path]}")
    return faults


def _conditional(store: Store, path: str) -> list[str]:
    try:
        if not store.create(path, b"first"):
            return [f"{store.root}: a conditional write (If-None-Match: *) of a new object was refused; {_RACE}"]
        faults = []
        if store.create(path, b"second") or store.read(path) != b"first":
            faults.append(f"{store.root}: a second conditional write (If-None-Match: *) replaced the first; {_RACE}")
        # An unconditional write, so that the two faults are told apart.
        store.write(path, b"third")
        _, stale = store.read_with_tag(path)
        store.write(path, b"fourth")
        if store.replace(path, b"fifth", stale) or store.read(path) != b"fourth":
            faults.append(f"{store.root}: a write with a stale tag (If-Match) was accepted; {_RACE}")
        _, tag = store.read_with_tag(path)
        if not store.replace(path, b"sixth", tag) or store.read(path) != b"sixth":
            faults.append(f"{store.root}: a write with the right tag (If-Match) was refused; {_RACE}")
        return faults
    except StorageError as error:
        return [f"conditional writes fail: {error}; without them {_RACE}"]
