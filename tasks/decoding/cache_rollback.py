"""Taking rejected draft tokens back out of a target's cache, exactly, for every kind of cache layer.

What each kind of layer allows (transformers 5.24 `cache_utils`):

- full attention: keys and values of the last n tokens are cut off;
- sliding window: the same, if the layer was told to keep what slides out of the window until the next cut;
- short convolution without recurrent state: the same, on the inputs it keeps;
- recurrent state (Gated DeltaNet, Mamba, lightning attention): n tokens cannot be subtracted. The state is cloned
  before the block and put back after it, and the accepted tokens are run again (replay);
- anything else: a deep copy before the block, put back, replay.

`Cache.crop` alone is not a rollback: it raises for windows and convolutions, and once it is made not to raise it leaves
recurrent states as the rejected tokens made them.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

# DummyLayer, of layers without a cache, came after transformers 5.17.
_CUT_BY_LENGTH = {DynamicLayer, DynamicSlidingWindowLayer, getattr(cache_utils, "DummyLayer", DynamicLayer)}


class CacheRollback:
    """Rolls one cache back. Made after the prefill; then, for each block: `mark`, one forward of it, `keep`."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        # A cache class of a model's own may keep state beside its layers: only the plain class is taken layer by layer.
        known = type(cache) is DynamicCache
        self._layers = [_layer_rollback(layer) for layer in cache.layers] if known else [_Copied(cache)]
        self.needs_replay = any(not layer.can_cut for layer in self._layers)

    def mark(self) -> None:
        """Remember the state before a block."""
        for layer in self._layers:
            layer.mark()

    def keep(self, fed: int, kept: int) -> int:
        """Leave the first `kept` of the `fed` tokens of the block in the cache.

        Returns:
            How many of the block's first tokens the caller must run again: 0, or `kept` on caches with state that
            cannot be cut (they are back at the mark then).
        """
        if not 0 <= kept <= fed:
            raise ValueError(f"kept: found {kept}; expected 0..{fed}, the tokens fed since the mark")
        replay = kept < fed and self.needs_replay
        for layer in self._layers:
            if replay:
                layer.restore(fed)
            elif layer.can_cut:
                layer.cut(fed - kept)
        return kept if replay else 0


class _Layer:
    """How one layer goes back."""

    can_cut = False

    def mark(self) -> None:
        raise NotImplementedError

    def restore(self, fed: int) -> None:
        raise NotImplementedError

    def cut(self, tokens: int) -> None:
        raise NotImplementedError


class _Cut(_Layer):
    """Keys and values, with or without a window; short convolutions. Nothing to remember: the end is cut off."""

    can_cut = True

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        if hasattr(layer, "activate_past_recording"):
            # Only now, after the prefill, so that the prompt itself is held to the window.
            layer.activate_past_recording()

    def mark(self) -> None:
        pass

    def restore(self, fed: int) -> None:
        self.cut(fed)

    def cut(self, tokens: int) -> None:
        # 0 too: it brings a recording layer back to its window.
        self._layer.crop(-tokens)


class _Recurrent(_Layer):
    """Convolution and recurrent states: cloned, and copied back in place (their addresses may be in a CUDA graph)."""

    def __init__(self, layer: LinearAttentionLayer) -> None:
        self._layer = layer
        self._saved: list[tuple[Tensor, Tensor]] = []

    def mark(self) -> None:
        states = [*self._layer.conv_states.values(), *self._layer.recurrent_states.values()]
        self._saved = [(state, state.clone()) for state in states if state is not None]

    def restore(self, fed: int) -> None:
        for state, saved in self._saved:
            state.copy_(saved)


class _RecurrentAndAttention(_Recurrent):
    """A layer with both (Falcon-H1 and the like)."""

    def restore(self, fed: int) -> None:
        super().restore(fed)
        DynamicLayer.crop(self._layer, -fed)


class _Copied(_Layer):
    """A layer class, or a whole cache of a class, that this module does not know."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._saved: dict[str, Any] = {}

    def mark(self) -> None:
        self._saved = copy.deepcopy(vars(self._layer))

    def restore(self, fed: int) -> None:
        vars(self._layer).clear()
        vars(self._layer).update(self._saved)


def _layer_rollback(layer: Any) -> _Layer:
    kind = type(layer)
    if kind in _CUT_BY_LENGTH:
        return _Cut(layer)
    if kind is LinearAttentionLayer:
        # Without recurrent states (LFM2) the kept inputs of the convolution can be cut like keys.
        return _Cut(layer) if layer.is_croppable else _Recurrent(layer)
    if kind is LinearAttentionAndFullAttentionLayer:
        return _RecurrentAndAttention(layer)
    return _Copied(layer)
