"""`plan`: resolve every parameter, check everything that can be checked without loading weights, count the cost.

    python -m tasks chain --until plan --set target=/models/my-target

All problems are collected and reported together, each with its field, before any GPU is taken. Runs anew in each
pipeline run, because it checks what surrounds the run: the store, MLflow, the device, the data's whereabouts.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from typing import Any, TypeVar

from tasks.contract.errors import ConfigurationError, DeviceUnavailable, Problem, StorageError
from tasks.contract.layers import LAYER_CONVENTION, check_layer_ids, default_layer_ids, huggingface_index, vllm_id
from tasks.contract.receipt import Receipt
from tasks.contract.spec import RunSpec
from tasks.data.sources import SourceFile, file_groups, resolve_sources
from tasks.execution import resolve_device
from tasks.stages.context import StageContext
from tasks.stages.resolution import resolve_drafter, resolve_mask_token
from tasks.target.facts import TargetFacts, read_target_facts
from tasks.target.source import target_fingerprint
from tasks.tracking import create_run, log_spec, tracking_uri

log = logging.getLogger("tasks")
_TOKENS_PER_BYTE = 1 / 4  # of chat files; an estimate that `assemble` replaces by the count
_BYTES = {"bfloat16": 2, "float32": 4}
T = TypeVar("T")


class _Problems:
    """Collects what is wrong, so that a person sees all of it at once."""

    def __init__(self) -> None:
        self.found: list[Problem] = []

    def attempt(self, action: Callable[[], T]) -> T | None:
        try:
            return action()
        except ConfigurationError as error:
            self.found += error.problems
        except DeviceUnavailable as error:
            self.found.append(Problem("device", "cuda", str(error)))
        except StorageError as error:
            self.found.append(Problem("store", str(error), "a store that answers, with credentials it accepts"))
        return None


def run(ctx: StageContext) -> Receipt:
    """Resolve and check the spec; the receipt holds the resolved spec, the file groups and the estimates.

    Raises:
        ConfigurationError: with every problem found.
    """
    spec, problems = ctx.spec, _Problems()
    problems.attempt(lambda: _check_store(ctx))
    sources = problems.attempt(lambda: resolve_sources(spec.sources))
    facts = problems.attempt(lambda: read_target_facts(spec, ctx.scratch()))
    device = problems.attempt(lambda: resolve_device(spec.device))
    resolved = resolve(spec, facts, device, problems.attempt) if facts else None
    if problems.found or sources is None or facts is None or resolved is None:
        raise ConfigurationError(problems.found)
    costs = _costs(resolved, facts, sources)
    _check_room(ctx, costs)
    tracker = create_run(resolved, ctx.request.run) if tracking_uri() and ctx.request.run.track else None
    if tracker:
        log_spec(tracker, resolved)
        tracker.log_metrics({f"plan/{name}": float(value) for name, value in costs.items()})
    _say(resolved, facts, costs)
    return ctx.publish(
        ctx.writer(),
        counts={"files": len(sources), **costs},
        details={
            "spec": resolved.model_dump(mode="json"),
            "target": facts.to_json(),
            "target_fingerprint": target_fingerprint(spec),
            "file_groups": file_groups(sources, resolved.extract_groups),
            "mlflow_run_id": tracker.run_id if tracker else None,
            "mlflow_url": tracker.url if tracker else None,
        },
    )


def resolve(
    spec: RunSpec, facts: TargetFacts, device: str | None, attempt: Callable[[Callable[[], Any]], Any]
) -> RunSpec:
    """The spec with every `None` that means "resolved by plan" replaced.

    Args:
        spec: as asked for.
        facts: of the target.
        device: `cpu` or `cuda`; None if there was a problem with it.
        attempt: runs one resolution and collects its problem.
    """
    values: dict[str, Any] = {}
    ids = spec.layer_ids
    values["layer_ids"] = attempt(
        lambda: check_layer_ids(ids, facts.num_layers) if ids else default_layer_ids(facts.num_layers, spec.layer_count)
    )
    values["mask_token"] = attempt(lambda: resolve_mask_token(spec.mask_token, facts))
    values.update(attempt(lambda: resolve_drafter(spec, facts)) or {})
    if spec.compute_dtype == "auto":
        values["compute_dtype"] = "bfloat16" if device == "cuda" else "float32"
    if spec.loss_decay is None:
        values["loss_decay"] = 7.0 if spec.block_size >= 16 else spec.block_size / 2
    if spec.model_name is None:
        values["model_name"] = f"drafter-{facts.name}"
    return spec.model_copy(update={name: value for name, value in values.items() if value is not None})


def _check_store(ctx: StageContext) -> None:
    faults = ctx.store.probe()
    if faults:
        raise ConfigurationError(
            [Problem("store", ctx.store.root, f"a store of which this holds: {f}") for f in faults]
        )


def _costs(spec: RunSpec, facts: TargetFacts, sources: list[SourceFile]) -> dict[str, int]:
    """What the run will take: estimates from file sizes, exact per token."""
    layers = len(spec.layer_ids or []) + (spec.last_hidden != "none")
    per_token = layers * facts.hidden_size * _BYTES[spec.states_dtype]
    tokens = int(sum(file["size"] for file in sources) * _TOKENS_PER_BYTE)
    if spec.max_samples is not None:
        tokens = min(tokens, spec.max_samples * spec.max_length)
    return {
        "bytes_per_token": per_token,
        "longest_sample_bytes": per_token * spec.max_length,
        "estimated_tokens": tokens,
        "estimated_states_bytes": tokens * per_token,
        # Forward pass of the target: two floating-point operations per parameter and token.
        "estimated_forward_tflop": round(2 * facts.parameters * tokens / 1e12),
    }


def _check_room(ctx: StageContext, costs: dict[str, int]) -> None:
    root = ctx.store.root
    if root.startswith("s3://"):
        return
    free = shutil.disk_usage(root).free
    if costs["estimated_states_bytes"] > free:
        needed = f"{costs['estimated_states_bytes'] / 1e9:.1f} GB for hidden states"
        expected = f"a store with about {needed}: choose fewer layers, max_samples, or another store"
        raise ConfigurationError(Problem("store", f"{root} with {free / 1e9:.1f} GB free", expected))


def _say(spec: RunSpec, facts: TargetFacts, costs: dict[str, int]) -> None:
    ids = spec.layer_ids or []
    log.info(
        "target %s: %s, %d layers, hidden size %d, vocabulary %d",
        facts.name,
        facts.architecture,
        facts.num_layers,
        facts.hidden_size,
        facts.vocab_size,
    )
    log.info(
        "layer ids (%s): %s; the same in Hugging Face's hidden_states: %s; in vLLM and speculators: %s",
        LAYER_CONVENTION,
        ids,
        [huggingface_index(i) for i in ids],
        [vllm_id(i) for i in ids],
    )
    log.info("drafter: %d layers, block %d, mask token %s", spec.draft_layers, spec.block_size, spec.mask_token)
    log.info(
        "about %s tokens, %s bytes of states each, %.2f GB in all",
        f"{costs['estimated_tokens']:,}",
        f"{costs['bytes_per_token']:,}",
        costs["estimated_states_bytes"] / 1e9,
    )
