"""A drafter on disk: `config.json` and `model.safetensors`, in the published layout, loaded strictly."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tasks.contract.errors import IntegrityError
from tasks.drafter.config import read_config
from tasks.drafter.model import DFlashDrafter


def save_drafter(drafter: DFlashDrafter, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write `config.json` and `model.safetensors`.

    Args:
        drafter: the drafter.
        folder: created if missing.
        dtype: of the stored weights; by default as they are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in drafter.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = drafter.config.to_json()
    config["dtype"] = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_drafter(folder: Path) -> DFlashDrafter:
    """Read a drafter's folder: every tensor of the model, none besides, each of its shape. On the CPU, as stored.

    Raises:
        ConfigurationError: if `config.json` asks for something this drafter does not do.
        IntegrityError: naming missing, unexpected and misshapen tensors.
    """
    drafter = DFlashDrafter(read_config(folder / "config.json"))
    tensors = load_file(folder / "model.safetensors")
    expected = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    faults = [f"{name} is missing" for name in expected.keys() - found.keys()]
    faults += [f"{name} is unexpected" for name in found.keys() - expected.keys()]
    faults += [
        f"{name} has shape {found[name]}, expected {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if faults:
        raise IntegrityError(
            f"{folder / 'model.safetensors'} does not fit its config.json: {'; '.join(sorted(faults))}"
        )
    drafter = drafter.to(next(iter(tensors.values())).dtype)
    drafter.load_state_dict(tensors, strict=True)
    return drafter
