"""Real speculative decoding, greedy: draft a block, verify it in one forward of the target, accept, roll back.

The output is the target's own greedy text, whatever the drafter proposes, on every kind of target.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tasks.decoding.acceptance import Step, step_outcome
from tasks.decoding.cache_rollback import CacheRollback
from tasks.decoding.cached_target import CachedTarget, choose
from tasks.decoding.proposers import Proposer
from tasks.decoding.verification import Verification, probe_verification
from tasks.target.capture import LayerCapture

if TYPE_CHECKING:
    from tasks.target.loading import Target


@dataclass
class Seconds:
    """Where the time of one answer went; the device is waited for at each boundary."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    rollback: float = 0.0

    @property
    def decode(self) -> float:
        """All but the prefill."""
        return self.draft + self.verify + self.rollback


@dataclass
class SpeculativeText:
    """Answer of one prompt.

    Attributes:
        tokens: generated ids: the prefill's token, then what the steps emitted.
        steps: the verification steps, in order.
        ended: whether the last token is an end token.
        seconds: split of the time.
    """

    tokens: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    ended: bool = False
    seconds: Seconds = field(default_factory=Seconds)


@torch.inference_mode()
def speculative_decode(
    target: Target,
    proposer: Proposer,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    states_dtype: torch.dtype = torch.bfloat16,
    verification: Verification | None = None,
) -> SpeculativeText:
    """Decode one prompt.

    Args:
        target: the target.
        proposer: drafts blocks of `proposer.block_size` tokens, anchor included. The last block is drafted whole and
            verified only as far as the limit reaches.
        prompt_ids: at least one token.
        max_new_tokens: limit of the answer, the prefill's token included.
        states_dtype: captured states are cast to it before drafting, as they are when stored for training.
        verification: `block` or `token`; `None` probes the target first (`probe_verification`), once a call.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: found {max_new_tokens}; expected at least 1")
    if verification is None:
        verification = probe_verification(target, prompt_ids, proposer.block_size).verification
    with ExitStack() as stack:
        capture = None
        if proposer.layer_ids:
            capture = stack.enter_context(LayerCapture(target, proposer.layer_ids))
        return _Loop(target, proposer, capture, states_dtype, verification).run(prompt_ids, max_new_tokens)


class _Loop:
    """State of one answer."""

    def __init__(
        self,
        target: Target,
        proposer: Proposer,
        capture: LayerCapture | None,
        states_dtype: torch.dtype,
        verification: Verification,
    ) -> None:
        self._target, self._proposer, self._capture, self._states_dtype = target, proposer, capture, states_dtype
        self._by_block = verification == "block"
        self._decoder = CachedTarget(target)
        self._rollback: CacheRollback | None = None

    def run(self, prompt_ids: Sequence[int], limit: int) -> SpeculativeText:
        text, now = SpeculativeText(), self._decoder.seconds
        start = now()
        text.tokens = choose(self._decoder.prefill(prompt_ids)[None])
        states = self._states()
        if self._by_block:
            assert self._decoder.cache is not None
            self._rollback = CacheRollback(self._decoder.cache)
        self._proposer.start(prompt_ids)
        text.seconds.prefill = now() - start
        while text.tokens[-1] not in self._target.eos_ids and len(text.tokens) < limit:
            start = now()
            position = len(prompt_ids) + len(text.tokens) - 1
            drafts = self._proposer.propose(text.tokens[-1], position, states)
            drafts = drafts[: limit - len(text.tokens) - 1]  # the target's own token takes the last place
            drafted = now()
            verify = self._verify_block if self._by_block else self._verify_tokens
            step, emitted, states, rollback_seconds = verify(position, text.tokens[-1], drafts)
            text.seconds.draft += drafted - start
            text.seconds.verify += now() - drafted - rollback_seconds
            text.seconds.rollback += rollback_seconds
            text.steps.append(step)
            text.tokens += emitted
        text.ended = text.tokens[-1] in self._target.eos_ids
        return text

    def _verify_block(
        self, position: int, anchor: int, drafts: list[int]
    ) -> tuple[Step, list[int], Tensor | None, float]:
        """One forward over anchor and drafts, then leave in the cache what was accepted."""
        assert self._rollback is not None
        now = self._decoder.seconds
        start = now()
        self._rollback.mark()
        marked = now()
        block = [anchor, *drafts]
        choices = choose(self._decoder.forward(block))
        step, emitted = step_outcome(position, drafts, choices, self._target.eos_ids)
        kept = len(emitted)  # anchor and accepted drafts, less an accepted end token: that one is never run again
        states = self._states(kept)
        verified = now()
        replay = self._rollback.keep(len(block), kept)
        if replay:
            self._decoder.forward(block[:replay])
        return step, emitted, states, (marked - start) + (now() - verified)

    def _verify_tokens(
        self, position: int, anchor: int, drafts: list[int]
    ) -> tuple[Step, list[int], Tensor | None, float]:
        """One token a forward while they match, so that no rejected token ever reaches the cache."""
        choices: list[int] = []
        captured: list[Tensor] = []
        for token in [anchor, *drafts]:
            choices += choose(self._decoder.forward([token]))
            if (states := self._states()) is not None:
                captured.append(states)
            if len(choices) > len(drafts) or choices[-1] != drafts[len(choices) - 1]:
                break
            if choices[-1] in self._target.eos_ids:
                break
        step, emitted = step_outcome(position, drafts, choices, self._target.eos_ids)
        return step, emitted, torch.cat(captured, dim=1) if captured else None, 0.0

    def _states(self, kept: int | None = None) -> Tensor | None:
        """States of the first `kept` tokens of the last forward, [1, kept, K, H]."""
        if self._capture is None:
            return None
        return self._capture.states()[:, :kept].to(self._states_dtype)
