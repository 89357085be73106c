"""What one task hands to the next through XCom: the receipt's address and digest and a few numbers, under 10 kB."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tasks.contract.errors import StageError
from tasks.contract.layout import receipt_path
from tasks.contract.receipt import Receipt, ReceiptRef

XCOM_BYTES = 10_000
_NUMBERS = 40  # of counts and of metrics each


class InputMissing(StageError):
    """A task that this one waits for gave no result. Another try of this task cannot change that."""

    retryable = False


def task_result(receipt: Receipt, root: str) -> dict[str, Any]:
    """XCom value for a receipt: `ref`, `counts`, `metrics`, `address` (below `root`, the store's root), `store`."""
    result: dict[str, Any] = {
        "ref": receipt.ref().model_dump(),
        "counts": _first(receipt.counts),
        "metrics": _first(receipt.metrics),
        "address": f"{root.rstrip('/')}/{receipt_path(receipt.kind, receipt.key)}",
        "store": root,
    }
    if len(json.dumps(result).encode()) >= XCOM_BYTES:  # the receipt itself has them all
        result["counts"], result["metrics"] = {}, {}
    return result


def _first(numbers: Mapping[str, Any]) -> dict[str, Any]:
    return dict(list(numbers.items())[:_NUMBERS])


def refs_of(value: Any) -> list[ReceiptRef]:
    """Receipt references in a task's result, a reference itself, or any nesting of sequences of these.

    Results of mapped tasks arrive as a lazy sequence; the order is that of the map index. `None` (a task without a
    result) adds nothing.

    Raises:
        TypeError: for anything else.
    """
    if value is None:
        return []
    if isinstance(value, ReceiptRef):
        return [value]
    if isinstance(value, Mapping):
        return [ReceiptRef.model_validate(value.get("ref", value))]
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [ref for item in value for ref in refs_of(item)]
    raise TypeError(f"found {type(value).__name__} {value!r}; expected the result of a stage or a receipt reference")


def collect_inputs(
    inputs: Mapping[str, Any] | None, group: Any = None, expect: Mapping[str, int] | None = None
) -> dict[str, list[ReceiptRef]]:
    """Inputs of a stage request.

    Args:
        inputs: results by input name.
        group: further results, each filed under its kind: the mapped part.
        expect: how many results an input must have; at least one where nothing is said.

    Raises:
        InputMissing: naming each input that has fewer, with both numbers.
    """
    collected = {name: refs_of(value) for name, value in (inputs or {}).items()}
    for ref in refs_of(group):
        collected.setdefault(ref.kind, []).append(ref)
    expected = {name: (expect or {}).get(name, 1) for name in collected}
    missing = [
        f"{name}: {len(refs)} of {expected[name]} tasks gave a result"
        for name, refs in collected.items()
        if len(refs) < expected[name]
    ]
    if missing:
        raise InputMissing("; ".join(missing) + ". Clear the failed ones to run them again")
    return collected
