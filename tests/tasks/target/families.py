"""Tiny random targets of every family, with a tokenizer trained on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>", "<tool_call>", "</tool_call>"]
TEMPLATE = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}{{- m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
_BASE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "bos_token_id": None,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_LINEAR: dict[str, Any] = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
_MROPE = {**_ROPE, "mrope_section": [1, 1, 0], "mrope_interleaved": True}
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
}  # fmt: skip


def _qwen35() -> Any:
    return tf.Qwen3_5TextConfig(**_BASE, **_LINEAR, num_hidden_layers=8, rope_parameters=_MROPE)


def _composite() -> Any:
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
        "num_position_embeddings": 16,
    }  # fmt: skip
    return tf.Qwen3_5Config(text_config=_qwen35().to_dict(), vision_config=vision, eos_token_id=2)


FAMILIES: dict[str, Any] = {
    "qwen3": lambda: tf.Qwen3Config(**_BASE, num_hidden_layers=4),
    "llama": lambda: tf.LlamaConfig(**_BASE, num_hidden_layers=4),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(
        **_BASE, num_hidden_layers=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "qwen3_5": _qwen35,
    "qwen3_5_multimodal": _composite,
    "qwen3_5_moe": lambda: tf.Qwen3_5MoeTextConfig(
        **_BASE, **_LINEAR, **_EXPERTS, num_hidden_layers=4, rope_parameters=_MROPE
    ),
    "qwen3_next": lambda: tf.Qwen3NextConfig(
        **_BASE, **_LINEAR, **_EXPERTS, num_hidden_layers=8, rope_parameters=_ROPE
    ),
    "gemma3": lambda: tf.Gemma3TextConfig(
        **_BASE, num_hidden_layers=6, sliding_window=32, query_pre_attn_scalar=16, tie_word_embeddings=True
    ),
    "gpt_oss": lambda: tf.GptOssConfig(
        **_BASE, num_hidden_layers=4, num_local_experts=4, num_experts_per_tok=2, sliding_window=32,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "lfm2": lambda: tf.Lfm2Config(
        **{k: v for k, v in _BASE.items() if k != "head_dim"}, num_hidden_layers=6, conv_L_cache=3,
        block_auto_adjust_ff_dim=False,
        layer_types=["conv", "conv", "full_attention", "conv", "conv", "full_attention"],
    ),
    "jamba": lambda: tf.JambaConfig(
        **{k: v for k, v in _BASE.items() if k != "head_dim"}, num_hidden_layers=4, attn_layer_period=2,
        attn_layer_offset=1, num_experts=2, num_experts_per_tok=1, use_mamba_kernels=False, mamba_d_state=8,
        mamba_dt_rank=8,
    ),
    "falcon_h1": lambda: tf.FalconH1Config(
        **_BASE, num_hidden_layers=4, mamba_d_ssm=128, mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=1,
        mamba_d_state=16, mamba_chunk_size=32,
    ),
    "nemotron_h": lambda: tf.NemotronHConfig(
        **_BASE, layers_block_type=["mamba", "moe", "attention", "mamba"], mamba_num_heads=8, mamba_head_dim=16,
        ssm_state_size=16, n_groups=2, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32, use_mamba_kernels=False, chunk_size=32,
    ),
    "gpt_neox": lambda: tf.GPTNeoXConfig(
        **{k: v for k, v in _BASE.items() if k not in ("head_dim", "num_key_value_heads")}, num_hidden_layers=4
    ),
}  # fmt: skip


# One of each kind of layer; the others take seconds to import.
QUICK = ("qwen3", "llama", "qwen3_5", "qwen3_5_multimodal", "qwen3_next", "gemma3", "gpt_oss", "lfm2")


def build(family: str, folder: Path) -> Path:
    """Write a tiny checkpoint of the family, float32, random weights large enough to tell right from wrong."""
    torch.manual_seed(0)
    config = FAMILIES[family]()
    auto = tf.AutoModelForImageTextToText if family.endswith("multimodal") else tf.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer() -> Any:
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator(
        ["the rain in the plain falls on the train", "a drafter proposes a block of tokens"], trainer
    )
    fast = tf.PreTrainedTokenizerFast(
        tokenizer_object=found, eos_token="<|im_end|>", pad_token="<|endoftext|>", mask_token="<|mask|>"
    )
    fast.chat_template = TEMPLATE
    return fast
