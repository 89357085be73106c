"""Repair: make exactly the faulty shards be extracted again, by taking away the receipts that call them complete."""

from __future__ import annotations

import logging
from collections.abc import Collection

from tasks.contract.layout import RECEIPT, receipt_path
from tasks.data.faults import faults_prefix, read_faults
from tasks.storage.artifact import find_receipt, remove_artifact
from tasks.storage.base import Store

log = logging.getLogger("tasks")


def drop_states(store: Store, keys: Collection[str]) -> list[str]:
    """Remove states artifacts, and the receipts of the extraction groups that name them.

    A group's receipt goes first: if this is interrupted, a rerun of the group finds which shards are left to do.

    Args:
        store: the artifact store.
        keys: keys of the states to extract again.

    Returns:
        Keys of the extraction groups that must run again.
    """
    wanted = set(keys)
    groups = []
    for info in store.list("extract/"):
        kind, key, *rest = info.path.split("/")
        if rest != [RECEIPT]:
            continue
        receipt = find_receipt(store, kind, key)
        if receipt is not None and any(entry["states"]["key"] in wanted for entry in receipt.details["shards"]):
            store.delete(receipt_path(kind, key))
            groups.append(key)
    for key in sorted(wanted):
        remove_artifact(store, "states", key)
    log.info("dropped %d states shards and the receipts of %d extraction groups", len(wanted), len(groups))
    return groups


def repair_run(store: Store, run_id: str) -> list[str]:
    """Drop every shard that the checks of a run found faulty, and the fault reports.

    Returns:
        Keys of the states dropped.
    """
    shards = sorted({fault.shard for fault in read_faults(store, run_id)})
    if shards:
        drop_states(store, shards)
    for info in list(store.list(faults_prefix(run_id))):
        store.delete(info.path)
    return shards
