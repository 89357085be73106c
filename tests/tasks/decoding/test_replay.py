"""Replay against real decoding: the same steps, one by one, in fp32."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tasks.decoding.acceptance import AcceptanceCount
from tasks.decoding.greedy import greedy_decode
from tasks.decoding.proposers import DrafterProposer
from tasks.decoding.replay import replay_acceptance, replay_steps
from tasks.decoding.speculative import speculative_decode
from tests.tasks.decoding.drafters import accepted, reference_sequence, tiny_drafter, train_briefly
from tests.tasks.decoding.families import prompt, tiny_target, with_eos

LAYER_IDS = (0, 2)
BLOCK = 6
LIMIT = 28


@pytest.mark.parametrize(
    ("family", "sliding"),
    [
        ("qwen3_5", True),
        pytest.param("qwen3_5", False, marks=pytest.mark.slow),
        pytest.param("qwen3", False, marks=pytest.mark.slow),
        pytest.param("qwen3", True, marks=pytest.mark.slow),
        pytest.param("gemma3", False, marks=pytest.mark.slow),
    ],
)
def test_replay_equals_real_decoding_step_by_step(family: str, sliding: bool) -> None:
    target = tiny_target(family)
    prompts = [prompt(length, seed) for length, seed in ((12, 1), (40, 2), (3, 3))]
    texts = [greedy_decode(target, ids, max_new_tokens=LIMIT).tokens for ids in prompts]
    sequences = [
        reference_sequence(target, LAYER_IDS, ids, tokens, LIMIT) for ids, tokens in zip(prompts, texts, strict=True)
    ]
    drafter = tiny_drafter(target, LAYER_IDS, BLOCK, sliding=sliding)
    for trained in (False, True):
        if trained:
            train_briefly(drafter, target, sequences)
        proposer = DrafterProposer(drafter, target)
        real = AcceptanceCount(BLOCK)
        for ids, tokens, sequence in zip(prompts, texts, sequences, strict=True):
            text = speculative_decode(
                target, proposer, ids, max_new_tokens=LIMIT, states_dtype=torch.float32, verification="block"
            )
            assert text.tokens == tokens
            steps = replay_steps(drafter, proposer.head_weight, proposer.embedding_weight, sequence, BLOCK)
            assert steps == text.steps
            real.add_prompt(text.steps)
        assert replay_acceptance(drafter, proposer.head_weight, proposer.embedding_weight, sequences) == real
        if trained:  # else the comparison would say little
            assert real.acceptance_length > 1.5


def test_replay_knows_end_tokens_and_limits() -> None:
    """Each answer token in turn as the end token, and each limit: the same steps as real decoding."""
    target, ids = tiny_target("qwen3_5"), prompt(12)
    whole = greedy_decode(target, ids, max_new_tokens=LIMIT).tokens
    drafter = tiny_drafter(target, LAYER_IDS, BLOCK)
    train_briefly(drafter, target, [reference_sequence(target, LAYER_IDS, ids, whole, LIMIT)])
    proposer = DrafterProposer(drafter, target)
    firsts = [i for i in range(8) if whole[i] not in whole[:i]]
    assert firsts[0] == 0  # the case of an answer that ends at once
    cut_by_end = 0
    for place, limit in [*((i, LIMIT) for i in firsts), *((None, limit) for limit in (1, 2, 6, 7))]:
        eos = [] if place is None else [whole[place]]
        ending = with_eos(target, *eos)
        tokens = greedy_decode(ending, ids, max_new_tokens=limit).tokens
        assert len(tokens) == (limit if place is None else place + 1)
        text = speculative_decode(
            ending, proposer, ids, max_new_tokens=limit, states_dtype=torch.float32, verification="block"
        )
        assert text.tokens == tokens
        sequence = reference_sequence(ending, LAYER_IDS, ids, tokens, limit)
        assert replay_steps(drafter, proposer.head_weight, proposer.embedding_weight, sequence, BLOCK) == text.steps
        cut_by_end += bool(text.steps) and text.steps[-1].emitted == text.steps[-1].accepted
    assert cut_by_end  # an end token was drafted and accepted at least once


def test_states_in_the_stored_dtype_reach_the_drafter_in_both() -> None:
    target, ids = tiny_target("qwen3"), prompt(12)
    tokens = greedy_decode(target, ids, max_new_tokens=LIMIT).tokens
    sequence = reference_sequence(target, LAYER_IDS, ids, tokens, LIMIT, dtype=torch.bfloat16)
    drafter = train_briefly(tiny_drafter(target, LAYER_IDS, BLOCK), target, [sequence])
    proposer = DrafterProposer(drafter, target)
    text = speculative_decode(target, proposer, ids, max_new_tokens=LIMIT, verification="block")
    steps = replay_steps(drafter, proposer.head_weight, proposer.embedding_weight, sequence, BLOCK)
    assert [step.accepted for step in steps] == accepted(text)


def test_anchors_in_several_parts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.decoding import replay

    target, ids = tiny_target("qwen3"), prompt(12)
    tokens = greedy_decode(target, ids, max_new_tokens=LIMIT).tokens
    sequence = reference_sequence(target, LAYER_IDS, ids, tokens, LIMIT)
    drafter = train_briefly(tiny_drafter(target, LAYER_IDS, BLOCK), target, [sequence])
    proposer = DrafterProposer(drafter, target)
    whole = replay_steps(drafter, proposer.head_weight, proposer.embedding_weight, sequence, BLOCK)
    monkeypatch.setattr(replay, "_SLOTS", 5 * BLOCK)
    monkeypatch.setattr(replay, "_LOGITS", 7 * target.vocab_size)
    assert replay_steps(drafter, proposer.head_weight, proposer.embedding_weight, sequence, BLOCK) == whole
    assert all(after.position - before.position == before.emitted for before, after in pairwise(whole))
