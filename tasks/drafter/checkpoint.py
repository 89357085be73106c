"""Checkpoints of a training, in the artifact store: whole or absent, moved forward by one writer only.

Objects first, then a manifest that names them with their digests, then the pointer `latest.json`, by compare-and-set.
The pointer holds a fencing number: an attempt takes it over by raising the number, and from then on an older attempt
that still lives cannot move it. A newest checkpoint that is damaged is passed over for the one before.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from tasks.contract.errors import StageError, StorageError
from tasks.contract.layout import artifact_prefix, checkpoint_prefix, latest_checkpoint_path
from tasks.storage.base import Store

log = logging.getLogger("tasks")
KEPT = 2


class Superseded(StageError):
    """Another attempt at the same training has taken over; this one must end."""


class DamagedCheckpoint(Exception):
    """A checkpoint's bytes are not those that its manifest names."""


@dataclass
class TrainingState:
    """Everything a training goes on from. The data's position and the learning rate follow from the step."""

    step: int = 0  # optimizer steps done
    evaluated_step: int = 0  # the last step after which the drafter was evaluated
    best_step: int = 0  # 0: never evaluated
    best_acceptance: float = 0.0
    best_validation_loss: float | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    first_moments: dict[str, Tensor] = field(default_factory=dict)
    second_moments: dict[str, Tensor] = field(default_factory=dict)
    best_weights: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class _Pointer:
    fence: int = 0
    attempt: str = ""
    checkpoints: list[dict[str, Any]] = field(default_factory=list)  # newest first: prefix, step, manifest (SHA-256)


_TENSORS = ("weights", "first_moments", "second_moments", "best_weights")
_STATE, _MANIFEST = "state.json", "manifest.json"


class Checkpoints:
    """The checkpoints of one training, for one attempt."""

    def __init__(self, store: Store, train_key: str, attempt: str) -> None:
        self._store, self._key, self._attempt = store, train_key, attempt
        self._path = latest_checkpoint_path(train_key)
        self._pointer, self._tag = self._take_over()

    # ---- the pointer ------------------------------------------------------------------------------------------------

    def _take_over(self) -> tuple[_Pointer, str]:
        while True:
            try:
                data, tag = self._store.read_with_tag(self._path)
            except FileNotFoundError:
                first = _Pointer(fence=1, attempt=self._attempt)
                if self._store.create(self._path, _encode(first)):
                    return first, self._own_tag(first)
                continue
            pointer = self._decode(data)
            pointer.fence, pointer.attempt = pointer.fence + 1, self._attempt
            if self._store.replace(self._path, _encode(pointer), tag):
                return pointer, self._own_tag(pointer)

    def _decode(self, data: bytes) -> _Pointer:
        try:
            return _Pointer(**json.loads(data))
        except (ValueError, TypeError) as error:
            log.warning("%s is damaged (%s): the training starts anew", self._path, error)
            return _Pointer()

    def _own_tag(self, pointer: _Pointer) -> str:
        """Tag of the pointer, which must be what this attempt wrote.

        Raises:
            Superseded: if it is another's.
        """
        try:
            data, tag = self._store.read_with_tag(self._path)
        except FileNotFoundError:
            data, tag = b"", ""
        if data != _encode(pointer):
            raise Superseded(
                f"training {self._key}: another attempt took over, or ended it; attempt {self._attempt} ends here"
            )
        return tag

    def _move(self, pointer: _Pointer) -> None:
        try:
            self._store.replace(self._path, _encode(pointer), self._tag)
        except FileNotFoundError:
            log.debug("%s is gone", self._path)
        # Judged by what is there: if an answer was lost, the repeated write reports a conflict with itself.
        self._tag = self._own_tag(pointer)
        self._pointer = pointer

    # ---- writing ----------------------------------------------------------------------------------------------------

    def save(self, state: TrainingState) -> None:
        """Write a checkpoint and move the pointer; older ones beyond the last two are removed.

        Raises:
            Superseded: if another attempt has taken over.
            StorageError: if the store fails.
        """
        prefix = checkpoint_prefix(self._key, self._attempt, state.step)
        objects: dict[str, dict[str, Any]] = {}
        with tempfile.TemporaryDirectory(prefix="drafter-") as folder:
            for group in _TENSORS:
                if group == "best_weights" and state.best_step in (0, state.step):
                    continue  # none yet, or the very weights
                file = Path(folder) / f"{group}.safetensors"
                save_file({n: t.detach().cpu().contiguous() for n, t in getattr(state, group).items()}, file)
                self._put(prefix, file, objects)
                file.unlink()
            facts = Path(folder) / _STATE
            facts.write_text(json.dumps({n: v for n, v in state.__dict__.items() if n not in _TENSORS}))
            self._put(prefix, facts, objects)
        manifest = json.dumps(objects, sort_keys=True).encode()
        self._store.write(f"{prefix}/{_MANIFEST}", manifest)
        entry = {"prefix": prefix, "step": state.step, "manifest": hashlib.sha256(manifest).hexdigest()}
        old = [e for e in self._pointer.checkpoints if e["prefix"] != prefix]
        self._move(_Pointer(self._pointer.fence, self._attempt, [entry, *old][:KEPT]))
        for gone in old[KEPT - 1 :]:
            self._remove(f"{gone['prefix']}/")

    def _put(self, prefix: str, file: Path, objects: dict[str, dict[str, Any]]) -> None:
        objects[file.name] = {"size": file.stat().st_size, "sha256": _sha256(file)}
        self._store.write(f"{prefix}/{file.name}", file)

    # ---- reading ----------------------------------------------------------------------------------------------------

    def load(self) -> TrainingState | None:
        """The newest checkpoint that is whole, or None.

        Raises:
            StorageError: if the store fails; a training must not start anew because the network is down.
        """
        for entry in self._pointer.checkpoints:
            try:
                return self._read(entry)
            except (DamagedCheckpoint, FileNotFoundError) as error:
                log.warning("checkpoint at step %d is passed over: %s", entry["step"], error)
        return None

    def _read(self, entry: dict[str, Any]) -> TrainingState:
        prefix = entry["prefix"]
        manifest = self._store.read(f"{prefix}/{_MANIFEST}")
        if hashlib.sha256(manifest).hexdigest() != entry["manifest"]:
            raise DamagedCheckpoint(f"{prefix}/{_MANIFEST} is not the manifest that {self._path} names")
        with tempfile.TemporaryDirectory(prefix="drafter-") as folder:
            files = {}
            for name, expected in json.loads(manifest).items():
                files[name] = Path(folder) / name
                self._store.download(f"{prefix}/{name}", files[name])
                size, digest = files[name].stat().st_size, _sha256(files[name])
                if (size, digest) != (expected["size"], expected["sha256"]):
                    raise DamagedCheckpoint(
                        f"{prefix}/{name}: {size:,} bytes with SHA-256 {digest}, expected {expected['size']:,} bytes "
                        f"with {expected['sha256']}"
                    )
            state = TrainingState(**json.loads(files[_STATE].read_text()))
            for group in _TENSORS:
                if file := files.get(f"{group}.safetensors"):
                    setattr(state, group, {name: t.clone() for name, t in load_file(file).items()})
        if state.best_step == state.step:
            state.best_weights = {name: tensor.clone() for name, tensor in state.weights.items()}
        return state

    def remove_all(self) -> None:
        """Remove the pointer and every checkpoint, crashed attempts' included: the final receipt made them useless."""
        try:
            self._store.delete(self._path)
            self._remove(f"{artifact_prefix('train', self._key)}/", holding="/checkpoint-")
        except StorageError as error:
            log.warning("checkpoints of training %s could not be removed: %s", self._key, error)

    def _remove(self, prefix: str, holding: str = "") -> None:
        for info in list(self._store.list(prefix)):
            if holding in info.path:
                self._store.delete(info.path)


def _encode(pointer: _Pointer) -> bytes:
    return json.dumps(asdict(pointer)).encode()


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
