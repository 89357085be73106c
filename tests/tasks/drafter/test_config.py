from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.contract.errors import ConfigurationError, IntegrityError
from tasks.contract.spec import RunSpec
from tasks.drafter.config import FULL, SLIDING, DrafterConfig, read_config
from tasks.drafter.model import DFlashDrafter
from tasks.drafter.serialization import load_drafter, save_drafter
from tests.tasks.drafter.cases import CONFIG, drafter, published

QWEN3_8B: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 16, "num_target_layers": 36,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}, "hidden_size": 4096,
    "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "num_hidden_layers": 5, "layer_types": [FULL] * 5, "sliding_window": None, "use_sliding_window": False,
    "max_window_layers": 5, "rope_theta": 1000000, "rope_scaling": None, "rms_norm_eps": 1e-06, "vocab_size": 151936,
    "tie_word_embeddings": False, "dtype": "bfloat16", "max_position_embeddings": 40960, "attention_bias": False,
    "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02,
}  # fmt: skip
QWEN36_27B = {
    **{k: v for k, v in QWEN3_8B.items() if k != "block_size"}, "num_target_layers": 64, "hidden_size": 5120,
    "dflash_config": {"block_size": 16, "mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
    "intermediate_size": 17408, "layer_types": [SLIDING] * 4 + [FULL], "sliding_window": 2048,
    "use_sliding_window": True, "rope_theta": 10000000, "vocab_size": 248320, "max_position_embeddings": 262144,
}  # fmt: skip
QWEN35_35B = {
    **QWEN3_8B, "num_target_layers": 40, "hidden_size": 2048, "intermediate_size": 6144, "num_key_value_heads": 4,
    "num_hidden_layers": 8, "layer_types": [FULL] * 8, "max_window_layers": 8, "vocab_size": 248320,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 10, 19, 28, 37]}, "rope_theta": 10000000,
}  # fmt: skip
GPT_OSS = {
    **QWEN3_8B, "model_type": "gpt_oss", "num_target_layers": 24, "hidden_size": 2880, "intermediate_size": 7680,
    "num_attention_heads": 64, "head_dim": 64, "num_hidden_layers": 8, "block_size": 8, "layer_types": [FULL] * 8,
    "dflash_config": {"mask_token_id": 200000, "target_layer_ids": [1, 6, 11, 16, 21]}, "rope_theta": 150000,
    "rms_norm_eps": 1e-05, "vocab_size": 201088, "attention_bias": True, "max_window_layers": 8,
}  # fmt: skip
# (config, tensors, parameters in millions)
PUBLISHED = {
    "Qwen3-8B-DFlash-b16": (QWEN3_8B, 58, 1049),
    "Qwen3.6-27B-DFlash": (QWEN36_27B, 58, 1730),
    "Qwen3.5-35B-A3B-DFlash": (QWEN35_35B, 91, None),
    "gpt-oss-20b-DFlash": (GPT_OSS, 3 + 15 * 8, None),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_round_trip(name: str, tmp_path: Path) -> None:
    original, tensors, millions = PUBLISHED[name]
    config = read_config(published(tmp_path, original))
    written = config.to_json()
    flat = {**original, **original["dflash_config"]}
    found = {**written, **written["dflash_config"]}
    assert {k: found[k] for k in flat if k not in ("dflash_config", "auto_map")} == {
        k: v for k, v in flat.items() if k not in ("dflash_config", "auto_map")
    }
    assert DrafterConfig.from_json(json.loads(json.dumps(written))) == config
    with torch.device("meta"):
        model = DFlashDrafter(config)
    assert len(model.state_dict()) == tensors
    parameters = sum(p.numel() for p in model.parameters())
    if millions:
        assert parameters / 1e6 == pytest.approx(millions, abs=1)


def test_tensor_names_are_the_published_ones() -> None:
    layer = [f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")] + ["input_layernorm.weight"]
    layer += [f"self_attn.{n}_proj.weight" for n in "qkvo"] + [f"self_attn.{n}_norm.weight" for n in "qk"]
    layer += ["post_attention_layernorm.weight"]
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"} | {f"layers.{i}.{n}" for i in (0, 1) for n in layer}
    assert set(drafter().state_dict()) == expected
    assert drafter().fc.weight.shape == (32, 96)


def test_causality_hides_in_the_layer_types() -> None:
    def causal(**entries: Any) -> list[bool]:
        config = DrafterConfig.from_json({**QWEN36_27B, **entries})
        return [config.causal(i) for i in range(config.num_layers)]

    assert causal() == [True] * 4 + [False]
    assert causal(is_causal=False) == [False] * 5
    assert causal(is_causal=True) == [True] * 5
    assert causal(dflash_config={**QWEN36_27B["dflash_config"], "causal": True}) == [True] * 5
    config = DrafterConfig.from_json(QWEN36_27B)
    assert [config.window(i) for i in range(5)] == [2048] * 4 + [None]
    assert "is_causal" not in config.to_json()
    assert DrafterConfig.from_json({**QWEN36_27B, "is_causal": False}).to_json()["is_causal"] is False


def test_the_rope_base_is_read_flat_and_nested_and_conflicts_are_named() -> None:
    """TRN-08."""
    nested = {k: v for k, v in QWEN36_27B.items() if k != "rope_theta"}
    nested["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000000}
    assert DrafterConfig.from_json(nested).rope_theta == 1e7
    with pytest.raises(ConfigurationError, match=r"rope_theta: found 100000; expected .* 10000000"):
        DrafterConfig.from_json({**nested, "rope_theta": 100000})
    with pytest.raises(ConfigurationError, match="rope_theta: found None"):
        DrafterConfig.from_json({k: v for k, v in QWEN3_8B.items() if k != "rope_theta"})


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 32}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1000000}}, "yarn"),
        ({"rope_parameters": {"rope_theta": 1000000, "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
        ({"has_own_lm_head": True}, "has_own_lm_head"),
        ({"dflash_config": {**QWEN3_8B["dflash_config"], "conv_kernel_size": 2}}, "conv_kernel_size"),
        ({"dflash_config": {**QWEN3_8B["dflash_config"], "final_logit_softcapping": 30.0}}, "final_logit_softcapping"),
        ({"dflash_config": {"mask_token_id": 151669, "target_layer_ids": [9, 1]}}, "target_layer_ids"),
        ({"dflash_config": {"target_layer_ids": [1, 9]}}, "mask_token_id"),
        ({"dflash_config": {"mask_token_id": 151936, "target_layer_ids": [1, 9]}}, r"0\.\.151935"),
        ({"num_key_value_heads": 7}, "num_attention_heads"),
        ({"layer_types": ["chunked_attention"] * 5}, "layer_types"),
    ],
)
def test_what_this_drafter_does_not_do_is_refused_by_name(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DrafterConfig.from_json({**QWEN3_8B, **entries})


def test_the_spec_makes_the_published_geometry() -> None:
    spec = RunSpec(
        layer_ids=[1, 16, 31, 46, 61], block_size=16, draft_layers=5, sliding_layers=4, sliding_window=2048,
        mask_token=248070, draft_heads=32, draft_kv_heads=8, draft_head_dim=128, draft_intermediate=17408,
        draft_rope_theta=1e7,
    )  # fmt: skip
    shape = {"hidden_size": 5120, "num_target_layers": 64, "vocab_size": 248320, "max_position_embeddings": 262144}
    assert DrafterConfig.from_spec(spec, **shape) == DrafterConfig.from_json(QWEN36_27B)
    with pytest.raises(ConfigurationError, match="mask_token: found None"):
        DrafterConfig.from_spec(spec.model_copy(update={"mask_token": None}), **shape)


def test_a_drafter_is_saved_and_loaded_strictly(tmp_path: Path) -> None:
    model = drafter()
    save_drafter(model, tmp_path / "a")
    loaded = load_drafter(tmp_path / "a")
    assert loaded.config == CONFIG
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert json.loads((tmp_path / "a/config.json").read_text())["dtype"] == "float32"
    save_drafter(model, tmp_path / "b", torch.bfloat16)
    assert {t.dtype for t in load_drafter(tmp_path / "b").state_dict().values()} == {torch.bfloat16}

    file = tmp_path / "a/model.safetensors"
    tensors = load_file(file)
    tensors["layers.0.extra"] = tensors.pop("norm.weight")
    tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()
    save_file(tensors, file)
    with pytest.raises(IntegrityError) as error:
        load_drafter(tmp_path / "a")
    for part in ("fc.weight has shape (32, 95), expected (32, 96)", "norm.weight is missing", "layers.0.extra is unex"):
        assert part in str(error.value)
