"""Artifacts: one winner, nothing unreferenced is read, damage is found."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

import tasks.storage
from tasks.contract.errors import IntegrityError, StorageError
from tasks.contract.layout import object_path, receipt_path
from tasks.contract.receipt import Receipt
from tasks.storage import Store
from tasks.storage.artifact import (
    ArtifactWriter,
    fetch_object,
    find_receipt,
    read_receipt,
    remove_artifact,
    remove_unreferenced,
)

KIND, KEY = "tokens", "0123456789abcdef0123456789abcdef"


def _writer(store: Store, attempt: str) -> ArtifactWriter:
    writer = ArtifactWriter(store, KIND, KEY, attempt)
    writer.add("tokens.safetensors", f"tokens of {attempt}".encode())
    writer.add("drafter/config.json", b"{}")
    return writer


def _receipt(writer: ArtifactWriter, **fields: Any) -> Receipt:
    values: dict[str, Any] = {"objects": writer.objects, "attempt": writer.attempt, "identity": KEY, **fields}
    return Receipt(kind=KIND, version=1, key=KEY, **values)


def _paths(store: Store) -> list[str]:
    return [info.path for info in store.list("")]


def test_commit_makes_the_artifact(store: Store, tmp_path: Path) -> None:
    writer = ArtifactWriter(store, KIND, KEY, "one")
    source = tmp_path / "part.safetensors"
    source.write_bytes(os.urandom(1_500_000))
    stored = writer.add("part.safetensors", source)
    assert stored.path == object_path(KIND, KEY, "one", "part.safetensors")
    assert (stored.size, stored.sha256) == (1_500_000, hashlib.sha256(source.read_bytes()).hexdigest())
    assert find_receipt(store, KIND, KEY) is None
    with pytest.raises(FileNotFoundError):
        read_receipt(store, KIND, KEY)
    receipt = _receipt(writer, counts={"samples": 3}, metrics={"loss": 0.1 + 0.2})
    assert writer.commit(receipt) == receipt
    assert read_receipt(store, KIND, KEY) == receipt
    assert read_receipt(store, KIND, KEY).digest() == hashlib.sha256(store.read(receipt_path(KIND, KEY))).hexdigest()
    assert fetch_object(store, receipt, "part.safetensors", tmp_path / "cache").read_bytes() == source.read_bytes()


def test_the_later_attempt_is_swept_and_gets_the_winner(store: Store) -> None:
    crashed, first, second = (_writer(store, name) for name in ("crashed", "first", "second"))
    assert crashed.objects
    won = first.commit(_receipt(first))
    assert second.commit(_receipt(second)) == won
    kept = [stored.path for writer in (crashed, first) for stored in writer.objects]
    assert _paths(store) == sorted([*kept, receipt_path(KIND, KEY)])
    assert second.objects == []


def test_of_eight_attempts_one_wins(store: Store, tmp_path: Path) -> None:
    barrier = Barrier(8)

    def attempt(number: int) -> Receipt:
        writer = _writer(store, f"attempt-{number}")
        barrier.wait()
        return writer.commit(_receipt(writer))

    with ThreadPoolExecutor(8) as pool:
        receipts = list(pool.map(attempt, range(8)))
    assert len({receipt.attempt for receipt in receipts}) == 1
    winner = receipts[0]
    assert read_receipt(store, KIND, KEY) == winner
    assert _paths(store) == sorted([*(stored.path for stored in winner.objects), receipt_path(KIND, KEY)])
    copy = fetch_object(store, winner, "tokens.safetensors", tmp_path)
    assert copy.read_text() == f"tokens of {winner.attempt}"


def test_committing_again_after_a_lost_answer_keeps_the_objects(store: Store) -> None:
    writer = _writer(store, "one")
    receipt = _receipt(writer)
    assert store.create(receipt_path(KIND, KEY), receipt.to_bytes())  # what an earlier try did before its answer
    assert writer.commit(receipt) == receipt
    writer.discard()
    assert len(_paths(store)) == 3


def test_discard_removes_nothing_when_the_receipt_may_have_arrived(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = _writer(folder_store, "one")
    create = folder_store.create

    def lost(path: str, data: bytes) -> bool:
        create(path, data)
        raise StorageError("connection reset")

    monkeypatch.setattr(folder_store, "create", lost)
    with pytest.raises(StorageError, match="connection reset"):
        writer.commit(_receipt(writer))
    writer.discard()
    receipt = read_receipt(folder_store, KIND, KEY)
    assert all(folder_store.exists(stored.path) for stored in receipt.objects)


def test_discard_removes_its_own_attempt_only(store: Store) -> None:
    first, second = _writer(store, "first"), _writer(store, "second")
    beside = object_path(KIND, KEY, "first", "checkpoint-00000010/model.safetensors")
    store.write(beside, b"a checkpoint that the next attempt resumes from")
    first.discard()
    assert _paths(store) == sorted([beside, *(stored.path for stored in second.objects)])
    first.discard()
    assert first.objects == []


def test_discard_also_takes_the_object_whose_write_failed(folder_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = _writer(folder_store, "one")
    write = folder_store.write

    def late(path: str, data: bytes | Path) -> None:
        write(path, data)
        raise StorageError("connection reset")

    monkeypatch.setattr(folder_store, "write", late)
    with pytest.raises(StorageError, match="connection reset"):
        writer.add("late", b"x")
    assert [stored.name for stored in writer.objects] == ["tokens.safetensors", "drafter/config.json"]
    writer.discard()
    assert _paths(folder_store) == []


def test_names_and_receipts_that_do_not_fit_are_refused(folder_store: Store) -> None:
    writer = _writer(folder_store, "one")
    with pytest.raises(ValueError, match=r"already has an object 'tokens\.safetensors'"):
        writer.add("tokens.safetensors", b"x")
    with pytest.raises(ValueError, match="object path"):
        writer.add("../two/tokens.safetensors", b"x")
    with pytest.raises(ValueError, match=r"names \['tokens\.safetensors'\], expected what was added"):
        writer.commit(_receipt(writer, objects=writer.objects[:1]))
    with pytest.raises(ValueError, match=r"'two'.*expected .*'one'"):
        writer.commit(_receipt(writer, attempt="two"))
    assert find_receipt(folder_store, KIND, KEY) is None


def test_a_file_that_changes_while_it_is_added_is_refused(
    folder_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "part"
    source.write_bytes(b"1234")
    write = folder_store.write

    def meanwhile(path: str, data: bytes | Path) -> None:
        source.write_bytes(b"123456")
        write(path, data)

    monkeypatch.setattr(folder_store, "write", meanwhile)
    writer = ArtifactWriter(folder_store, KIND, KEY, "one")
    with pytest.raises(IntegrityError, match=r"changed while it was stored \(4 bytes, then 6\)"):
        writer.add("part", source)
    assert writer.objects == []


# ---- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[: len(data) // 2], "Invalid JSON"),
        (lambda data: b"", "Invalid JSON"),
        (lambda data: data.replace(b'"size":2', b'"size":-2'), r"objects\.1\.size: .*greater than or equal to 0"),
        (lambda data: data.replace(b'"version":1,', b'"version":1.5,', 1), "version"),
        (lambda data: data.replace(b'"schema_version":1', b'"schema_version":2'), "schema_version 2.*update it"),
        (lambda data: data.replace(KEY.encode(), b"f" * 32), "is of tokens/ffff"),
        (lambda data: data.replace(b'"kind":"tokens"', b'"kind":"states"'), "is of states/0123"),
    ],
)
def test_damaged_receipts_are_refused(folder_store: Store, change: Callable[[bytes], bytes], words: str) -> None:
    writer = _writer(folder_store, "one")
    data = writer.commit(_receipt(writer)).to_bytes()
    assert change(data) != data
    folder_store.write(receipt_path(KIND, KEY), change(data))
    with pytest.raises(IntegrityError, match=f"receipt {receipt_path(KIND, KEY)}.*{words}"):
        find_receipt(folder_store, KIND, KEY)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda data: data[:-1], "found 12 bytes"),
        (lambda data: bytes([data[0] ^ 1]) + data[1:], "found 13 bytes"),
        (lambda data: data + b"\0", "found 14 bytes"),
        (lambda data: b"", "found 0 bytes"),
    ],
)
def test_damaged_objects_are_refused(
    store: Store, tmp_path: Path, damage: Callable[[bytes], bytes], found: str
) -> None:
    writer = _writer(store, "one")
    receipt = writer.commit(_receipt(writer))
    stored = receipt.object("tokens.safetensors")
    content = store.read(stored.path)
    assert len(content) == 13
    store.write(stored.path, damage(content))
    with pytest.raises(IntegrityError) as caught:
        fetch_object(store, receipt, "tokens.safetensors", tmp_path / "cache")
    message = str(caught.value)
    digests = [hashlib.sha256(damage(content)).hexdigest(), stored.sha256]
    for part in [f"artifact tokens/{KEY}", "object tokens.safetensors", found, "states 13 bytes", *digests]:
        assert part in message
    assert list((tmp_path / "cache").iterdir()) == []


def test_absent_objects_are_refused(store: Store, tmp_path: Path) -> None:
    writer = _writer(store, "one")
    receipt = writer.commit(_receipt(writer))
    store.delete(receipt.object("tokens.safetensors").path)
    with pytest.raises(IntegrityError, match=r"object tokens\.safetensors .*: found nothing there; its receipt states"):
        fetch_object(store, receipt, "tokens.safetensors", tmp_path)
    with pytest.raises(KeyError, match="has no object 'other'"):
        fetch_object(store, receipt, "other", tmp_path)


def test_cached_copies_are_used_and_damaged_ones_fetched_again(
    folder_store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = _writer(folder_store, "one")
    receipt = writer.commit(_receipt(writer))
    copy = fetch_object(folder_store, receipt, "tokens.safetensors", tmp_path / "cache")
    assert copy.name == receipt.object("tokens.safetensors").sha256
    inode = copy.stat().st_ino
    assert fetch_object(folder_store, receipt, "tokens.safetensors", tmp_path / "cache") == copy
    assert copy.stat().st_ino == inode
    for damage in (b"tokens of onE", b"tokens", b""):
        copy.write_bytes(damage)
        with caplog.at_level(logging.WARNING, logger="tasks"):
            assert fetch_object(folder_store, receipt, "tokens.safetensors", tmp_path / "cache") == copy
        assert "is damaged; fetching it again" in caplog.text
        assert copy.read_bytes() == b"tokens of one"
        caplog.clear()
    folder_store.delete(receipt.object("tokens.safetensors").path)
    assert fetch_object(folder_store, receipt, "tokens.safetensors", tmp_path / "cache") == copy  # from the cache


FETCHER = """
import sys, time
from pathlib import Path
from tasks.storage import open_store
from tasks.storage.artifact import fetch_object, read_receipt
root, cache, kind, key, start = sys.argv[1:]
store = open_store(root)
receipt = read_receipt(store, kind, key)
print("ready", flush=True)
while not Path(start).exists():
    time.sleep(0.001)
names = [stored.name for stored in receipt.objects]
print(sum(len(fetch_object(store, receipt, name, Path(cache)).read_bytes()) for name in names))
"""


def test_two_processes_share_a_cache(folder_store: Store, tmp_path: Path) -> None:
    writer = ArtifactWriter(folder_store, KIND, KEY, "one")
    for number in range(20):
        writer.add(f"part-{number}", os.urandom(300_000))
    writer.commit(_receipt(writer))
    cache, start = tmp_path / "cache", tmp_path / "start"
    environment = {**os.environ, "PYTHONPATH": str(Path(tasks.storage.__file__).parents[2])}
    arguments = [sys.executable, "-c", FETCHER, folder_store.root, str(cache), KIND, KEY, str(start)]
    processes = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    start.touch()
    assert [process.communicate(timeout=60)[0].strip() for process in processes] == ["6000000", "6000000"]
    assert sorted(file.name for file in cache.iterdir()) == sorted(stored.sha256 for stored in writer.objects)


# ---- removing -------------------------------------------------------------------------------------------------------


def test_remove_takes_the_receipt_first(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    other = _writer(store, "live")
    writer = _writer(store, "one")
    writer.commit(_receipt(writer))
    removed: list[str] = []
    delete = store.delete
    monkeypatch.setattr(store, "delete", lambda path: (removed.append(path), delete(path)))
    assert remove_artifact(store, KIND, KEY) == 2
    assert removed[0] == receipt_path(KIND, KEY)
    assert _paths(store) == sorted(stored.path for stored in other.objects)
    assert remove_artifact(store, KIND, KEY) == 0
    again = _receipt(other)
    assert other.commit(again) == again


def test_remove_of_a_damaged_receipt(folder_store: Store) -> None:
    writer = _writer(folder_store, "one")
    data = json.loads(writer.commit(_receipt(writer)).to_bytes())
    folder_store.write("states/other/one/x", b"another artifact's")
    data["objects"][0]["path"] = "states/other/one/x"
    folder_store.write(receipt_path(KIND, KEY), json.dumps(data).encode())
    assert remove_artifact(folder_store, KIND, KEY) == 1
    assert folder_store.exists("states/other/one/x")
    folder_store.write(receipt_path(KIND, KEY), b"{")
    assert remove_artifact(folder_store, KIND, KEY) == 0
    assert find_receipt(folder_store, KIND, KEY) is None


def test_what_crashed_attempts_left_can_be_removed(store: Store) -> None:
    crashed, writer = _writer(store, "crashed"), _writer(store, "one")
    writer.commit(_receipt(writer))
    store.write(f"{KIND}/{KEY}/latest.json", b"{}")
    store.write(f"{KIND}/{KEY}f/crashed/x", b"a neighbour's")
    assert remove_unreferenced(store, KIND, KEY, before=time.time() - 3600) == 0
    assert remove_unreferenced(store, KIND, KEY, before=time.time() + 3600) == 2
    kept = [f"{KIND}/{KEY}/latest.json", receipt_path(KIND, KEY), *(stored.path for stored in writer.objects)]
    assert _paths(store) == sorted([*kept, f"{KIND}/{KEY}f/crashed/x"])
    assert crashed.objects
