"""Small chat templates, each with one habit of a published family, and a byte-level tokenizer made on the spot."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
PLAIN_TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # tokens of their own, not special

_OPEN = "{{- '<|im_start|>' + message.role + '\\n' }}"
_PROMPT = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"

CHATML = "{%- for message in messages %}" + _OPEN + "{{- message.content + '<|im_end|>\\n' }}{%- endfor %}" + _PROMPT

# Tool calls, tools, reasoning always kept, generation markers; the newline after the end token is outside them.
MARKED = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}" + _OPEN + "{%- if message.role == 'assistant' %}{%- generation %}"
    "{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}"
    "{%- endif %}"
    "{{- message.content }}"
    "{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + call.function.name + ' ' }}"
    "{{- call.function.arguments | tojson }}{{- '</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}"
    "{%- else %}{{- message.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}" + _PROMPT
)

# As Qwen3's: reasoning before the last question is dropped, an empty block stands in for missing reasoning, the
# prompt holds it when thinking is off, a conversation without a question raises; arguments are iterated over.
THINKING = (
    "{%- set ns = namespace(last=-1) %}"
    "{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}"
    "{%- endfor %}{%- if ns.last < 0 %}{{- raise_exception('No user query found in messages.') }}{%- endif %}"
    "{%- for message in messages %}"
    + _OPEN
    + "{%- set content = message.content %}{%- set reasoning = message.reasoning_content or '' %}"
    "{%- if message.role == 'assistant' %}"
    "{%- if not reasoning and '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last and (loop.last or reasoning) %}"
    "{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}"
    "{{- content }}"
    "{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + call.function.name }}"
    "{%- for name, value in call.function.arguments | items %}{{- ' ' + name + '=' }}{{- value | tojson }}"
    "{%- endfor %}{{- '</tool_call>' }}{%- endfor %}"
    "{%- else %}{{- content }}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)

# The markers stand around the question.
WRONGLY_MARKED = (
    "{%- for message in messages %}"
    + _OPEN
    + "{%- if message.role == 'user' %}{%- generation %}{{- message.content }}{%- endgeneration %}"
    "{{- '<|im_end|>\\n' }}{%- else %}{{- message.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}" + _PROMPT
)

# No special tokens, blanks at the boundaries: tokens may reach over them.
PLAIN = (
    "{%- for message in messages %}{%- if message.role == 'user' %}{{- 'Q: ' + message.content + '\\n' }}"
    "{%- elif message.role == 'assistant' %}{{- 'A: ' + message.content + '\\n\\n' }}"
    "{%- else %}{{- message.content + '\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'A: ' }}{%- endif %}"
)

# The generation prompt asks for something that the render of an answer does not have.
CONTRADICTING = CHATML.replace("assistant\\n", "assistant: ")

# As Phi-3's: the whole text is closed by a further special token, which the target does not say.
CLOSED = CHATML.removesuffix("{%- endif %}") + "{%- else %}{{- '<|endoftext|>' }}{%- endif %}"

TEMPLATES = {
    "closed": CLOSED,
    "chatml": CHATML,
    "marked": MARKED,
    "thinking": THINKING,
    "wrongly_marked": WRONGLY_MARKED,
    "plain": PLAIN,
    "contradicting": CONTRADICTING,
}
_LINES = [
    "Name one thing.",
    "user assistant system",
    "\n\nthe answer is the rain",
    "Q: who? A: you",
    "  indented code():\n",
]


@cache
def _backend(trim_offsets: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_LINES * 4, trainer)
    tokenizer.add_tokens(PLAIN_TAGS)
    return tokenizer


def make_tokenizer(template: str | None, *, trim_offsets: bool = True) -> Any:
    """A tokenizer of about 300 tokens with one of `TEMPLATES` (None: without any)."""
    backend = Tokenizer.from_str(_backend(trim_offsets).to_str())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", mask_token="<|mask|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = TEMPLATES[template] if template else None
    return tokenizer
