from __future__ import annotations

import json

import pytest

from operators.results import XCOM_BYTES, InputMissing, collect_inputs, refs_of, task_result
from tasks.contract.receipt import Receipt, ReceiptRef


def receipt(kind: str = "extract", n: int = 0, **fields) -> Receipt:
    return Receipt(kind=kind, version=1, key=f"{n:032x}", identity=f"{n:032x}", **fields)


class Lazy:
    """Like the result of a mapped task: iterable, neither list nor tuple."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)

    def __len__(self):
        return len(self.items)


def test_references_are_found_in_any_nesting_in_order():
    refs = [receipt(n=n).ref() for n in range(4)]
    results = [task_result(receipt(n=n), "s3://b/p") for n in range(2)]
    value = [Lazy(results), refs[2], [[refs[3].model_dump()]], None]
    assert refs_of(value) == refs


@pytest.mark.parametrize("value", [7, "address", [b"x"]])
def test_anything_else_is_refused(value):
    with pytest.raises(TypeError, match="expected the result of a stage"):
        refs_of(value)


def test_inputs_by_name_and_the_group_by_kind():
    target, tokens = receipt("target", 1), [receipt("tokens", n) for n in (2, 3)]
    collected = collect_inputs({"target": task_result(target, "/s")}, [shard.ref() for shard in tokens])
    assert collected == {"target": [target.ref()], "tokens": [shard.ref() for shard in tokens]}


def test_missing_inputs_are_counted():
    results = Lazy([task_result(receipt(n=n), "/s") for n in range(7)])
    with pytest.raises(InputMissing, match=r"extract: 7 of 8 .*; verify: 0 of 1") as error:
        collect_inputs({"extract": results, "verify": None}, expect={"extract": 8})
    assert not error.value.retryable
    assert collect_inputs({"extract": results}, expect={"extract": 7})["extract"][6].key == f"{6:032x}"


def test_result_stays_under_ten_kilobytes_whatever_the_receipt_holds():
    """ORC-09."""
    many = receipt(
        counts={f"rejected because of reason {n}": n for n in range(500)},
        metrics={f"acceptance/{'x' * 300}/{n}": 0.5 for n in range(500)},
        details={"shards": ["x" * 1000] * 100},
    )
    result = task_result(many, "s3://bucket/prefix/")
    assert len(json.dumps(result).encode()) < XCOM_BYTES
    assert ReceiptRef(**result["ref"]) == many.ref()
    assert result["address"] == f"s3://bucket/prefix/extract/{many.key}/receipt.json"
