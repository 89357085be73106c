"""The paper's loss (DFlash, Eq. 4): cross-entropy of each draft slot with the data's own token, decaying in the block.

Slot k of a block with anchor a predicts the token at a + k (labels are not shifted); slot 0 is the anchor and has no
loss. Its weight is exp(-(k - 1) / gamma), if the position a + k is supervised and of the anchor's document, else 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

# Published decays: (block size, gamma). Between them linear, outside in proportion.
_DECAYS = ((8, 4.0), (10, 5.0), (16, 7.0))
# Logits of one chunk. On a CPU they should stay near its caches (32 MiB); on a GPU 1 GiB in fp32 fills it.
_LOGITS = {"cpu": 1 << 23, "cuda": 1 << 28}


def default_decay(block_size: int) -> float:
    """The paper's gamma for a block size: 4, 5, 7 for 8, 10, 16 (appendix A.1)."""
    for (small, low), (large, high) in pairwise(_DECAYS):
        if small <= block_size <= large:
            return low + (high - low) * (block_size - small) / (large - small)
    size, gamma = _DECAYS[0] if block_size < _DECAYS[0][0] else _DECAYS[-1]
    return gamma * block_size / size


@dataclass(frozen=True)
class Slots:
    """The slots of some blocks that have a loss. M slots in all."""

    block: Tensor  # [M] int64 index of the block
    slot: Tensor  # [M] int64 k, 1 .. B-1
    label: Tensor  # [M] int64 token id
    weight: Tensor  # [M] float32


def supervised_slots(
    input_ids: Tensor, loss_mask: Tensor, anchors: Tensor, block_size: int, gamma: float, ends: Tensor | None = None
) -> Slots:
    """Which slots count, with label and weight.

    Args:
        input_ids: [S] int64.
        loss_mask: [S], 1 where the token at that position is supervised.
        anchors: [A] int64 indices in the row.
        block_size: B.
        gamma: decay.
        ends: [A] int64, index after the anchor's document; by default S.
    """
    offsets = torch.arange(1, block_size, device=input_ids.device)
    index = anchors[:, None] + offsets  # [A, B-1]
    limit = torch.full_like(anchors, len(input_ids)) if ends is None else ends
    inside = index < limit[:, None]
    safe = index.clamp(max=len(input_ids) - 1)
    counts = inside & (loss_mask[safe] != 0)
    block, column = counts.nonzero(as_tuple=True)
    weight = torch.exp(-(offsets - 1).float() / gamma)[column]
    return Slots(block, offsets[column], input_ids[safe[block, column]].long(), weight)


class _HeadCrossEntropy(torch.autograd.Function):
    """Weighted cross-entropy sum under a frozen head, with its gradient made in the same pass over the logits.

    Logits exist only for one chunk of rows at a time and are never recomputed.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        gradient = torch.empty_like(hidden)
        losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        correct = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        rows = max(_LOGITS.get(head.device.type, 1 << 28) // len(head), 1)
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            label, weight = labels[part, None], weights[part, None]
            logits = functional.linear(hidden[part], head).float()
            first = logits.argmax(1, keepdim=True)
            correct[part] = (first == label)[:, 0]
            largest, picked = logits.gather(1, first), logits.gather(1, label)
            powers = logits.sub_(largest).exp_()
            total = powers.sum(1, keepdim=True)
            losses[part] = (largest + total.log() - picked)[:, 0]
            if ctx.needs_input_grad[0]:
                slopes = powers.mul_(weight / total)
                slopes.scatter_add_(1, label, -weight)
                gradient[part] = slopes.to(head.dtype) @ head
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(correct)
        return (losses * weights).sum(), correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None


def head_cross_entropy(hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of weight * cross-entropy, and which rows the head gets right.

    Args:
        hidden: [M, H]; gradients flow into it.
        head: [V, H], frozen.
        labels: [M] int64.
        weights: [M] float32.

    Returns:
        Scalar float32 loss sum; [M] bool.
    """
    return cast(tuple[Tensor, Tensor], _HeadCrossEntropy.apply(hidden, head, labels, weights))
