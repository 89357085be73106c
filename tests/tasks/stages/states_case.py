"""A small world for the stages from `extract` to `check`: a store, a target receipt, token shards, and a way to run."""

from __future__ import annotations

import importlib
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tasks.contract.receipt import Receipt, ReceiptRef, StoredObject
from tasks.contract.request import RunContext, StageRequest
from tasks.contract.spec import RunSpec
from tasks.data.token_shard import Sample, TokenShard, sample_digest, write_token_shard
from tasks.stages.context import StageContext
from tasks.storage.artifact import ArtifactWriter, read_receipt
from tasks.storage.folder import FolderStore
from tasks.target.source import target_fingerprint
from tasks.tracking import NullTracker


@dataclass
class StatesCase:
    """Runs stages on a folder store."""

    folder: Path
    target_folder: Path
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store = FolderStore(self.folder / "store")
        self.spec = RunSpec(target=str(self.target_folder), **{**_DEFAULTS, **self.options})
        self.cache = self.folder / "cache"

    def context(self, stage: str, inputs: dict[str, Sequence[Receipt]], **args: Any) -> StageContext:
        refs = {name: [r.ref() for r in receipts] for name, receipts in inputs.items()}
        run = RunContext(run_id="test", task=stage)
        request = StageRequest(stage=stage, store=self.store.root, spec=self.spec, inputs=refs, args=args, run=run)
        return StageContext(request, self.store, NullTracker(), cache=self.cache)

    def run(self, stage: str, inputs: dict[str, Sequence[Receipt]], **args: Any) -> Receipt:
        with self.context(stage, inputs, **args) as ctx:
            return importlib.import_module(f"tasks.stages.{stage}").run(ctx)

    def target(self) -> Receipt:
        return self.run("target", {}, fingerprint=target_fingerprint(self.spec))

    def tokens(self, samples: Sequence[Sample], split: str = "train") -> Receipt:
        """Store one token shard, keyed by its samples."""
        key = sample_digest(np.concatenate([s.input_ids for s in samples]), np.array([len(samples)])).hex()
        path = self.folder / f"{key}.safetensors"
        write_token_shard(path, TokenShard(list(samples), ["chat"], {"split": split}))
        writer = ArtifactWriter(self.store, "tokens", key, attempt="a")
        writer.add("tokens.safetensors", path)
        counts = {"samples": len(samples), "tokens": sum(len(s.input_ids) for s in samples)}
        receipt = Receipt(
            kind="tokens", version=1, key=key, identity=key, objects=writer.objects, attempt="a", counts=counts,
            details={"split": split, "slices": ["chat"]},
        )  # fmt: skip
        return writer.commit(receipt)

    def assemble(self, shards: Sequence[Receipt]) -> Receipt:
        writer = ArtifactWriter(self.store, "assemble", "assembled", attempt="a")
        details = {
            "shards": [
                {"ref": s.ref().model_dump(), "split": s.details["split"], **s.counts} for s in shards
            ]
        }  # fmt: skip
        counts = {name: sum(s.counts[name] for s in shards) for name in ("samples", "tokens")}
        receipt = Receipt(
            kind="assemble",
            version=1,
            key="assembled",
            identity="assembled",
            attempt="a",
            counts=counts,
            details=details,
        )
        return writer.commit(receipt)

    def judge(self, target: Receipt, extract: Receipt) -> tuple[Receipt, Receipt]:
        return self.run("verify", {"extract": [extract]}), self.run("prove", {"target": [target], "extract": [extract]})

    def states(self, extract: Receipt, index: int = 0) -> Receipt:
        ref = ReceiptRef(**extract.details["shards"][index]["states"])
        return read_receipt(self.store, "states", ref.key)

    def path(self, stored: StoredObject) -> Path:
        return Path(self.store.root) / stored.path

    def fetch_text(self, receipt: Receipt, name: str) -> str:
        return self.path(receipt.object(name)).read_text()

    def forge(self, extract: Receipt, change: Callable[[dict[str, np.ndarray]], None], index: int = 0) -> Receipt:
        """What a faulty producer would have stored: states changed, all receipts made anew to agree with them."""
        states = self.states(extract, index)
        change_tensors(self.path(states.objects[0]), change)
        return self.resign(extract, index)

    def resign(self, extract: Receipt, index: int = 0, **update: Any) -> Receipt:
        """Make a shard's receipt agree with its object again, and the group's receipt with that."""
        states = self.states(extract, index)
        data = [self.path(o).read_bytes() for o in states.objects]
        objects = [_object(o, d) for o, d in zip(states.objects, data, strict=True)]
        states = states.model_copy(update={"objects": objects, **update})
        self._overwrite(states)
        details = json.loads(json.dumps(extract.details))
        details["shards"][index]["states"] = states.ref().model_dump()
        extract = extract.model_copy(update={"details": details})
        self._overwrite(extract)
        return extract

    def _overwrite(self, receipt: Receipt) -> None:
        self.store.write(f"{receipt.kind}/{receipt.key}/receipt.json", receipt.to_bytes())


_DEFAULTS: dict[str, Any] = {
    "layer_ids": [1, 3, 5], "states_dtype": "float32", "compute_dtype": "float32", "extract_batch_tokens": 96,
    "device": "cpu", "proof_samples": 2,
}  # fmt: skip


def make_samples(lengths: Sequence[int], seed: int = 0, vocabulary: int = 400) -> list[Sample]:
    """Samples of random ids, all but the first token supervised."""
    random = np.random.default_rng(seed)
    return [make_sample(random.integers(6, vocabulary, length)) for length in lengths]


def make_sample(input_ids: np.ndarray) -> Sample:
    """A sample of these ids, all but the first token supervised."""
    mask = np.ones(len(input_ids), dtype=np.uint8)
    mask[0] = len(input_ids) == 1
    ids = input_ids.astype(np.int32)
    identity = sample_digest(ids, mask)
    return Sample(ids, mask, identity, identity, 0, "data")


def change_tensors(path: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Change a safetensors file's float32 and integer tensors in place."""
    data = bytearray(path.read_bytes())
    [length] = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    kinds = {"I64": np.int64, "I32": np.int32, "F32": np.float32, "BF16": np.uint16, "U8": np.uint8}
    views = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = (8 + length + o for o in entry["data_offsets"])
            views[name] = np.frombuffer(
                data,
                dtype=kinds[entry["dtype"]],
                count=(end - start) // np.dtype(kinds[entry["dtype"]]).itemsize,
                offset=start,
            ).reshape(entry["shape"])
    change(views)
    views.clear()
    path.write_bytes(bytes(data))


def _object(stored: StoredObject, data: bytes) -> StoredObject:
    import hashlib

    return stored.model_copy(update={"size": len(data), "sha256": hashlib.sha256(data).hexdigest()})
