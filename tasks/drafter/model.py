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

from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from tasks.drafter.attention import Chunk, DraftAttention, LayerKind, plan_chunks
from tasks.drafter.config import DrafterConfig
from tasks.drafter.norm import RMSNorm


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
        chunks: list[Chunk],
        kind: LayerKind,
    ) -> Tensor:
        """One layer over the A blocks of one row; arguments as in `DraftAttention`."""
        x = x + self.self_attn(self.input_layernorm(x), context, rope, chunks, kind)
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
        self._kinds = [LayerKind(config.window(i), config.causal(i)) for i in range(config.num_layers)]

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
        if len(states) != 1 or len(block_embeddings) != 1:
            raise ValueError(f"one row at a time; found {len(states)} of states, {len(block_embeddings)} of blocks")
        if not anchors.shape[1]:
            return block_embeddings
        if positions is None:
            positions = torch.arange(states.shape[1], device=states.device)[None]
        context = self.context_key_value(self.fuse(states), positions)
        chunks = plan_chunks(
            self._kinds, block_embeddings.shape[2], anchors[0], positions[0][anchors[0]], positions[0],
            None if documents is None else documents[0],
        )  # fmt: skip
        return self._blocks(block_embeddings[0], context, positions[0][anchors[0]], chunks)[None]

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
        if new_states.shape[1] or not cache.keys:
            positions = torch.arange(cache.length, start, device=device)[None]
            cache.append(self.context_key_value(self.fuse(new_states), positions))
        anchor = torch.tensor([start], device=device)
        chunks = plan_chunks(
            self._kinds, block_embeddings.shape[1], anchor, anchor, torch.arange(start, device=device)
        )  # fmt: skip
        context = list(zip(cache.keys, cache.values, strict=True))
        return self._blocks(block_embeddings, context, anchor, chunks)

    def _blocks(
        self, x: Tensor, context: list[tuple[Tensor, Tensor]], anchor_positions: Tensor, chunks: list[Chunk]
    ) -> Tensor:
        """Blocks x [A, B, H] over the context's keys and values by layer, [1, kv heads, S, head size]."""
        positions = anchor_positions[:, None] + torch.arange(x.shape[1], device=x.device)  # [A, B]
        cos, sin = self.rope(positions, x.dtype)
        rope = (cos[:, None], sin[:, None])
        for index, (keys, values) in enumerate(context):
            x = self._layer(index)(x, (keys[0], values[0]), rope, chunks, self._kinds[index])
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
