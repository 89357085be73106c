"""What only a folder can get wrong: crashes between two system calls, full disks, links, folders that vanish."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import tasks.storage
from tasks.contract.errors import StorageError
from tasks.storage import Store
from tasks.storage.folder import FolderStore
from tasks.storage.paths import RESERVED


def _temporary_files(store: Store) -> list[Path]:
    return [p for p in Path(store.root).rglob(f"{RESERVED}tmp-*")]


def test_failed_writes_leave_the_old_content_and_no_temporary_file(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    # INT-06: the old object survives a write that fails half-way.
    folder_store.write("a/x", b"old")
    _, tag = folder_store.read_with_tag("a/x")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for write in (
        lambda: folder_store.write("a/x", b"new"),
        lambda: folder_store.create("a/y", b"new"),
        lambda: folder_store.replace("a/x", b"new", tag),
    ):
        with pytest.raises(StorageError, match=rf"{folder_store.root}: cannot write a/[xy]: No space left.*free some"):
            write()
    monkeypatch.undo()
    assert [(i.path, i.size) for i in folder_store.list("")] == [("a/x", 3)]
    assert folder_store.read("a/x") == b"old"
    assert _temporary_files(folder_store) == []


def test_the_kernel_refuses_in_the_middle_of_a_file(folder_store: Store, tmp_path: Path) -> None:
    folder_store.write("a/x", b"old")
    source = tmp_path / "source"
    source.write_bytes(bytes(3 << 20))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(StorageError, match="cannot write a/x: File too large"):
            folder_store.write("a/x", source)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert folder_store.read("a/x") == b"old"
    assert _temporary_files(folder_store) == []


def test_local_failures_of_a_download_name_the_local_file(folder_store: Store, tmp_path: Path) -> None:
    folder_store.write("x", b"content")
    target = tmp_path / "copies"
    target.write_bytes(b"")  # a file where the folder would be
    with pytest.raises(StorageError, match=rf"cannot copy x to the local file {target}/x"):
        folder_store.download("x", target / "x")


def test_read_only_places_are_reported() -> None:
    store = FolderStore(Path("/proc/sys/drafter-store"))
    with pytest.raises(StorageError, match="/proc/sys/drafter-store: cannot write x"):
        store.write("x", b"1")


def test_object_in_the_way_of_a_folder(folder_store: Store) -> None:
    folder_store.write("a", b"1")
    folder_store.write("b/c", b"2")
    for write in (folder_store.write, folder_store.create):
        with pytest.raises(StorageError, match=r"cannot write a/x: .*an object stands where the path needs a folder"):
            write("a/x", b"3")
        with pytest.raises(StorageError, match=r"cannot write b: .*a folder stands where the object would be"):
            write("b", b"3")
    assert [i.path for i in folder_store.list("")] == ["a", "b/c"]
    assert _temporary_files(folder_store) == []


def test_links_out_of_the_root_are_not_followed(folder_store: Store, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    folder_store.write("x", b"1")
    (Path(folder_store.root) / "link").symlink_to(outside)
    for use in (
        lambda: folder_store.read("link/secret"),
        lambda: folder_store.write("link/new", b"2"),
        lambda: folder_store.delete("link/secret"),
    ):
        with pytest.raises(StorageError, match="leads out of the root"):
            use()
    assert [i.path for i in folder_store.list("")] == ["x"]
    assert [p.name for p in outside.iterdir()] == ["secret"]


def test_a_root_that_is_a_link_works(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    store = FolderStore(tmp_path / "link")
    store.write("a/x", b"1")
    assert store.read("a/x") == b"1"


def test_delete_removes_empty_folders_but_not_the_root(folder_store: Store) -> None:
    folder_store.write("a/b/c/x", b"1")
    folder_store.write("a/y", b"2")
    folder_store.delete("a/b/c/x")
    assert not (Path(folder_store.root) / "a/b").exists()
    assert folder_store.read("a/y") == b"2"
    folder_store.delete("a/y")
    assert not (Path(folder_store.root) / "a").exists()
    assert Path(folder_store.root).is_dir()


def test_temporary_files_of_killed_writers(folder_store: Store) -> None:
    folder_store.write("a/x", b"1")
    folder = Path(folder_store.root) / "a"
    old, new = folder / f"{RESERVED}tmp-old", folder / f"{RESERVED}tmp-new"
    old.write_bytes(b"part")
    os.utime(old, (time.time() - 90_000,) * 2)
    new.write_bytes(b"part")
    assert [i.path for i in folder_store.list("")] == ["a/x"]
    folder_store.delete("a/x")
    assert new.exists()  # may belong to a live writer
    new.unlink()
    old.write_bytes(b"part")
    os.utime(old, (time.time() - 90_000,) * 2)
    folder_store.write("a/x", b"1")
    folder_store.delete("a/x")
    assert not folder.exists()


def test_a_parent_that_vanishes_is_made_again(folder_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    # What a deletion elsewhere does between the making of the folder and that of the file.
    made = Path.mkdir
    vanished: list[Path] = []

    def vanish(folder: Path, *args: Any, **options: Any) -> None:
        made(folder, *args, **options)
        if folder.name == "folder" and len(vanished) < 3:
            folder.rmdir()
            vanished.append(folder)

    monkeypatch.setattr(Path, "mkdir", vanish)
    folder_store.write("deep/folder/x", b"1")
    assert folder_store.read("deep/folder/x") == b"1"
    assert len(vanished) == 3


def test_writes_survive_deletions_of_the_same_folder(folder_store: Store) -> None:
    def churn(number: int) -> None:
        for _ in range(40):
            assert folder_store.create(f"deep/er/folder/{number}", b"x")
            folder_store.delete(f"deep/er/folder/{number}")

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(churn, range(6)))
    assert list(folder_store.list("")) == []


def test_tags_hold_the_exact_time(folder_store: Store) -> None:
    # The kernel's stamp is that of its last tick: two writes within one could get one inode and one stamp.
    tags = set()
    for number in range(30):
        before = time.time_ns()
        folder_store.write("x", b"%02d" % number)
        stamp = (Path(folder_store.root) / "x").stat().st_mtime_ns
        assert before <= stamp <= time.time_ns()
        tags.add(folder_store.stat("x").tag)
    assert len(tags) == 30


RACER = """
import sys, time
from pathlib import Path
from tasks.storage.folder import FolderStore
root, number, start = sys.argv[1:]
store = FolderStore(Path(root))
print("ready", flush=True)
while not Path(start).exists():
    time.sleep(0.001)
print(*[k for k in range(20) if store.create(f"race/{k}", number.encode())])
"""


def test_one_process_of_three_creates_each(tmp_path: Path) -> None:
    root, start = tmp_path / "store", tmp_path / "start"
    environment = {**os.environ, "PYTHONPATH": str(Path(tasks.storage.__file__).parents[2])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(root), str(number), str(start)],
            stdout=subprocess.PIPE, text=True, env=environment,
        )
        for number in range(3)
    ]  # fmt: skip
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    start.touch()
    won = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sorted(int(word) for line in won for word in line.split()) == list(range(20))
    store = FolderStore(root)
    for number, line in enumerate(won):
        assert all(store.read(f"race/{k}") == b"%d" % number for k in line.split())


PATHS = st.sampled_from(["a/x", "a/y", "a/b/x", "a-b/x", "a.b", "c", "d/e/f/g", "a/b/c/d"])
CONTENTS = st.binary(max_size=20)


class FolderAgainstDict(RuleBasedStateMachine):
    """Any sequence of operations leaves what the same sequence leaves in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.store = FolderStore(Path(self.folder.name) / "store")
        self.model: dict[str, bytes] = {}
        self.tags: dict[str, tuple[str, bool]] = {}  # path -> a tag seen, and whether it still holds

    def teardown(self) -> None:
        self.folder.cleanup()

    def _changed(self, path: str) -> None:
        if path in self.tags:
            self.tags[path] = (self.tags[path][0], False)

    @rule(path=PATHS, content=CONTENTS)
    def write(self, path: str, content: bytes) -> None:
        self.store.write(path, content)
        self.model[path] = content
        self._changed(path)

    @rule(path=PATHS, content=CONTENTS)
    def create(self, path: str, content: bytes) -> None:
        assert self.store.create(path, content) == (path not in self.model)
        self.model.setdefault(path, content)

    @rule(path=PATHS)
    def delete(self, path: str) -> None:
        self.store.delete(path)
        self.model.pop(path, None)
        self._changed(path)

    @rule(path=PATHS)
    def read(self, path: str) -> None:
        if path not in self.model:
            with pytest.raises(FileNotFoundError):
                self.store.read_with_tag(path)
            return
        content, tag = self.store.read_with_tag(path)
        assert content == self.model[path]
        assert self.store.stat(path).tag == tag
        self.tags[path] = (tag, True)

    @precondition(lambda self: self.tags)
    @rule(data=st.data(), content=CONTENTS)
    def replace(self, data: st.DataObject, content: bytes) -> None:
        path = data.draw(st.sampled_from(sorted(self.tags)))
        tag, holds = self.tags[path]
        assert self.store.replace(path, content, tag) == holds
        if holds:
            self.model[path] = content
            self._changed(path)

    @rule(path=PATHS, start=st.integers(0, 25), length=st.none() | st.integers(0, 25))
    def range(self, path: str, start: int, length: int | None) -> None:
        if path in self.model:
            end = None if length is None else start + length
            assert self.store.read(path, start, length) == self.model[path][start:end]

    @rule(prefix=st.sampled_from(["", "a", "a/", "a/b", "a-", "d/e/f/", "x"]))
    def list(self, prefix: str) -> None:
        found = [(info.path, info.size) for info in self.store.list(prefix)]
        assert found == [(p, len(c)) for p, c in sorted(self.model.items()) if p.startswith(prefix)]

    @invariant()
    def only_objects_are_on_disk(self) -> None:
        root = Path(self.store.root)
        files = {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() and RESERVED not in str(p)}
        assert files == set(self.model)
        assert _temporary_files(self.store) == []
        empty = [p for p in root.rglob("*") if p.is_dir() and not any(p.iterdir())]
        assert empty == []


TestFolderAgainstDict = FolderAgainstDict.TestCase
TestFolderAgainstDict.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
