from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tasks.drafter.attention import _QUERIES
from tasks.drafter.config import FULL, SLIDING
from tasks.drafter.model import DFlashDrafter, DrafterCache
from tests.tasks.drafter.cases import BLOCK, HIDDEN, LAYERS, block_embeddings, drafter, normal

KINDS = [
    {"layer_types": (FULL, FULL)},
    {"layer_types": (SLIDING, SLIDING)},
    {"layer_types": (SLIDING, FULL)},
    {"layer_types": (SLIDING, FULL), "is_causal": False},
    {"layer_types": (SLIDING, FULL), "is_causal": True},
    {"layer_types": (FULL, SLIDING), "sliding_window": 2},
    {"layer_types": (FULL,), "attention_bias": True},
]


def hidden(model: DFlashDrafter, states: Tensor, anchors: list[int], **row: Any) -> Tensor:
    with torch.no_grad():
        return model.block_hidden(states, block_embeddings([a % 40 for a in anchors]), torch.tensor([anchors]), **row)[
            0
        ]


@pytest.mark.parametrize("kind", KINDS)
def test_training_forward_is_decoding_forward(kind: dict[str, Any]) -> None:
    model, states = drafter(**kind), normal(1, 30, LAYERS, HIDDEN)
    anchors = [0, 1, 2, 3, 5, 11, 12, 20, 29]
    trained = hidden(model, states, anchors)
    cache = DrafterCache()
    for row, anchor in zip(trained, anchors, strict=True):
        with torch.no_grad():
            drafted = model.draft(cache, states[:, cache.length : anchor], block_embeddings([anchor])[0], anchor)
        torch.testing.assert_close(drafted[0], row, rtol=1e-5, atol=1e-5)
    assert cache.length == 29


def test_flat_states_are_the_same_and_what_does_not_reach_the_anchor_is_refused() -> None:
    model, states = drafter(), normal(1, 9, LAYERS, HIDDEN)
    assert torch.equal(hidden(model, states, [4, 8]), hidden(model, states.flatten(2), [4, 8]))
    with pytest.raises(ValueError, match=r"anchor at 5 needs the states of positions 0..4; the cache has 0, 4 are new"):
        model.draft(DrafterCache(), states[:, :4], block_embeddings([1])[0], 5)
    with pytest.raises(ValueError, match="one row at a time"):
        model.block_hidden(states.expand(2, -1, -1, -1), block_embeddings([1]), torch.tensor([[3]]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_at_or_after_the_anchor_changes_nothing(kind: dict[str, Any]) -> None:
    """TRN-01: anchors closer than the block size; exactly 0, not nearly."""
    model, states = drafter(**kind), normal(1, 24, LAYERS, HIDDEN)
    anchors = list(range(4, 23))
    before = hidden(model, states, anchors)
    window = model.config.sliding_window if FULL not in model.config.layer_types else None
    for position in (0, 6, 7, 12, 23):
        changed = states.clone()
        changed[0, position] = 1e4
        differs = (hidden(model, changed, anchors) != before).flatten(1).any(1).tolist()
        # The first slot reaches furthest back: window - 1 positions before the anchor.
        expected = [position < a and (window is None or a - position < window) for a in anchors]
        assert differs == expected, position


def test_mask_tokens_see_each_other_in_full_layers_and_only_back_in_causal_ones() -> None:
    states, blocks = normal(1, 8, LAYERS, HIDDEN), block_embeddings([5])
    changed = blocks.clone()
    changed[0, 0, 2] += 1
    for kind, expected in (({"layer_types": (FULL,)}, [1, 1, 1, 1]), ({"layer_types": (SLIDING,)}, [0, 0, 1, 1])):
        model = drafter(**kind)
        with torch.no_grad():
            a, b = (model.block_hidden(states, x, torch.tensor([[6]]))[0, 0] for x in (blocks, changed))
        assert (a != b).any(1).int().tolist() == expected
    wide = drafter(layer_types=(SLIDING,), is_causal=False, sliding_window=2)
    with torch.no_grad():
        a, b = (wide.block_hidden(states, x, torch.tensor([[6]]))[0, 0] for x in (blocks, changed))
    assert (a != b).any(1).int().tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("slot", range(BLOCK))
def test_the_window_moves_with_the_slot(slot: int) -> None:
    """z-lab and SpecForge: slot j of a block at a sees context from a + j - (W - 1) on."""
    model = drafter(layer_types=(SLIDING,), sliding_window=6)
    states = normal(1, 20, LAYERS, HIDDEN)
    with torch.no_grad():
        before = model.block_hidden(states, block_embeddings([5]), torch.tensor([[15]]))[0, 0, slot]
        seen = []
        for position in range(20):
            changed = states.clone()
            changed[0, position] += 10
            after = model.block_hidden(changed, block_embeddings([5]), torch.tensor([[15]]))[0, 0, slot]
            seen.append(bool((after != before).any()))
    assert [p for p in range(20) if seen[p]] == list(range(15 + slot - 5, 15))


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(2, 12), min_size=1, max_size=4),
    kind=st.sampled_from(KINDS),
    data=st.data(),
)
def test_samples_in_one_row_are_as_alone(lengths: list[int], kind: dict[str, Any], data: st.DataObject) -> None:
    model = drafter(**kind)
    rows = [normal(1, length, LAYERS, HIDDEN, seed=n) for n, length in enumerate(lengths)]
    anchors = [sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=5))) for n in lengths]
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    tokens = [a % 40 for chosen in anchors for a in chosen]
    with torch.no_grad():
        packed = model.block_hidden(
            torch.cat(rows, 1),
            block_embeddings(tokens),
            torch.tensor([[a + s for chosen, s in zip(anchors, starts, strict=True) for a in chosen]]),
            positions=torch.cat([torch.arange(n) for n in lengths])[None],
            documents=torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None],
        )[0]
    alone = torch.cat([hidden(model, row, chosen) for row, chosen in zip(rows, anchors, strict=True)])
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)


def test_chunks_change_neither_result_nor_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    states, anchors = normal(1, 40, LAYERS, HIDDEN), list(range(1, 40))
    results = []
    for queries in (4, 28, 10_000):
        monkeypatch.setitem(_QUERIES, "cpu", queries)
        model = drafter()
        out = model.block_hidden(states, block_embeddings(anchors), torch.tensor([anchors]))
        (out * normal(*out.shape, seed=5)).sum().backward()
        results.append([out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for other in results[1:]:
        for expected, found in zip(results[0], other, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_block_does_not_depend_on_the_other_blocks() -> None:
    model, states = drafter(), normal(1, 30, LAYERS, HIDDEN)
    together = hidden(model, states, [3, 4, 5, 20])
    for row, anchor in zip(together, [3, 4, 5, 20], strict=True):
        torch.testing.assert_close(hidden(model, states, [anchor])[0], row, rtol=1e-5, atol=1e-5)
    backwards = hidden(model, states, [20, 5, 4, 3])
    torch.testing.assert_close(backwards.flip(0), together, rtol=1e-5, atol=1e-5)
    none = model.block_hidden(states, torch.zeros(1, 0, BLOCK, HIDDEN), torch.zeros(1, 0, dtype=torch.long))
    assert none.shape == (1, 0, BLOCK, HIDDEN)


def test_bfloat16_keeps_the_rope_frequencies() -> None:
    """A buffer of frequencies would be rounded by `.to(bfloat16)`: at position 4,000 that is another angle."""
    model = drafter().to(torch.bfloat16)
    cos, _ = model.rope(torch.tensor([4001]), torch.float32)
    exact = torch.cos(torch.tensor(4001.0) * 1e4 ** -(torch.arange(0, 8, 2) / 8))
    torch.testing.assert_close(cos[0, :4], exact, rtol=1e-4, atol=1e-4)


def test_initial_weights_follow_the_seed() -> None:
    one, same, other = (DFlashDrafter(drafter().config).initialize(s) for s in (0, 0, 1))
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, same.state_dict()[name])
        assert torch.equal(tensor, other.state_dict()[name]) == (tensor.ndim == 1), name
    assert one.fc.weight.detach().std().item() == pytest.approx(0.02, rel=0.05)


def test_equal_to_the_dflash_model_of_transformers() -> None:
    """`MuseGlimmerAssistantModel` is DFlash under other tensor names, never causal inside the block."""
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    model = drafter(layer_types=(FULL, FULL))
    config = model.config
    peer = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(
            hidden_size=HIDDEN, intermediate_size=config.intermediate_size, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, rms_norm_eps=config.rms_norm_eps, layer_types=list(config.layer_types),
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta}, block_size=BLOCK,
            target_layer_ids=list(config.target_layer_ids), mask_token_id=3, attn_implementation="eager",
        )
    ).eval()  # fmt: skip
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    peer.load_state_dict({names.get(n, n): t for n, t in model.state_dict().items()}, strict=True)
    states = normal(1, 20, LAYERS, HIDDEN)
    for anchor in (1, 7, 20):
        with torch.no_grad():
            expected = peer(block_embeddings([5])[0], states[:, :anchor].flatten(2)).last_hidden_state
            found = model.draft(DrafterCache(), states[:, :anchor], block_embeddings([5])[0], anchor)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
