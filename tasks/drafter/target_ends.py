"""The two tensors of the target that a drafter needs: embedding and head, without the layers between them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import cast

import torch
from safetensors import safe_open
from torch import Tensor

log = logging.getLogger("tasks")

_EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "gpt_neox.embed_in.weight",
    "backbone.embeddings.weight",
    "model.embeddings.weight",
)
_HEADS = ("lm_head.weight", "embed_out.weight", "language_model.lm_head.weight")


def read_target_ends(
    folder: Path, *, tied: bool, model_type: str, hidden_size: int, dtype: torch.dtype, trust_remote_code: bool = False
) -> tuple[Tensor, Tensor]:
    """Embedding and head of a checkpoint folder, as real decoding uses them.

    Args:
        folder: with `*.safetensors` and, if there are several, `model.safetensors.index.json`.
        tied: the head is the embedding.
        model_type: of the text configuration; Gemma scales its embedding.
        hidden_size: for that scale.
        dtype: of the result; the target's compute dtype.
        trust_remote_code: for a checkpoint whose tensors have other names: then the whole model is loaded.

    Returns:
        Two [V, H] tensors on the CPU, the very same one if tied and not scaled; the embedding as blocks are fed.

    Raises:
        ConfigurationError: field `target`, if it cannot be loaded.
    """
    files = _tensor_files(folder)
    names = next((n for n in _EMBEDDINGS if n in files), None), next((n for n in _HEADS if n in files), None)
    if names[0] is None or (names[1] is None and not tied):
        return _from_model(folder, dtype, trust_remote_code)
    embedding = _read(files, names[0]).to(dtype)
    head = embedding if tied or names[1] is None else _read(files, names[1]).to(dtype)
    if model_type.startswith("gemma"):
        # As Gemma's embedding module does: times the root of the hidden size, rounded to the compute dtype.
        embedding = embedding * torch.tensor(hidden_size**0.5, dtype=dtype)
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


def _read(files: dict[str, Path], name: str) -> Tensor:
    with safe_open(str(files[name]), framework="pt") as file:
        return cast(Tensor, file.get_tensor(name))


def _from_model(folder: Path, dtype: torch.dtype, trust_remote_code: bool) -> tuple[Tensor, Tensor]:
    from tasks.decoding.proposers import embedding_weight, head_weight
    from tasks.target.loading import load_target_folder

    log.info("embedding and head of %s have no usual name: loading the whole model for them", folder.name)
    target = load_target_folder(folder, "cpu", dtype, trust_remote_code=trust_remote_code)
    return embedding_weight(target).detach().clone(), head_weight(target).detach().clone()
