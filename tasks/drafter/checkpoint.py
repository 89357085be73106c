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

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tasks.contract.errors import StageError
from tasks.contract.layout import checkpoint_prefix, latest_checkpoint_path
from tasks.storage.base import Store

log = logging.getLogger("tasks")
KEPT = 2


class Superseded(StageError):
    """Another attempt at the same training has taken over; this one must end."""


@dataclass
class TrainingState:
    """Everything a training goes on from."""

    step: int  # optimizer steps done
    weights: dict[str, Tensor]
    first_moments: dict[str, Tensor]
    second_moments: dict[str, Tensor]
    best_weights: dict[str, Tensor]
    best_step: int
    best_acceptance: float
    history: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class _Pointer:
    fence: int = 0
    attempt: str = ""
    checkpoints: list[dict[str, Any]] = field(default_factory=list)  # newest first: prefix, step, manifest (SHA-256)


_GROUPS = ("weights", "first_moments", "second_moments", "best_weights")


class Checkpoints:
    """The checkpoints of one training, for one attempt."""

    def __init__(self, store: Store, train_key: str, attempt: str) -> None:
        self._store, self._key, self._attempt = store, train_key, attempt
        self._path = latest_checkpoint_path(train_key)
        self._pointer, self._tag = self._take_over()

    def _take_over(self) -> tuple[_Pointer, str]:
        while True:
            try:
                data, tag = self._store.read_with_tag(self._path)
            except FileNotFoundError:
                first = _Pointer(fence=1, attempt=self._attempt)
                if self._store.create(self._path, _encode(first)):
                    return first, self._store.read_with_tag(self._path)[1]
                continue
            pointer = _Pointer(**json.loads(data))
            pointer.fence, pointer.attempt = pointer.fence + 1, self._attempt
            if self._store.replace(self._path, _encode(pointer), tag):
                return pointer, self._store.read_with_tag(self._path)[1]

    def _move(self, pointer: _Pointer) -> None:
        if not self._store.replace(self._path, _encode(pointer), self._tag):
            raise Superseded(f"training {self._key}: another attempt has taken over after {self._attempt}; this one ends")
        self._tag = self._store.read_with_tag(self._path)[1]
        self._pointer = pointer

    def save(self, state: TrainingState) -> None:
        """Write a checkpoint and move the pointer; older ones beyond the last two are removed.

        Raises:
            Superseded: if another attempt has taken over.
        """
        prefix = checkpoint_prefix(self._key, self._attempt, state.step)
        objects = {}
        with tempfile.TemporaryDirectory(prefix="drafter-") as folder:
            for group in _GROUPS:
                file = Path(folder) / f"{group}.safetensors"
                save_file({n: t.detach().cpu().contiguous() for n, t in getattr(state, group).items()}, file)
                objects[file.name] = _describe(file.read_bytes())
                self._store.write(f"{prefix}/{file.name}", file)
        facts = {n: getattr(state, n) for n in ("step", "best_step", "best_acceptance", "history")}
        data = json.dumps(facts).encode()
        objects["state.json"] = _describe(data)
        self._store.write(f"{prefix}/state.json", data)
        manifest = json.dumps(objects, sort_keys=True).encode()
        self._store.write(f"{prefix}/manifest.json", manifest)
        entry = {"prefix": prefix, "step": state.step, "manifest": hashlib.sha256(manifest).hexdigest()}
        old = [e for e in self._pointer.checkpoints if e["prefix"] != prefix]
        self._move(_Pointer(self._pointer.fence, self._attempt, [entry, *old][:KEPT]))
        for gone in old[KEPT - 1 :]:
            self._remove(gone["prefix"])
        log.info("checkpoint at step %d", state.step)

    def load(self) -> TrainingState | None:
        """The newest checkpoint that is whole, or None."""
        for entry in self._pointer.checkpoints:
            try:
                return self._read(entry)
            except (ValueError, FileNotFoundError) as error:
                log.warning("checkpoint at step %d is passed over: %s", entry["step"], error)
        return None

    def _read(self, entry: dict[str, Any]) -> TrainingState:
        prefix = entry["prefix"]
        manifest = self._store.read(f"{prefix}/manifest.json")
        _require(manifest, entry["manifest"], None, f"{prefix}/manifest.json")
        with tempfile.TemporaryDirectory(prefix="drafter-") as folder:
            files = {}
            for name, described in json.loads(manifest).items():
                files[name] = Path(folder) / name
                self._store.download(f"{prefix}/{name}", files[name])
                _require(files[name].read_bytes(), described["sha256"], described["size"], f"{prefix}/{name}")
            facts = json.loads(files["state.json"].read_text())
            groups = {group: load_file(files[f"{group}.safetensors"]) for group in _GROUPS}
            return TrainingState(**facts, **groups)

    def remove_all(self) -> None:
        """Remove every checkpoint and the pointer: the final receipt has made them useless."""
        for entry in self._pointer.checkpoints:
            self._remove(entry["prefix"])
        self._store.delete(self._path)

    def _remove(self, prefix: str) -> None:
        for info in list(self._store.list(f"{prefix}/")):
            self._store.delete(info.path)


def _encode(pointer: _Pointer) -> bytes:
    return json.dumps(asdict(pointer)).encode()


def _describe(data: bytes) -> dict[str, Any]:
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _require(data: bytes, sha256: str, size: int | None, name: str) -> None:
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        detail = f"{len(data):,} bytes" + (f" of {size:,}" if size is not None else "")
        raise ValueError(f"{name}: SHA-256 {found} ({detail}), expected {sha256}")


def moments(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """First and second moments of an AdamW optimizer by parameter name."""
    first, second = {}, {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if state := optimizer.state.get(parameter):
                first[names[id(parameter)]] = state["exp_avg"]
                second[names[id(parameter)]] = state["exp_avg_sq"]
    return first, second
