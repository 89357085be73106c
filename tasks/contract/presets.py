"""Named starting points of the trigger form. A preset is what differs from the demo's defaults; fields override it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from tasks.contract.errors import ConfigurationError, Problem
from tasks.contract.spec import RunSpec

PRESETS: dict[str, dict[str, Any]] = {
    "demo": {},
    "smoke": {"max_samples": 64, "epochs": 1, "max_steps": 10, "measure_prompts": 2, "max_new_tokens": 16},
    "reference": {
        "target": "Qwen/Qwen3.6-27B",
        "max_length": 4096,
        "validation_share": 0.01,
        "shard_tokens": 400_000,
        "block_size": 16,
        "draft_layers": 5,
        "sliding_layers": 4,
        "sliding_window": 2048,
        "epochs": 6,
        "batch_tokens": 65_536,
        "anchors": 512,
        "learning_rate": 6e-4,
        "checkpoint_steps": 500,
        "evaluate_steps": 1000,
        "measure_prompts": 256,
        "max_new_tokens": 2048,
        "device": "cuda",
        "extract_groups": 16,
        "extract_batch_tokens": 16_384,
        "smoke_hybrid": False,
    },
}
PURPOSES = {
    "demo": "SmolLM2-135M-Instruct on the shipped chats, minutes on two CPU cores",
    "smoke": "the demo's target and data, 64 samples and ten steps: does everything work here?",
    "reference": "Qwen3.6-27B on GPUs: the published drafter's geometry, the paper's training; name your chats",
}
DEFAULT_PRESET = "demo"


def spec_from_form(values: Mapping[str, Any]) -> RunSpec:
    """Build the spec from what a person (or `dag_run.conf`) gave: a preset and the fields that override it.

    Args:
        values: `preset` plus any RunSpec fields; `None` means "as in the preset".

    Raises:
        ConfigurationError: naming each wrong field, the nearest valid name for an unknown one.
    """
    name = values.get("preset") or DEFAULT_PRESET
    if name not in PRESETS:
        raise ConfigurationError(Problem("preset", name, f"one of {sorted(PRESETS)}"))
    given = {key: value for key, value in values.items() if key != "preset" and value is not None}
    problems = []
    for key in given:
        if key not in RunSpec.model_fields:
            close = difflib.get_close_matches(key, RunSpec.model_fields, n=1)
            expected = f"a parameter of this pipeline; did you mean {close[0]!r}?" if close else "a known parameter"
            problems.append(Problem(key, given[key], expected))
    if problems:
        raise ConfigurationError(problems)
    try:
        return RunSpec(**{**PRESETS[name], **given})
    except ValidationError as error:
        raise ConfigurationError([_problem(e) for e in error.errors()]) from error


def _problem(error: Any) -> Problem:
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["loc"]:
        return Problem(".".join(str(part) for part in error["loc"]), error["input"], message)
    field, _, rest = message.partition(": found ")  # a cross-field check of RunSpec names its field itself
    found, _, expected = rest.partition("; expected ")
    return Problem(field, found, expected)
