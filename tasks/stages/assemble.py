"""All tokenized sources together: duplicates, the split, the held-out prompts, and the token shards.

Inputs: the target's receipt and the tokenize receipts in source order. Result: a `tokens` artifact for each shard
(found again by its content, not rewritten), the held-out prompts, and a page about the data. Of equal samples the one
of the earliest source is kept. If it is killed, the shards written so far are found by the next try.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tasks.contract.errors import DataError
from tasks.contract.receipt import Receipt, ReceiptRef, canonical_json
from tasks.contract.stages import STAGES
from tasks.data.rejection import RejectReason
from tasks.data.report import LengthHistogram, RejectCounts, data_page, plot_lengths
from tasks.data.sharding import shard_bounds
from tasks.data.split import hash_order, split_conversations
from tasks.data.token_shard import ID_BYTES, TokenShardFile, TokenShardWriter
from tasks.stages.context import StageContext
from tasks.stages.tokenize import REJECTS_OBJECT, TOKENS_OBJECT
from tasks.storage.artifact import find_receipt

SHARD_OBJECT = "tokens.safetensors"
PROMPTS_OBJECT = "prompts.jsonl"
PAGE_OBJECT = "report.md"
PLOT_OBJECT = "lengths.png"
SPLITS = ("train", "validation")


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a sample stands and what is needed to place it; its tokens stay in the file."""

    file: int
    index: int
    tokens: int
    supervised_tokens: int
    sample_id: bytes
    conversation_id: bytes
    prompt_id: bytes  # digest of the tokens before the first supervised one
    slice: str
    origin: str


def run(ctx: StageContext) -> Receipt:
    """Run the stage."""
    target, tokenized = ctx.receipt("target"), ctx.receipts("tokenize")
    files = [TokenShardFile(ctx.fetch(receipt, TOKENS_OBJECT)) for receipt in tokenized]
    rejects = _row_rejects(tokenized)
    before = Counter(rejects.counts)
    entries, duplicates = collect(files, rejects, mask_token=ctx.spec.mask_token, max_samples=ctx.spec.max_samples)
    if not entries:
        raise DataError(_nothing_left(tokenized, rejects))
    splits = divide(entries, rejects, seed=ctx.spec.seed, share=ctx.spec.validation_share)
    prompts = choose_prompts(splits["validation"], files, ctx.spec.seed, ctx.spec.measure_prompts)
    header = {
        "tokenizer_digest": str(target.details["tokenizer_digest"]),
        "template_digest": files[0].header["template_digest"],
        "thinking": files[0].header["thinking"],
    }
    shards = _write_shards(ctx, files, splits, header)
    writer = ctx.writer()
    writer.add(PROMPTS_OBJECT, b"".join(canonical_json(prompt) + b"\n" for prompt in prompts))
    kept = [entry for split in SPLITS for entry in splits[split]]
    rows = {name: sum(r.counts[name] for r in tokenized) for name in ("read", "kept", "rejected", "repaired")}
    counts = {
        **rows,
        "tokenized_samples": sum(len(file) for file in files),
        "duplicates": duplicates,
        "dropped_samples": sum((rejects.counts - before).values()),
        "samples": len(kept),
        "tokens": sum(entry.tokens for entry in kept),
        "supervised_tokens": sum(entry.supervised_tokens for entry in kept),
        "conversations": len({entry.conversation_id for entry in kept}),
        **{f"{split}_samples": len(splits[split]) for split in SPLITS},
        "prompts": len(prompts),
        "shards": len(shards),
    }
    details = {
        "shards": shards,
        "slices": _in_order(entry.slice for entry in kept),
        "rejected": dict(sorted(rejects.counts.items())),
        "examples": rejects.examples,
        "sources": [file for receipt in tokenized for file in receipt.details["files"]],
        "header": header,
    }
    folder = ctx.scratch()
    _write_page(folder, counts, details, splits, ctx.spec.sources)
    for name in (PAGE_OBJECT, PLOT_OBJECT):
        writer.add(name, folder / name)
        ctx.tracker.log_file(folder / name, "data")
    metrics = {"supervised_share": counts["supervised_tokens"] / counts["tokens"]}
    return ctx.publish(writer, counts=counts, details=details, metrics=metrics)


def collect(
    files: Sequence[TokenShardFile], rejects: RejectCounts, *, mask_token: int | None, max_samples: int | None
) -> tuple[list[Entry], int]:
    """Distinct samples in source order, and the number of exact duplicates left out. Other losses go to `rejects`."""
    entries: list[Entry] = []
    seen: set[bytes] = set()
    duplicates = 0
    for number, file in enumerate(files):
        for index, sample in enumerate(file):
            if sample.sample_id in seen:
                duplicates += 1
                continue
            seen.add(sample.sample_id)
            if mask_token is not None and (sample.input_ids == mask_token).any():
                position = int(np.argmax(sample.input_ids == mask_token))
                detail = f"token {position} of sample {sample.sample_id.hex()} is the mask token {mask_token}"
                rejects.add(RejectReason.MASK_TOKEN_IN_SAMPLE, {"detail": detail})
                continue
            if max_samples is not None and len(entries) >= max_samples:
                rejects.add(RejectReason.SAMPLE_LIMIT)
                continue
            prompt = sample.input_ids[: int(np.argmax(sample.loss_mask))]
            entries.append(
                Entry(
                    number,
                    index,
                    len(sample.input_ids),
                    int(sample.loss_mask.sum()),
                    sample.sample_id,
                    sample.conversation_id,
                    _prompt_digest(prompt),
                    file.slices[sample.slice_id],
                    sample.origin,
                )
            )
    return entries, duplicates


def divide(entries: Sequence[Entry], rejects: RejectCounts, *, seed: int, share: float) -> dict[str, list[Entry]]:
    """Training and validation samples, each in source order. A training sample that asks exactly what a held-out
    sample asks is left out.

    Raises:
        DataError: if one side would be empty.
    """
    held_out = split_conversations((entry.conversation_id for entry in entries), seed, share)
    validation = [entry for entry in entries if entry.conversation_id in held_out]
    asked = {entry.prompt_id for entry in validation}
    train: list[Entry] = []
    for entry in entries:
        if entry.conversation_id in held_out:
            continue
        if entry.prompt_id in asked:
            detail = f"sample {entry.sample_id.hex()} has the prompt of a held-out sample"
            rejects.add(RejectReason.HELD_OUT_PROMPT, {"detail": detail})
        else:
            train.append(entry)
    if not train:
        raise DataError(
            f"validation_share: every training sample asks what one of the {len(validation)} held-out samples asks; "
            "at least 2 different prompts are needed"
        )
    return {"train": train, "validation": validation}


def choose_prompts(
    validation: Sequence[Entry], files: Sequence[TokenShardFile], seed: int, limit: int
) -> list[dict[str, Any]]:
    """Distinct prompts of the held-out samples, at most `limit`, in an order that depends on each prompt alone."""
    distinct: dict[bytes, Entry] = {}
    for entry in validation:
        distinct.setdefault(entry.prompt_id, entry)
    chosen = sorted(distinct.values(), key=lambda entry: (hash_order(entry.prompt_id, seed), entry.prompt_id))[:limit]
    prompts = []
    for entry in chosen:
        sample = files[entry.file][entry.index]
        ids = sample.input_ids[: int(np.argmax(sample.loss_mask))]
        prompts.append({"prompt_id": entry.prompt_id.hex(), "input_ids": ids.tolist(), "slice": entry.slice})
    return prompts


def shard_key(entries: Sequence[Entry], split: str, header: dict[str, str]) -> str:
    """Content key of a token shard: 32 hexadecimal digits over everything that is stored in it."""
    samples = [[e.sample_id.hex(), e.conversation_id.hex(), e.slice, e.origin] for e in entries]
    material = {
        "stage": "tokens",
        "version": STAGES["tokens"].version,
        "split": split,
        "header": header,
        "samples": samples,
    }
    return hashlib.sha256(canonical_json(material)).hexdigest()[:32]


def _write_shards(
    ctx: StageContext, files: Sequence[TokenShardFile], splits: dict[str, list[Entry]], header: dict[str, str]
) -> list[dict[str, Any]]:
    cut = []
    for split in SPLITS:
        entries = splits[split]
        lengths = [entry.tokens for entry in entries]
        bounds = shard_bounds([entry.sample_id for entry in entries], lengths, ctx.spec.shard_tokens)
        cut += [(split, entries[first:end]) for first, end in bounds]
    shards = []
    with ctx.progress(len(cut), "shards", "assemble") as progress:
        for split, entries in cut:
            receipt = _shard_receipt(ctx, files, split, entries, header)
            tokens = receipt.counts["tokens"]
            ref: ReceiptRef = receipt.ref()
            shards.append(
                {"ref": ref.model_dump(mode="json"), "split": split, "samples": len(entries), "tokens": tokens}
            )
            progress.add()
    return shards


def _shard_receipt(
    ctx: StageContext,
    files: Sequence[TokenShardFile],
    split: str,
    entries: Sequence[Entry],
    header: dict[str, str],
) -> Receipt:
    key = shard_key(entries, split, header)
    found = find_receipt(ctx.store, "tokens", key)
    if found:
        return found
    # Slices are numbered within the shard: a further source does not change the shards of the others.
    slices = _in_order(entry.slice for entry in entries)
    path = ctx.scratch() / SHARD_OBJECT
    with TokenShardWriter(path) as shard:
        for entry in entries:
            sample = files[entry.file][entry.index]
            shard.add(replace(sample, slice_id=slices.index(entry.slice)))
        shard.finish(slices, {**header, "split": split})
    writer = ctx.writer("tokens", key)
    writer.add(SHARD_OBJECT, path)
    path.unlink()
    return ctx.publish(
        writer,
        counts={
            "samples": len(entries),
            "tokens": sum(entry.tokens for entry in entries),
            "supervised_tokens": sum(entry.supervised_tokens for entry in entries),
        },
        details={"split": split, "slices": slices, **header},
    )


def _row_rejects(tokenized: Sequence[Receipt]) -> RejectCounts:
    rejects = RejectCounts()
    for receipt in tokenized:
        for reason, count in receipt.details["rejected"].items():
            rejects.add(reason, count=count)
        for example in receipt.details["examples"]:
            rejects.add(example["reason"], example, count=0)
    return rejects


def _nothing_left(tokenized: Sequence[Receipt], rejects: RejectCounts) -> str:
    read = sum(receipt.counts["read"] for receipt in tokenized)
    sources = [file["uri"] for receipt in tokenized for file in receipt.details["files"]]
    examples = "; ".join(f"{e.get('source', '')}:{e.get('line', '')} {e['detail']}" for e in rejects.examples[:3])
    where = [f"tokenize/{receipt.key}/{receipt.attempt}/{REJECTS_OBJECT}" for receipt in tokenized]
    return (
        f"no sample is left of the {read:,} rows of {', '.join(sources)}. Left out: {rejects.in_words()}. "
        f"For example: {examples}. All rejected rows are in {', '.join(where)}"
    )


def _write_page(
    folder: Path,
    counts: dict[str, int],
    details: dict[str, Any],
    splits: dict[str, list[Entry]],
    sources: Sequence[str],
) -> None:
    lengths = {split: LengthHistogram() for split in SPLITS}
    slices: dict[str, Counter[str]] = {}
    for split in SPLITS:
        for entry in splits[split]:
            lengths[split].add(entry.tokens)
            row = slices.setdefault(entry.slice, Counter())
            row.update({split: 1, "tokens": entry.tokens, "supervised tokens": entry.supervised_tokens})
    names = (*SPLITS, "tokens", "supervised tokens")
    examples = [
        {"reason": e["reason"], "where": f"{e.get('source', '')}:{e.get('line', '')}", "found": e["detail"][:300]}
        for e in details["examples"]
    ]
    files = [
        {
            "file": file["uri"],
            "slice": file["slice"],
            "format": ", ".join(file["formats"]),
            **{name: file[name] for name in ("read", "kept", "rejected", "samples", "tokens")},
            "supervised share": file["supervised_tokens"] / max(file["tokens"], 1),
        }
        for file in details["sources"]
    ]
    page = data_page(
        "Training data",
        {"sources": ", ".join(sources), **counts, **details["header"]},
        {
            "Sources": files,
            "Slices": [{"slice": name, **{n: row[n] for n in names}} for name, row in slices.items()],
            "Left out": [{"reason": reason, "count": count} for reason, count in details["rejected"].items()],
            "Examples of what was left out": examples,
        },
    )
    (folder / PAGE_OBJECT).write_text(page, encoding="utf-8")
    plot_lengths(folder / PLOT_OBJECT, lengths)


def _prompt_digest(ids: np.ndarray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(ids, "<i4").tobytes()).digest()[:ID_BYTES]


def _in_order(names: Any) -> list[str]:
    """Distinct names in the order of their first appearance."""
    return list(dict.fromkeys(names))
