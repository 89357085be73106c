"""Taking hidden states out of a forward pass: hooks on the decoder layers, and a decoder cut after the last one needed.

The convention is `layer_output`: id i is what decoder layer i returns, before the final norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from tasks.contract.layers import check_layer_ids
from tasks.target.loading import Target, describe_model

LastHidden = Literal["none", "pre_norm", "post_norm"]


class LayerCapture:
    """Keeps the chosen layers' outputs of the latest forward pass. Use as a context manager.

    Args:
        target: an open target, or a bare causal language model.
        layer_ids: `layer_output` ids, distinct and ascending.
        last_hidden: also the last layer's output, before (`pre_norm`) or after (`post_norm`) the final norm.

    Raises:
        ConfigurationError: field `layer_ids`, for an id outside 0..N-1.
    """

    def __init__(self, target: Target | nn.Module, layer_ids: Sequence[int], last_hidden: LastHidden = "none") -> None:
        if not isinstance(target, Target):
            target = describe_model(target, _NoTokenizer(), type(target).__name__)
        self.target = target
        self.layer_ids = check_layer_ids(layer_ids, target.num_layers)
        self.last_hidden = last_hidden
        self._found: dict[object, Tensor] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        for layer_id in self.layer_ids:
            self._hook(self.target.layers[layer_id], layer_id)
        if self.last_hidden == "pre_norm":
            self._hook(self.target.layers[-1], "last")
        elif self.last_hidden == "post_norm":
            self._hook(self.target.final_norm, "last")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._found.clear()

    def _hook(self, module: nn.Module, key: object) -> None:
        def keep(_module: nn.Module, _inputs: object, output: Any) -> None:
            # Layers of older model code return a tuple whose first entry is the residual stream.
            self._found[key] = output[0] if isinstance(output, tuple) else output

        self._handles.append(module.register_forward_hook(keep))

    def states(self) -> Tensor:
        """Outputs of the chosen layers in the latest forward pass, [batch, seq, K, H], compute dtype.

        Raises:
            RuntimeError: if there was no forward pass since the last call of `clear`.
        """
        missing = [i for i in self.layer_ids if i not in self._found]
        if missing:
            raise RuntimeError(f"no forward pass has reached layers {missing} of {self.target.name}")
        return torch.stack([self._found[i] for i in self.layer_ids], dim=2)

    def last(self) -> Tensor | None:
        """The last hidden state as asked for, [batch, seq, H], or None for `last_hidden="none"`."""
        if self.last_hidden == "none":
            return None
        if "last" not in self._found:
            raise RuntimeError(f"no forward pass has reached the end of {self.target.name}")
        return self._found["last"]

    def clear(self) -> None:
        """Forget the latest forward pass and its memory."""
        self._found.clear()


class _NoTokenizer:
    eos_token_id = None
    pad_token_id = None


@contextmanager
def truncated(target: Target, last_layer: int) -> Iterator[None]:
    """Run no decoder layer after `last_layer` while the context lasts; the layer list is restored however it ends.

    What the decoder returns meanwhile is not the model's output: only hooks may be read.
    """
    if not 0 <= last_layer < target.num_layers:
        raise ValueError(f"last_layer: found {last_layer}; expected 0..{target.num_layers - 1}")
    setattr(target.decoder, target.layers_name, target.layers[: last_layer + 1])
    try:
        yield
    finally:
        setattr(target.decoder, target.layers_name, target.layers)
