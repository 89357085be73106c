"""Stage `extract`: hidden states of a group of token shards. One receipt per shard (`states`), one for the group."""

from __future__ import annotations

import contextlib
import datetime
import logging
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tasks.contract.errors import ConfigurationError, DataError, Problem, StorageError
from tasks.contract.layers import LAYER_CONVENTION, check_layer_ids, huggingface_index, vllm_id
from tasks.contract.receipt import Receipt, ReceiptRef
from tasks.contract.stages import stage_key
from tasks.data.states_shard import StatesHeader
from tasks.data.states_writer import STORED_DTYPES, StatesShardWriter
from tasks.data.token_shard import TokenShard, read_token_shard
from tasks.progress import Progress
from tasks.stages.context import StageContext
from tasks.storage.artifact import find_receipt
from tasks.target.extraction import Extractor, self_check
from tasks.target.loading import Target, open_target

log = logging.getLogger("tasks")


@dataclass
class _Shard:
    """One token shard of the group and its states."""

    tokens: ReceiptRef
    key: str  # of the states
    receipt: Receipt  # of the tokens
    states: Receipt | None


def run(ctx: StageContext) -> Receipt:
    """Extract what has no receipt yet.

    Inputs: `target`; `tokens`, the shards of the group. If the process dies, shards with a receipt stay done.

    Raises:
        ConfigurationError: field `layer_ids` or `max_length`.
        IntegrityError: if the self-check on the real target fails.
        Interrupted: on SIGTERM; finished shards are in the store.
    """
    target_ref = ctx.refs("target")[0]
    layer_ids = ctx.spec.layer_ids
    if layer_ids is None:
        raise ConfigurationError(Problem("layer_ids", None, "ids resolved by `plan`: extract takes the resolved spec"))
    shards = []
    for ref in ctx.refs("tokens"):
        key = stage_key("states", ctx.spec, {"target": [target_ref], "tokens": [ref]})
        shards.append(_Shard(ref, key, ctx.load(ref), find_receipt(ctx.store, "states", key)))
    waiting = [s for s in shards if s.states is None]
    log.info("%d shards, %d of them done already", len(shards), len(shards) - len(waiting))
    started, tokens = time.monotonic(), sum(s.receipt.counts["tokens"] for s in waiting)
    if waiting:
        _extract(ctx, waiting, layer_ids)
    seconds = time.monotonic() - started
    return ctx.publish(
        ctx.writer(),
        counts={
            "shards": len(shards),
            "samples": sum(s.receipt.counts["samples"] for s in shards),
            "tokens": sum(s.receipt.counts["tokens"] for s in shards),
            "reused": len(shards) - len(waiting),
        },
        metrics={"tokens_per_second": tokens / seconds} if waiting and seconds else {},
        details={"shards": [_entry(s) for s in shards]},
    )


def _entry(shard: _Shard) -> dict[str, object]:
    if shard.states is None:
        raise RuntimeError(f"tokens/{shard.tokens.key} has no states")
    return {
        "tokens": shard.tokens.model_dump(),
        "states": shard.states.ref().model_dump(),
        "split": shard.receipt.details["split"],
    }


def _extract(ctx: StageContext, waiting: list[_Shard], layer_ids: list[int]) -> None:
    target = open_target(ctx, ctx.receipt("target"))
    check_layer_ids(layer_ids, target.num_layers)
    log.info(
        "layers: %s in layer_output (as z-lab, SpecForge), %s as indices of Hugging Face's hidden_states, %s for vLLM "
        "and speculators",
        layer_ids,
        [huggingface_index(i) for i in layer_ids],
        [vllm_id(i) for i in layer_ids],
    )
    ctx.tracker.set_tags({"drafter.attention": target.attention, "drafter.linear_attention": target.linear_attention})
    spec = ctx.spec
    _self_check(ctx, target, waiting, layer_ids)
    samples = sum(s.receipt.counts["samples"] for s in waiting)
    extractor = Extractor(
        target, layer_ids, spec.last_hidden, STORED_DTYPES[spec.states_dtype], spec.extract_batch_tokens
    )
    with ctx.progress(samples, "samples", "extract") as progress, extractor:
        meter = _Meter(progress)
        for shard in waiting:
            shard.states = _extract_shard(ctx, target, extractor, shard, meter)


def _self_check(ctx: StageContext, target: Target, waiting: list[_Shard], layer_ids: list[int]) -> None:
    for shard in waiting:
        samples = [s.input_ids for s in _read_tokens(ctx, shard).samples[:2]]
        if samples:
            error = self_check(target, layer_ids, ctx.spec.last_hidden, samples)
            log.info("self-check: a padded batch equals single forward passes within %.1e", error)
            return


class _Meter:
    """Progress with tokens a second."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._tokens, self._start = progress, 0, time.monotonic()

    def add(self, samples: int, tokens: int) -> None:
        self._tokens += tokens
        rate = self._tokens / max(time.monotonic() - self._start, 1e-9)
        self._progress.add(samples, tokens_per_second=rate)


def _read_tokens(ctx: StageContext, shard: _Shard) -> TokenShard:
    tokens = read_token_shard(ctx.fetch(shard.receipt, "tokens.safetensors"))
    if len(tokens.samples) != shard.receipt.counts["samples"]:
        raise DataError(
            f"token shard {shard.tokens.key}: {len(tokens.samples)} samples, its receipt says "
            f"{shard.receipt.counts['samples']}"
        )
    return tokens


def _extract_shard(ctx: StageContext, target: Target, extractor: Extractor, shard: _Shard, meter: _Meter) -> Receipt:
    began, clock = datetime.datetime.now(datetime.UTC), time.monotonic()
    tokens, spec = _read_tokens(ctx, shard), ctx.spec
    header = StatesHeader(
        layer_ids=tuple(spec.layer_ids or ()),
        last_hidden=spec.last_hidden,
        target=ctx.refs("target")[0].identity,
        tokens=shard.tokens.key,
        slices=tuple(tokens.slices),
    )
    writer = ctx.writer("states", shard.key)
    # A shard of the reference target takes 20 GB: its local files go as soon as they are stored.
    with tempfile.TemporaryDirectory(dir=ctx.scratch()) as folder:
        parts = StatesShardWriter(Path(folder), tokens.samples, header, target.hidden_size, spec.states_dtype)
        for batch in extractor.extract([s.input_ids for s in tokens.samples]):
            for found in batch:
                parts.put(found.index, found.hidden_states, found.last_hidden, found.layer_digest)
            meter.add(len(batch), sum(len(found.hidden_states) for found in batch))
        try:
            for path in parts.close():
                writer.add(path.name, path)
            return ctx.publish(
                writer,
                inputs={"target": [header.target], "tokens": [shard.tokens.identity]},
                counts={"samples": len(tokens.samples), "tokens": sum(len(s.input_ids) for s in tokens.samples)},
                details={
                    "layer_ids": list(header.layer_ids),
                    "layer_convention": LAYER_CONVENTION,
                    "last_hidden": spec.last_hidden,
                    "dtype": spec.states_dtype,
                    "hidden_size": target.hidden_size,
                    "split": shard.receipt.details["split"],
                    "tokens_key": shard.tokens.key,
                    "compute_dtype": str(target.dtype).removeprefix("torch."),
                    "attention": target.attention,
                    "linear_attention": target.linear_attention,
                    "batch_tokens": extractor.batch_tokens,
                    "batch_halved": extractor.halved,
                },
                started_at=began.isoformat(timespec="seconds"),
                seconds=round(time.monotonic() - clock, 3),
            )
        except BaseException:
            # Objects without a receipt are swept later too; a store that is down must not hide the first error.
            with contextlib.suppress(StorageError):
                writer.discard()
            raise
