"""Tiny drafters: random, and trained for a moment on the very texts they are measured on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from tasks.decoding.proposers import embedding_weight, head_weight
from tasks.decoding.replay import ReferenceSequence
from tasks.decoding.speculative import SpeculativeText
from tasks.drafter.config import FULL, SLIDING, DrafterConfig
from tasks.drafter.model import DFlashDrafter
from tasks.target.capture import LayerCapture
from tasks.target.loading import Target


def tiny_drafter(target: Target, layer_ids: Sequence[int], block_size: int, *, sliding: bool = False) -> DFlashDrafter:
    config = DrafterConfig(
        hidden_size=target.hidden_size, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=16,
        layer_types=(SLIDING, FULL) if sliding else (FULL, FULL), target_layer_ids=tuple(layer_ids),
        num_target_layers=target.num_layers, vocab_size=target.vocab_size, mask_token_id=3, block_size=block_size,
        rope_theta=1e4, sliding_window=8,
    )  # fmt: skip
    return DFlashDrafter(config).initialize(0).eval()


def train_briefly(
    drafter: DFlashDrafter, target: Target, sequences: Sequence[ReferenceSequence], steps: int = 40
) -> DFlashDrafter:
    """Overfit: what it drafts is often right then, and not always."""
    head, embedding = head_weight(target).detach(), embedding_weight(target).detach()
    size, mask_id = drafter.config.block_size, drafter.config.mask_token_id
    optimizer = torch.optim.Adam(drafter.parameters(), lr=3e-3)
    drafter.train()
    for step in range(steps):
        sequence = sequences[step % len(sequences)]
        ids = sequence.input_ids
        anchors = torch.arange(sequence.prompt_length, len(ids) - 1)
        blocks = torch.full((len(anchors), size), mask_id)
        blocks[:, 0] = ids[anchors]
        places = anchors[:, None] + torch.arange(1, size)
        labels = torch.where(places < len(ids), ids[places.clamp_max(len(ids) - 1)], -100)
        states = sequence.states[None].float()
        hidden = drafter.block_hidden(states, functional.embedding(blocks, embedding)[None], anchors[None])[0, :, 1:]
        loss = functional.cross_entropy(functional.linear(hidden, head).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.eval()


@torch.no_grad()
def reference_sequence(
    target: Target, layer_ids: Sequence[int], prompt_ids: list[int], tokens: Sequence[int], limit: int,
    dtype: torch.dtype = torch.float32,
) -> ReferenceSequence:  # fmt: skip
    """What stage `reference` would store."""
    ids = torch.tensor([*prompt_ids, *tokens])
    with LayerCapture(target, layer_ids) as capture:
        target.decoder(input_ids=ids[None], use_cache=False)
        states = capture.states()[0].to(dtype)
    return ReferenceSequence(
        input_ids=ids, prompt_length=len(prompt_ids), load_states=lambda: states, slice="s",
        ended=tokens[-1] in target.eos_ids, prompt_id="p", limit=limit, margins=torch.ones(len(tokens)),
    )  # fmt: skip


def accepted(text: SpeculativeText) -> list[int]:
    return [step.accepted for step in text.steps]
