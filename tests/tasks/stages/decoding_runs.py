"""A tiny hybrid target, a few held-out prompts, and the stages that decode them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.contract.receipt import Receipt
from tasks.contract.request import RunContext, StageRequest
from tasks.contract.spec import RunSpec
from tasks.stages.context import StageContext
from tasks.storage.artifact import ArtifactWriter, fetch_object
from tasks.storage.folder import FolderStore
from tasks.target.source import target_fingerprint
from tasks.target.tiny_hybrid import write_tiny_hybrid
from tasks.tracking import NullTracker, Tracker

LAYER_IDS = [1, 4, 6]
PROMPTS = [
    {"prompt_id": "00aa", "input_ids": [7, 80, 33, 101, 9], "slice": "code"},
    {"prompt_id": "01bb", "input_ids": [300, 12, 45], "slice": "chat"},
    {"prompt_id": "02cc", "input_ids": list(range(20, 60)), "slice": "code"},
]


class DecodingRun:
    """Runs stages on a folder store, with prompts instead of data stages."""

    def __init__(self, folder: Path, **fields: Any) -> None:
        self.folder = folder
        self.target_folder = write_tiny_hybrid(folder / "target")
        self._scale_weights()
        self.store = FolderStore(folder / "store")
        defaults = {
            "layer_ids": LAYER_IDS,
            "states_dtype": "float32",
            "compute_dtype": "float32",
            "device": "cpu",
            "block_size": 4,
            "max_new_tokens": 14,
            "mask_token": 3,
        }
        self.spec = RunSpec(target=str(self.target_folder), **{**defaults, **fields})
        self.target = self.run("target", {}, args={"fingerprint": target_fingerprint(self.spec)})

    def run(
        self,
        stage: str,
        inputs: dict[str, Sequence[Receipt]],
        tracker: Tracker | None = None,
        args: dict[str, Any] | None = None,
    ) -> Receipt:
        request = StageRequest(
            stage=stage,
            store=self.store.root,
            spec=self.spec,
            inputs={name: [receipt.ref() for receipt in receipts] for name, receipts in inputs.items()},
            args=args or {},
            run=RunContext(run_id="test", task=stage),
        )
        with StageContext(request, self.store, tracker or NullTracker(), cache=self.folder / "cache") as ctx:
            receipt: Receipt = importlib.import_module(f"tasks.stages.{stage}").run(ctx)
            return receipt

    def assemble(self, prompts: Sequence[dict[str, Any]] = PROMPTS) -> Receipt:
        """A receipt of `assemble` with these prompts."""
        return self.forge(
            "assemble", f"{len(prompts)}", {"prompts.jsonl": "".join(json.dumps(p) + "\n" for p in prompts).encode()}
        )

    def forge(self, kind: str, key: str, objects: dict[str, bytes | Path], **details: Any) -> Receipt:
        """A receipt as another stage would write it."""
        writer = ArtifactWriter(self.store, kind, key, attempt="a")
        for name, data in objects.items():
            writer.add(name, data)
        receipt = Receipt(
            kind=kind, version=1, key=key, identity=key, objects=writer.objects, attempt="a", details=details
        )
        return writer.commit(receipt)

    def reference(self, prompts: Sequence[dict[str, Any]] = PROMPTS) -> Receipt:
        return self.run("reference", {"target": [self.target], "assemble": [self.assemble(prompts)]})

    def path(self, receipt: Receipt, name: str) -> Path:
        return fetch_object(self.store, receipt, name, self.folder / "cache")

    def _scale_weights(self) -> None:
        """Random logits are so flat that wrong and right runs would agree."""
        from safetensors.torch import load_file, save_file

        file = self.target_folder / "model.safetensors"
        tensors = {n: t * 4 if t.dim() > 1 and "A_log" not in n else t for n, t in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
