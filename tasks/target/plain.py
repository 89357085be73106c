"""The plain forward pass: one sample, no padding, no hooks of ours. What extraction is compared with.

It takes the states from `output_hidden_states=True`, a way through the library that extraction never uses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tasks.contract.layers import huggingface_index
from tasks.target.loading import Target


@dataclass(frozen=True)
class PlainStates:
    """All hidden states of one sample, [T, H] each, compute dtype, on the target's device."""

    target: Target
    entries: tuple[Tensor, ...]  # N+1: embeddings, layers 0..N-2, and the last layer after the final norm

    def comparable(self, states: Tensor, layer: int, *, already_normed: bool = False) -> tuple[Tensor, Tensor]:
        """Stored states and the plain ones of a layer in a form in which they must be equal.

        The library gives the last layer only after the final norm, so there the stored states go through it too.

        Args:
            states: [T, H] as stored.
            layer: `layer_output` id; -1 for the embeddings.
            already_normed: the stored states are after the final norm.

        Returns:
            Two float32 tensors [T, H] on the target's device.
        """
        states = states.to(device=self.target.device, dtype=self.target.dtype)
        if layer == self.target.num_layers - 1 and not already_normed:
            with torch.inference_mode():
                states = self.target.final_norm(states[None])[0]
        elif layer != self.target.num_layers - 1 and already_normed:
            # Neighbour of a normed state: norm the plain one instead.
            with torch.inference_mode():
                reference = self.target.final_norm(self.entries[huggingface_index(layer)][None])[0]
            return states.float(), reference.float()
        return states.float(), self.entries[huggingface_index(layer)].float()


@torch.inference_mode()
def plain_states(target: Target, input_ids: np.ndarray) -> PlainStates:
    """Forward pass of one sample alone through the whole model.

    Args:
        target: the open target.
        input_ids: [T] token ids.
    """
    ids = torch.from_numpy(input_ids.astype(np.int64))[None].to(target.device)
    output = target.decoder(input_ids=ids, use_cache=False, output_hidden_states=True)
    entries = output.hidden_states
    if entries is None or len(entries) != target.num_layers + 1:
        found = None if entries is None else len(entries)
        raise RuntimeError(f"{target.name}: hidden_states has {found} entries, expected {target.num_layers + 1}")
    return PlainStates(target, tuple(entry[0] for entry in entries))


@dataclass(frozen=True)
class RelativeError:
    """Relative L2 errors of the rows (tokens) of a sample."""

    mean: float
    largest: float
    row: int  # where the largest is


def relative_error(found: Tensor, expected: Tensor) -> RelativeError:
    """|found - expected| / |expected| by row; not finite where an input is not.

    The mean over rows, not the error of the whole matrix: the first token of many targets has a norm hundreds of times
    the others', and would hide everything else.

    Args:
        found: [T, H] float32.
        expected: [T, H] float32.
    """
    scale = expected.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    rows = (found - expected).norm(dim=-1) / scale
    # NaN must win: argmax of torch returns the first NaN where there is one.
    row = int(rows.argmax())
    return RelativeError(float(rows.mean()), float(rows[row]), row)
