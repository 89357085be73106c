"""`tokenize` and `assemble` run as the pipeline runs them: a tiny target in a folder, a folder as the store."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tasks.contract.errors import DataError
from tasks.contract.spec import RunSpec
from tasks.data.sources import resolve_sources
from tasks.data.token_shard import read_token_shard
from tests.tasks.stages.data_runs import Run, chat_rows, make_tiny_target, write_rows


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory) -> Path:
    return make_tiny_target(tmp_path_factory)


@pytest.fixture
def run(tmp_path, tiny_target) -> Run:
    return Run(tmp_path, tiny_target)


def test_counts_add_up_and_rejects_name_their_lines(run):
    rows = chat_rows(6)
    lines = [json.dumps(row) for row in rows[:3]] + ["{broken", json.dumps({"prompt": "only"})]
    lines += [json.dumps({"messages": [{"role": "robot", "content": "x"}]})] + [json.dumps(row) for row in rows[3:]]
    path = write_rows(run.folder / "a.jsonl", lines)
    receipt = run.tokenize([path + "#slice=code"])
    assert receipt.counts["read"] == 9
    assert (receipt.counts["kept"], receipt.counts["rejected"]) == (6, 3)
    assert receipt.counts["samples"] == 6
    rejects = [json.loads(line) for line in run.read(receipt, "rejects.jsonl").splitlines()]
    assert [(r["source"], r["line"], r["reason"]) for r in rejects] == [
        (path, 4, "bad_json"), (path, 5, "no_answer"), (path, 6, "unknown_role"),
    ]  # fmt: skip
    assert "robot" in rejects[2]["detail"]
    report = json.loads(run.read(receipt, "report.json"))
    assert report["files"][0]["formats"] == {"messages": 7}
    assert report["files"][0]["slice"] == "code"
    assert report["rejected"] == {"bad_json": 1, "no_answer": 1, "unknown_role": 1}
    assert sum(report["lengths"].values()) == 6


def test_samples_stand_in_row_order_with_ids_and_origin(run):
    rows = chat_rows(3)
    rows[1]["origin"] = "greedy"
    receipt = run.tokenize([write_rows(run.folder / "a.jsonl", rows)])
    shard = read_token_shard(run.path(receipt, "tokenized.safetensors"))
    assert [sample.origin for sample in shard.samples] == ["data", "greedy", "data"]
    sample = shard.samples[0]
    data = sample.input_ids.astype("<i4").tobytes() + sample.loss_mask.tobytes()
    assert sample.sample_id == hashlib.sha256(data).digest()[:16]
    assert receipt.counts["tokens"] == sum(len(s.input_ids) for s in shard.samples)
    assert receipt.counts["supervised_tokens"] == sum(int(s.loss_mask.sum()) for s in shard.samples)


def test_result_depends_on_the_rows_and_not_on_the_batches(run, monkeypatch):
    path = write_rows(run.folder / "a.jsonl", chat_rows(12))
    first = run.tokenize([path])
    monkeypatch.setattr("tasks.data.samples.BATCH_ROWS", 5)
    again = Run(run.folder / "other", run.target).tokenize([path])
    assert first.key == again.key
    assert [o.sha256 for o in first.objects] == [o.sha256 for o in again.objects]


def test_key_covers_files_length_and_thinking(run):  # TOK-19
    rows = chat_rows(2)
    path = write_rows(run.folder / "a.jsonl", rows)
    files = {"files": resolve_sources([path])}
    key = run.request("tokenize", {"target": [run.target_ref]}, files).key()
    assert run.request("tokenize", {"target": [run.target_ref]}, files).key() == key
    for change in ({"max_length": 100}, {"thinking": "on"}, {"supervise": "last_turn"}):
        spec = RunSpec(**{**run.spec.model_dump(), **change})
        assert run.request("tokenize", {"target": [run.target_ref]}, files, spec).key() != key
    write_rows(Path(path), rows[:1])
    changed = {"files": resolve_sources([path])}
    assert run.request("tokenize", {"target": [run.target_ref]}, changed).key() != key


def test_file_that_changed_since_planning_fails_the_stage(run):
    path = write_rows(run.folder / "a.jsonl", chat_rows(2))
    files = resolve_sources([path])
    write_rows(Path(path), chat_rows(3))
    with pytest.raises(DataError, match="changed since"):
        run.tokenize_files(files)
