"""The target with a cache that is kept between forwards: what plain and speculative decoding both run on."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from tasks.contract.errors import ConfigurationError, Problem

if TYPE_CHECKING:
    from tasks.target.loading import Target


class CachedTarget:
    """One sequence on its way through the target (batch 1).

    `prefill` comes first, once; every `forward` after it appends to the cache.
    """

    def __init__(self, target: Target) -> None:
        self._model: Any = target.model
        self._model_type = str(getattr(target.config, "model_type", type(target.model).__name__))
        self._device = target.device
        self._parameters = _parameters(target)
        self.cache: Cache | None = None
        self.length = 0

    def prefill(self, prompt_ids: Sequence[int]) -> Tensor:
        """Run the prompt. Returns the logits after its last token, [vocabulary] fp32.

        Raises:
            ValueError: if the prompt is empty.
            ConfigurationError: field `target`, if this family keeps its state elsewhere than in a cache object.
        """
        if not prompt_ids:
            raise ValueError("prompt_ids: found no token; expected at least one")
        kept = {"logits_to_keep": 1} if "logits_to_keep" in self._parameters else {}
        output = self._model(input_ids=self._tensor(prompt_ids), use_cache=True, **kept)
        cache = output.cache if "cache" in output else output.get("past_key_values")
        if not isinstance(cache, Cache):
            raise ConfigurationError(
                Problem(
                    "target",
                    self._model_type,
                    "a family whose forward returns a cache object (this one keeps its state elsewhere, so a rejected "
                    "draft could not be taken back)",
                )
            )
        self.cache, self.length = cache, len(prompt_ids)
        return output.logits[0, -1].float()

    def forward(self, ids: Sequence[int]) -> Tensor:
        """Append tokens. Returns the logits after each of them, [tokens, vocabulary] fp32."""
        # `cache` replaced `past_key_values` in the course of transformers 5; both are taken as long as both exist.
        name = "cache" if "cache" in self._parameters else "past_key_values"
        output = self._model(input_ids=self._tensor(ids), use_cache=True, **{name: self.cache})
        self.length += len(ids)
        return output.logits[0].float()

    def seconds(self) -> float:
        """A clock that waits for the device, for timing what runs on it."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], dtype=torch.long, device=self._device)


def plain_logits(target: Target, ids: Sequence[int], last: int) -> Tensor:
    """Logits after each of the last `last` tokens, from one forward without a cache: [last, vocabulary], its dtype."""
    kept = {"logits_to_keep": last} if "logits_to_keep" in _parameters(target) else {}
    output = target.model(input_ids=torch.tensor([list(ids)], device=target.device), use_cache=False, **kept)
    logits: Tensor = output.logits[0, -last:]
    return logits


def choose(logits: Tensor) -> list[int]:
    """Greedy choice in each row of [tokens, vocabulary]: the largest logit, the lowest id among equal ones.

    `torch.argmax` gives the first index of the maximum on every device; plain decoding, verification and replay all
    choose by this function, so that a tie is broken the same way in all three.
    """
    return [int(token) for token in logits.argmax(dim=-1).tolist()]


def _parameters(target: Target) -> frozenset[str]:
    return frozenset(inspect.signature(type(target.model).forward).parameters)
