"""Rules by which `plan` fills in what a person left open: mask token and drafter shape."""

from __future__ import annotations

from typing import Any

from tasks.contract.errors import ConfigurationError, Problem
from tasks.contract.spec import RunSpec
from tasks.target.facts import TargetFacts

# Published DFlash drafters (z-lab): padded vocabulary size -> mask token id.
_PUBLISHED_MASK = {151_936: 151_669, 248_320: 248_070}
_LARGE_TARGET = 2048  # hidden size from which the published drafters use 32/8 heads of 128, whatever the target has
_ROPE_WITHOUT_TARGETS = 10_000.0  # for targets that have no rotary embedding (Mamba-like)


def resolve_mask_token(asked: int | None, facts: TargetFacts) -> int:
    """The mask token id: as asked, else the published one, else an embedding row that no text uses.

    Ids past the tokenizer's length are allowed (151669 is published for Qwen3): the embedding has rows there.

    Raises:
        ConfigurationError: outside the embedding, equal to pad or an end token, or none can be chosen safely.
    """
    if asked is not None:
        expected = f"a row of the target's embedding, 0..{facts.vocab_size - 1}, neither pad nor an end token"
        if not 0 <= asked < facts.vocab_size:
            raise ConfigurationError(Problem("mask_token", asked, expected))
        if asked in facts.eos_ids or asked == facts.pad_id:
            role = "an end token" if asked in facts.eos_ids else "the pad token"
            raise ConfigurationError(Problem("mask_token", asked, f"{expected}; {asked} is {role}"))
        return asked
    published = _PUBLISHED_MASK.get(facts.vocab_size)
    if published is not None and facts.model_type.startswith("qwen3"):
        return published
    if facts.vocab_size > facts.tokenizer_length:
        return facts.tokenizer_length
    if facts.unused_special_ids:
        return max(facts.unused_special_ids)
    raise ConfigurationError(
        Problem(
            "mask_token",
            None,
            f"an explicit id in 0..{facts.vocab_size - 1} that occurs in no sample: this tokenizer uses every row of "
            "the embedding and has no spare special token",
        )
    )


def resolve_drafter(spec: RunSpec, facts: TargetFacts) -> dict[str, Any]:
    """Heads, sizes and rope base of the drafter, where they were left open.

    Raises:
        ConfigurationError: if heads are not a multiple of key/value heads.
    """
    large = facts.hidden_size >= _LARGE_TARGET
    shape = {
        "draft_heads": spec.draft_heads or (32 if large else facts.heads),
        "draft_kv_heads": spec.draft_kv_heads or (8 if large else facts.kv_heads),
        "draft_head_dim": spec.draft_head_dim or (128 if large else facts.head_dim),
        "draft_intermediate": spec.draft_intermediate or facts.intermediate_size,
        "draft_rope_theta": spec.draft_rope_theta or facts.rope_theta or _ROPE_WITHOUT_TARGETS,
    }
    if shape["draft_heads"] % shape["draft_kv_heads"]:
        expected = f"a multiple of draft_kv_heads = {shape['draft_kv_heads']}"
        raise ConfigurationError(Problem("draft_heads", shape["draft_heads"], expected))
    if shape["draft_head_dim"] % 2:
        expected = "an even number: rope rotates pairs"
        raise ConfigurationError(Problem("draft_head_dim", shape["draft_head_dim"], expected))
    return shape
