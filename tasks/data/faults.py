"""Faults of stored states: what the integrity checks find, named so that a person and a repair can act on them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tasks.contract.errors import IntegrityError
from tasks.contract.layout import run_folder
from tasks.contract.request import RunContext
from tasks.storage.base import Store

_SHOWN = 40  # faults spelled out in a message; all of them are in the store


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a shard."""

    shard: str  # key of the states
    kind: str  # missing, size, sha256, unreadable, header, stale, samples, rows, token_ids, loss_mask, not_finite, ...
    detail: str  # what was found, what was expected
    sample: str | None = None  # sample id, hexadecimal
    layer: int | str | None = None  # layer_output id, or "last_hidden"

    def __str__(self) -> str:
        sample = f", sample {self.sample}" if self.sample else ""
        layer = f", layer {self.layer}" if isinstance(self.layer, int) else f", {self.layer}" if self.layer else ""
        return f"shard {self.shard}{sample}{layer}: {self.kind}: {self.detail}"


class FaultsFound(IntegrityError):
    """A check failed. `faults` holds all of them, `shards` the keys of the states to extract again."""

    def __init__(self, stage: str, faults: Sequence[Fault]) -> None:
        self.faults = list(faults)
        self.shards = sorted({fault.shard for fault in faults})
        shown = "\n".join(str(fault) for fault in self.faults[:_SHOWN])
        more = f"\nand {len(self.faults) - _SHOWN} more" if len(self.faults) > _SHOWN else ""
        super().__init__(
            f"{stage}: {len(self.faults)} faults in {len(self.shards)} shards; training cannot start on them\n"
            f"{shown}{more}\nto extract exactly these shards again, drop their receipts and run extract: "
            f"{' '.join(self.shards)}"
        )


def faults_prefix(run_id: str) -> str:
    """Where a run's fault reports stand."""
    return f"{run_folder(run_id)}/faults/"


def report_faults(store: Store, run: RunContext, stage: str, faults: Sequence[Fault]) -> None:
    """Leave the faults in the run's folder, then fail.

    Raises:
        FaultsFound: if there are any.
    """
    if not faults:
        return
    document = {"stage": stage, "faults": [asdict(fault) for fault in faults]}
    store.write(f"{faults_prefix(run.run_id)}{run.task}.json", json.dumps(document, indent=1).encode())
    raise FaultsFound(stage, faults)


def read_faults(store: Store, run_id: str) -> list[Fault]:
    """All faults that the checks of a run have reported."""
    documents: Iterable[Any] = (json.loads(store.read(info.path)) for info in store.list(faults_prefix(run_id)))
    return [Fault(**fault) for document in documents for fault in document["faults"]]
