"""The plain forward pass: one sample, no padding, no hook on any layer. What extraction is compared with.

It takes the states from `output_hidden_states=True`, a way through the library that extraction never uses. That way
shows the last layer only after the final norm, so what the norm is given is taken there.
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
    norm_input: Tensor  # what the final norm was given: the last layer before the norm

    def reference(self, layer: int, *, normed: bool = False) -> Tensor:
        """Output of a layer, [T, H].

        Args:
            layer: `layer_output` id; -1 for the embeddings.
            normed: after the final norm.
        """
        last = self.target.num_layers - 1
        if normed:
            return self.entries[-1] if layer == last else self._norm(self.entries[huggingface_index(layer)])
        return self.norm_input if layer == last else self.entries[huggingface_index(layer)]

    def error(self, states: Tensor, layer: int, *, normed: bool = False) -> RelativeError:
        """How far stored states are from a layer's output.

        The last layer is compared twice: as it is, with what the final norm was given, and through the norm, with what
        the library gives. The second alone would not tell a state from its normed form (the norm undoes the scale).

        Args:
            states: [T, H] as stored.
            layer: `layer_output` id; -1 for the embeddings.
            normed: the states are stored after the final norm.
        """
        states = states.to(device=self.target.device, dtype=self.target.dtype)
        found = relative_error(states.float(), self.reference(layer, normed=normed).float())
        if layer == self.target.num_layers - 1 and not normed:
            through = relative_error(self._norm(states).float(), self.entries[-1].float())
            # Not max(): a comparison with NaN must not lose it.
            return found if found.mean >= through.mean or found.mean != found.mean else through
        return found

    @torch.inference_mode()
    def _norm(self, states: Tensor) -> Tensor:
        return self.target.final_norm(states[None])[0]


@torch.inference_mode()
def plain_states(target: Target, input_ids: np.ndarray) -> PlainStates:
    """Forward pass of one sample alone through the whole model.

    Args:
        target: the open target.
        input_ids: [T] token ids.
    """
    given: list[Tensor] = []
    ids = torch.from_numpy(input_ids.astype(np.int64))[None].to(target.device)
    handle = target.final_norm.register_forward_pre_hook(lambda _module, inputs: given.append(inputs[0]))
    try:
        output = target.decoder(input_ids=ids, use_cache=False, output_hidden_states=True)
    finally:
        handle.remove()
    entries = output.hidden_states
    if entries is None or len(entries) != target.num_layers + 1 or len(given) != 1:
        found = None if entries is None else len(entries)
        raise RuntimeError(f"{target.name}: hidden_states has {found} entries, expected {target.num_layers + 1}")
    return PlainStates(target, tuple(entry[0] for entry in entries), given[0][0])


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
