"""Small drafters, samples and trainings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tasks.contract.spec import RunSpec
from tasks.data.states_shard import StatesSample
from tasks.data.token_shard import Sample, sample_digest
from tasks.drafter.batches import SampleAddress, ShardIndex, index_shard
from tasks.drafter.checkpoint import Checkpoints
from tasks.drafter.config import FULL, SLIDING, DrafterConfig
from tasks.drafter.model import DFlashDrafter
from tasks.drafter.objective import Objective
from tasks.drafter.trainer import Evaluation, Training

VOCABULARY, HIDDEN, LAYERS, BLOCK, MASK = 50, 32, 3, 4, 49

CONFIG = DrafterConfig(
    hidden_size=HIDDEN, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8, layer_types=(SLIDING, FULL),
    target_layer_ids=(1, 3, 5), num_target_layers=8, vocab_size=VOCABULARY, mask_token_id=MASK, block_size=BLOCK,
    rope_theta=1e4, sliding_window=6,
)  # fmt: skip


def drafter(seed: int = 0, **fields: Any) -> DFlashDrafter:
    """A drafter with weights large enough that everything it sees shows in what it says."""
    model = DFlashDrafter(replace(CONFIG, **fields)).initialize(seed).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
            else:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    return model


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def embedding() -> Tensor:
    return normal(VOCABULARY, HIDDEN, seed=11)


def head() -> Tensor:
    return normal(VOCABULARY, HIDDEN, seed=12) / 4


def block_embeddings(tokens: Sequence[int], block_size: int = BLOCK) -> Tensor:
    """[1, A, B, H] of these anchor tokens."""
    blocks = torch.full((len(tokens), block_size), MASK)
    blocks[:, 0] = torch.tensor(tokens)
    return functional.embedding(blocks, embedding())[None]


def sample(length: int, seed: int, mask: Sequence[int] | None = None) -> StatesSample:
    """A cyclic text with states that tell where in the cycle it is; by default all but two tokens are supervised."""
    generator = np.random.default_rng(seed)
    start, stride = generator.integers(0, 40), generator.integers(1, 4)
    ids = ((start + stride * np.arange(length)) % 40).astype(np.int32)
    loss_mask = np.array(mask if mask is not None else [0, 0] + [1] * (length - 2), dtype=np.uint8)
    identity = sample_digest(ids, loss_mask)
    states = functional.embedding(torch.from_numpy(ids).long(), normal(VOCABULARY, LAYERS * HIDDEN, seed=13))
    return StatesSample(
        Sample(ids, loss_mask, identity, identity, 0, "data"),
        states.view(length, LAYERS, HIDDEN),
        None,
        torch.zeros(LAYERS, dtype=torch.int64),
    )


class Shards:
    """Shards in memory."""

    def __init__(self, shards: Sequence[Sequence[StatesSample]]) -> None:
        self.samples = [list(shard) for shard in shards]
        self.index: list[ShardIndex] = [
            index_shard(f"shard-{n}", [s.sample for s in shard]) for n, shard in enumerate(self.samples)
        ]

    def __call__(self, address: SampleAddress) -> StatesSample:
        return self.samples[address[0]][address[1]]


def shards(count: int = 12) -> Shards:
    samples = [sample(12 + n % 5, seed=n) for n in range(count)]
    return Shards([samples[: count // 2], samples[count // 2 :]])


class FallingLoss:
    """Evaluation whose acceptance is a function of the step alone, so that the best one is known beforehand."""

    def __init__(self, acceptance: dict[int, float] | None = None) -> None:
        self.training: Training | None = None
        self.acceptance = acceptance or {}

    def __call__(self, model: DFlashDrafter, objective: Objective) -> Evaluation:
        assert self.training is not None
        step = self.training.state.step
        value = self.acceptance.get(step, 1.0)
        loss = 10.0 - step / 100
        return Evaluation({"train/replay_acceptance_length": value, "train/validation_loss": loss}, value, loss)


def training(
    data: Shards,
    checkpoints: Checkpoints | None = None,
    evaluate: FallingLoss | None = None,
    **fields: Any,
) -> Training:
    defaults: dict[str, Any] = {
        "epochs": 3, "batch_tokens": 64, "anchors": 4, "block_size": BLOCK, "learning_rate": 1e-3,
        "checkpoint_steps": 2, "evaluate_steps": 3, "loss_decay": 4.0,
    }  # fmt: skip
    evaluate = evaluate or FallingLoss()
    logged: list[tuple[int, dict[str, float]]] = []
    made = Training(
        spec=RunSpec(**{**defaults, **fields}),
        drafter=DFlashDrafter(CONFIG).initialize(0),
        objective=Objective(embedding(), head(), 4.0),
        shards=data.index,
        read=data,
        evaluate=evaluate,
        log_metrics=lambda metrics, step: logged.append((step, metrics)),
        checkpoints=checkpoints,
    )
    evaluate.training = made
    return made


def published(folder: Path, config: dict[str, Any]) -> Path:
    """A folder with a published config.json."""
    import json

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"
