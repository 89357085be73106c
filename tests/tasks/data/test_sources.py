from __future__ import annotations

import contextlib
import gzip
import importlib.util
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.contract.errors import ConfigurationError, DataError
from tasks.data.reading import read_rows
from tasks.data.rejection import Rejection, RejectReason
from tasks.data.sources import Source, file_groups, file_sha256, parse_source, resolve_sources
from tasks.storage import open_store

ROW = {"messages": [{"role": "user", "content": "Q é"}, {"role": "assistant", "content": "A"}]}


def write(path: Path, data: str | bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)


def rows_of(source: str):
    [file] = resolve_sources([source])
    return list(read_rows(file))


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("a/b.jsonl", Source("a/b.jsonl", "default", None)),
        ("s3://b/k*.jsonl#slice=code", Source("s3://b/k*.jsonl", "code", None)),
        ("a#limit=5", Source("a", "default", 5)),
        ("a#b.jsonl#slice=x y,limit=5", Source("a#b.jsonl", "x y", 5)),
    ],
)
def test_parse(text, source):
    assert parse_source(text) == source


@pytest.mark.parametrize("text", ["a#limit=0", "a#limit=x", "a#weight=2", "a#slice=", "#slice=x", "a#limit=1,limit=2"])
def test_wrong_options_are_refused(text):
    with pytest.raises(ConfigurationError, match="sources: found"):
        parse_source(text)


def test_glob_folder_and_order(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", "sub/README.md"):
        write(tmp_path / name, json.dumps(ROW))
    files = resolve_sources([f"{tmp_path}/b.jsonl#slice=first", f"{tmp_path}/**/*.jsonl#slice=rest"])
    assert [(Path(f["uri"]).name, f["slice"], f["order"]) for f in files] == [
        ("b.jsonl", "first", 0), ("a.jsonl", "rest", 1), ("c.jsonl", "rest", 2),
    ]  # fmt: skip
    assert files[0]["sha256"] == file_sha256(tmp_path / "b.jsonl")
    assert [Path(f["uri"]).name for f in resolve_sources([str(tmp_path)])] == ["a.jsonl", "b.jsonl", "c.jsonl"]


def test_objects_in_s3_by_glob(tmp_path, monkeypatch):
    for key in ("chats/2.jsonl", "chats/1.jsonl", "chats/sub/3.jsonl", "chats/1.jsonl.bak", "other/4.jsonl"):
        write(tmp_path / "bucket" / key, json.dumps(ROW))
    monkeypatch.setattr("tasks.data.sources.open_store", lambda root: open_store(str(tmp_path / root[5:])))
    files = resolve_sources(["s3://bucket/chats/*.jsonl#slice=a", "s3://bucket/**/*.jsonl#slice=b"])
    assert [(f["uri"], f["slice"]) for f in files] == [
        ("s3://bucket/chats/1.jsonl", "a"), ("s3://bucket/chats/2.jsonl", "a"),
        ("s3://bucket/chats/sub/3.jsonl", "b"), ("s3://bucket/other/4.jsonl", "b"),
    ]  # fmt: skip
    assert "sha256" not in files[0]
    assert [row for _, row in read_rows(files[0])] == [ROW]
    write(tmp_path / "bucket/chats/1.jsonl", json.dumps(ROW).replace("A", "B"))
    with pytest.raises(DataError, match="changed since"):
        list(read_rows(files[0]))
    (tmp_path / "bucket/chats/2.jsonl").unlink()
    with pytest.raises(DataError, match="gone since"):
        list(read_rows(files[1]))
    for wrong in ("s3://bucket/none.jsonl", "s3://bucket/none*", "s3://bucket"):
        with pytest.raises(ConfigurationError, match="sources"):
            resolve_sources([wrong])


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.sampled_from([b"[", b"]", b"{", b"}", b",", b":", b'"', b"\n", b" ", b"\\ud83d", b"\xff", b"1", b"null",
                         json.dumps(ROW).encode(), b'{"messages": [{"role": "user"}]}', b"\xef\xbb\xbf", b"\0"]),
        min_size=1, max_size=12,
    )
)  # fmt: skip
def test_any_bytes_are_rows_rejections_or_one_error(tmp_path, parts):
    source = write(tmp_path / "a.jsonl", b"".join(parts))
    rows = []
    with contextlib.suppress(DataError):  # a list that is cut off
        rows = rows_of(source)
    assert all(isinstance(row, dict | Rejection) for _, row in rows)
    assert [line for line, _ in rows] == sorted(line for line, _ in rows)


def test_sample_data_keeps_its_name():
    [file] = resolve_sources(["sample:smollm2_chat.jsonl#limit=2"])
    assert file["uri"] == "sample:smollm2_chat.jsonl"
    assert len(list(read_rows(file))) == 2


def test_every_wrong_source_is_named(tmp_path):
    empty = write(tmp_path / "empty.jsonl", b"")
    csv = write(tmp_path / "data.csv", "Query,Tool\n")
    with pytest.raises(ConfigurationError) as caught:
        resolve_sources([str(tmp_path / "missing.jsonl"), f"{tmp_path}/*.nothing", empty, csv, "sample:none.jsonl"])
    problems = caught.value.problems
    assert [p.field for p in problems] == ["sources"] * 5
    assert "existing file" in problems[0].expected
    assert "matches at least one" in problems[1].expected
    assert "empty" in problems[2].expected
    assert "CSV" in problems[3].expected
    assert "smollm2_chat.jsonl" in problems[4].expected


def test_limit_counts_over_all_files_of_a_source(tmp_path):
    for name, count in (("a", 3), ("b", 3), ("c", 3)):
        write(tmp_path / f"{name}.jsonl", "\n".join([json.dumps(ROW)] * count))
    files = resolve_sources([f"{tmp_path}/*.jsonl#limit=5"])
    assert [sum(1 for _ in read_rows(file)) for file in files] == [3, 2]


@pytest.mark.parametrize(
    ("name", "data", "lines"),
    [
        ("a.jsonl", json.dumps(ROW) + "\n\n" + json.dumps(ROW), [1, 3]),
        ("crlf.jsonl", "\r\n".join([json.dumps(ROW)] * 2) + "\r\n", [1, 2]),
        ("bom.jsonl", "\ufeff" + json.dumps(ROW, ensure_ascii=False), [1]),
        ("lines.json", (json.dumps(ROW) + "\n") * 2, [1, 2]),
        ("list.json", json.dumps([ROW, ROW, ROW], indent=2), [1, 2, 3]),
        ("list1.json", json.dumps([ROW, ROW], ensure_ascii=False), [1, 2]),
        ("object.json", json.dumps(ROW, indent=1), [1]),
        ("run.traj", json.dumps(ROW["messages"]), [1]),
        ("turns.jsonl", "\n".join(json.dumps(m) for m in ROW["messages"]), [1]),
        ("turnlists.jsonl", "\n".join([json.dumps(ROW["messages"])] * 2), [1, 2]),
        ("emptylist.json", "[ ]", []),
        ("blank.jsonl", " \n\n", []),
    ],
)
def test_layouts_are_found_by_content(tmp_path, name, data, lines):
    for path, content in ((name, data.encode()), (f"{name}.gz", gzip.compress(data.encode()))):
        rows = rows_of(write(tmp_path / path, content))
        assert [line for line, _ in rows] == lines
        assert all(row == ROW for _, row in rows)


def test_bad_lines_are_rejected_one_by_one(tmp_path):
    lines = [b'{"messages": [', json.dumps(ROW).encode(), b"[1, 2]", b"\xff\xfe", b"null", b"{" * 100_000, b"1" * 5000]
    rows = rows_of(write(tmp_path / "a.jsonl", b"\n".join(lines)))
    assert [line for line, _ in rows] == [1, 2, 3, 4, 5, 6, 7]
    reasons = [row.reason if isinstance(row, Rejection) else None for _, row in rows]
    assert reasons == [
        RejectReason.BAD_JSON, None, RejectReason.NOT_AN_OBJECT, RejectReason.BAD_ENCODING, RejectReason.NOT_AN_OBJECT,
        RejectReason.BAD_JSON, RejectReason.BAD_JSON,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("cut.json", json.dumps([ROW, ROW])[:-4].encode()),
        ("noend.json", json.dumps([ROW, ROW])[:-1].encode()),
        ("cut.jsonl.gz", gzip.compress((json.dumps(ROW) + "\n").encode() * 9999)[:-20]),
        ("not.jsonl.gz", json.dumps(ROW).encode()),
    ],
)
def test_damaged_file_is_an_error_and_not_a_shorter_file(tmp_path, name, data):
    with pytest.raises(DataError, match=name):
        rows_of(write(tmp_path / name, data))


def test_file_changed_since_planning_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    [file] = resolve_sources([write(path, json.dumps(ROW))])
    write(path, json.dumps(ROW).replace("A", "B"))
    with pytest.raises(DataError, match="changed since the run was planned"):
        list(read_rows(file))
    path.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        list(read_rows(file))


def test_null_fields_late_and_early(tmp_path):  # TOK-17
    rows = [{**ROW, "tools": None}] * 2000 + [{**ROW, "tools": "[]"}]
    found = rows_of(write(tmp_path / "a.jsonl", "\n".join(json.dumps(row) for row in rows)))
    assert [row for _, row in found] == rows


def test_long_list_is_read_across_buffers(tmp_path):
    rows = [{"prompt": "é" * size, "completion": "]},{[" * size} for size in (1, 400_000, 2, 300_000)]
    found = rows_of(write(tmp_path / "a.json", json.dumps(rows, ensure_ascii=False)))
    assert [row for _, row in found] == rows


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="reading Parquet needs pyarrow")
def test_parquet_rows_lose_the_nulls_of_other_rows(tmp_path):  # TOK-11
    import pyarrow
    import pyarrow.parquet

    rows = [{**ROW, "tools": [{"name": "f", "parameters": {p: {"type": "string"}}}]} for p in ("a", "b")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [row for _, row in rows_of(str(tmp_path / "a.parquet"))] == rows
    with pytest.raises(DataError, match="Parquet"):
        rows_of(write(tmp_path / "bad.parquet", b"PAR1"))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 12))
def test_groups_cover_all_files_in_order(sizes, n):
    files = [{"uri": str(i), "size": size, "slice": "", "limit": None, "order": i} for i, size in enumerate(sizes)]
    groups = file_groups(files, n)
    assert [file for group in groups for file in group] == files
    assert len(groups) <= n
    assert all(groups)
    assert max(sum(f["size"] for f in g) for g in groups) <= sum(sizes) / n + 2 * max(sizes)
