"""Stage `prove`: extract samples of each shard again, independently, and compare with what is stored.

Digests prove that nothing changed since extraction; only this proves that what was extracted is what was asked for:
the right layers, before the norm, of the right sample.
"""

from __future__ import annotations

import logging
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from tasks.contract.receipt import Receipt, ReceiptRef
from tasks.data.faults import Fault, report_faults
from tasks.data.states_shard import StatesSample, StatesShard
from tasks.stages.context import StageContext
from tasks.storage.artifact import fetch_object
from tasks.target.loading import Target, open_target
from tasks.target.plain import RelativeError, plain_states, relative_error

log = logging.getLogger("tasks")

MEAN_TOLERANCE = 0.05  # mean over rows of the relative L2 error
ROW_TOLERANCE = 0.5  # of a single row: rows of other tokens are off by about 1
NEIGHBOUR_SHARE = 0.25  # of the distance to the nearer neighbouring layer


@dataclass
class _Proof:
    """Largest error and smallest distance to a neighbour, by layer."""

    errors: dict[str, float] = field(default_factory=dict)
    distances: dict[str, float] = field(default_factory=dict)

    def note(self, layer: int | str, error: float, distance: float) -> None:
        name = str(layer)
        self.errors[name] = max(self.errors.get(name, 0.0), error)
        self.distances[name] = min(self.distances.get(name, distance), distance)


def run(ctx: StageContext) -> Receipt:
    """Prove `spec.proof_samples` samples of every shard of one extraction group.

    Returns:
        Details: `judged`, digests of the states receipts; `max_error` and `min_neighbour_distance` by layer.

    Raises:
        FaultsFound: an IntegrityError naming shard, sample, layer and kind of each disagreement.
    """
    group = ctx.receipt("extract")
    entries = group.details["shards"]
    target = open_target(ctx, ctx.receipt("target"))
    faults: list[Fault] = []
    judged, proof, proved = [], _Proof(), 0
    with ctx.progress(len(entries), "shards", "prove") as progress:
        for entry in entries:
            receipt = ctx.load(ReceiptRef(**entry["states"]))
            # Not into the cache: a shard of the reference target takes 20 GB, and is looked at once.
            with tempfile.TemporaryDirectory(dir=ctx.scratch()) as folder:
                paths = [fetch_object(ctx.store, receipt, stored.name, Path(folder)) for stored in receipt.objects]
                shard = StatesShard(paths)
                for index in draw(len(shard), ctx.spec.proof_samples, f"{ctx.spec.seed} {receipt.key}"):
                    faults.extend(prove_sample(target, receipt.key, shard, index, proof))
                    proved += 1
            judged.append(receipt.digest())
            progress.add(1, samples_proved=float(proved))
    report_faults(ctx.store, ctx.request.run, "prove", faults)
    log.info("prove: %d samples of %d shards agree; errors by layer %s", proved, len(judged), proof.errors)
    worst, nearest = max(proof.errors.values(), default=0.0), min(proof.distances.values(), default=0.0)
    return ctx.publish(
        ctx.writer(),
        counts={"shards": len(judged), "samples": proved, "faults": 0},
        metrics={"max_error": worst, "min_neighbour_distance": nearest},
        details={
            "judged": judged,
            "max_error": proof.errors,
            "min_neighbour_distance": proof.distances,
            "tolerance": MEAN_TOLERANCE,
            "verdict": "pass",
        },
    )


def draw(samples: int, count: int, seed: str) -> list[int]:
    """Positions of the samples to prove: distinct, ascending, the same for the same seed."""
    return sorted(random.Random(seed).sample(range(samples), min(count, samples)))


def prove_sample(target: Target, key: str, shard: StatesShard, index: int, proof: _Proof) -> Iterator[Fault]:
    """Compare every stored layer of one sample with a plain forward pass, and with the neighbouring layers."""
    found = shard[index]
    name = found.sample.sample_id.hex()
    plain = plain_states(target, found.sample.input_ids)
    for label, states, layer, normed in _columns(found, shard, target.num_layers):
        error = plain.error(states, layer, normed=normed)
        neighbours = {
            j: relative_error(states.to(target.device).float(), plain.reference(j, normed=normed).float()).mean
            for j in (layer - 1, layer + 1)
            if -1 <= j < target.num_layers
        }
        nearest = min(neighbours, key=lambda j: neighbours[j])
        distance = neighbours[nearest]
        proof.note(label, error.mean, distance)
        if (detail := _disagreement(error, nearest, distance)) is not None:
            yield Fault(key, detail[0], detail[1], name, label)


def _columns(found: StatesSample, shard: StatesShard, num_layers: int) -> Iterator[tuple[int | str, Tensor, int, bool]]:
    for column, layer in enumerate(shard.header.layer_ids):
        yield layer, found.hidden_states[:, column], layer, False
    if found.last_hidden is not None:
        yield "last_hidden", found.last_hidden, num_layers - 1, shard.header.last_hidden == "post_norm"


def _disagreement(error: RelativeError, nearest: int, distance: float) -> tuple[str, str] | None:
    """Kind and description, or None. Comparisons are written so that NaN fails them."""
    size = f"relative L2 error {error.mean:.3g} (at most {MEAN_TOLERANCE} and {NEIGHBOUR_SHARE} of {distance:.3g})"
    if error.mean <= MEAN_TOLERANCE and error.mean < NEIGHBOUR_SHARE * distance:
        if error.largest <= ROW_TOLERANCE:
            return None
        return "wrong_rows", f"row {error.row} is off by {error.largest:.3g} (at most {ROW_TOLERANCE})"
    what = "the embeddings" if nearest < 0 else f"layer {nearest}"
    if distance < error.mean:
        return "wrong_layer", f"{size}; nearer to {what}"
    if error.mean <= MEAN_TOLERANCE:
        return "indistinct", f"{size}; {what} is too near to tell the two apart"
    return "wrong_states", size
