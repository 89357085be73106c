"""One layer convention: published ids, conversions, refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.contract.errors import ConfigurationError
from tasks.contract.layers import check_layer_ids, default_layer_ids, huggingface_index, vllm_id


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (64, [1, 16, 31, 46, 61]),  # Qwen3.6-27B-DFlash
        (40, [1, 10, 19, 28, 37]),  # Qwen3.5-35B-A3B
        (36, [1, 9, 17, 25, 33]),  # Qwen3-8B
        (32, [1, 8, 15, 22, 29]),  # Qwen3.5-4B
        (24, [1, 6, 11, 16, 21]),  # gpt-oss-20b
        (30, [1, 8, 14, 20, 27]),  # SmolLM2-135M
        (18, [1, 4, 8, 12, 15]),
    ],
)
def test_published_ids(layers, expected):
    assert default_layer_ids(layers, 5) == expected


def test_one_layer_is_the_middle_one():
    assert default_layer_ids(64, 1) == [32]


def test_shallow_target_is_refused():
    with pytest.raises(ConfigurationError, match="layer_count: found 4"):
        default_layer_ids(4, 4)


@given(st.integers(1, 200), st.integers(1, 40))
def test_default_ids_are_legal_or_refused(layers, count):
    try:
        ids = default_layer_ids(layers, count)
    except ConfigurationError:
        return
    assert len(ids) == count
    assert check_layer_ids(ids, layers) == ids


def test_the_off_by_one_that_ruined_900_000_samples():
    with pytest.raises(ConfigurationError, match=r"layer_ids: found \[1, 65\].*0\.\.63.*out of range: \[65\]"):
        check_layer_ids([1, 65], 64)
    with pytest.raises(ConfigurationError, match="after the final norm"):
        check_layer_ids([1, 64], 64)
    assert check_layer_ids([63], 64) == [63]


@pytest.mark.parametrize("ids", [[], [2, 1], [1, 1], [-1, 3]])
def test_ids_must_ascend(ids):
    with pytest.raises(ConfigurationError, match="layer_ids"):
        check_layer_ids(ids, 8)


def test_conversions():
    assert [huggingface_index(i) for i in (1, 16, 61)] == [2, 17, 62]
    assert [vllm_id(i) for i in (1, 16, 31, 46, 61)] == [2, 17, 32, 47, 62]
