from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tasks.contract.errors import ConfigurationError, IntegrityError
from tasks.target import extraction
from tasks.target.capture import LayerCapture, truncated
from tasks.target.extraction import Extractor, plan_batches, self_check
from tasks.target.loading import Target, load_target_folder
from tasks.target.plain import plain_states
from tests.tasks.target.families import FAMILIES, QUICK

LENGTHS = (5, 12, 9, 40, 7, 33, 6, 11)


def sequences(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(6, 400, n).astype(np.int32) for n in lengths]


def extract(target: Target, ids: list[int], texts: list[np.ndarray], budget: int, last: str = "none") -> dict:
    with Extractor(target, ids, last, torch.float32, budget) as extractor:
        return {e.index: e for batch in extractor.extract(texts) for e in batch}


@pytest.mark.parametrize(
    "family", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in sorted(FAMILIES)]
)
def test_every_family_stores_the_outputs_of_its_layers(family: str, checkpoint: Callable[[str], Path]) -> None:
    """EXT-06, EXT-08, EXT-09, EXT-12: padded batches equal plain single passes; the last id is before the norm."""
    target = load_target_folder(checkpoint(family))
    layers, texts = target.num_layers, sequences()
    found = extract(target, list(range(layers)), texts, 64, "pre_norm")
    normed = extract(target, [0], texts, 64, "post_norm")
    cut = extract(target, [0, 1], texts, 64)
    for index, text in enumerate(texts):
        states = found[index].hidden_states
        assert states.shape == (len(text), layers, target.hidden_size)
        ids = torch.from_numpy(text.astype(np.int64))[None]
        with torch.inference_mode():
            plain = target.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        for layer in range(layers - 1):
            assert (states[:, layer] - plain[layer + 1][0]).abs().max() < 1e-4
        with torch.inference_mode():
            assert (target.final_norm(states[:, -1]) - plain[-1][0]).abs().max() < 1e-4
        assert not torch.allclose(states[:, -1], plain[-1][0], atol=0.05)
        assert torch.equal(states[:, -1], found[index].last_hidden)
        assert (normed[index].last_hidden - plain[-1][0]).abs().max() < 1e-4
        assert (cut[index].hidden_states - states[:, :2]).abs().max() < 1e-4
    assert self_check(target, list(range(layers)), "post_norm", texts) < 1e-4


def test_states_are_bitwise_the_layers_output_where_the_kernels_are_the_same(checkpoint: Callable[[str], Path]) -> None:
    """EXT-06: ids [1, 3, 5] of 8 layers are what forward hooks on exactly these layers see."""
    target = load_target_folder(checkpoint("qwen3_5"))
    [text] = sequences((21,))
    seen: dict[int, torch.Tensor] = {}
    hooks = [
        layer.register_forward_hook(lambda _m, _i, out, n=n: seen.__setitem__(n, out))
        for n, layer in enumerate(target.layers)
    ]
    with Extractor(target, [1, 3, 5], "none", torch.float32) as extractor:
        [[found]] = extractor.extract([text])
    for hook in hooks:
        hook.remove()
    assert sorted(seen) == [0, 1, 2, 3, 4, 5], "layers after the last one needed must not run"
    for column, layer in enumerate((1, 3, 5)):
        assert torch.equal(found.hidden_states[:, column], seen[layer][0])


def test_order_and_batch_size_do_not_matter(checkpoint: Callable[[str], Path]) -> None:
    """EXT-04: lengths 5..12, batches of 4, in both orders, and one by one."""
    target = load_target_folder(checkpoint("qwen3_5"))
    texts = sequences(tuple(range(5, 13)))
    ids = [1, 7]
    forward = extract(target, ids, texts, 48)
    backward = extract(target, ids, texts[::-1], 48)
    single = extract(target, ids, texts, 1)
    for index in range(8):
        assert (forward[index].hidden_states - backward[7 - index].hidden_states).abs().max() < 1e-4
        assert (forward[index].hidden_states - single[index].hidden_states).abs().max() < 1e-4


def test_samples_with_a_common_prefix_keep_all_their_rows(checkpoint: Callable[[str], Path]) -> None:
    """EXT-03."""
    target = load_target_folder(checkpoint("qwen3"))
    prefix, one, two = sequences((64, 5, 9))
    texts = [np.concatenate([prefix, one]), np.concatenate([prefix, two])]
    found = extract(target, [2], texts, 1000)
    for index, text in enumerate(texts):
        assert len(found[index].hidden_states) == len(text)
        plain = plain_states(target, text).entries[3]
        assert (found[index].hidden_states[:, 0] - plain).abs().max() < 1e-4


def test_last_state_gives_the_targets_own_logits(checkpoint: Callable[[str], Path]) -> None:
    """EXT-10."""
    target = load_target_folder(checkpoint("qwen3_next"))
    [text] = sequences((50,))
    found = extract(target, [0], [text], 64, "post_norm")[0]
    with torch.inference_mode():
        logits = target.model(input_ids=torch.from_numpy(text.astype(np.int64))[None]).logits[0]
        assert torch.equal(target.head(found.last_hidden).argmax(-1), logits.argmax(-1))


def test_bfloat16_does_not_overflow(checkpoint: Callable[[str], Path]) -> None:
    """EXT-19: 70000 becomes 70144 in bfloat16, infinity in float16."""
    target = load_target_folder(checkpoint("llama"))
    handle = target.layers[0].register_forward_hook(lambda _m, _i, out: torch.full_like(out, 70000.0))
    try:
        with Extractor(target, [0], "none", torch.bfloat16) as extractor:
            [[found]] = extractor.extract(sequences((4,)))
    finally:
        handle.remove()
    # The hook of the test was there first, so the extractor sees its result.
    assert found.hidden_states.unique().tolist() == [70144.0]


@pytest.mark.parametrize("ids", [[8], [0, 8], [-1], [3, 3], [5, 1], []])
def test_wrong_layer_ids_are_refused(ids: list[int], checkpoint: Callable[[str], Path]) -> None:
    """EXT-08: id 8 of 8 layers is out of range."""
    target = load_target_folder(checkpoint("qwen3_5"))
    with pytest.raises(ConfigurationError, match=r"layer_ids.*0\.\.7"):
        LayerCapture(target, ids)


def test_layer_list_and_hooks_are_restored_after_an_error(checkpoint: Callable[[str], Path]) -> None:
    target = load_target_folder(checkpoint("qwen3"))
    broken = target.layers[1].register_forward_hook(lambda *_: {}["an error in mid-forward"])
    with Extractor(target, [1]) as extractor:
        assert len(target.decoder.layers) == 2
        with pytest.raises(KeyError):
            list(extractor.extract(sequences((4,))))
    broken.remove()
    assert target.decoder.layers is target.layers
    assert not any(layer._forward_hooks for layer in target.layers)
    with pytest.raises(ValueError, match=r"0\.\.3"), truncated(target, 4):
        pass


def test_capture_on_a_bare_model_and_without_a_forward_pass(checkpoint: Callable[[str], Path]) -> None:
    model = load_target_folder(checkpoint("llama")).model
    with LayerCapture(model, [0, 3], "pre_norm") as capture:
        with pytest.raises(RuntimeError, match=r"layers \[0, 3\]"):
            capture.states()
        model(input_ids=torch.tensor([[7, 8, 9]]))
        assert capture.states().shape == (1, 3, 2, 64)
        assert torch.equal(capture.last(), capture.states()[:, :, 1])


def test_a_tuple_from_a_layer_is_understood(checkpoint: Callable[[str], Path]) -> None:
    target = load_target_folder(checkpoint("llama"))
    states = torch.ones(1, 2, 64)
    with LayerCapture(target, [1]) as capture:
        for hook in target.layers[1]._forward_hooks.values():
            hook(target.layers[1], (), (states, None))
        assert torch.equal(capture.states()[:, :, 0], states)


def test_a_family_without_decoder_layers_is_refused_by_name(checkpoint: Callable[[str], Path]) -> None:
    target = load_target_folder(checkpoint("llama"))
    target.decoder.layers, target.decoder.strange = nn.ModuleList(), target.layers
    with pytest.raises(ConfigurationError, match=r"LlamaForCausalLM \(model type llama\) cannot: 0 of 4 layers"):
        LayerCapture(target.model, [0])


def test_out_of_memory_halves_the_batch_and_goes_on(
    checkpoint: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    target = load_target_folder(checkpoint("qwen3"))
    texts = sequences()
    expected = extract(target, [1], texts, 1000)

    def small_memory(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs[0].shape[0] * inputs[0].shape[1] > 80:
            raise torch.OutOfMemoryError("out of memory")

    handle = target.layers[0].register_forward_pre_hook(small_memory)
    try:
        with Extractor(target, [1], "none", torch.float32, 320) as extractor:
            found = {e.index: e for batch in extractor.extract(texts) for e in batch}
            assert extractor.batch_tokens == 80
            assert extractor.halved
            with pytest.raises(ConfigurationError, match=r"max_length: found 81"):
                list(extractor.extract(sequences((81,))))
    finally:
        handle.remove()
    assert len([r for r in caplog.records if "out of memory" in r.message]) == 2
    for index in range(len(texts)):
        assert (found[index].hidden_states - expected[index].hidden_states).abs().max() < 1e-5


def test_self_check_stops_on_states_that_leak_between_samples(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """EXT-13: as if boundaries were lost one call before the layer that needs them."""
    target = load_target_folder(checkpoint("qwen3_5"))
    layer = target.layers[0]
    handle = layer.register_forward_hook(lambda _m, _i, out: out + out.mean(0, keepdim=True) if len(out) > 1 else out)
    try:
        with pytest.raises(IntegrityError, match=r"layer 0 of a padded batch differs .* nothing was extracted"):
            self_check(target, [0, 3], "none", sequences((20, 15)))
    finally:
        handle.remove()
    assert self_check(target, [0, 3], "none", sequences((20,))) < 1e-4, "one sample is enough for the check"
    assert extraction.SELF_CHECK_TOLERANCE[torch.float32] < 0.01


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 100))
def test_batches_hold_every_sample_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = plan_batches(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or max(lengths[i] for i in batch) * len(batch) <= budget
