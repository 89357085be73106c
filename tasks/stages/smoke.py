"""`smoke`: the complete chain on five samples, through the very same code, before any long run.

Works in a scratch store laid over the run's own, so it leaves nothing there but its receipt: extract, verify, prove,
check, one training step, decoded prompts. With `smoke_hybrid` the whole chain, from rows to acceptance, also runs
on a tiny random hybrid target, whose recurrent state exercises what an attention-only target never does.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from tasks.chain import Chain, run_chain
from tasks.contract.errors import DataError
from tasks.contract.presets import spec_from_form
from tasks.contract.receipt import Receipt, ReceiptRef
from tasks.data.token_shard import Sample, TokenShard, read_token_shard, write_token_shard
from tasks.stages.context import StageContext
from tasks.storage.artifact import ArtifactWriter
from tasks.storage.folder import FolderStore
from tasks.storage.overlay import OverlayStore
from tasks.tracking import NullTracker

log = logging.getLogger("tasks")
SAMPLES = 5
PROMPTS = 2  # not one: an answer that ends at once has no verification step to measure
_ONE_STEP = {"epochs": 1, "max_steps": 1, "measure_prompts": 1, "proof_samples": 1, "extract_groups": 1}


def run(ctx: StageContext) -> Receipt:
    """Run the chain on five samples of the real data; on a tiny hybrid too where the spec says so.

    Raises:
        StageError: whatever the first failing stage raises.
    """
    scratch = ctx.scratch()
    ctx.cache = ctx.cache or scratch / "cache"
    chain = _real_target(ctx, scratch / "real")
    acceptance = chain.results["measure"][0].metrics["acceptance_length"]
    metrics = {"acceptance_length": acceptance}
    if ctx.spec.smoke_hybrid:
        metrics["hybrid_acceptance_length"] = _tiny_hybrid(ctx, scratch / "hybrid")
    log.info("smoke: the complete chain works on %d samples: %s", SAMPLES, metrics)
    return ctx.publish(ctx.writer(), counts={"samples": SAMPLES}, metrics=metrics)


def _real_target(ctx: StageContext, folder: Path) -> Chain:
    spec = ctx.spec.model_copy(update={**_ONE_STEP, "max_new_tokens": min(8, ctx.spec.max_new_tokens)})
    store = OverlayStore(FolderStore(folder), ctx.store)
    chain = Chain(spec, store.root, f"smoke-{ctx.request.run.run_id}", store, NullTracker(), ctx.cache)
    chain.use(ctx.receipt("target"))
    chain.use(_five_samples(ctx, store))
    chain.extract_and_check()
    chain.train_and_measure()
    return chain


def _five_samples(ctx: StageContext, store: OverlayStore) -> Receipt:
    """An `assemble` artifact of the run's first samples: four train, one validation whose prompt is decoded."""
    assemble = ctx.receipt("assemble")
    samples = {
        "train": _first(ctx, assemble, "train", SAMPLES - 1),
        "validation": _first(ctx, assemble, "validation", 1),
    }
    entries = []
    for split, (chosen, slices) in samples.items():
        file = ctx.scratch() / "tokens.safetensors"
        write_token_shard(file, TokenShard(chosen, slices, {"split": split}))
        tokens = sum(len(sample.input_ids) for sample in chosen)
        writer = ArtifactWriter(store, "tokens", f"smoke-{split}-{ctx.request.key()}", attempt="smoke")
        writer.add("tokens.safetensors", file)
        receipt = ctx.publish(
            writer,
            counts={
                "samples": len(chosen),
                "tokens": tokens,
                "supervised_tokens": sum(int(sample.loss_mask.sum()) for sample in chosen),
            },
            details={"split": split, "slices": slices},
        )
        entries.append({"ref": receipt.ref().model_dump(), "split": split, "samples": len(chosen), "tokens": tokens})
    writer = ArtifactWriter(store, "assemble", f"smoke-{ctx.request.key()}", attempt="smoke")
    prompts = ctx.fetch(assemble, "prompts.jsonl").read_text().splitlines()[:PROMPTS]
    writer.add("prompts.jsonl", "".join(line + "\n" for line in prompts).encode())
    return ctx.publish(
        writer,
        counts={
            "samples": sum(entry["samples"] for entry in entries),
            "tokens": sum(entry["tokens"] for entry in entries),
            "prompts": len(prompts),
        },
        details={"shards": entries, "slices": assemble.details["slices"]},
    )


def _first(ctx: StageContext, assemble: Receipt, split: str, count: int) -> tuple[list[Sample], list[str]]:
    """The first samples of a split that are short enough to be quick."""
    chosen: list[Sample] = []
    slices: list[str] = []
    for entry in assemble.details["shards"]:
        if entry["split"] != split:
            continue
        shard = read_token_shard(ctx.fetch(ctx.load(ReceiptRef(**entry["ref"])), "tokens.safetensors"))
        slices = shard.slices
        chosen += sorted(shard.samples, key=lambda sample: len(sample.input_ids))[: count - len(chosen)]
        if len(chosen) == count:
            break
    if not chosen:
        raise DataError(f"split {split!r} has no sample to try the chain on")
    return chosen, slices


def _tiny_hybrid(ctx: StageContext, folder: Path) -> float:
    from tasks.target.tiny_hybrid import SAMPLE_ROWS, write_tiny_hybrid

    target = write_tiny_hybrid(folder / "target")
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(json.dumps(row) for row in SAMPLE_ROWS) + "\n")
    spec = spec_from_form(
        {
            **_ONE_STEP,
            "target": str(target),
            "sources": [str(rows)],
            "max_length": 256,
            "validation_share": 0.3,
            "shard_tokens": 256,
            "layer_count": 3,
            "block_size": 4,
            "draft_layers": 1,
            "batch_tokens": 256,
            "max_new_tokens": 12,
            "device": ctx.spec.device,
            "compute_dtype": "float32",
            "states_dtype": "float32",
            "smoke_hybrid": False,
        }
    )
    results = run_chain(
        spec,
        str(folder / "store"),
        f"smoke-hybrid-{ctx.request.run.run_id}",
        until="measure",
        tracker=NullTracker(),
        smoke=False,
    )
    return results["measure"][0].metrics["acceptance_length"]
