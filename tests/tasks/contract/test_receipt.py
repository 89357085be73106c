"""Receipts round-trip, have one digest, and never hold what JSON cannot say."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tasks.contract.errors import (
    NEVER_RETRIED,
    ConfigurationError,
    FailureReport,
    Interrupted,
    Problem,
    StorageError,
)
from tasks.contract.layout import run_folder
from tasks.contract.receipt import Receipt

finite = st.floats(allow_nan=False, allow_infinity=False)
receipts = st.builds(
    Receipt,
    kind=st.sampled_from(["states", "train"]),
    version=st.integers(1, 9),
    key=st.text("0123456789abcdef", min_size=32, max_size=32),
    identity=st.text("0123456789abcdef", min_size=32, max_size=32),
    counts=st.dictionaries(st.text(max_size=5), st.integers(0, 2**53), max_size=4),
    metrics=st.dictionaries(st.text(max_size=5), finite, max_size=4),
    details=st.dictionaries(st.text(max_size=5), st.one_of(st.none(), st.text(max_size=5), finite), max_size=4),
    seconds=st.floats(0, 1e9),
)


@given(receipts)
def test_round_trip(receipt):
    again = Receipt.model_validate_json(receipt.to_bytes())
    assert again == receipt
    assert again.digest() == receipt.digest() == receipt.ref().digest


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_metrics_are_finite(value):
    with pytest.raises(ValidationError, match="finite"):
        Receipt(kind="measure", version=1, key="k", identity="k", metrics={"acceptance_length": value})


def test_an_unknown_object_names_what_there_is():
    receipt = Receipt(kind="states", version=1, key="abc", identity="abc")
    with pytest.raises(KeyError, match="states/abc has no object"):
        receipt.object("x")


def test_failure_reports_say_field_and_whether_to_retry():
    report = FailureReport.of("plan", ConfigurationError(Problem("block_size", 1, "at least 2")))
    assert (report.exit_code, report.retryable, report.fields) == (64, False, ["block_size"])
    assert "found 1; expected at least 2" in report.message
    assert FailureReport.of("extract", StorageError("gone")).retryable
    assert FailureReport.of("extract", ZeroDivisionError("x")).exit_code == 1
    assert 64 in NEVER_RETRIED
    assert Interrupted.exit_code not in NEVER_RETRIED


def test_run_folders_are_safe_and_distinct():
    one, two = run_folder("manual__2026-12-01T03:00:00+00:00"), run_folder("manual__2026-12-01T03:00:00-00:00")
    assert one != two
    assert set(one.removeprefix("runs/")) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
