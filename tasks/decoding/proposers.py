"""Who proposes draft tokens: a trained drafter, or a script that is right exactly as often as it is told."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from tasks.decoding.cached_target import choose

if TYPE_CHECKING:
    from tasks.drafter.model import DFlashDrafter
    from tasks.target.loading import Target


class Proposer(Protocol):
    """Proposes the draft tokens of one sequence after another."""

    block_size: int
    layer_ids: Sequence[int]  # target layers whose states it wants; empty: none

    def start(self, prompt_ids: Sequence[int]) -> None:
        """A new sequence begins: forget the last one."""

    def propose(self, anchor: int, position: int, states: Tensor | None) -> list[int]:
        """Draft the tokens at position + 1 ... position + block_size - 1.

        Args:
            anchor: the last token of the sequence so far; the target has not seen it yet.
            position: its index in the sequence.
            states: [1, n, K, H] captured states of the n positions before `position` that are new since the last call
                (the first call: the whole prompt), in the stored dtype; `None` if `layer_ids` is empty.

        Returns:
            block_size - 1 token ids.
        """


class DrafterProposer:
    """A DFlash drafter with its cache, on the target's embedding and head.

    Attributes:
        head_weight: [vocabulary, H] of the target's head.
        embedding_weight: [vocabulary, H] what the target's embedding module gives for each id.
    """

    def __init__(self, drafter: DFlashDrafter, target: Target) -> None:
        self._drafter = drafter
        self.block_size = drafter.config.block_size
        self.layer_ids: Sequence[int] = drafter.config.target_layer_ids
        self.head_weight, self.embedding_weight = head_weight(target), embedding_weight(target)
        self._dtype = next(drafter.parameters()).dtype
        self._device = next(drafter.parameters()).device
        self._masked = torch.full((1, self.block_size), drafter.config.mask_token_id, device=self._device)
        self.start([])

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Drop the context of the last sequence."""
        from tasks.drafter.model import DrafterCache

        self._cache = DrafterCache()

    def propose(self, anchor: int, position: int, states: Tensor | None) -> list[int]:
        """One drafter forward; the draft tokens are the head's first choice at each masked slot."""
        assert states is not None, "a drafter reads states: its layer_ids are never empty"
        block = self._masked.clone()
        block[0, 0] = anchor
        embeddings = functional.embedding(block, self.embedding_weight).to(self._dtype)
        hidden = self._drafter.draft(self._cache, states.to(self._device, self._dtype), embeddings, position)
        return choose(functional.linear(hidden[0, 1:].to(self.head_weight.dtype), self.head_weight))


def head_weight(target: Target) -> Tensor:
    """[vocabulary, H] of the target's head."""
    return cast(Tensor, target.head.weight)


def embedding_weight(target: Target) -> Tensor:
    """[vocabulary, H] what the target's embedding module gives for each id: its weight, scaled where the module scales
    (Gemma)."""
    if type(target.embedding) is nn.Embedding:
        return target.embedding.weight
    with torch.no_grad():
        return cast(Tensor, target.embedding(torch.arange(target.vocab_size, device=target.device)))


class ScriptedProposer:
    """Right for w tokens, then wrong, w taken in turn from `widths`: drives every pattern of rejections in a test."""

    layer_ids: Sequence[int] = ()

    def __init__(self, continuation: Sequence[int], widths: Sequence[int], *, block_size: int, vocab_size: int) -> None:
        """`continuation`: the target's own greedy answer, from its first token on."""
        self.block_size = block_size
        self._answer, self._widths, self._vocab_size = list(continuation), list(widths), vocab_size
        self.start([])

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Begin the script again."""
        self._prompt_length = len(prompt_ids)
        self._next: Iterator[int] = itertools.cycle(self._widths)

    def propose(self, anchor: int, position: int, states: Tensor | None) -> list[int]:
        """The next w tokens of the answer, then tokens that it does not have there."""
        index = position - self._prompt_length + 1  # of the first draft token, in the answer
        right = self._answer[index : index + self.block_size - 1]
        right += [0] * (self.block_size - 1 - len(right))
        width = next(self._next)
        return [token if k < width else (token + 1) % self._vocab_size for k, token in enumerate(right)]
