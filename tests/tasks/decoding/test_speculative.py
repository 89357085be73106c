"""Real decoding on tiny random targets, driven by scripted drafters: all rejections, all kinds of cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

from tasks.contract.errors import ConfigurationError
from tasks.decoding.acceptance import AcceptanceCount, Step
from tasks.decoding.cache_rollback import CacheRollback
from tasks.decoding.cached_target import CachedTarget, choose
from tasks.decoding.greedy import greedy_decode
from tasks.decoding.proposers import ScriptedProposer
from tasks.decoding.speculative import SpeculativeText, speculative_decode
from tasks.decoding.verification import Verification, probe_verification
from tasks.target.loading import Target
from tests.tasks.decoding.families import VOCAB, greedy_text, prompt, tiny_target, with_eos

BLOCK = 8
LENGTH = 41  # the prefill's token and 40 of verification steps
PATTERNS = [[7], [0], [2], [3, 1], [6, 0, 2, 4]]
BLOCK_VERIFIED = ["qwen3", "qwen3_5"]
SLOW_BLOCK_VERIFIED = ["llama", "gemma3", "gpt_oss", "lfm2", "qwen3_5_moe", "qwen3_next", "falcon_h1", "nemotron_h",
                       "mamba2"]  # fmt: skip
TOKEN_VERIFIED = ["jamba", "bamba", "minimax"]


def _expected(widths: Sequence[int], length: int = LENGTH) -> list[Step]:
    """What arithmetic demands: w accepted and one more, the last block cut to the limit."""
    steps, known = [], 1
    for width in cycle(widths):
        if known >= length:
            return steps
        drafted = min(BLOCK - 1, length - known - 1)
        accepted = min(width, drafted)
        steps.append(Step(known, drafted, accepted, accepted + 1))
        known += accepted + 1
    raise AssertionError


def _relative(text: SpeculativeText, prompt_length: int) -> list[Step]:
    return [dataclasses.replace(step, position=step.position - prompt_length + 1) for step in text.steps]


def _check_patterns(target: Target, prompt_ids: list[int], verification: Verification | None) -> None:
    plain = greedy_decode(target, prompt_ids, max_new_tokens=LENGTH).tokens
    assert len(plain) == LENGTH
    for widths in PATTERNS:
        proposer = ScriptedProposer(plain, widths, block_size=BLOCK, vocab_size=VOCAB)
        text = speculative_decode(target, proposer, prompt_ids, max_new_tokens=LENGTH, verification=verification)
        assert text.tokens == plain, widths
        assert _relative(text, len(prompt_ids)) == _expected(widths), widths
        assert not text.ended


@pytest.mark.parametrize("family", BLOCK_VERIFIED)
def test_every_pattern_gives_the_greedy_text_and_the_counts_of_arithmetic(family: str) -> None:
    """ACC-01."""
    target, prompt_ids = tiny_target(family), prompt(12)
    probe = probe_verification(target, prompt_ids, BLOCK)
    assert probe.verification == "block"
    assert probe.needs_replay == (family != "qwen3")
    _check_patterns(target, prompt_ids, "block")


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 40])  # 40: past the window of 32 of gemma3 and gpt_oss
@pytest.mark.parametrize("family", [*BLOCK_VERIFIED, *SLOW_BLOCK_VERIFIED])
def test_every_pattern_on_every_family(family: str, length: int) -> None:
    target, prompt_ids = tiny_target(family), prompt(length)
    assert probe_verification(target, prompt_ids, BLOCK).verification == "block"
    _check_patterns(target, prompt_ids, "block")


@pytest.mark.slow
@pytest.mark.parametrize("family", TOKEN_VERIFIED)
def test_families_with_an_inexact_block_forward_are_verified_token_by_token(family: str) -> None:
    target, prompt_ids = tiny_target(family), prompt(40)
    assert probe_verification(target, prompt_ids, BLOCK).verification == "token"
    _check_patterns(target, prompt_ids, None)


def test_verification_token_by_token_is_the_same_decoding() -> None:
    _check_patterns(tiny_target("qwen3_5"), prompt(12), "token")


@pytest.mark.parametrize("family", BLOCK_VERIFIED)
def test_rollback_equals_a_fresh_run(family: str) -> None:
    """ACC-02: 12 prompt tokens, a block of 6, keep 2, one more token: logits of a fresh run within 1e-4."""
    target, ids = tiny_target(family), prompt(21)
    head, block, last = ids[:12], ids[12:18], ids[20]
    with torch.inference_mode():
        cached = CachedTarget(target)
        cached.prefill(head)
        assert isinstance(cached.cache, DynamicCache)
        rollback = CacheRollback(cached.cache)
        rollback.mark()
        cached.forward(block)
        replay = rollback.keep(6, 2)
        assert replay == (2 if family == "qwen3_5" else 0)
        if replay:
            cached.forward(block[:replay])
        found = cached.forward([last])[0]
        fresh = target.model(torch.tensor([[*head, *block[:2], last]]), use_cache=False).logits[0, -1]
    assert (found - fresh).abs().max() < 1e-4 * fresh.abs().max()


def test_rollback_that_forgets_the_recurrent_state_would_be_seen() -> None:
    """The control of the tests above: without the restored state the text differs."""
    target, prompt_ids = tiny_target("qwen3_5"), prompt(12)
    plain = list(greedy_text("qwen3_5", 12, LENGTH))
    with torch.inference_mode():
        cached = CachedTarget(target)
        tokens = choose(cached.prefill(prompt_ids)[None])
        assert cached.cache is not None
        while len(tokens) < LENGTH:
            wrong = [(token + 1) % VOCAB for token in plain[len(tokens) : len(tokens) + 3]]
            tokens += choose(cached.forward([tokens[-1], *wrong])[:1])
            for layer in cached.cache.layers:
                if hasattr(layer, "keys"):
                    layer.crop(-len(wrong))
    assert tokens != plain


@pytest.mark.parametrize("family", [pytest.param("qwen3", marks=pytest.mark.slow), "qwen3_5"])
def test_always_wrong_drafter_for_200_steps(family: str) -> None:
    """ACC-15, ACC-04."""
    target, prompt_ids = tiny_target(family), prompt(12)
    plain = greedy_decode(target, prompt_ids, max_new_tokens=201).tokens
    proposer = ScriptedProposer(plain, [0], block_size=2, vocab_size=VOCAB)
    text = speculative_decode(target, proposer, prompt_ids, max_new_tokens=201, verification="block")
    assert text.tokens == plain
    count = AcceptanceCount(2)
    count.add_prompt(text.steps)
    assert (count.steps, count.acceptance_length, count.accepted) == (200, 1.0, 0)


@pytest.mark.parametrize("verification", ["block", "token"])
def test_end_token_inside_an_accepted_block(verification: Verification) -> None:
    """ACC-03 in real decoding: what follows the end token is neither emitted nor counted."""
    target, prompt_ids = tiny_target("qwen3_5"), prompt(12)
    plain = list(greedy_text("qwen3_5", 12, LENGTH))
    place = next(i for i in range(3, 20) if plain[i] not in plain[:i] and i % BLOCK)
    target = with_eos(target, plain[place])
    assert greedy_decode(target, prompt_ids, max_new_tokens=LENGTH).tokens == plain[: place + 1]
    proposer = ScriptedProposer(plain, [7], block_size=BLOCK, vocab_size=VOCAB)
    text = speculative_decode(target, proposer, prompt_ids, max_new_tokens=LENGTH, verification=verification)
    assert text.tokens == plain[: place + 1]
    assert text.ended
    assert sum(step.emitted for step in text.steps) == place
    last = text.steps[-1]
    assert last.accepted == last.emitted == last.drafted == place - (len(text.steps) - 1) * BLOCK


def test_prompts_that_end_at_once_make_no_step() -> None:
    target, prompt_ids = tiny_target("qwen3"), prompt(12)
    first = greedy_decode(target, prompt_ids, max_new_tokens=1).tokens
    proposer = ScriptedProposer(first, [7], block_size=BLOCK, vocab_size=VOCAB)
    ended = speculative_decode(
        with_eos(target, *first), proposer, prompt_ids, max_new_tokens=LENGTH, verification="block"
    )
    assert (ended.tokens, ended.steps, ended.ended) == (first, [], True)
    limited = speculative_decode(target, proposer, prompt_ids, max_new_tokens=1, verification="block")
    assert (limited.tokens, limited.steps, limited.ended) == (first, [], False)


@pytest.mark.parametrize("limit", range(2, 12))
def test_length_limit(limit: int) -> None:
    target, prompt_ids = tiny_target("qwen3"), prompt(12)
    plain = list(greedy_text("qwen3", 12, LENGTH))[:limit]
    assert len(plain) == limit
    proposer = ScriptedProposer(plain, [7], block_size=BLOCK, vocab_size=VOCAB)
    text = speculative_decode(target, proposer, prompt_ids, max_new_tokens=limit, verification="block")
    assert text.tokens == plain
    assert _relative(text, 12) == _expected([7], limit)


def test_the_mask_id_is_kept_when_the_target_emits_it() -> None:
    """ACC-10: no id is special in the output. Each emitted id in turn is the mask id here."""
    target, prompt_ids = tiny_target("qwen3_5"), prompt(12)
    plain = list(greedy_text("qwen3_5", 12, LENGTH))

    class Masked(ScriptedProposer):
        def propose(self, anchor: int, position: int, states: torch.Tensor | None) -> list[int]:
            super().propose(anchor, position, states)
            return [plain[5]] * (self.block_size - 1)  # drafts nothing but the mask id

    proposer = Masked(plain, [0], block_size=BLOCK, vocab_size=VOCAB)
    text = speculative_decode(target, proposer, prompt_ids, max_new_tokens=LENGTH, verification="block")
    assert text.tokens == plain
    assert plain[5] in text.tokens
    assert len(text.tokens) == 1 + sum(step.emitted for step in text.steps)


def test_ties_go_to_the_lowest_id_in_both() -> None:
    """ACC-11: every logit has an equal twin at a higher id."""
    target = tiny_target("qwen3", seed=7)
    head = target.model.lm_head.weight
    with torch.no_grad():
        kept = head.clone()
        head[VOCAB // 2 :] = head[: VOCAB // 2]
    try:
        prompt_ids = prompt(12)
        plain = greedy_decode(target, prompt_ids, max_new_tokens=LENGTH)
        assert set(plain.margins) == {0.0}
        assert max(plain.tokens) < VOCAB // 2
        for widths in ([7], [0], [3, 1]):
            proposer = ScriptedProposer(plain.tokens, widths, block_size=BLOCK, vocab_size=VOCAB)
            text = speculative_decode(target, proposer, prompt_ids, max_new_tokens=LENGTH, verification="block")
            assert text.tokens == plain.tokens
            assert _relative(text, 12) == _expected(widths)
    finally:
        with torch.no_grad():
            head.copy_(kept)


def test_states_handed_to_the_drafter_are_those_of_a_plain_forward() -> None:
    """Every position once, in order, in the stored dtype, and the anchor's own state never."""
    from tasks.target.capture import LayerCapture

    target, prompt_ids = tiny_target("qwen3_5"), prompt(12)
    plain = list(greedy_text("qwen3_5", 12, LENGTH))
    received: list[torch.Tensor] = []

    class Listening(ScriptedProposer):
        layer_ids = (0, 2)

        def propose(self, anchor: int, position: int, states: torch.Tensor | None) -> list[int]:
            assert states is not None
            received.append(states)
            assert sum(s.shape[1] for s in received) == position
            assert anchor == plain[position - len(prompt_ids)]
            return super().propose(anchor, position, states)

    proposer = Listening(plain, [6, 0, 2, 4], block_size=BLOCK, vocab_size=VOCAB)
    with LayerCapture(target, (0, 2)) as capture, torch.inference_mode():
        target.model(torch.tensor([[*prompt_ids, *plain]]), use_cache=False)
        whole = capture.states()
    for verification in ("block", "token"):
        received.clear()
        speculative_decode(
            target, proposer, prompt_ids, max_new_tokens=LENGTH, states_dtype=torch.float32, verification=verification
        )
        states = torch.cat(received, dim=1)
        assert states.dtype == torch.float32
        expected = whole[:, : states.shape[1]]
        assert (states - expected).norm() < 1e-4 * expected.norm()
    received.clear()
    speculative_decode(target, proposer, prompt_ids, max_new_tokens=20, verification="block")
    assert {s.dtype for s in received} == {torch.bfloat16}


def test_seconds_are_split() -> None:
    target, prompt_ids = tiny_target("qwen3_5"), prompt(12)
    plain = greedy_decode(target, prompt_ids, max_new_tokens=20)
    assert plain.prefill_seconds > 0
    assert plain.decode_seconds > 0
    proposer = ScriptedProposer(plain.tokens, [1], block_size=BLOCK, vocab_size=VOCAB)
    seconds = speculative_decode(target, proposer, prompt_ids, max_new_tokens=20, verification="block").seconds
    assert min(seconds.prefill, seconds.draft, seconds.verify, seconds.rollback) > 0
    assert seconds.decode == pytest.approx(seconds.draft + seconds.verify + seconds.rollback)


def test_a_target_without_a_cache_object_is_refused_by_name() -> None:
    class Stateful(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, use_cache: bool = True) -> dict[str, object]:
            raise AssertionError

    class Output(dict[str, object]):
        logits = torch.zeros(1, 1, 4)

    model = Stateful()
    model.forward = lambda **_: Output()  # type: ignore[method-assign]
    target = SimpleNamespace(model=model, config=SimpleNamespace(model_type="rwkv"), device=torch.device("cpu"))
    with pytest.raises(ConfigurationError, match="'rwkv'; expected a family whose forward returns a cache object"):
        CachedTarget(target).prefill([1, 2])  # type: ignore[arg-type]
