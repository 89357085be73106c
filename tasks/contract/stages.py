"""The stages: name, version, inputs, and the content key of their result.

A stage is a function of (its semantic fields of the spec, its input receipts, its arguments) to objects plus one
receipt. The key is a digest of exactly these, so equal inputs find the receipt that is already there.
Raise `version` when a change of the code changes the result for the same inputs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.contract.receipt import ReceiptRef, canonical_json
from tasks.contract.spec import RunSpec


@dataclass(frozen=True)
class Stage:
    """One stage (or kind of artifact) of the pipeline."""

    name: str
    version: int
    inputs: tuple[str, ...] = ()
    needs_gpu: bool = False
    per_run: bool = False  # executed anew in each run (checks or announces something), whatever is in the store
    by_digest: tuple[str, ...] = ()  # inputs whose very bytes are judged: their receipts' digests go into the key
    summary: str = ""


_ALL = (
    Stage("plan", 1, (), per_run=True, summary="Resolve and check everything before any GPU is taken."),
    Stage("target", 1, (), summary="Import the target: digest of its weights, safetensors where it was GGUF."),
    Stage("tokenize", 1, ("target",), summary="Chat rows to token ids and loss mask, one task per group of files."),
    Stage("assemble", 1, ("target", "tokenize"), summary="Deduplicate, split, cut shards, choose prompts."),
    Stage("tokens", 1, summary="One token shard (written by assemble)."),
    Stage("smoke", 1, ("target", "assemble"), needs_gpu=True, summary="The whole chain on five samples."),
    Stage("extract", 1, ("target", "tokens"), needs_gpu=True, summary="Hidden states of a group of shards."),
    Stage("states", 1, ("target", "tokens"), summary="Hidden states of one shard (written by extract)."),
    Stage(
        "verify", 1, ("extract",), by_digest=("extract",), summary="Read every byte of the group's shards and check it."
    ),
    Stage(
        "prove",
        1,
        ("target", "extract"),
        needs_gpu=True,
        by_digest=("extract",),
        summary="Re-extract samples independently, compare.",
    ),
    Stage(
        "check",
        1,
        ("assemble", "extract", "verify", "prove"),
        by_digest=("extract", "verify", "prove"),
        summary="One verdict over all shards.",
    ),
    Stage("reference", 1, ("target", "assemble"), needs_gpu=True, summary="Plain greedy decoding of the prompts."),
    Stage("train", 1, ("target", "check", "reference"), needs_gpu=True, summary="Train the drafter."),
    Stage("measure", 1, ("target", "train", "reference"), needs_gpu=True, summary="Acceptance by real decoding."),
    Stage("drafter", 1, summary="A registered drafter's own copy (written by register)."),
    Stage(
        "register",
        1,
        ("target", "assemble", "check", "reference", "train", "measure"),
        per_run=True,
        summary="MLflow model version with lineage; the gate.",
    ),
)
STAGES: dict[str, Stage] = {stage.name: stage for stage in _ALL}

Inputs = Mapping[str, Sequence[ReceiptRef]]


def stage_key(
    stage: str, spec: RunSpec, inputs: Inputs, args: Mapping[str, Any] | None = None, run_id: str | None = None
) -> str:
    """Content key of a stage's result: 32 hexadecimal digits.

    Args:
        stage: a name in `STAGES`.
        spec: the resolved spec (the spec as asked for, for `plan`).
        inputs: receipts the stage starts from, by name; order counts.
        args: further semantic values that are not in the spec (the group of source files, say).
        run_id: goes into the keys of per-run stages only, and must be given for them.
    """
    definition = STAGES[stage]
    unknown = set(inputs) - set(definition.inputs)
    if unknown:
        raise ValueError(f"stage {stage} takes inputs {definition.inputs}, found {sorted(unknown)}")
    material: dict[str, Any] = {
        "stage": stage,
        "version": definition.version,
        "spec": spec.model_dump(mode="json") if definition.per_run else spec.semantic(stage),
        "inputs": {
            name: [ref.digest if name in definition.by_digest else ref.identity for ref in refs]
            for name, refs in inputs.items()
        },
        "args": dict(args or {}),
    }
    if definition.per_run:
        if not run_id:
            raise ValueError(f"stage {stage} is executed in each run: its key needs the run id")
        material["run"] = run_id
    return hashlib.sha256(canonical_json(material)).hexdigest()[:32]
