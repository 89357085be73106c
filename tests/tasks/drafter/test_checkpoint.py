from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tasks.contract.errors import StorageError
from tasks.drafter.checkpoint import Checkpoints, Superseded, TrainingState
from tasks.storage.folder import FolderStore
from tests.tasks.drafter.cases import normal


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "store")


def state(step: int, best_step: int = 0) -> TrainingState:
    tensors = [{"fc.weight": normal(3, 4, seed=step + i)} for i in range(4)]
    return TrainingState(
        step, step - 1, best_step, 1.5, None, [{"step": step, "metrics": {"train/loss": 0.1 + 0.2}}], *tensors
    )


def names(store: FolderStore) -> list[str]:
    return sorted(info.path for info in store.list("train/"))


def test_a_checkpoint_comes_back_bit_by_bit(store: FolderStore) -> None:
    Checkpoints(store, "key", "a1").save(state(7, best_step=5))
    found = Checkpoints(store, "key", "a2").load()
    assert found is not None
    expected = state(7, best_step=5)
    for name, value in expected.__dict__.items():
        if isinstance(value, dict):
            assert torch.equal(getattr(found, name)["fc.weight"], value["fc.weight"]), name
        else:
            assert getattr(found, name) == value
    assert Checkpoints(store, "other", "a1").load() is None


def test_the_best_weights_are_not_stored_twice(store: FolderStore) -> None:
    now = state(7, best_step=7)
    now.best_weights = now.weights
    Checkpoints(store, "key", "a1").save(now)
    assert not [name for name in names(store) if "best_weights" in name]
    found = Checkpoints(store, "key", "a2").load()
    assert found is not None
    assert torch.equal(found.best_weights["fc.weight"], now.weights["fc.weight"])
    assert found.best_weights["fc.weight"].data_ptr() != found.weights["fc.weight"].data_ptr()


def test_the_last_two_are_kept(store: FolderStore) -> None:
    checkpoints = Checkpoints(store, "key", "a1")
    for step in (1, 2, 3, 4):
        checkpoints.save(state(step))
    assert {name.split("/")[3] for name in names(store) if "/checkpoint" in name} == {
        "checkpoint-00000003",
        "checkpoint-00000004",
    }
    later = Checkpoints(store, "key", "a2")
    later.save(state(4))  # an attempt that stopped where it had begun
    later.save(state(5))
    prefixes = [entry["prefix"] for entry in json.loads(store.read("train/key/latest.json"))["checkpoints"]]
    assert prefixes == ["train/key/a2/checkpoint-00000005", "train/key/a2/checkpoint-00000004"]
    assert not [name for name in names(store) if "/a1/" in name]


@pytest.mark.parametrize(
    "object_name", ["weights.safetensors", "second_moments.safetensors", "state.json", "manifest.json"]
)
@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_a_damaged_newest_checkpoint_is_passed_over(
    store: FolderStore, object_name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(store, "key", "a1")
    checkpoints.save(state(1))
    checkpoints.save(state(2))
    path = Path(store.root) / "train/key/a1/checkpoint-00000002" / object_name
    data = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    found = Checkpoints(store, "key", "a2").load()
    assert found is not None
    assert found.step == 1
    assert "checkpoint at step 2 is passed over" in caplog.text


def test_a_damaged_pointer_and_a_first_start_have_no_checkpoint(store: FolderStore) -> None:
    checkpoints = Checkpoints(store, "key", "a1")
    assert checkpoints.load() is None
    checkpoints.save(state(3))
    store.write("train/key/latest.json", b'{"fence": 1, "check')
    later = Checkpoints(store, "key", "a2")
    assert later.load() is None
    later.save(state(1))
    with pytest.raises(Superseded):
        checkpoints.save(state(4))


def test_an_older_attempt_cannot_move_the_pointer_back(store: FolderStore) -> None:
    old = Checkpoints(store, "key", "a1")
    old.save(state(1))
    new = Checkpoints(store, "key", "a2")
    new.save(state(2))
    with pytest.raises(Superseded, match="attempt a1 ends here"):
        old.save(state(9))
    pointer = json.loads(store.read("train/key/latest.json"))
    assert (pointer["fence"], pointer["attempt"], pointer["checkpoints"][0]["step"]) == (2, "a2", 2)
    new.save(state(3))


def test_a_write_whose_answer_was_lost_is_no_conflict(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(store, "key", "a1")
    replace = store.replace

    def twice(path: str, data: bytes, tag: str) -> bool:
        assert replace(path, data, tag)
        return replace(path, data, tag)  # what a client does that got no answer

    monkeypatch.setattr(store, "replace", twice)
    checkpoints.save(state(1))
    checkpoints.save(state(2))
    found = Checkpoints(FolderStore(store.root), "key", "a2").load()
    assert found is not None
    assert found.step == 2


def test_a_failing_store_does_not_start_the_training_anew(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(store, "key", "a1")
    checkpoints.save(state(1))

    def down(*args: object) -> None:
        raise StorageError("connection refused")

    monkeypatch.setattr(store, "download", down)
    with pytest.raises(StorageError):
        checkpoints.load()


def test_a_crash_while_saving_leaves_the_one_before(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(store, "key", "a1")
    checkpoints.save(state(1))
    write, written = store.write, []

    def crash(path: str, data: bytes | Path) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path)
        write(path, data)

    monkeypatch.setattr(store, "write", crash)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(state(2))
    monkeypatch.undo()
    later = Checkpoints(store, "key", "a2")
    found = later.load()
    assert found is not None
    assert found.step == 1
    later.remove_all()
    assert names(store) == []  # what the crash left as well
