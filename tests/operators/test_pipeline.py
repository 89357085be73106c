"""The small tasks between the stages, and the end of the MLflow run."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException

from operators.pipeline import MAX_MAPPED, end_mlflow_run, file_groups, mlflow_outcome, shard_groups
from tasks.contract.receipt import Receipt
from tasks.contract.spec import RunSpec
from tasks.storage.artifact import ArtifactWriter


def assembled(deployment, shards: list[dict[str, Any]]) -> dict[str, Any]:
    key = "b" * 32
    receipt = Receipt(
        kind="assemble", version=1, key=key, identity=key, attempt="1",
        details={"shards": shards, "rejected": {"no supervised tokens": 12}},
    )  # fmt: skip
    stored = ArtifactWriter(deployment.store, "assemble", key, "1").commit(receipt)
    return {"ref": stored.ref().model_dump(), "store": deployment.store.root}


def shard(n: int, tokens: int) -> dict[str, Any]:
    ref = {"kind": "tokens", "key": f"{n:032x}", "identity": f"{n:032x}", "digest": "0" * 64}
    return {"ref": ref, "split": "train", "samples": 1, "tokens": tokens}


def test_file_groups_are_arguments_of_tokenize(deployment):
    plan = deployment.plan(file_groups=[["a.jsonl"], ["b.jsonl", "c.jsonl"]])
    assert file_groups.function(plan) == [{"files": ["a.jsonl"]}, {"files": ["b.jsonl", "c.jsonl"]}]


def test_shard_groups_are_balanced_and_as_many_as_the_spec_says(deployment):
    spec = RunSpec(extract_groups=3).model_dump(mode="json")
    plan = deployment.plan(spec=spec)
    assemble = assembled(deployment, [shard(n, tokens) for n, tokens in enumerate([900, 100, 100, 800, 700])])
    groups = shard_groups.function(plan, assemble)
    assert [[int(ref["key"], 16) for ref in group] for group in groups] == [[0], [1, 4], [2, 3]]


def test_nothing_to_do_is_a_failure_with_its_reason(deployment):
    """ORC-11: over an empty list Airflow would skip the rest of the run."""
    with pytest.raises(AirflowFailException, match=r"file groups: found 0; .*no source file"):
        file_groups.function(deployment.plan(file_groups=[]))


def test_no_shards_is_a_failure_with_its_reason(deployment):
    with pytest.raises(AirflowFailException, match=r"shard groups: found 0; .*no row was kept"):
        shard_groups.function(deployment.plan(), assembled(deployment, []))


def test_more_groups_than_airflow_maps_over_are_refused(deployment):
    """ORC-10."""
    with pytest.raises(AirflowFailException, match=f"found {MAX_MAPPED + 1}; expected at most {MAX_MAPPED}"):
        file_groups.function(deployment.plan(file_groups=[["f"]] * (MAX_MAPPED + 1)))


@pytest.mark.parametrize(
    ("states", "outcome"),
    [
        ({"plan": "success", "extract_0": "success"}, "FINISHED"),
        ({"plan": "success", "extract_0": "failed", "train": "upstream_failed"}, "FAILED"),
        ({"plan": "success", "train": "None"}, "FAILED"),
        ({"plan": "success", "extract_0": "failed", "train": "skipped"}, "KILLED"),
        ({"plan": "success", "extract_0": "removed"}, "KILLED"),
    ],
)
def test_outcome_of_the_mlflow_run(states, outcome):
    assert mlflow_outcome(states) == outcome


@pytest.mark.slow
def test_mlflow_run_is_ended_by_id_or_found_by_its_tag(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlruns'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.create_experiment("drafters")
    first, second, other = (
        client.create_run(experiment, tags={"drafter.run_id": name}).info.run_id for name in ("r1", "r2", "r3")
    )
    assert end_mlflow_run("FAILED", "r1", first) == "FAILED"
    assert end_mlflow_run("KILLED", "r2", None) == "KILLED"  # `plan` failed after it had made the run
    assert end_mlflow_run("KILLED", "r9", None) is None
    assert [client.get_run(run).info.status for run in (first, second, other)] == ["FAILED", "KILLED", "RUNNING"]
