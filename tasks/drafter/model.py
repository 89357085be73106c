"""The DFlash drafter (arXiv 2602.06036): a block of tokens from the target's hidden states in one forward pass.

Shape letters: N rows, S context positions, A anchors, B block slots, K captured layers, H hidden size.

1. Fusion: the K captured states of a position, concatenated, through `fc` and `hidden_norm`: the context C [N, S, H].
2. Block input: the target's raw embedding of [anchor token, mask, ..., mask].
3. Layers as in Qwen3, but each injects C into its attention: keys and values of the context come from C by the same
   projections as the block's own; C itself is never updated.
4. Final norm; logits by the target's head, which like the embedding is not part of the drafter.

A block sees the context strictly before its anchor, and itself. The anchor's own state is never visible: at decoding
time the target has not computed it yet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from tasks.drafter.config import DrafterConfig

_SCORES = 1 << 27  # attention scores of one chunk of anchors: 512 MiB in fp32


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in float32 inside."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


@dataclass
class DrafterCache:
    """Keys and values of the context, by layer: [N, kv heads, S, head size]. Empty at the start of a sequence."""

    length: int = 0
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def append(self, new: list[tuple[Tensor, Tensor]]) -> None:
        """Add the next positions."""
        if not self.keys:
            self.keys, self.values = [k for k, _ in new], [v for _, v in new]
        else:
            self.keys = [torch.cat([old, k], 2) for old, (k, _) in zip(self.keys, new, strict=True)]
            self.values = [torch.cat([old, v], 2) for old, (_, v) in zip(self.values, new, strict=True)]
        self.length += new[0][0].shape[2]


class DraftAttention(nn.Module):
    """Attention of the block over context and block, with grouped key/value heads and per-head norms."""

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
        return rotate(keys, rope), self.v_proj(x).view(shape).transpose(-2, -3)

    def forward(
        self,
        x: Tensor,
        context: tuple[Tensor, Tensor],
        rope: tuple[Tensor, Tensor],
        context_mask: Tensor,
        block_mask: Tensor,
    ) -> Tensor:
        """Attention of A blocks of one row.

        Args:
            x: [A, B, H] block, after the layer's input norm.
            context: keys and values [kv heads, S, head size] of the row.
            rope: cos and sin [A, B, head size] of the block's positions.
            context_mask: [A, B, S] bool, what of the context each slot sees.
            block_mask: [B, B] bool, what of its own block each slot sees.

        Returns:
            [A, B, H].
        """
        blocks, slots = x.shape[:2]
        groups = self.heads // self.kv_heads
        queries = self.q_norm(self.q_proj(x).view(blocks, slots, self.heads, self.dim)).transpose(1, 2)
        queries = rotate(queries, rope).unflatten(1, (self.kv_heads, groups))  # [A, kv, groups, B, dim]
        keys, values = self.key_value(x, rope)  # [A, kv, B, dim]
        scale = 1 / math.sqrt(self.dim)
        far = torch.einsum("akgbd,ksd->akgbs", queries, context[0]) * scale
        near = torch.einsum("akgbd,akcd->akgbc", queries, keys) * scale
        far = far.masked_fill(~context_mask[:, None, None], -torch.inf)
        near = near.masked_fill(~block_mask, -torch.inf)
        weights = torch.cat([far, near], -1).softmax(-1, dtype=torch.float32).to(x.dtype)
        far_weights, near_weights = weights.split([far.shape[-1], slots], -1)
        out = torch.einsum("akgbs,ksd->akgbd", far_weights, context[1])
        out = out + torch.einsum("akgbc,akcd->akgbd", near_weights, values)
        return cast(Tensor, self.o_proj(out.flatten(1, 2).transpose(1, 2).flatten(2)))


class DraftMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., H]."""
        return cast(Tensor, self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x)))


class DraftLayer(nn.Module):
    """Pre-norm layer."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DraftMLP(config)

    def forward(
        self,
        x: Tensor,
        context: tuple[Tensor, Tensor],
        rope: tuple[Tensor, Tensor],
        context_mask: Tensor,
        block_mask: Tensor,
    ) -> Tensor:
        """One layer over A blocks of one row; arguments as in `DraftAttention`."""
        x = x + self.self_attn(self.input_layernorm(x), context, rope, context_mask, block_mask)
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)))


class DFlashDrafter(nn.Module):
    """The drafter. Tensor names are the published ones: 3 + 11 tensors a layer."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    @torch.no_grad()
    def initialize(self, seed: int) -> DFlashDrafter:
        """Draw the weights anew: normal of standard deviation 0.02, norms 1, biases 0. Independent of the device."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        return self

    def fuse(self, states: Tensor) -> Tensor:
        """Context [N, S, H] from captured states [N, S, K, H] (or [N, S, K * H])."""
        flat = states.flatten(2) if states.ndim == 4 else states
        return cast(Tensor, self.hidden_norm(self.fc(flat.to(self.fc.weight.dtype))))

    def context_key_value(self, context: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of the context for each layer: [N, kv heads, S, head size].

        Args:
            context: [N, S, H] of `fuse`.
            positions: [N, S] int64.
        """
        cos, sin = self.rope(positions, context.dtype)
        rope = (cos[:, None], sin[:, None])
        return [self._attention(i).key_value(context, rope) for i in range(self.config.num_layers)]

    def block_hidden(
        self,
        states: Tensor,
        block_embeddings: Tensor,
        anchors: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Hidden states of many blocks over one row of context: training and replay.

        Args:
            states: [1, S, K, H] captured states of the row.
            block_embeddings: [1, A, B, H] embeddings of each block's anchor and masks.
            anchors: [1, A] int64, indices in the row.
            positions: [1, S] int64 position of each index inside its document; by default the index itself.
            documents: [1, S] int64; a block sees its anchor's document only. By default the row is one document.

        Returns:
            [1, A, B, H], normed: the target's head makes logits of it. Slot k predicts the token at anchor + k.
        """
        length, device = states.shape[1], states.device
        if positions is None:
            positions = torch.arange(length, device=device)[None]
        context = self.context_key_value(self.fuse(states), positions)
        rows = [(k[0], v[0]) for k, v in context]
        slots = block_embeddings.shape[2]
        per_block = self.config.num_heads * slots * (length + slots)
        parts = []
        for part, blocks in zip(
            anchors[0].split(max(_SCORES // per_block, 1)),
            block_embeddings[0].split(max(_SCORES // per_block, 1)),
            strict=True,
        ):
            index = torch.arange(length, device=device)
            visible = index < part[:, None]  # strictly before the anchor
            if documents is not None:
                visible = visible & (documents[0] == documents[0][part][:, None])
            parts.append(self._blocks(blocks, rows, positions[0][part], visible, positions[0]))
        return torch.cat(parts)[None]

    def draft(self, cache: DrafterCache, new_states: Tensor, block_embeddings: Tensor, start: int) -> Tensor:
        """Hidden states of one block: decoding.

        Args:
            cache: context so far; the new positions are appended to it.
            new_states: [1, n, K, H] captured states of positions cache.length .. start - 1.
            block_embeddings: [1, B, H].
            start: position of the anchor.

        Returns:
            [1, B, H].

        Raises:
            ValueError: if the states do not reach exactly to the anchor.
        """
        if cache.length + new_states.shape[1] != start:
            raise ValueError(
                f"the anchor at {start} needs the states of positions 0..{start - 1}; the cache has {cache.length}, "
                f"{new_states.shape[1]} are new"
            )
        device = new_states.device
        if new_states.shape[1]:
            positions = torch.arange(cache.length, start, device=device)[None]
            cache.append(self.context_key_value(self.fuse(new_states), positions))
        rows = [(k[0], v[0]) for k, v in zip(cache.keys, cache.values, strict=True)]
        visible = torch.ones(1, start, dtype=torch.bool, device=device)
        anchor = torch.tensor([start], device=device)
        return self._blocks(block_embeddings, rows, anchor, visible, torch.arange(start, device=device))

    def _blocks(
        self,
        blocks: Tensor,
        context: list[tuple[Tensor, Tensor]],
        anchors: Tensor,
        visible: Tensor,
        context_positions: Tensor,
    ) -> Tensor:
        """A blocks [A, B, H] whose anchors stand at positions [A]; `visible` [A, S] bool."""
        slots = blocks.shape[1]
        offsets = torch.arange(slots, device=blocks.device)
        positions = anchors[:, None] + offsets  # [A, B]
        cos, sin = self.rope(positions, blocks.dtype)
        rope = (cos[:, None], sin[:, None])
        distance = offsets[:, None] - offsets  # of a query slot to a key slot
        x = blocks
        for i in range(self.config.num_layers):
            window = self.config.window(i)
            context_mask, block_mask = visible[:, None].expand(-1, slots, -1), torch.ones_like(distance, dtype=torch.bool)
            if window is not None:
                reach = positions[:, :, None] - context_positions
                context_mask = context_mask & (reach < window)
                block_mask = distance.abs() < window
            if self.config.causal(i):
                block_mask = block_mask & (distance >= 0)
            x = self._layer(i)(x, context[i], rope, context_mask, block_mask)
        return cast(Tensor, self.norm(x))

    def rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cos and sin [..., head size] of the whole head's rotation at integer positions [...]."""
        dim = self.config.head_dim
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim
        angles = positions.float()[..., None] * self.config.rope_theta**-exponents
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def _layer(self, index: int) -> DraftLayer:
        return cast(DraftLayer, self.layers[index])

    def _attention(self, index: int) -> DraftAttention:
        return self._layer(index).self_attn


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding, halves convention (Llama, Qwen): x * cos + (-x2, x1) * sin."""
    first, second = x.chunk(2, -1)
    return x * rope[0] + torch.cat([-second, first], -1) * rope[1]
