"""Layer ids: the one convention, `layer_output`, and the named conversions to everybody else's.

`layer_output` id i, 0-based, is the residual stream after decoder layer i, before the final norm. Valid ids of a
target of N layers are 0..N-1. z-lab and SpecForge use the same numbers. Hugging Face's `hidden_states` tuple has the
embeddings at index 0, so the same tensor stands at i + 1, except that its last entry has passed the final norm.
vLLM and speculators count from the embeddings too: i + 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from tasks.contract.errors import ConfigurationError, Problem

LAYER_CONVENTION = "layer_output"


def huggingface_index(layer_id: int) -> int:
    """Index in the `hidden_states` tuple. For the last layer that entry is after the final norm: use a hook there."""
    return layer_id + 1


def vllm_id(layer_id: int) -> int:
    """Auxiliary layer id of vLLM and speculators for the same tensor."""
    return layer_id + 1


def default_layer_ids(num_layers: int, count: int) -> list[int]:
    """Published spacing of DFlash (z-lab `build_target_layer_ids`), for `count` ids over `num_layers` target layers.

    One id: the middle layer, N // 2. Otherwise round(1 + k * (N - 4) / (count - 1)), Python's banker's rounding.
    Shallow targets, where that formula repeats an id, are refused: the user names the ids.

    Raises:
        ConfigurationError: if the ids would not be distinct.
    """
    if count == 1:
        return [num_layers // 2]
    ids = [round(1 + k * (num_layers - 4) / (count - 1)) for k in range(count)]
    if len(set(ids)) < count or ids != sorted(ids) or ids[0] < 0 or ids[-1] > num_layers - 1:
        raise ConfigurationError(
            Problem(
                "layer_count",
                count,
                f"at most {max(1, num_layers - 3)} evenly spaced layers in a target of {num_layers} layers "
                f"(the published spacing gives {ids}); lower layer_count or name layer_ids yourself",
            )
        )
    return ids


def check_layer_ids(layer_ids: Sequence[int], num_layers: int) -> list[int]:
    """Return the ids unchanged, or refuse them.

    Raises:
        ConfigurationError: naming the valid range, if an id is outside 0..N-1, repeated or out of order.
    """
    ids = list(layer_ids)
    expected = f"distinct ascending ids in 0..{num_layers - 1} ({LAYER_CONVENTION}: id i is the output of layer i)"
    outside = [i for i in ids if not 0 <= i < num_layers]
    if outside:
        hint = ""
        if outside == [num_layers]:
            hint = (
                f"; {num_layers} is an index of Hugging Face's hidden_states tuple, "
                f"whose entry {num_layers} is layer {num_layers - 1} after the final norm"
            )
        raise ConfigurationError(Problem("layer_ids", ids, f"{expected}; out of range: {outside}{hint}"))
    if not ids or ids != sorted(set(ids)):
        raise ConfigurationError(Problem("layer_ids", ids, expected))
    return ids
