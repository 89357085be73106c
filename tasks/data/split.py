"""Training and validation: which side a conversation is on, and which held-out prompts are measured."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from tasks.contract.errors import DataError

SMALL = 20  # conversations


def split_conversations(conversation_ids: Iterable[bytes], seed: int, share: float) -> set[bytes]:
    """The conversations held out for validation: those whose hash with the seed lies below the share.

    The side of a conversation depends on nothing but itself, so it stays there when data is added. Only where that
    cannot do, the hash's order decides: with fewer than `SMALL` conversations the number held out is share times
    their number, rounded; and each side gets at least one.

    Args:
        conversation_ids: in any order, repeated or not.
        seed: of the spec.
        share: between 0 and 1.

    Raises:
        DataError: if there are fewer than two conversations.
    """
    distinct = set(conversation_ids)
    if len(distinct) < 2:
        raise DataError(
            f"validation_share: {len(distinct)} conversation cannot be split into training and validation (share "
            f"{share}); at least 2 with different first questions are needed: add sources, or raise max_samples"
        )
    ranked = sorted(distinct, key=lambda conversation: (_rank(seed, conversation), conversation))
    if len(ranked) < SMALL:
        count = round(share * len(ranked))
    else:
        count = sum(_rank(seed, conversation) < share for conversation in ranked)
    return set(ranked[: min(max(count, 1), len(ranked) - 1)])


def hash_order(prompt_id: bytes, seed: int) -> float:
    """Position of a held-out prompt in the order from which the measured ones are taken."""
    return _rank(seed, b"prompt" + prompt_id)


def _rank(seed: int, value: bytes) -> float:
    """Uniform in [0, 1)."""
    digest = hashlib.sha256(f"{seed}:".encode() + value).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
