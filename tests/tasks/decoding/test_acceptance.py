from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.contract.errors import NEVER_RETRIED
from tasks.decoding.acceptance import (
    AcceptanceCount,
    NoVerificationSteps,
    Step,
    expected_accepted_drafts,
    merge,
    proxy_acceptance_length,
    step_outcome,
)

END = 9


def _count(*prompts: list[Step], block_size: int = 8) -> AcceptanceCount:
    count = AcceptanceCount(block_size)
    for prompt in prompts:
        count.add_prompt(prompt)
    return count


def _step(accepted: int, drafted: int = 7, position: int = 0) -> Step:
    return Step(position, drafted, accepted, accepted + 1)


def test_tokens_after_an_accepted_end_token_are_not_counted() -> None:
    """ACC-03: block [t1, END, t3, t4] plus bonus, all right: 2 tokens, not 5."""
    step, emitted = step_outcome(20, [1, END, 3, 4], [1, END, 3, 4, 5], {END})
    assert emitted == [1, END]
    assert step == Step(20, drafted=2, accepted=2, emitted=2)
    assert _count([step]).acceptance_length == 2.0


def test_end_token_as_the_targets_own_token() -> None:
    step, emitted = step_outcome(20, [1, 2, 3], [1, END, 7, 7], {END})
    assert emitted == [1, END]
    assert step == Step(20, drafted=3, accepted=1, emitted=2)


def test_always_wrong_drafter_is_exactly_one() -> None:
    """ACC-04: acceptance length 1.0, accepted draft tokens 0, under names that say which is which."""
    count = _count([_step(0) for _ in range(200)])
    assert count.acceptance_length == 1.0
    assert count.accepted == 0
    assert count.share_by_position() == dict.fromkeys(range(1, 8), 0.0)


def test_proxy_leaves_the_target_token_out() -> None:
    """ACC-06: accuracies .5, .5, .5 give .875, and 1.875 on the scale of acceptance length."""
    assert expected_accepted_drafts([0.5, 0.5, 0.5]) == 0.875
    assert proxy_acceptance_length([0.5, 0.5, 0.5]) == 1.875


def test_headline_is_tokens_over_steps_and_the_mean_of_means_has_its_own_name() -> None:
    """ACC-07: one prompt of 3 steps of 8, one of 24 steps of 1: 48/27, not 4.5."""
    count = _count([_step(7)] * 3, [_step(0)] * 24)
    assert (count.emitted, count.steps) == (48, 27)
    assert count.acceptance_length == pytest.approx(48 / 27)
    assert round(count.acceptance_length, 3) == 1.778
    assert count.mean_of_prompt_means == 4.5


@pytest.mark.parametrize("attribute", ["acceptance_length", "mean_of_prompt_means"])
def test_no_step_is_an_error_and_not_nan(attribute: str) -> None:
    count = _count([], [])
    with pytest.raises(NoVerificationSteps, match="no verification steps: found 0 steps in 2 prompts"):
        getattr(count, attribute)
    with pytest.raises(NoVerificationSteps):
        count.confidence_interval()
    assert NoVerificationSteps.exit_code in NEVER_RETRIED


def test_prompts_without_steps_have_no_mean_but_are_prompts() -> None:
    count = _count([], [_step(3)])
    assert count.mean_of_prompt_means == 4.0
    assert len(count.prompts) == 2


def test_shares_count_only_positions_that_were_drafted() -> None:
    count = _count([_step(3, drafted=7), _step(2, drafted=2)])
    shares = count.share_by_position()
    assert shares[1] == shares[2] == 1.0
    assert shares[3] == 1.0  # the second step had no third draft token
    assert shares[4] == 0.0
    assert count.steps_by_accepted == [0, 0, 1, 1, 0, 0, 0, 0]


def test_interval_contains_the_figure_and_shrinks_with_prompts() -> None:
    few = _count(*[[_step(a)] * 5 for a in (0, 7, 3)])
    many = _count(*[[_step(a)] * 5 for a in (0, 7, 3) * 40])
    low, high = few.confidence_interval()
    assert low <= few.acceptance_length <= high
    narrow = many.confidence_interval()
    assert narrow[1] - narrow[0] < (high - low) / 3
    assert many.confidence_interval() == narrow  # the same draw each time
    assert _count([_step(2)] * 4).confidence_interval() == (3.0, 3.0)


def test_different_block_sizes_are_not_merged() -> None:
    with pytest.raises(ValueError, match="8 and 4"):
        AcceptanceCount(8) + AcceptanceCount(4)


_steps = st.lists(
    st.integers(0, 7).flatmap(
        lambda drafted: st.builds(lambda accepted, d=drafted: _step(accepted, d), st.integers(0, drafted))
    ),
    max_size=6,
)


@given(st.lists(_steps, max_size=5), st.lists(_steps, max_size=5))
def test_merging_equals_counting_together(left: list[list[Step]], right: list[list[Step]]) -> None:
    together = _count(*left, *right)
    assert _count(*left) + _count(*right) == together
    assert merge([_count(p) for p in [*left, *right]], 8) == together
    assert AcceptanceCount.from_json(json.loads(json.dumps(together.to_json()))) == together
    assert together.emitted == together.accepted + together.steps
    assert sum(together.steps_by_accepted) == together.steps
    if together.steps:
        assert 1.0 <= together.acceptance_length <= 8.0


@given(st.lists(st.integers(0, 3), min_size=1, max_size=7), st.lists(st.integers(0, 3), min_size=8, max_size=8))
def test_outcome_is_what_plain_decoding_would_emit(drafts: list[int], choices: list[int]) -> None:
    step, emitted = step_outcome(0, drafts, choices[: len(drafts) + 1], {3})
    assert emitted == choices[: len(emitted)]  # always the target's own tokens
    assert 3 not in emitted[:-1]
    assert step.emitted == len(emitted)
    assert step.accepted <= step.drafted <= len(drafts)
