from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from tasks.drafter import loss as module
from tasks.drafter.anchors import draw_anchors, legal_anchors
from tasks.drafter.loss import Slots, default_decay, head_cross_entropy, supervised_slots
from tests.tasks.drafter.cases import normal


def slots_of(mask: list[int], anchors: list[int], block: int, ends: list[int] | None = None) -> list[tuple[int, ...]]:
    """(anchor, k, label) of every slot with a loss, where the token at position i is 100 + i."""
    ids = torch.arange(len(mask)) + 100
    found = supervised_slots(
        ids, torch.tensor(mask), torch.tensor(anchors), block, 4.0, None if ends is None else torch.tensor(ends)
    )
    check_weights(found, 4.0)
    return [
        (anchors[b], k, t)
        for b, k, t in zip(found.block.tolist(), found.slot.tolist(), found.label.tolist(), strict=True)
    ]


def check_weights(slots: Slots, gamma: float) -> None:
    expected = [math.exp(-(k - 1) / gamma) for k in slots.slot.tolist()]
    assert slots.weight.tolist() == pytest.approx(expected)


def test_labels_are_not_shifted() -> None:
    """TRN-02: slot k of anchor a predicts the token at a + k."""
    assert slots_of([1] * 10, [2, 7], 4) == [
        (2, 1, 103), (2, 2, 104), (2, 3, 105), (7, 1, 108), (7, 2, 109),
    ]  # fmt: skip


def test_the_first_answer_token_anchors_the_next_three() -> None:
    """TRN-03: prompt of 5 tokens, answer of 7, block 4."""
    mask = [0] * 5 + [1] * 7
    assert legal_anchors(np.array(mask)).tolist() == [5, 6, 7, 8, 9, 10]
    assert slots_of(mask, [5], 4) == [(5, 1, 106), (5, 2, 107), (5, 3, 108)]


def test_slots_are_gated_by_the_predicted_position() -> None:
    """TRN-04: answer at 10..29, anchor 27, block 4, the following turn unsupervised."""
    mask = [0] * 10 + [1] * 20 + [0] * 10
    assert slots_of(mask, [27], 4) == [(27, 1, 128), (27, 2, 129)]


def test_a_block_that_leaves_one_answer_may_enter_the_next() -> None:
    assert slots_of([1, 1, 0, 1], [0], 4) == [(0, 1, 101), (0, 3, 103)]


def test_another_samples_tokens_are_no_labels() -> None:
    """speculators scores them (read, not run): a block near the end of a sample in a packed row."""
    assert slots_of([1] * 8, [2, 3, 6], 4, ends=[4, 4, 8]) == [(2, 1, 103), (6, 1, 107)]


@pytest.mark.parametrize(
    ("mask", "legal"),
    [([0, 0, 1], []), ([0, 1, 1], [1]), ([1], []), ([], []), ([1, 0, 1, 0, 1], []), ([0] * 17 + [1] * 3, [17, 18])],
)
def test_legal_anchors(mask: list[int], legal: list[int]) -> None:
    """TRN-06: samples with few or no anchors."""
    assert legal_anchors(np.array(mask, dtype=np.uint8)).tolist() == legal


@settings(max_examples=50)
@given(mask=st.lists(st.integers(0, 1), max_size=60), count=st.integers(1, 20), epoch=st.integers(0, 5))
def test_anchors_are_legal_distinct_ascending_and_as_many_as_possible(mask: list[int], count: int, epoch: int) -> None:
    legal = legal_anchors(np.array(mask)).tolist()
    drawn = draw_anchors(np.array(mask), count, seed=1, epoch=epoch, sample_id=b"a" * 16).tolist()
    assert drawn == sorted(set(drawn))
    assert set(drawn) <= set(legal)
    assert len(drawn) == min(count, len(legal))


def test_anchors_are_drawn_anew_each_epoch_and_the_same_for_the_same_seed() -> None:
    mask = np.ones(200)

    def draw(seed: int, epoch: int, sample: bytes) -> tuple[int, ...]:
        return tuple(draw_anchors(mask, 20, seed=seed, epoch=epoch, sample_id=sample).tolist())

    assert draw(0, 0, b"x") == draw(0, 0, b"x")
    assert len({draw(s, e, i) for s in (0, 1) for e in (0, 1) for i in (b"x", b"y")}) == 8
    drawn = [a for e in range(400) for a in draw(0, e, b"x")]
    counts = np.bincount(drawn, minlength=199)
    assert counts.min() > 15  # 40 expected of each position
    assert counts.max() < 75


@pytest.mark.parametrize(("block", "gamma"), [(16, 7), (10, 5), (8, 4), (13, 6), (4, 2), (32, 14)])
def test_default_decay(block: int, gamma: float) -> None:
    assert default_decay(block) == gamma


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_fused_loss_and_gradient_are_the_plain_ones(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = 37
    monkeypatch.setitem(module._LOGITS, "cpu", chunk * vocabulary)
    hidden, head = normal(20, 12, seed=1).requires_grad_(), normal(vocabulary, 12, seed=2)
    labels, weights = torch.arange(20) % vocabulary, torch.rand(20, generator=torch.Generator().manual_seed(0))
    total, right = head_cross_entropy(hidden, head, labels, weights)
    (3 * total).backward()
    plain = normal(20, 12, seed=1).requires_grad_()
    logits = plain @ head.T
    expected = (functional.cross_entropy(logits, labels, reduction="none") * weights).sum()
    (3 * expected).backward()
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)
    assert plain.grad is not None
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad, plain.grad, rtol=1e-5, atol=1e-6)
    assert torch.equal(right, logits.argmax(1) == labels)


def test_the_gradient_is_that_of_finite_differences() -> None:
    hidden = normal(5, 6, seed=3).double().requires_grad_()
    head, labels = normal(11, 6, seed=4).double(), torch.tensor([0, 3, 10, 3, 7])
    weights = torch.tensor([1.0, 0.5, 0.25, 2.0, 0.0])

    def plain(h: torch.Tensor) -> torch.Tensor:
        return (functional.cross_entropy(h @ head.T, labels, reduction="none") * weights).sum()

    total, _ = head_cross_entropy(hidden, head, labels, weights)
    total.backward()
    step = 1e-6
    for i in range(5):
        for j in range(6):
            moved = torch.zeros_like(hidden)
            moved[i, j] = step
            slope = (plain(hidden.detach() + moved) - plain(hidden.detach() - moved)) / (2 * step)
            assert hidden.grad is not None
            assert hidden.grad[i, j].item() == pytest.approx(slope.item(), abs=2e-5)


def test_large_logits_do_not_overflow_and_logits_stay_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module._LOGITS, "cpu", 64)
    seen = []
    linear = functional.linear
    monkeypatch.setattr(module.functional, "linear", lambda h, w: seen.append(len(h)) or linear(h, w))
    hidden = (1000 * normal(9, 4, seed=5)).requires_grad_()
    total, _ = head_cross_entropy(hidden, 1000 * normal(16, 4, seed=6), torch.zeros(9, dtype=torch.long), torch.ones(9))
    total.backward()
    assert math.isfinite(total.item())
    assert hidden.grad is not None
    assert bool(torch.isfinite(hidden.grad).all())
    assert seen == [4, 4, 1]
