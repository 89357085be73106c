"""Hidden states of token sequences: length-sorted, right-padded batches through hooked decoder layers.

Shapes: B samples, S padded length, T one sample's length, K chosen layers, H hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from tasks.contract.errors import ConfigurationError, IntegrityError, Problem
from tasks.data.state_digest import row_digests, sample_digests
from tasks.target.capture import LastHidden, LayerCapture, truncated
from tasks.target.loading import Target
from tasks.target.plain import plain_states

log = logging.getLogger("tasks")

# Largest mean relative L2 error between a padded batch and one sample alone that is only rounding. In bfloat16, for
# samples as short as these, other matrix kernels run for two samples than for one: 0.005, 0.024, 0.036 were measured
# after layers 1, 15, 29 of a random 4B hybrid (H200, PyTorch's reference kernels), and 0.058 between either and
# float32. States of a neighbouring layer are off by 0.18 and more there, those of another sample by 1.4.
SELF_CHECK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
_SELF_CHECK_TOKENS = 48


@dataclass(frozen=True)
class Extracted:
    """States of one sample, on the CPU."""

    index: int  # of the sample in the sequence given
    hidden_states: Tensor  # [T, K, H], stored dtype
    last_hidden: Tensor | None  # [T, H], stored dtype
    layer_digest: Tensor  # [K (+1)] int64, computed before the copy


def plan_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Group samples into batches of at most `batch_tokens` padded tokens, longest first.

    A function of the lengths alone, so that a shard is extracted in the same batches wherever and whenever. A sample
    longer than the budget has a batch of its own. The longest come first: what does not fit in memory shows at once.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches: list[list[int]] = []
    width = 0
    for index in order:
        if batches and width * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
            width = lengths[index]
    return batches


class Extractor:
    """Extracts states from an open target. Use as a context manager: hooks are set while it is open.

    No layer after the last one needed is run, unless the last hidden state is asked for, and the output head never is.

    Args:
        target: the open target.
        layer_ids: `layer_output` ids.
        last_hidden: none, pre_norm or post_norm.
        dtype: stored dtype.
        batch_tokens: padded tokens of one forward; halved for good when memory does not suffice.
    """

    def __init__(
        self,
        target: Target,
        layer_ids: Sequence[int],
        last_hidden: LastHidden = "none",
        dtype: torch.dtype = torch.bfloat16,
        batch_tokens: int = 4096,
    ) -> None:
        self.target, self.dtype, self.batch_tokens = target, dtype, batch_tokens
        self.halved = False
        self._capture = LayerCapture(target, layer_ids, last_hidden)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._capture)
        if self._capture.last_hidden == "none":
            self._stack.enter_context(truncated(self.target, self._capture.layer_ids[-1]))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def extract(self, sequences: Sequence[np.ndarray]) -> Iterator[list[Extracted]]:
        """States of all sequences, batch by batch (not in their order: see `Extracted.index`).

        Args:
            sequences: token ids, [T] int32 each, T >= 1.

        Raises:
            ConfigurationError: field `max_length`, if a single sample does not fit into the device's memory.
        """
        lengths = [len(s) for s in sequences]
        waiting = plan_batches(lengths, self.batch_tokens)
        while waiting:
            batch = waiting[0]
            found = self._attempt(sequences, batch)
            if found is None:
                self._halve(batch, lengths)
                left = [i for b in waiting for i in b]
                waiting = [[left[i] for i in b] for b in plan_batches([lengths[i] for i in left], self.batch_tokens)]
                continue
            waiting.pop(0)
            yield found

    def _attempt(self, sequences: Sequence[np.ndarray], batch: Sequence[int]) -> list[Extracted] | None:
        """None if memory did not suffice; the exception, and the tensors its frames hold, are gone by then."""
        try:
            return self._forward(sequences, batch)
        except torch.OutOfMemoryError:
            return None
        finally:
            self._capture.clear()

    def _halve(self, batch: Sequence[int], lengths: Sequence[int]) -> None:
        longest = max(lengths[i] for i in batch)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if len(batch) == 1:
            raise ConfigurationError(
                Problem(
                    "max_length",
                    longest,
                    f"samples that fit into the device's memory: one of {longest} tokens alone does not; lower "
                    "max_length or take a GPU with more memory",
                )
            )
        padded = longest * len(batch)
        self.batch_tokens = max(longest, min(padded, self.batch_tokens) // 2)
        self.halved = True
        log.warning(
            "out of memory with %d padded tokens in a batch: going on with %d (set extract_batch_tokens to that)",
            padded,
            self.batch_tokens,
        )

    @torch.inference_mode()
    def _forward(self, sequences: Sequence[np.ndarray], batch: Sequence[int]) -> list[Extracted]:
        lengths = torch.tensor([len(sequences[i]) for i in batch])
        width = int(lengths.max())
        ids = torch.full((len(batch), width), self.target.pad_id or 0, dtype=torch.long)
        for row, index in enumerate(batch):
            ids[row, : lengths[row]] = torch.from_numpy(sequences[index].astype(np.int64))
        mask = torch.arange(width)[None, :] < lengths[:, None]
        device = self.target.device
        self.target.decoder(
            input_ids=ids.to(device), attention_mask=mask.to(device=device, dtype=torch.long), use_cache=False
        )
        hidden = self._capture.states().to(self.dtype)  # [B, S, K, H]
        last = self._capture.last()
        self._capture.clear()
        rows = row_digests(hidden)  # [B, S, K]
        if last is not None:
            last = last.to(self.dtype)
            rows = torch.cat([rows, row_digests(last)[:, :, None]], dim=2)
        digests = sample_digests(rows, lengths).cpu()
        # Only rows of tokens leave the device: [sum T, K, H].
        valid = mask.to(device)
        hidden_rows = hidden[valid].cpu()
        last_rows = last[valid].cpu() if last is not None else None
        result, start = [], 0
        for row, index in enumerate(batch):
            end = start + int(lengths[row])
            tail = last_rows[start:end] if last_rows is not None else None
            result.append(Extracted(index, hidden_rows[start:end], tail, digests[row]))
            start = end
        return result


def self_check(
    target: Target, layer_ids: Sequence[int], last_hidden: LastHidden, samples: Sequence[np.ndarray]
) -> float:
    """Compare a padded batch of two short samples, as extraction makes it, with plain single forward passes.

    Catches, on the real target and with the kernels in use, what corrupts every sample silently: recurrent state that
    runs from padding or a neighbour into a sample, hooks on the wrong modules, a wrong layer number.

    Args:
        target: the open target.
        layer_ids: as for the extraction.
        last_hidden: as for the extraction.
        samples: at least one sequence of at least two tokens.

    Returns:
        The largest mean relative L2 error over samples and layers.

    Raises:
        IntegrityError: naming layer and error, if they differ by more than rounding.
    """
    first = samples[0][:_SELF_CHECK_TOKENS]
    second = (samples[1] if len(samples) > 1 else samples[0])[: max(1, len(first) * 2 // 3)]
    pair = [first, second]
    tolerance = SELF_CHECK_TOLERANCE[target.dtype]
    worst = 0.0
    with Extractor(target, layer_ids, last_hidden, target.dtype, batch_tokens=2 * len(first)) as extractor:
        batches = list(extractor.extract(pair))
    for found in (e for batch in batches for e in batch):
        plain = plain_states(target, pair[found.index])
        stored = [(f"layer {i}", found.hidden_states[:, k], i) for k, i in enumerate(layer_ids)]
        if found.last_hidden is not None:
            stored.append(("last hidden state", found.last_hidden, target.num_layers - 1))
        for name, states, layer in stored:
            normed = name == "last hidden state" and last_hidden == "post_norm"
            error = plain.error(states, layer, normed=normed).mean
            worst = max(worst, error)
            if not error <= tolerance:
                raise IntegrityError(
                    f"self-check of the extraction on {target.name}: {name} of a padded batch differs from a plain "
                    f"forward pass by {error:.3g} (relative L2, at most {tolerance} expected); attention "
                    f"{target.attention}, linear attention {target.linear_attention}: nothing was extracted"
                )
    return worst
