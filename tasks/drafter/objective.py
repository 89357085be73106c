"""The loss of a step: blocks of many samples through the drafter, only the slots that count through the head."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tasks.drafter.batches import Row
from tasks.drafter.loss import Slots, head_cross_entropy, supervised_slots
from tasks.drafter.model import DFlashDrafter


@dataclass(frozen=True)
class Outcome:
    """Sums over some rows."""

    loss: float  # mean by weight
    correct: Tensor  # [B] slots that the head's first choice gets right, by position in the block
    counted: Tensor  # [B]

    def accuracies(self, prefix: str) -> dict[str, float]:
        """Share right at each draft position that was scored, named `<prefix>_01`, ..."""
        pairs = enumerate(zip(self.correct.tolist(), self.counted.tolist(), strict=True))
        return {f"{prefix}_{k:02d}": right / count for k, (right, count) in pairs if count}


@dataclass
class _Sums:
    """Sums over rows, on the device."""

    loss: Tensor
    weight: Tensor
    correct: Tensor
    counted: Tensor

    @classmethod
    def zero(cls, block_size: int, device: torch.device) -> _Sums:
        floats, counts = torch.zeros(2, device=device), torch.zeros(2, block_size, dtype=torch.long, device=device)
        return cls(floats[0], floats[1], counts[0], counts[1])

    def add(self, slots: Slots, loss: Tensor, right: Tensor) -> None:
        size = len(self.counted)
        self.loss += loss
        self.weight += slots.weight.sum()
        self.correct += torch.bincount(slots.slot[right], minlength=size)
        self.counted += torch.bincount(slots.slot, minlength=size)

    def outcome(self) -> Outcome:
        return Outcome(float(self.loss / self.weight), self.correct.cpu(), self.counted.cpu())


@dataclass(frozen=True)
class Objective:
    """The paper's loss under one target.

    Attributes:
        embedding: [V, H] as blocks are fed.
        head: [V, H], frozen.
        gamma: decay of the weights over the draft positions.
    """

    embedding: Tensor
    head: Tensor
    gamma: float

    def accumulate(self, drafter: DFlashDrafter, rows: list[Row]) -> Outcome:
        """Add the gradient of the step's loss (sum of weight * CE over all rows / sum of weights) to the parameters.

        Rows are computed one after the other: a step may be larger than memory.
        """
        slots = [self._slots(drafter, row) for row in rows]
        total = sum(float(chosen.weight.sum()) for chosen in slots)
        sums = _Sums.zero(drafter.config.block_size, self.head.device)
        for row, chosen in zip(rows, slots, strict=True):
            loss, right = self._row_loss(drafter, row, chosen)
            (loss / total).backward()
            sums.add(chosen, loss.detach(), right)
        return sums.outcome()

    @torch.no_grad()
    def score(self, drafter: DFlashDrafter, rows: Iterable[Row]) -> Outcome | None:
        """Loss and accuracy without a gradient, one row in memory at a time; None if there is no row."""
        sums = _Sums.zero(drafter.config.block_size, self.head.device)
        for row in rows:
            chosen = self._slots(drafter, row)
            sums.add(chosen, *self._row_loss(drafter, row, chosen))
        return sums.outcome() if float(sums.weight) else None

    @torch.no_grad()
    def samples_not_finite(self, drafter: DFlashDrafter, row: Row) -> list[str]:
        """Samples of a row whose states are not finite; if there are none, samples whose loss is not.

        (A state that is not finite spoils its neighbours in the row too: a weight of zero times NaN is NaN.)
        """
        names = set(row.documents[0][~torch.isfinite(row.states[0]).flatten(1).all(1)].tolist())
        if not names:
            chosen = self._slots(drafter, row)
            hidden = self._hidden(drafter, row)[chosen.block, chosen.slot]
            documents = row.documents[0][row.anchors[0]][chosen.block]
            for document in range(len(row.sample_ids)):
                own = documents == document
                loss, _ = self._cross_entropy(hidden[own], chosen.label[own], chosen.weight[own])
                if not torch.isfinite(loss):
                    names.add(document)
        return [row.sample_ids[index] for index in sorted(names)]

    def _row_loss(self, drafter: DFlashDrafter, row: Row, slots: Slots) -> tuple[Tensor, Tensor]:
        """Sum of weight * CE of one row, and which slots are right."""
        hidden = self._hidden(drafter, row)
        return self._cross_entropy(hidden[slots.block, slots.slot], slots.label, slots.weight)

    def _cross_entropy(self, hidden: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return head_cross_entropy(hidden.to(self.head.dtype), self.head, labels, weights)

    def _hidden(self, drafter: DFlashDrafter, row: Row) -> Tensor:
        """[A, B, H] of the row's blocks."""
        anchors = row.anchors[0]
        shape = (len(anchors), drafter.config.block_size)
        blocks = torch.full(shape, drafter.config.mask_token_id, device=anchors.device)
        blocks[:, 0] = row.input_ids[anchors]
        low = anchors.device.type == "cuda" and self.head.dtype == torch.bfloat16
        with torch.autocast(anchors.device.type, torch.bfloat16, enabled=low):
            embeddings = functional.embedding(blocks, self.embedding).to(drafter.fc.weight.dtype)
            return drafter.block_hidden(
                row.states, embeddings[None], row.anchors, positions=row.positions, documents=row.documents
            )[0]

    def _slots(self, drafter: DFlashDrafter, row: Row) -> Slots:
        return supervised_slots(
            row.input_ids, row.loss_mask, row.anchors[0], drafter.config.block_size, self.gamma, row.ends
        )
