"""Acceptance, as sums: everything reported of speculative decoding is computed from an `AcceptanceCount`.

Acceptance length = tokens emitted by verification steps / verification steps. The token that the target adds in every
step is included; tokens past the end token or the limit are not counted; the token that the prefill gives is no step's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np

from tasks.contract.errors import DataError


class NoVerificationSteps(DataError):
    """No prompt made a verification step, so there is no acceptance to speak of (it is not NaN and not 0)."""

    def __init__(self, prompts: int) -> None:
        super().__init__(
            f"no verification steps: found 0 steps in {prompts} prompts; expected prompts whose greedy answer has at "
            "least two tokens; raise max_new_tokens or take other prompts"
        )


@dataclass(frozen=True)
class Step:
    """One verification step.

    Attributes:
        position: index of the anchor in the whole sequence, prompt included.
        drafted: draft tokens that the step could have used: block size - 1, less what lies past the answer limit, and
            less what follows an accepted end token.
        accepted: leading draft tokens that are the target's own choice, up to an end token.
        emitted: tokens that the step added to the answer: accepted + 1, or accepted where the last one is an end token.
    """

    position: int
    drafted: int
    accepted: int
    emitted: int


class PromptCount(NamedTuple):
    """Sums of one prompt."""

    steps: int
    emitted: int


def step_outcome(
    position: int, drafts: Sequence[int], choices: Sequence[int], eos_ids: Iterable[int]
) -> tuple[Step, list[int]]:
    """Decide one verification step.

    Args:
        position: index of the anchor.
        drafts: draft tokens that were verified, d of them (the block already shortened to the answer limit).
        choices: the target's choice after the anchor and after each draft token; d + 1 of them, or fewer where an
            accepted end token comes first (replay does not know what the target would say after the end).
        eos_ids: end tokens.

    Returns:
        The step, and the tokens it emits.
    """
    ends = frozenset(eos_ids)
    accepted = 0
    for draft, choice in zip(drafts, choices, strict=False):
        if draft != choice:
            break
        accepted += 1
        if draft in ends:
            return Step(position, accepted, accepted, accepted), list(drafts[:accepted])
    tokens = [*drafts[:accepted], choices[accepted]]
    return Step(position, len(drafts), accepted, accepted + 1), tokens


@dataclass
class AcceptanceCount:
    """Sums over verification steps; counts of different prompts, slices or processes are merged by `+`.

    Attributes:
        block_size: tokens of a block, the anchor included.
        accepted_by_position: [block_size - 1] steps that accepted the draft token at position k + 1.
        drafted_by_position: [block_size - 1] steps that had a usable draft token there.
        steps_by_accepted: [block_size] histogram: steps that accepted 0, 1, ... draft tokens.
        prompts: sums of each prompt, prompts without a step included.
    """

    block_size: int
    steps: int = 0
    emitted: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    drafted_by_position: list[int] = field(default_factory=list)
    steps_by_accepted: list[int] = field(default_factory=list)
    prompts: list[PromptCount] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size: found {self.block_size}; expected at least 1")
        self.accepted_by_position = self.accepted_by_position or [0] * (self.block_size - 1)
        self.drafted_by_position = self.drafted_by_position or [0] * (self.block_size - 1)
        self.steps_by_accepted = self.steps_by_accepted or [0] * self.block_size

    def add_prompt(self, steps: Iterable[Step]) -> None:
        """Count all the steps of one prompt; a prompt that ended at its first token has none and still counts."""
        count, emitted = 0, 0
        for step in steps:
            count += 1
            emitted += step.emitted
            self.steps_by_accepted[step.accepted] += 1
            for k in range(step.drafted):
                self.drafted_by_position[k] += 1
            for k in range(step.accepted):
                self.accepted_by_position[k] += 1
        self.steps += count
        self.emitted += emitted
        self.prompts.append(PromptCount(count, emitted))

    def __add__(self, other: Self) -> AcceptanceCount:
        if other.block_size != self.block_size:
            raise ValueError(f"counts of block sizes {self.block_size} and {other.block_size} cannot be merged")
        return AcceptanceCount(
            self.block_size,
            self.steps + other.steps,
            self.emitted + other.emitted,
            [a + b for a, b in zip(self.accepted_by_position, other.accepted_by_position, strict=True)],
            [a + b for a, b in zip(self.drafted_by_position, other.drafted_by_position, strict=True)],
            [a + b for a, b in zip(self.steps_by_accepted, other.steps_by_accepted, strict=True)],
            self.prompts + other.prompts,
        )

    @property
    def accepted(self) -> int:
        """Accepted draft tokens (the target's own token of each step is not among them)."""
        return sum(self.accepted_by_position)

    @property
    def acceptance_length(self) -> float:
        """Emitted tokens / verification steps.

        Raises:
            NoVerificationSteps: if there is none.
        """
        self._require_steps()
        return self.emitted / self.steps

    @property
    def mean_of_prompt_means(self) -> float:
        """Mean over prompts of each prompt's own emitted / steps (what z-lab's benchmark prints).

        Prompts without a step have no mean and are left out.

        Raises:
            NoVerificationSteps: if no prompt has a step.
        """
        self._require_steps()
        means = [prompt.emitted / prompt.steps for prompt in self.prompts if prompt.steps]
        return sum(means) / len(means)

    def share_by_position(self) -> dict[int, float]:
        """Share of steps that accepted draft position k = 1..block_size - 1, of those that had a draft token there.

        Positions that were never drafted are absent.
        """
        return {
            k: accepted / drafted
            for k, (accepted, drafted) in enumerate(
                zip(self.accepted_by_position, self.drafted_by_position, strict=True), start=1
            )
            if drafted
        }

    def confidence_interval(self, level: float = 0.95, resamples: int = 2000, seed: int = 0) -> tuple[float, float]:
        """Percentile bootstrap interval of the acceptance length, prompts being what is drawn anew.

        Raises:
            NoVerificationSteps: if no prompt has a step.
        """
        self._require_steps()
        sums = np.array([prompt for prompt in self.prompts if prompt.steps], dtype=np.int64)
        n = len(sums)
        generator = np.random.default_rng(seed)
        lengths = np.empty(resamples)
        for start in range(0, resamples, 256):  # [256, n] draws at a time
            drawn = sums[generator.integers(0, n, size=(min(256, resamples - start), n))].sum(axis=1)
            lengths[start : start + len(drawn)] = drawn[:, 1] / drawn[:, 0]
        low, high = np.quantile(lengths, [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)

    def to_json(self) -> dict[str, Any]:
        """JSON values; `from_json` gives an equal count."""
        return {
            "block_size": self.block_size,
            "steps": self.steps,
            "emitted": self.emitted,
            "accepted_by_position": self.accepted_by_position,
            "drafted_by_position": self.drafted_by_position,
            "steps_by_accepted": self.steps_by_accepted,
            "prompts": [list(prompt) for prompt in self.prompts],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> AcceptanceCount:
        """The count that `to_json` wrote."""
        return cls(**{**value, "prompts": [PromptCount(*prompt) for prompt in value["prompts"]]})

    def _require_steps(self) -> None:
        if not self.steps:
            raise NoVerificationSteps(len(self.prompts))


def merge(counts: Iterable[AcceptanceCount], block_size: int) -> AcceptanceCount:
    """Sum of the counts (of all slices, say); an empty count for none."""
    total = AcceptanceCount(block_size)
    for count in counts:
        total = total + count
    return total


def expected_accepted_drafts(accuracies: Sequence[float]) -> float:
    """Proxy from validation: expected accepted draft tokens if position k is right with probability accuracies[k - 1].

    Each accuracy is given that all positions before it were right. The target's own token is left out: add 1 to compare
    with an acceptance length.
    """
    return float(sum(itertools.accumulate(accuracies, lambda product, accuracy: product * accuracy)))


def proxy_acceptance_length(accuracies: Sequence[float]) -> float:
    """`expected_accepted_drafts` plus 1: comparable with measured acceptance, never logged under its name."""
    return 1.0 + expected_accepted_drafts(accuracies)
