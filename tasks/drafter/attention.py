"""Attention of draft blocks over their context and themselves.

A block sees the context of its own document strictly before its anchor, and its own slots: all of them in a full layer,
those up to itself in a causal one; a sliding layer sees no further than its window (z-lab: query - key < window, and in
a layer that is not causal key - query < window too). Blocks never see each other.

Blocks are computed in chunks. Neighbouring anchors share most of their context, so a chunk reads only the stretch of
context that one of its blocks can see, and its scores are never stored. Masks are made once for each kind of layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from tasks.drafter.config import DrafterConfig
from tasks.drafter.norm import RMSNorm

# Queries of one chunk. A chunk's blocks are masked from each other, which costs queries^2: little beside the context of
# a long text on a GPU, more than all of it for the short ones of a CPU run.
_QUERIES = {"cpu": 128, "cuda": 2048}


class LayerKind(NamedTuple):
    """What the mask of a layer depends on."""

    window: int | None  # None: full attention
    causal: bool  # inside the block


@dataclass(frozen=True)
class Chunk:
    """Blocks start..stop of a row, which see at most the context rows low..high. c blocks of B slots, n rows."""

    start: int
    stop: int
    low: int
    high: int
    masks: dict[LayerKind, Tensor]  # [c * B, n + c * B] bool, True where a slot sees a context row or a slot


def plan_chunks(
    kinds: Iterable[LayerKind],
    slots: int,
    anchors: Tensor,
    anchor_positions: Tensor,
    context_positions: Tensor,
    documents: Tensor | None = None,
) -> list[Chunk]:
    """Cut the blocks of a row into chunks, with the masks of every kind of layer.

    Args:
        kinds: of the drafter's layers.
        slots: B.
        anchors: [A] int64 indices in the row, ascending for the least work; S (behind the last row) is allowed.
        anchor_positions: [A] int64 positions inside their documents.
        context_positions: [S] int64.
        documents: [S] int64, non-decreasing, if the row holds more than one document; anchors are inside the row then.
    """
    size = max(_QUERIES.get(anchors.device.type, 2048) // slots, 1)
    first = (anchors - anchor_positions).clamp(min=0) if documents is not None else torch.zeros_like(anchors)
    bounds = list(zip(anchors.tolist(), first.tolist(), strict=True))
    chunks = []
    for start in range(0, len(bounds), size):
        stop = min(start + size, len(bounds))
        low = min(begin for _, begin in bounds[start:stop])
        high = max(anchor for anchor, _ in bounds[start:stop])
        rows = torch.arange(low, high, device=anchors.device)
        part = anchors[start:stop]
        visible = rows < part[:, None]
        if documents is not None:
            visible &= documents[low:high] == documents[part][:, None]
        positions = anchor_positions[start:stop, None] + torch.arange(slots, device=anchors.device)
        masks = {kind: _mask(kind, visible, positions, context_positions[low:high]) for kind in set(kinds)}
        chunks.append(Chunk(start, stop, low, high, masks))
    return chunks


def _mask(kind: LayerKind, visible: Tensor, positions: Tensor, context_positions: Tensor) -> Tensor:
    """Mask of one chunk: `visible` [c, n], `positions` [c, B], `context_positions` [n]."""
    blocks, slots = positions.shape
    context = visible[:, None].expand(-1, slots, -1)
    offsets = torch.arange(slots, device=positions.device)
    distance = offsets[:, None] - offsets  # of a query slot to a key slot
    inner = torch.ones_like(distance, dtype=torch.bool)
    if kind.window is not None:
        context = context & (positions[:, :, None] - context_positions < kind.window)
        inner = distance.abs() < kind.window
    if kind.causal:
        inner = inner & (distance >= 0)
    own = torch.block_diag(*[inner] * blocks).bool() if blocks > 1 else inner
    return torch.cat([context.flatten(0, 1), own], 1)


class DraftAttention(nn.Module):
    """Attention of blocks with keys and values of the context injected; grouped key/value heads, per-head norms."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        size, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.heads, self.kv_heads, self.dim = config.num_heads, config.num_kv_heads, dim
        self.q_proj = nn.Linear(size, self.heads * dim, bias=bias)
        self.k_proj = nn.Linear(size, self.kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(size, self.kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * dim, size, bias=bias)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(dim, config.rms_norm_eps)

    def key_value(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated keys and values of x [..., T, H]: [..., kv heads, T, head size] each."""
        shape = (*x.shape[:-1], self.kv_heads, self.dim)
        keys = self.k_norm(self.k_proj(x).view(shape)).transpose(-2, -3)
        values = self.v_proj(x).view(shape).transpose(-2, -3)
        return rotate(keys, rope).to(values.dtype), values

    def forward(
        self,
        x: Tensor,
        context: tuple[Tensor, Tensor],
        rope: tuple[Tensor, Tensor],
        chunks: list[Chunk],
        kind: LayerKind,
    ) -> Tensor:
        """Attention of the A blocks of one row.

        Args:
            x: [A, B, H] blocks, after the layer's input norm.
            context: rotated keys and values [kv heads, S, head size] of the row.
            rope: cos and sin [A, 1, B, head size] of the blocks' positions.
            chunks: of `plan_chunks`, over all A blocks.
            kind: this layer's.

        Returns:
            [A, B, H].
        """
        blocks, slots = x.shape[:2]
        queries = self.q_norm(self.q_proj(x).view(blocks, slots, self.heads, self.dim)).transpose(1, 2)
        keys, values = self.key_value(x, rope)  # [A, kv heads, B, head size]
        queries = rotate(queries, rope).to(values.dtype)
        far_keys, far_values = (t.to(values.dtype) for t in context)
        parts = []
        for chunk in chunks:
            own = slice(chunk.start, chunk.stop)
            seen = slice(chunk.low, chunk.high)
            out = functional.scaled_dot_product_attention(
                _side_by_side(queries[own])[None],
                self._repeated(far_keys[:, seen], keys[own]),
                self._repeated(far_values[:, seen], values[own]),
                attn_mask=chunk.masks[kind],
            )
            parts.append(out[0].unflatten(1, (-1, slots)).permute(1, 2, 0, 3))  # [c, B, heads, head size]
        return cast(Tensor, self.o_proj(torch.cat(parts).flatten(2)))

    def _repeated(self, context: Tensor, own: Tensor) -> Tensor:
        """Context [kv heads, n, head size], then own slots, for each query head: [1, heads, n + c * B, head size]."""
        joined = torch.cat([context, _side_by_side(own)], 1)
        return joined.repeat_interleave(self.heads // self.kv_heads, 0)[None]


def _side_by_side(x: Tensor) -> Tensor:
    """[c, heads, B, head size] to [heads, c * B, head size]."""
    return x.transpose(0, 1).flatten(1, 2)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding, halves convention (Llama, Qwen): x * cos + (-x2, x1) * sin."""
    first, second = x.chunk(2, -1)
    return x * rope[0] + torch.cat([-second, first], -1) * rope[1]
