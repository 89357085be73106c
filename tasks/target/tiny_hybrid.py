"""A tiny random hybrid target: Qwen3.5-type, 8 layers, three Gated DeltaNet layers before each full-attention layer.

What the smoke stage tries the complete chain on, and the tests. Made on the spot in about a second: 0.4 M parameters,
a byte-level tokenizer of 512 tokens, a ChatML template. Its text is noise; its recurrent state is real.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 512
LAYERS = 8
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>", "<tool_call>", "</tool_call>"]
_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' %}{%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}"
    "{{- '\\n' }}{%- else %}{{- message.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

_TOPICS = ("rain", "bread", "glass", "salt", "wool", "steel", "paper", "light")
SAMPLE_ROWS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": f"Say {count} things about {topic}."},
            {"role": "assistant", "content": " ".join(f"{topic} is {word}." for word in words)},
        ]
    }
    for count, words in (("two", ("useful", "old")), ("three", ("common", "cheap", "plain")))
    for topic in _TOPICS
]


def write_tiny_hybrid(folder: Path, seed: int = 0) -> Path:
    """Write the checkpoint: config, safetensors weights (float32), tokenizer with chat template.

    Args:
        folder: created if missing.
        seed: of the random weights; equal seeds give equal weights.

    Returns:
        The folder.
    """
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        max_position_embeddings=1024,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        },
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3_5ForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    # At the usual scale the logits are so flat that right and wrong states give the same tokens.
                    parameter.mul_(4)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = [message["content"] for row in SAMPLE_ROWS for message in row["messages"]]
    core.train_from_iterator(lines, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", mask_token="<|mask|>"
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer
