"""Replay: the acceptance of real greedy decoding, from stored states and the target's own text, without the target.

Speculative decoding is lossless, so the text is known beforehand, and with it what the target answers to every draft.
Only the drafter runs: all anchors of an answer in one pass, then a walk over the steps that real decoding would make.
Equal to real decoding step by step in fp32; in reduced precision near ties may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from tasks.decoding.acceptance import AcceptanceCount, Step, step_outcome
from tasks.decoding.cached_target import choose

if TYPE_CHECKING:
    from tasks.drafter.model import DFlashDrafter

_SLOTS = 8192  # block slots of one drafter pass
_LOGITS = 1 << 26  # logits of one chunk of the head: 256 MiB in fp32


@dataclass(frozen=True)
class ReferenceSequence:
    """A prompt with the target's own greedy answer.

    Attributes:
        input_ids: [T] int64, prompt and answer, the end token included where one came.
        prompt_length: tokens of the prompt.
        load_states: reads `states`; they stay in the file until then.
        slice: name of the slice the prompt belongs to.
        ended: whether the answer ends with an end token (otherwise it reached the limit).
        prompt_id: name of the prompt.
        limit: the limit under which the answer was decoded, its first token included.
        margins: [T - prompt_length] fp32, logit margin of each answer token over the runner-up in plain decoding.
    """

    input_ids: Tensor
    prompt_length: int
    load_states: Callable[[], Tensor]
    slice: str
    ended: bool
    prompt_id: str
    limit: int
    margins: Tensor

    @property
    def states(self) -> Tensor:
        """[T, K, H] states of the captured layers, in the stored dtype; read anew at each access."""
        return self.load_states()

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt."""
        return [int(token) for token in self.input_ids[: self.prompt_length].tolist()]

    @property
    def answer(self) -> list[int]:
        """The answer."""
        return [int(token) for token in self.input_ids[self.prompt_length :].tolist()]


def replay_acceptance(
    drafter: DFlashDrafter,
    head_weight: Tensor,
    embedding_weight: Tensor,
    sequences: Iterable[ReferenceSequence],
    block_size: int | None = None,
) -> AcceptanceCount:
    """Greedy acceptance of a drafter on reference sequences, all slices together.

    Args:
        drafter: in eval mode, on the device where it is to run; left as it is.
        head_weight: [vocabulary, H] the target's head.
        embedding_weight: [vocabulary, H] the target's embedding as its blocks are fed (a scaled embedding: scaled).
        sequences: reference sequences with states of the drafter's layers.
        block_size: the drafter's own if left out.
    """
    size = block_size or drafter.config.block_size
    count = AcceptanceCount(size)
    for sequence in sequences:
        count.add_prompt(replay_steps(drafter, head_weight, embedding_weight, sequence, size))
    return count


@torch.no_grad()
def replay_steps(
    drafter: DFlashDrafter,
    head_weight: Tensor,
    embedding_weight: Tensor,
    sequence: ReferenceSequence,
    block_size: int,
) -> list[Step]:
    """The verification steps that real decoding makes on one sequence."""
    answer, eos = sequence.answer, sequence.answer[-1:] if sequence.ended else []
    if len(answer) < 2:
        return []
    drafts = _drafts(drafter, head_weight, embedding_weight, sequence, block_size)
    steps: list[Step] = []
    known = 1  # answer tokens emitted so far; the last of them is the anchor
    while known < len(answer):
        usable = drafts[known - 1][: max(sequence.limit - known - 1, 0)]
        step, emitted = step_outcome(sequence.prompt_length + known - 1, usable, answer[known:], eos)
        steps.append(step)
        known += len(emitted)
    return steps


def _drafts(
    drafter: DFlashDrafter,
    head_weight: Tensor,
    embedding_weight: Tensor,
    sequence: ReferenceSequence,
    block_size: int,
) -> list[list[int]]:
    """Draft tokens at every anchor: each answer token but the last."""
    parameter = next(drafter.parameters())
    device, dtype = parameter.device, parameter.dtype
    length = len(sequence.input_ids) - 1
    anchors = torch.arange(sequence.prompt_length, length, device=device)
    ids = sequence.input_ids.to(device)
    states = sequence.states[None, :length].to(device, dtype)
    mask_id = drafter.config.mask_token_id
    drafts: list[list[int]] = []
    for part in anchors.split(max(_SLOTS // block_size, 1)):
        blocks = torch.full((len(part), block_size), mask_id, dtype=torch.long, device=device)
        blocks[:, 0] = ids[part]
        embeddings = functional.embedding(blocks, embedding_weight).to(dtype)
        # shape: [anchors, block - 1, H]
        hidden = drafter.block_hidden(states, embeddings[None], part[None])[0, :, 1:]
        flat = hidden.reshape(-1, hidden.shape[-1]).to(head_weight.dtype)
        tokens: list[int] = []
        for rows in flat.split(max(_LOGITS // len(head_weight), 1)):
            tokens += choose(functional.linear(rows, head_weight))
        drafts += [tokens[i : i + block_size - 1] for i in range(0, len(tokens), block_size - 1)]
    return drafts
