"""Stage `verify`: read every byte of a group's states once and check everything that needs no GPU."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from tasks.contract.errors import IntegrityError
from tasks.contract.layers import LAYER_CONVENTION
from tasks.contract.receipt import Receipt, ReceiptRef
from tasks.contract.stages import STAGES, stage_key
from tasks.data.faults import Fault, report_faults
from tasks.data.states_checks import ValueChecks, compare_samples, repeated_rows
from tasks.data.states_shard import StatesShard
from tasks.data.token_shard import read_token_shard
from tasks.stages.context import StageContext
from tasks.target.digests import hash_file

log = logging.getLogger("tasks")


def run(ctx: StageContext) -> Receipt:
    """Check the shards of one extraction group.

    Checked: receipts against objects (size, SHA-256), headers against the spec, samples against the token shard, every
    value finite, no zero, constant or repeated rows and samples, norms within the group's own range, the digests taken
    on the device. A receipt is written only if all of it holds.

    Returns:
        Details: `judged`, the digests of the states receipts; `layers`, statistics by layer.

    Raises:
        FaultsFound: an IntegrityError naming every fault by shard, sample, layer and kind.
    """
    group = ctx.receipt("extract")
    entries = group.details["shards"]
    layers: list[int | str] = [*(ctx.spec.layer_ids or [])]
    if ctx.spec.last_hidden != "none":
        layers.append("last_hidden")
    checks = ValueChecks(layers)
    judged, read = [], 0
    with ctx.progress(len(entries), "shards", "verify") as progress:
        for entry in entries:
            states, tokens = ReceiptRef(**entry["states"]), ReceiptRef(**entry["tokens"])
            receipt = _receipt(ctx, states, group, tokens, checks.faults)
            if receipt is not None:
                read += _verify_shard(ctx, receipt, tokens, checks)
                judged.append(receipt.digest())
            progress.add(1, gigabytes=read / 1e9)
    checks.faults.extend(checks.envelope())
    report_faults(ctx.store, ctx.request.run, "verify", checks.faults)
    log.info("verify: %d shards, %d samples, %.3f GB: no fault", len(judged), checks.samples, read / 1e9)
    return ctx.publish(
        ctx.writer(),
        counts={
            "shards": len(judged),
            "samples": checks.samples,
            "tokens": group.counts["tokens"],
            "bytes": read,
            "faults": 0,
        },
        details={"judged": judged, "layers": checks.statistics(), "verdict": "pass"},
    )


def _receipt(
    ctx: StageContext, ref: ReceiptRef, group: Receipt, tokens: ReceiptRef, faults: list[Fault]
) -> Receipt | None:
    """The states receipt, if it is the one of the group and made for this spec, target and token shard."""
    try:
        receipt = ctx.load(ref)
    except FileNotFoundError:
        faults.append(Fault(ref.key, "missing", "the shard has no receipt"))
        return None
    except IntegrityError as error:
        faults.append(Fault(ref.key, "receipt", str(error)))
        return None
    [identity] = group.inputs["target"]
    target = ReceiptRef(kind="target", key="", identity=identity, digest="")  # a key takes identities only
    expected = stage_key("states", ctx.spec, {"target": [target], "tokens": [tokens]})
    details = {
        "layer_ids": ctx.spec.layer_ids,
        "layer_convention": LAYER_CONVENTION,
        "last_hidden": ctx.spec.last_hidden,
        "dtype": ctx.spec.states_dtype,
        "tokens_key": tokens.key,
    }
    checks = [
        ("key", receipt.key, expected),
        ("version", receipt.version, STAGES["states"].version),
        ("spec", receipt.spec, ctx.spec.semantic("states")),
        ("target", receipt.inputs.get("target"), [identity]),
        ("tokens", receipt.inputs.get("tokens"), [tokens.identity]),
        *((name, receipt.details.get(name), value) for name, value in details.items()),
    ]
    stale = [Fault(ref.key, "stale", f"{name}: found {a!r}, expected {b!r}") for name, a, b in checks if a != b]
    faults.extend(stale)
    return None if stale else receipt


def _verify_shard(ctx: StageContext, receipt: Receipt, tokens_ref: ReceiptRef, checks: ValueChecks) -> int:
    """Check one shard; bytes read."""
    faults, read = checks.faults, 0
    with tempfile.TemporaryDirectory(dir=ctx.scratch()) as folder:
        paths = []
        for stored in receipt.objects:
            path = Path(folder) / stored.name
            try:
                ctx.store.download(stored.path, path)
            except FileNotFoundError:
                faults.append(Fault(receipt.key, "missing", f"object {stored.name} is gone"))
                continue
            size = path.stat().st_size
            read += size
            if size != stored.size:
                faults.append(Fault(receipt.key, "size", f"{stored.name}: {size} bytes, expected {stored.size}"))
            if (digest := hash_file(path)) != stored.sha256:
                faults.append(Fault(receipt.key, "sha256", f"{stored.name}: {digest}, expected {stored.sha256}"))
            paths.append(path)
        if len(paths) < max(1, len(receipt.objects)):
            return read
        try:
            shard = StatesShard(paths)
            _compare(ctx, receipt, tokens_ref, shard, checks)
        except IntegrityError as error:
            faults.append(Fault(receipt.key, "unreadable", str(error)))
    return read


def _compare(ctx: StageContext, receipt: Receipt, ref: ReceiptRef, shard: StatesShard, checks: ValueChecks) -> None:
    faults, key, header = checks.faults, receipt.key, shard.header
    expected = {
        "layer_ids": (list(header.layer_ids), ctx.spec.layer_ids),
        "last_hidden": (header.last_hidden, ctx.spec.last_hidden),
        "target": (header.target, receipt.inputs["target"][0]),
        "tokens": (header.tokens, ref.key),
        "dtype": (shard.dtype, ctx.spec.states_dtype),
        "hidden_size": (shard.hidden_size, receipt.details["hidden_size"]),
    }
    wrong = [Fault(key, "header", f"{n}: found {a!r}, expected {b!r}") for n, (a, b) in expected.items() if a != b]
    faults.extend(wrong)
    tokens_receipt = ctx.load(ref)
    tokens = read_token_shard(ctx.fetch(tokens_receipt, "tokens.safetensors"))
    faults.extend(compare_samples(key, shard, tokens))
    counts = {"samples": len(shard), "tokens": sum(shard.sample_lengths)}
    if counts != receipt.counts:
        faults.append(Fault(key, "counts", f"found {counts}, the receipt says {receipt.counts}"))
    if any(fault.kind == "header" for fault in wrong):
        return
    names, joint, ids = [], [], []
    for found in shard:
        joint.append(checks.read(key, found))
        names.append(found.sample.sample_id.hex())
        ids.append(found.sample.input_ids)
    faults.extend(repeated_rows(key, names, joint, ids))
