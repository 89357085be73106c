"""Tiny random targets of many families. Matrices are multiplied by 4: with logits as flat as they are after
initialisation, wrong and right runs would agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import transformers

from tasks.decoding.greedy import greedy_decode
from tasks.target.loading import Target, describe_model

VOCAB = 512
_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GDN = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
_MROPE = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "mrope_section": [1, 1, 0],
    "mrope_interleaved": True,
}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_ssm": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}


def _config(family: str) -> Any:
    t: Any = transformers
    builders: dict[str, Callable[[], Any]] = {
        "qwen3": lambda: t.Qwen3Config(**_BASE, num_hidden_layers=4),
        "llama": lambda: t.LlamaConfig(**_BASE, num_hidden_layers=4),
        "gemma3": lambda: t.Gemma3TextConfig(
            **_BASE, num_hidden_layers=6, sliding_window=32, query_pre_attn_scalar=16, tie_word_embeddings=True
        ),
        "gpt_oss": lambda: t.GptOssConfig(
            **_BASE,
            num_hidden_layers=4,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=32,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
        "lfm2": lambda: t.Lfm2Config(
            **_BASE,
            num_hidden_layers=6,
            conv_L_cache=3,
            block_auto_adjust_ff_dim=False,
            layer_types=["conv", "conv", "full_attention"] * 2,
        ),
        "qwen3_5": lambda: t.Qwen3_5TextConfig(
            **_BASE,
            **_GDN,
            num_hidden_layers=3,
            rope_parameters=_MROPE,
            layer_types=["linear_attention", "linear_attention", "full_attention"],
        ),
        "qwen3_5_moe": lambda: t.Qwen3_5MoeTextConfig(
            **_BASE, **_GDN, **_MOE, num_hidden_layers=4, rope_parameters=_MROPE
        ),
        "qwen3_next": lambda: t.Qwen3NextConfig(
            **_BASE,
            **_GDN,
            **_MOE,
            num_hidden_layers=8,
            decoder_sparse_step=1,
            rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        ),
        "jamba": lambda: t.JambaConfig(
            **_BASE,
            num_hidden_layers=4,
            num_experts=2,
            num_experts_per_tok=1,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            mamba_d_state=8,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_dt_rank=8,
            use_mamba_kernels=False,
        ),
        "falcon_h1": lambda: t.FalconH1Config(**_BASE, **_MAMBA2, num_hidden_layers=4),
        "bamba": lambda: t.BambaConfig(**_BASE, **_MAMBA2, num_hidden_layers=4, attn_layer_indices=[1, 3]),
        "nemotron_h": lambda: t.NemotronHConfig(
            **_BASE,
            layers_block_type=["mamba", "attention", "mamba", "moe"],
            mamba_num_heads=8,
            mamba_head_dim=16,
            n_groups=1,
            ssm_state_size=16,
            conv_kernel=4,
            chunk_size=8,
            expand=2,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=32,
            n_group=1,
            topk_group=1,
        ),
        "mamba2": lambda: t.Mamba2Config(
            vocab_size=VOCAB,
            hidden_size=64,
            num_hidden_layers=4,
            num_heads=8,
            head_dim=16,
            expand=2,
            n_groups=1,
            state_size=16,
            chunk_size=8,
            eos_token_id=2,
            pad_token_id=0,
            bos_token_id=1,
        ),
        "minimax": lambda: t.MiniMaxConfig(
            **_BASE,
            num_hidden_layers=4,
            num_local_experts=4,
            num_experts_per_tok=2,
            block_size=8,
            layer_types=["linear_attention", "full_attention"] * 2,
        ),
    }
    return builders[family]()


@lru_cache(maxsize=4)
def tiny_target(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Target:
    """A random target without end tokens: give it some by `with_eos`."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(_config(family), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "A_log" not in name:
                parameter.mul_(4)
    target = describe_model(model.to(dtype), _NoTokenizer(), family)
    return dataclasses.replace(target, eos_ids=frozenset())


@lru_cache(maxsize=32)
def greedy_text(family: str, prompt_length: int, limit: int, seed: int = 0) -> tuple[int, ...]:
    """The plain greedy answer to `prompt(prompt_length)`."""
    return tuple(greedy_decode(tiny_target(family, seed), prompt(prompt_length), max_new_tokens=limit).tokens)


def with_eos(target: Target, *eos: int) -> Target:
    return dataclasses.replace(target, eos_ids=frozenset(eos))


def prompt(length: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(i) for i in torch.randint(3, VOCAB, (length,), generator=generator)]


class _NoTokenizer:
    eos_token_id = None
    pad_token_id = None
