"""The two tensors of the target that a drafter needs: embedding and head, without the layers between them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from tasks.contract.errors import ConfigurationError, Problem

_EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "gpt_neox.embed_in.weight",
    "backbone.embeddings.weight",
    "model.embeddings.weight",
)
_HEADS = ("lm_head.weight", "embed_out.weight", "language_model.lm_head.weight")


def read_target_ends(folder: Path, tied: bool, model_type: str, hidden_size: int) -> tuple[Tensor, Tensor]:
    """Embedding and head of a checkpoint folder.

    Args:
        folder: with `*.safetensors` and, if there are several, `model.safetensors.index.json`.
        tied: the head is the embedding.
        model_type: of the text configuration; Gemma scales its embedding.
        hidden_size: for that scale.

    Returns:
        Two [V, H] tensors on the CPU, in the checkpoint's dtype; the embedding as blocks are fed (scaled for Gemma).

    Raises:
        ConfigurationError: field `target`, naming the tensors looked for.
    """
    files = _tensor_files(folder)
    embedding = _read(files, _EMBEDDINGS, "input embedding")
    head = embedding if tied else _read(files, _HEADS, "output head")
    if model_type.startswith("gemma"):
        # Gemma multiplies the embedding by the root of the hidden size, rounded to the weight's dtype.
        embedding = embedding * torch.tensor(hidden_size**0.5, dtype=embedding.dtype)
    return embedding, head


def _tensor_files(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            found.update({name: path for name in file.keys()})  # noqa: SIM118 (not a dict)
    return found


def _read(files: dict[str, Path], names: tuple[str, ...], what: str) -> Tensor:
    for name in names:
        if name in files:
            with safe_open(str(files[name]), framework="pt") as file:
                return file.get_tensor(name)
    raise ConfigurationError(Problem("target", sorted(files)[:3], f"a checkpoint whose {what} is one of {names}"))
