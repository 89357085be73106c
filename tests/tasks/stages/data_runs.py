"""Running the data stages in tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tasks.contract.receipt import Receipt, ReceiptRef
from tasks.contract.request import RunContext, StageRequest
from tasks.contract.spec import RunSpec
from tasks.data.sources import SourceFile, resolve_sources
from tasks.stages import assemble, target, tokenize
from tasks.stages.context import StageContext, StageFunction
from tasks.storage import open_store
from tasks.storage.artifact import fetch_object
from tasks.target.source import target_fingerprint
from tasks.tracking import NullTracker

WORDS = ["rain", "bread", "glass", "salt", "wool", "steel", "paper", "light", "stone", "river"]


def chat_rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    """Distinct conversations of one turn."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"Question {i}: what is {WORDS[i % 10]}?"},
                {"role": "assistant", "content": f"{WORDS[i % 10]} is {WORDS[i // 10 % 10]}, number {i}."},
            ]
        }
        for i in range(start, start + count)
    ]


def write_rows(path: Path, rows: Sequence[dict[str, Any] | str]) -> str:
    """A JSON Lines file; texts go in as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def make_tiny_target(factory: pytest.TempPathFactory) -> Path:
    """A random hybrid target of 0.4 M parameters with a ChatML template, as a checkpoint folder."""
    from tasks.target.tiny_hybrid import write_tiny_hybrid

    return write_tiny_hybrid(factory.mktemp("target") / "tiny")


class Run:
    """One pipeline run's data stages over a folder store."""

    def __init__(self, folder: Path, target_folder: Path, **fields: Any) -> None:
        self.folder, self.target = folder, target_folder
        self.root = str(folder / "store")
        self.store = open_store(self.root)
        self.spec = RunSpec(
            **{"target": str(target_folder), "max_length": 256, "shard_tokens": 256, "validation_share": 0.25, **fields}
        )
        self.target_ref = self._run("target", target.run, {}, {"fingerprint": target_fingerprint(self.spec)}).ref()

    def request(
        self, stage: str, inputs: dict[str, list[ReceiptRef]], args: dict[str, Any], spec: RunSpec | None = None
    ) -> StageRequest:
        run = RunContext(run_id="test", task=stage)
        return StageRequest(stage=stage, store=self.root, spec=spec or self.spec, inputs=inputs, args=args, run=run)

    def tokenize(self, sources: list[str]) -> Receipt:
        return self.tokenize_files(resolve_sources(sources))

    def tokenize_files(self, files: list[SourceFile]) -> Receipt:
        return self._run("tokenize", tokenize.run, {"target": [self.target_ref]}, {"files": files})

    def assemble(self, *tokenized: Receipt) -> Receipt:
        inputs = {"target": [self.target_ref], "tokenize": [receipt.ref() for receipt in tokenized]}
        return self._run("assemble", assemble.run, inputs, {})

    def read(self, receipt: Receipt, name: str) -> bytes:
        return self.path(receipt, name).read_bytes()

    def path(self, receipt: Receipt, name: str) -> Path:
        return fetch_object(self.store, receipt, name, self.folder / "cache")

    def _run(
        self, stage: str, function: StageFunction, inputs: dict[str, list[ReceiptRef]], args: dict[str, Any]
    ) -> Receipt:
        request = self.request(stage, inputs, args)
        with StageContext(request, self.store, NullTracker(), cache=self.folder / "cache") as ctx:
            return function(ctx)
