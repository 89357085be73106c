"""64-bit digests of stored states, computed where the states are: on the GPU before the copy, on the CPU in `verify`.

A row (one token, one layer) is read as 64-bit words of its stored bits: r = mix(sum_j word_j * w_j mod 2^64). A
sample's digest of one layer is sum_t r_t * u_t mod 2^64. All w and u are odd and mix is a bijection, so a change of
any single word, and of any single row, always changes the digest; anything else goes unseen with probability 2^-64.
It guards against accidents between GPU and file; against changes at rest there is the SHA-256 of the receipt.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_ROW_SEED = 0x243F6A8885A308D3
_TOKEN_SEED = 0x13198A2E03707344


def row_digests(states: Tensor) -> Tensor:
    """Digest of each row.

    Args:
        states: [..., H], stored dtype (2 or 4 bytes a value), contiguous in its last dimension.

    Returns:
        [...] int64.
    """
    words = _words(states)
    return _mix((words * _weights(words.shape[-1], _ROW_SEED, words.device)).sum(-1))


def sample_digests(rows: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Digest of each sample and layer.

    Args:
        rows: [batch, T, K] int64 of `row_digests`, right-padded.
        lengths: [batch] valid rows of each sample; None: all of them.

    Returns:
        [batch, K] int64.
    """
    weights = _weights(rows.shape[1], _TOKEN_SEED, rows.device)[None, :, None]
    weighted = rows * weights
    if lengths is not None:
        valid = torch.arange(rows.shape[1], device=rows.device)[None, :] < lengths.to(rows.device)[:, None]
        weighted = weighted * valid[:, :, None]
    return weighted.sum(1)


def _words(states: Tensor) -> Tensor:
    """The rows' bits as 64-bit words, [..., ceil(H * bytes / 8)]; a remainder is filled up with zero bits."""
    per_word = 8 // states.element_size()
    rest = states.shape[-1] % per_word
    if rest:
        states = torch.nn.functional.pad(states, (0, per_word - rest))
    return states.contiguous().view(torch.int64)


def _mix(value: Tensor) -> Tensor:
    """Finalizer of splitmix64 (Steele, Lea and Flood 2014), a bijection of 64-bit numbers."""
    value = (value ^ _shift(value, 30)) * _signed(_FIRST)
    value = (value ^ _shift(value, 27)) * _signed(_SECOND)
    return value ^ _shift(value, 31)


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own shift of int64 drags the sign along."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


@lru_cache(maxsize=64)
def _weights(count: int, seed: int, device: torch.device) -> Tensor:
    index = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    return _mix(index * _signed(_GOLDEN) + seed) | 1
