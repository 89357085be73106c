"""Shape of a drafter, and the published `config.json` that engines read.

Written: the layout of the published drafters (z-lab's loop, vLLM, SGLang). Read: that and its older and newer forms,
where block size, mask token and layer ids stand at the top level or inside `dflash_config`, and the rope base flat or
inside `rope_parameters`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.contract.errors import ConfigurationError, Problem
from tasks.contract.spec import RunSpec

SLIDING, FULL = "sliding_attention", "full_attention"
_DEFAULT_BLOCK = 16  # what the published reader assumes where a file says nothing


@dataclass(frozen=True)
class DrafterConfig:
    """A DFlash drafter: Qwen3-style layers of the target's hidden size, a shape of their own otherwise."""

    hidden_size: int  # the target's: embedding and head are shared
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layer_types: tuple[str, ...]  # one a draft layer
    target_layer_ids: tuple[int, ...]  # layer_output convention, ascending
    num_target_layers: int
    vocab_size: int  # the target's embedding rows
    mask_token_id: int
    block_size: int
    rope_theta: float
    sliding_window: int = 2048
    is_causal: bool | None = None  # None: sliding layers are causal inside the block, full layers are not
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    max_position_embeddings: int = 32768
    model_type: str = "qwen3"

    def __post_init__(self) -> None:
        problems = []
        if self.num_heads % self.num_kv_heads:
            problems.append(
                Problem("num_attention_heads", self.num_heads, f"a multiple of {self.num_kv_heads} kv heads")
            )
        if self.head_dim % 2:
            problems.append(Problem("head_dim", self.head_dim, "an even number: rope rotates pairs"))
        if not 0 <= self.mask_token_id < self.vocab_size:
            expected = f"a row of the target's embedding, 0..{self.vocab_size - 1}"
            problems.append(Problem("mask_token_id", self.mask_token_id, expected))
        if unknown := sorted(set(self.layer_types) - {SLIDING, FULL}):
            problems.append(Problem("layer_types", unknown, f"{SLIDING} or {FULL}"))
        if not self.layer_types or not self.target_layer_ids:
            problems.append(Problem("layer_types, target_layer_ids", [], "at least one draft layer and target layer"))
        if problems:
            raise ConfigurationError(problems)

    @property
    def num_layers(self) -> int:
        """Draft layers."""
        return len(self.layer_types)

    def causal(self, layer: int) -> bool:
        """Whether a slot of the block sees only the slots before it, in this layer."""
        return self.layer_types[layer] == SLIDING if self.is_causal is None else self.is_causal

    def window(self, layer: int) -> int | None:
        """Tokens a sliding layer sees, itself included; None for a full layer."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    @classmethod
    def from_spec(
        cls,
        spec: RunSpec,
        *,
        hidden_size: int,
        num_target_layers: int,
        vocab_size: int,
        max_position_embeddings: int | None = None,
    ) -> DrafterConfig:
        """The drafter a resolved spec asks for on a target of this shape.

        `max_position_embeddings` is the target's; engines read it, the drafter itself has no such limit.

        Raises:
            ConfigurationError: naming a field that `plan` should have resolved.
        """
        values = {
            "draft_intermediate": spec.draft_intermediate,
            "draft_heads": spec.draft_heads,
            "draft_kv_heads": spec.draft_kv_heads,
            "draft_head_dim": spec.draft_head_dim,
            "draft_rope_theta": spec.draft_rope_theta,
            "layer_ids": spec.layer_ids,
            "mask_token": spec.mask_token,
        }
        open_fields = [Problem(name, None, "a value: run plan first") for name, v in values.items() if v is None]
        if open_fields:
            raise ConfigurationError(open_fields)
        types = [SLIDING] * spec.sliding_layers + [FULL] * (spec.draft_layers - spec.sliding_layers)
        return cls(
            hidden_size=hidden_size,
            intermediate_size=int(spec.draft_intermediate or 0),
            num_heads=int(spec.draft_heads or 0),
            num_kv_heads=int(spec.draft_kv_heads or 0),
            head_dim=int(spec.draft_head_dim or 0),
            layer_types=tuple(types),
            target_layer_ids=tuple(spec.layer_ids or ()),
            num_target_layers=num_target_layers,
            vocab_size=vocab_size,
            mask_token_id=int(spec.mask_token or 0),
            block_size=spec.block_size,
            rope_theta=float(spec.draft_rope_theta or 0),
            sliding_window=spec.sliding_window,
            max_position_embeddings=max_position_embeddings or 32768,
        )

    def to_json(self) -> dict[str, Any]:
        """The published `config.json`."""
        sliding = SLIDING in self.layer_types
        config: dict[str, Any] = {
            "architectures": ["DFlashDraftModel"],
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "model_type": self.model_type,
            "block_size": self.block_size,
            "dflash_config": {"mask_token_id": self.mask_token_id, "target_layer_ids": list(self.target_layer_ids)},
            "num_target_layers": self.num_target_layers,
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "layer_types": list(self.layer_types),
            "sliding_window": self.sliding_window if sliding else None,
            "use_sliding_window": sliding,
            "max_window_layers": self.num_layers,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rms_norm_eps": self.rms_norm_eps,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }
        if self.is_causal is not None:
            config["is_causal"] = self.is_causal
        return config

    @classmethod
    def from_json(cls, config: Mapping[str, Any], where: str = "config.json") -> DrafterConfig:
        """Read a published `config.json`, old or new.

        Args:
            config: its content.
            where: file name for messages.

        Raises:
            ConfigurationError: naming the entry that is missing or that this drafter cannot honour.
        """
        inner = config.get("dflash_config") or {}

        def either(name: str, default: Any = None) -> Any:
            value = inner.get(name, config.get(name, default))
            if value is None:
                raise ConfigurationError(Problem(f"{where}: {name}", None, "a value, at the top or in dflash_config"))
            return value

        _refuse_unsupported({**(config.get("rope_parameters") or {}), **config, **inner}, where)
        layers = int(config["num_hidden_layers"])
        types = config.get("layer_types") or [FULL] * layers
        if inner.get("use_swa") and "layer_types" not in config:
            types = [SLIDING] * layers
        ids = [int(i) for i in either("target_layer_ids")]
        if ids != sorted(set(ids)):
            raise ConfigurationError(
                Problem(f"{where}: target_layer_ids", ids, "ascending and distinct: engines sort them")
            )
        return cls(
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_heads=int(config["num_attention_heads"]),
            num_kv_heads=int(config["num_key_value_heads"]),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]),
            layer_types=tuple(types),
            target_layer_ids=tuple(ids),
            num_target_layers=int(config.get("num_target_layers") or ids[-1] + 3),
            vocab_size=int(config["vocab_size"]),
            mask_token_id=int(either("mask_token_id")),
            block_size=int(either("block_size", _DEFAULT_BLOCK)),
            rope_theta=_rope_theta(config, where),
            sliding_window=int(inner.get("swa_window_size") or config.get("sliding_window") or 2048),
            is_causal=config.get("is_causal", inner.get("causal")),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            attention_bias=bool(config.get("attention_bias", False)),
            max_position_embeddings=int(config.get("max_position_embeddings", 32768)),
            model_type=str(config.get("model_type", "qwen3")),
        )


def read_config(file: Path) -> DrafterConfig:
    """Read the `config.json` of a drafter's folder."""
    return DrafterConfig.from_json(json.loads(file.read_text()), str(file))


# Entries that change what a published drafter computes, with the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "input_embedding_scale": (None, 1),
    "output_multiplier": (None, 1),
    "final_logit_softcapping": (None, 0),
    "attention_sink_bias": (None, False),
    "has_own_lm_head": (None, False),
    "partial_rotary_factor": (None, 1),
    "hidden_act": (None, "silu"),
    "conv_kernel_size": (None,),  # DFlash 2
    "selector_rank": (None,),
}


def _refuse_unsupported(entries: Mapping[str, Any], where: str) -> None:
    problems = [
        Problem(f"{where}: {name}", entries[name], "absent: this drafter does not apply it")
        for name, neutral in _NEUTRAL.items()
        if entries.get(name) not in neutral
    ]
    if problems:
        raise ConfigurationError(problems)


def _rope_theta(config: Mapping[str, Any], where: str) -> float:
    nested = (config.get("rope_parameters") or {}).get("rope_theta")
    flat = config.get("rope_theta")
    if nested is not None and flat is not None and float(nested) != float(flat):
        raise ConfigurationError(
            Problem(f"{where}: rope_theta", flat, f"the same as rope_parameters.rope_theta, which is {nested}")
        )
    theta = nested if nested is not None else flat
    if theta is None:
        raise ConfigurationError(Problem(f"{where}: rope_theta", None, "a value, flat or in rope_parameters"))
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if scaling and scaling.get("rope_type", scaling.get("type")) not in (None, "default"):
        raise ConfigurationError(Problem(f"{where}: rope_scaling", scaling, "none: this drafter does not apply it"))
    return float(theta)
