"""Writing a hidden-state shard (format: `states_shard`): the parts are laid out in full, then filled in any order."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tasks.data.states_shard import StatesHeader
from tasks.data.token_shard import ORIGINS, Sample

PART_BYTES = 1 << 30
STORED_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_STORED = {"bfloat16": ("BF16", 2), "float32": ("F32", 4)}
_WIDTH = {"I64": 8, "I32": 4, "F32": 4, "BF16": 2, "U8": 1}
_NUMPY = {"I64": np.int64, "I32": np.int32, "F32": np.int32, "BF16": np.int16, "U8": np.uint8}
_BITS = {2: torch.int16, 4: torch.int32}


class StatesShardWriter:
    """Writes one shard's parts into a folder. Sizes are known beforehand, so samples may come in any order and only
    one sample's states need to be in memory.

    Args:
        folder: where the parts go.
        samples: all samples of the shard, in its order.
        header: `part` and `parts` are set here.
        hidden_size: H.
        dtype: "bfloat16" or "float32".
        part_bytes: a part holds whole samples up to this size, at least one.
    """

    def __init__(
        self,
        folder: Path,
        samples: Sequence[Sample],
        header: StatesHeader,
        hidden_size: int,
        dtype: str,
        part_bytes: int = PART_BYTES,
    ) -> None:
        stored, width = _STORED[dtype]
        self._layers = len(header.layer_ids)
        self._last = header.last_hidden != "none"
        row = (self._layers + self._last) * hidden_size * width
        lengths = [len(s.input_ids) for s in samples]
        bounds = part_bounds([n * row for n in lengths], part_bytes)
        self._parts: list[_Part] = []
        self._place: list[tuple[_Part, int]] = []
        for index, (start, end) in enumerate(bounds):
            own = StatesHeader(**{**header.__dict__, "part": index, "parts": len(bounds)})
            path = folder / part_name(index)
            part = _Part(path, samples[start:end], own, self._layers, hidden_size, stored, self._last)
            self._parts.append(part)
            self._place.extend((part, i) for i in range(end - start))
        self._missing = set(range(len(samples)))

    def put(self, index: int, hidden_states: Tensor, last_hidden: Tensor | None, layer_digest: Tensor) -> None:
        """Store one sample.

        Args:
            index: position in the shard.
            hidden_states: [T, K, H] on the CPU, stored dtype.
            last_hidden: [T, H] likewise, or None if the shard has none.
            layer_digest: [K (+1)] int64 on the CPU.
        """
        part, position = self._place[index]
        if (last_hidden is not None) != self._last:
            raise ValueError(f"sample {index}: last_hidden does not fit the header")
        part.put(position, hidden_states, last_hidden, layer_digest)
        self._missing.discard(index)

    def close(self) -> list[Path]:
        """Finish the files.

        Raises:
            RuntimeError: if a sample was never put.
        """
        if self._missing:
            raise RuntimeError(f"{len(self._missing)} samples were never written, the first is {min(self._missing)}")
        for part in self._parts:
            part.close()
        return [part.path for part in self._parts]


def part_name(index: int) -> str:
    """Object name of a part."""
    return f"states-{index:05d}.safetensors"


def part_bounds(sizes: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Cut samples of these sizes, in order, into parts of at most `limit` bytes, each with at least one sample.

    An empty shard has one empty part.
    """
    bounds, start, total = [], 0, 0
    for index, size in enumerate(sizes):
        if index > start and total + size > limit:
            bounds.append((start, index))
            start, total = index, 0
        total += size
    bounds.append((start, len(sizes)))
    return bounds


class _Part:
    """One file, laid out in full at creation, filled through a memory map."""

    def __init__(
        self,
        path: Path,
        samples: Sequence[Sample],
        header: StatesHeader,
        layers: int,
        hidden: int,
        stored: str,
        last: bool,
    ) -> None:
        self.path = path
        self._offsets = np.cumsum([0, *(len(s.input_ids) for s in samples)], dtype=np.int64)
        rows, count = int(self._offsets[-1]), len(samples)
        # Widest alignment first, so that every tensor starts at a multiple of its element size.
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {
            "offsets": ("I64", (count + 1,)),
            "layer_digest": ("I64", (count, layers + last)),
            "input_ids": ("I32", (rows,)),
            "slice_id": ("I32", (count,)),
            "hidden_states": (stored, (rows, layers, hidden)),
            **({"last_hidden": (stored, (rows, hidden))} if last else {}),
            "loss_mask": ("U8", (rows,)),
            "sample_id": ("U8", (count, 16)),
            "conversation_id": ("U8", (count, 16)),
            "origin": ("U8", (count,)),
        }
        entries: dict[str, Any] = {"__metadata__": header.to_metadata()}
        position = 0
        for name, (kind, shape) in shapes.items():
            size = math.prod(shape) * _WIDTH[kind]
            entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [position, position + size]}
            position += size
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + position)
        # An empty shard has offsets and nothing else; a memory map of it is still eight bytes long.
        self._map = np.memmap(path, dtype=np.uint8, mode="r+", offset=8 + len(text), shape=(position,))
        self._views = {
            name: self._map[entries[name]["data_offsets"][0] : entries[name]["data_offsets"][1]]
            .view(_NUMPY[kind])
            .reshape(shape)
            for name, (kind, shape) in shapes.items()
        }
        self._tokens(samples)

    def _tokens(self, samples: Sequence[Sample]) -> None:
        self._views["offsets"][:] = self._offsets
        for index, sample in enumerate(samples):
            start, end = self._offsets[index], self._offsets[index + 1]
            self._views["input_ids"][start:end] = sample.input_ids
            self._views["loss_mask"][start:end] = sample.loss_mask
            self._views["slice_id"][index] = sample.slice_id
            self._views["sample_id"][index] = np.frombuffer(sample.sample_id, dtype=np.uint8)
            self._views["conversation_id"][index] = np.frombuffer(sample.conversation_id, dtype=np.uint8)
            self._views["origin"][index] = ORIGINS.index(sample.origin)

    def put(self, index: int, hidden: Tensor, last: Tensor | None, digest: Tensor) -> None:
        start, end = int(self._offsets[index]), int(self._offsets[index + 1])
        values = {"hidden_states": hidden} if last is None else {"hidden_states": hidden, "last_hidden": last}
        for name, value in values.items():
            view = self._views[name][start:end]
            if tuple(value.shape) != view.shape or value.element_size() != view.itemsize:
                raise ValueError(
                    f"{self.path.name}, sample {index}: {name} is {tuple(value.shape)} {value.dtype}, "
                    f"expected {view.shape} of {view.itemsize} bytes a value"
                )
            # numpy has no bfloat16: bits are copied, as integers of the same width.
            view[...] = value.contiguous().view(_BITS[value.element_size()]).numpy()
        self._views["layer_digest"][index] = digest.numpy()

    def close(self) -> None:
        self._map.flush()
        self._views.clear()
        del self._map
