"""What every store promises, on a folder and on a real S3 server."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from tasks.contract.errors import ConfigurationError
from tasks.storage import Store, open_store

RACERS = 16
ESCAPES = ["../out", "a/../../out", "/etc/passwd", "a//b", "", ".", "a/", "a\\b", "a\nb", ".store-locks/00", "a\0b"]


def test_written_bytes_are_read_back(store: Store) -> None:
    # STO-02: "hello\n", through the client's own checksum framing.
    store.write("a/b.txt", b"hello\n")
    assert store.read("a/b.txt") == b"hello\n"
    info = store.stat("a/b.txt")
    assert (info.path, info.size) == ("a/b.txt", 6)
    assert abs(info.modified - time.time()) < 60


def test_write_replaces_and_takes_files(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "source.bin"
    source.write_bytes(os.urandom(3_000_000))
    store.write("a/b.bin", b"old")
    before = store.stat("a/b.bin").tag
    store.write("a/b.bin", source)
    assert store.read("a/b.bin") == source.read_bytes()
    assert store.stat("a/b.bin").tag != before


def test_empty_objects_and_odd_names(store: Store) -> None:
    for path in ["empty", "k=v/100%/plus+ and blank.json", "ünï/кодировка"]:
        store.write(path, b"")
        assert store.read(path) == b""
        assert store.exists(path)
    assert sorted(i.path for i in store.list("")) == sorted(["empty", "k=v/100%/plus+ and blank.json", "ünï/кодировка"])


@pytest.mark.parametrize(
    ("start", "length", "expected"),
    [(0, None, b"0123456789"), (3, 4, b"3456"), (8, 100, b"89"), (7, None, b"789"), (10, 5, b""), (99, None, b""),
     (4, 0, b"")],
)  # fmt: skip
def test_ranges(store: Store, start: int, length: int | None, expected: bytes) -> None:
    store.write("digits", b"0123456789")
    assert store.read("digits", start, length) == expected


def test_negative_range_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        store.read("digits", -1)


def test_absent_objects(store: Store, tmp_path: Path) -> None:
    store.write("there/is/one", b"x")
    for path in ["absent", "there", "there/is", "there/is/one/more"]:
        assert not store.exists(path)
        for read in (store.read, store.read_with_tag, store.stat, lambda p: store.download(p, tmp_path / "copy")):
            with pytest.raises(FileNotFoundError, match=f"no such object in {store.root}"):
                read(path)
        assert store.replace(path, b"y", "tag") is False
    with pytest.raises(FileNotFoundError):
        store.read("absent", 3, 0)
    store.delete("absent")
    assert list(tmp_path.glob("copy*")) == []
    assert [i.path for i in store.list("")] == ["there/is/one"]


@pytest.mark.parametrize("path", ESCAPES)
def test_paths_stay_below_the_root(store: Store, path: str) -> None:
    for write in (store.write, store.create):
        with pytest.raises(ValueError, match="object path"):
            write(path, b"x")
    with pytest.raises(ValueError, match="object path"):
        store.read(path)
    with pytest.raises(ValueError, match="object path"):
        store.delete(path)


def test_lists_refuse_foreign_prefixes(store: Store) -> None:
    for prefix in ["../", "/etc", "a/../"]:
        with pytest.raises(ValueError, match="object p"):
            list(store.list(prefix))


def test_download(store: Store, tmp_path: Path) -> None:
    content = os.urandom(1_000_000)
    store.write("x", content)
    target = tmp_path / "new" / "copy"
    store.download("x", target)
    assert target.read_bytes() == content
    assert list(target.parent.iterdir()) == [target]


def test_create_writes_once(store: Store) -> None:
    assert store.create("a/receipt.json", b"first") is True
    assert store.create("a/receipt.json", b"second") is False
    assert store.create("a/receipt.json", b"first") is False
    assert store.read("a/receipt.json") == b"first"
    store.delete("a/receipt.json")
    assert store.create("a/receipt.json", b"third") is True


def test_replace_needs_the_tag_of_the_content(store: Store) -> None:
    store.write("latest", b"1")
    content, first = store.read_with_tag("latest")
    assert (content, store.stat("latest").tag) == (b"1", first)
    assert store.replace("latest", b"2", first) is True
    assert store.replace("latest", b"3", first) is False
    content, second = store.read_with_tag("latest")
    assert content == b"2"
    assert store.replace("latest", b"3", second) is True
    store.delete("latest")
    assert store.replace("latest", b"4", second) is False
    assert not store.exists("latest")


def test_of_sixteen_creates_one_wins(store: Store) -> None:
    barrier = Barrier(RACERS)

    def race(number: int) -> bool:
        barrier.wait()
        return store.create(f"race/{round_}", b"by %d" % number)

    for round_ in range(3):
        with ThreadPoolExecutor(RACERS) as pool:
            won = list(pool.map(race, range(RACERS)))
        assert won.count(True) == 1
        assert store.read(f"race/{round_}") == b"by %d" % won.index(True)


def test_of_sixteen_replaces_one_wins(store: Store) -> None:
    barrier = Barrier(RACERS)
    store.write("pointer", b"start")

    def race(number: int) -> bool:
        barrier.wait()
        return store.replace("pointer", b"%d by %d" % (round_, number), tag)

    for round_ in range(3):
        _, tag = store.read_with_tag("pointer")
        with ThreadPoolExecutor(RACERS) as pool:
            won = list(pool.map(race, range(RACERS)))
        assert won.count(True) == 1
        assert store.read("pointer") == b"%d by %d" % (round_, won.index(True))


def test_counter_by_compare_and_set_loses_nothing(store: Store) -> None:
    store.write("counter", b"0")

    def count(_: int) -> None:
        while True:
            content, tag = store.read_with_tag("counter")
            if store.replace("counter", b"%d" % (int(content) + 1), tag):
                return

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count, range(20)))
    assert store.read("counter") == b"20"


def test_list_is_by_prefix_and_in_path_order(store: Store) -> None:
    paths = ["a-b/x", "a/x", "a/y/z", "a.b", "ab", "a/y-/z", "b/x", "a/y/a/deep/one"]
    for path in paths:
        store.write(path, path.encode())
    assert [i.path for i in store.list("")] == sorted(paths)
    assert [i.path for i in store.list("a/")] == ["a/x", "a/y-/z", "a/y/a/deep/one", "a/y/z"]
    assert [i.path for i in store.list("a")] == sorted(p for p in paths if p.startswith("a"))
    assert [i.path for i in store.list("a/y/a/deep/o")] == ["a/y/a/deep/one"]
    assert list(store.list("nothing/")) == []
    assert {i.path: i.size for i in store.list("b")} == {"b/x": 3}


def test_more_than_a_thousand_objects_are_listed(store: Store) -> None:
    # STO-04: 1,003 shards; a page of S3 holds 1,000.
    paths = [f"states/{number:032x}/receipt.json" for number in range(1003)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda path: store.write(path, b"{}"), paths))
    assert [i.path for i in store.list("states/")] == paths


def test_probe_finds_nothing_and_leaves_nothing(store: Store) -> None:
    assert list(store.probe()) == []
    assert list(store.list("")) == []


def test_stores_of_one_root_share_objects_and_others_do_not(store: Store) -> None:
    store.write("x", b"1")
    assert open_store(store.root).read("x") == b"1"
    assert open_store(f"{store.root}/").root == store.root
    assert not open_store(f"{store.root}-other").exists("x")


@pytest.mark.parametrize("root", ["", " ", "gs://bucket/x", "http://host/x", "s3://", "s3:///x", "file://host/x",
                                  "s3://bucket/../x", "s3://bucket/a//b"])  # fmt: skip
def test_roots_that_are_none_are_refused(root: str) -> None:
    with pytest.raises(ConfigurationError, match="store: found"):
        open_store(root)


def test_folder_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for root in ["a b", str(tmp_path / "a b"), f"file://{tmp_path}/a%20b", "./x/../a b"]:
        assert open_store(root).root == str(tmp_path / "a b")
    assert not (tmp_path / "a b").exists()  # nothing is made before something is written
