"""Hidden-state shard: safetensors parts of whole samples, written in any order of samples, read one by one.

Tensors of a part (n samples, T tokens, K layers, hidden size H):

    offsets          [n+1] int64        rows of sample i are offsets[i] .. offsets[i+1]
    layer_digest     [n, K (+1)] int64  of `tasks.data.state_digest`, as computed before the copy from the device; the
                                        last column is the last hidden state's, where it is stored
    input_ids        [T] int32          as in the token shard, like loss_mask [T] uint8, sample_id [n, 16] uint8,
                                        conversation_id [n, 16] uint8, slice_id [n] int32, origin [n] uint8
    hidden_states    [T, K, H]          bfloat16 or float32
    last_hidden      [T, H]             same dtype; only where the header says so

The header (safetensors metadata) states what the numbers are: `layer_convention`, `layer_ids`, `last_hidden`, `target`
(identity), `tokens` (key of the token shard), `slices`, `part`, `parts`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tasks.contract.errors import IntegrityError
from tasks.contract.layers import LAYER_CONVENTION
from tasks.data.token_shard import ORIGINS, Sample

PART_BYTES = 1 << 30
LAST_HIDDEN = ("none", "pre_norm", "post_norm")

_DTYPES = {"bfloat16": (torch.bfloat16, "BF16", 2), "float32": (torch.float32, "F32", 4)}
_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


@dataclass(frozen=True)
class StatesHeader:
    """What a shard says of itself."""

    layer_ids: tuple[int, ...]
    last_hidden: str  # none | pre_norm | post_norm
    target: str  # identity of the target
    tokens: str  # key of the token shard
    slices: tuple[str, ...]
    part: int = 0
    parts: int = 1

    def to_metadata(self) -> dict[str, str]:
        """As safetensors metadata."""
        return {
            "layer_convention": LAYER_CONVENTION,
            "layer_ids": json.dumps(list(self.layer_ids)),
            "last_hidden": self.last_hidden,
            "target": self.target,
            "tokens": self.tokens,
            "slices": json.dumps(list(self.slices)),
            "part": str(self.part),
            "parts": str(self.parts),
        }

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str] | None, where: str) -> Self:
        """Read and check.

        Raises:
            IntegrityError: naming the file and the field.
        """
        metadata = metadata or {}
        if (convention := metadata.get("layer_convention")) != LAYER_CONVENTION:
            raise IntegrityError(
                f"{where}: header layer_convention: found {convention!r}, expected {LAYER_CONVENTION!r}"
            )
        try:
            ids = [int(i) for i in json.loads(metadata["layer_ids"])]
            header = cls(
                layer_ids=tuple(ids),
                last_hidden=metadata["last_hidden"],
                target=metadata["target"],
                tokens=metadata["tokens"],
                slices=tuple(json.loads(metadata["slices"])),
                part=int(metadata["part"]),
                parts=int(metadata["parts"]),
            )
        except (KeyError, ValueError, TypeError) as error:
            raise IntegrityError(f"{where}: header: {type(error).__name__} {error}; found {dict(metadata)}") from error
        if not ids or ids != sorted(set(ids)) or ids[0] < 0:
            raise IntegrityError(f"{where}: header layer_ids: found {ids}, expected distinct ascending ids from 0")
        if header.last_hidden not in LAST_HIDDEN:
            raise IntegrityError(
                f"{where}: header last_hidden: found {header.last_hidden!r}, expected one of {LAST_HIDDEN}"
            )
        if not 0 <= header.part < header.parts:
            raise IntegrityError(f"{where}: header part: found {header.part} of {header.parts}")
        return header


@dataclass(frozen=True)
class StatesSample:
    """One sample with its states."""

    sample: Sample
    hidden_states: Tensor  # [T, K, H], stored dtype
    last_hidden: Tensor | None  # [T, H], stored dtype
    layer_digest: Tensor  # [K (+1)] int64


# ---- writing --------------------------------------------------------------------------------------------------------


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
        self._dtype, stored, width = _DTYPES[dtype]
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


_WIDTH = {"I64": 8, "I32": 4, "F32": 4, "BF16": 2, "U8": 1}
_NUMPY = {"I64": np.int64, "I32": np.int32, "F32": np.int32, "BF16": np.int16, "U8": np.uint8}
_BITS = {2: torch.int16, 4: torch.int32}


# ---- reading --------------------------------------------------------------------------------------------------------


class StatesPart:
    """One part, opened and its structure checked; states are read sample by sample.

    Raises:
        IntegrityError: naming the file, what was found and what was expected.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = safe_open(str(path), framework="pt")
        except (SafetensorError, OSError) as error:
            raise IntegrityError(f"{path.name}: not a readable safetensors file ({error})") from error
        self.header = StatesHeader.from_metadata(self._file.metadata(), path.name)
        names = set(self._file.keys())
        columns = len(self.header.layer_ids) + (self.header.last_hidden != "none")
        self._shapes = {name: tuple(self._file.get_slice(name).get_shape()) for name in names}
        self._require_tensors(names)
        self.offsets = self._file.get_tensor("offsets").tolist()
        self._require_offsets()
        self.hidden_size = int(self._shapes["hidden_states"][2])
        self.dtype = _DTYPE_OF.get(self._file.get_slice("hidden_states").get_dtype(), "")
        if not self.dtype:
            found = self._file.get_slice("hidden_states").get_dtype()
            raise IntegrityError(f"{path.name}: hidden_states has dtype {found}, expected BF16 or F32")
        if self._shapes["layer_digest"] != (len(self), columns):
            raise IntegrityError(
                f"{path.name}: layer_digest is {self._shapes['layer_digest']}, expected {(len(self), columns)}"
            )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def _small(self) -> dict[str, np.ndarray]:
        names = ("input_ids", "loss_mask", "sample_id", "conversation_id", "slice_id", "origin", "layer_digest")
        return {name: self._file.get_tensor(name).numpy() for name in names}

    def sample(self, index: int) -> Sample:
        """Tokens of one sample."""
        start, end = self.offsets[index], self.offsets[index + 1]
        small = self._small
        return Sample(
            input_ids=small["input_ids"][start:end],
            loss_mask=small["loss_mask"][start:end],
            sample_id=small["sample_id"][index].tobytes(),
            conversation_id=small["conversation_id"][index].tobytes(),
            slice_id=int(small["slice_id"][index]),
            origin=ORIGINS[int(small["origin"][index])],
        )

    def __getitem__(self, index: int) -> StatesSample:
        start, end = self.offsets[index], self.offsets[index + 1]
        has_last = self.header.last_hidden != "none"
        return StatesSample(
            sample=self.sample(index),
            hidden_states=self._file.get_slice("hidden_states")[start:end],
            last_hidden=self._file.get_slice("last_hidden")[start:end] if has_last else None,
            layer_digest=torch.from_numpy(self._small["layer_digest"][index].copy()),
        )

    def _require_tensors(self, names: set[str]) -> None:
        expected = {"offsets", "layer_digest", "input_ids", "loss_mask", "sample_id", "conversation_id", "slice_id"}
        expected |= {"origin", "hidden_states"} | ({"last_hidden"} if self.header.last_hidden != "none" else set())
        if names != expected:
            raise IntegrityError(
                f"{self.path.name}: missing tensors {sorted(expected - names)}, unknown {sorted(names - expected)}"
            )
        shape = self._shapes["hidden_states"]
        if len(shape) != 3 or shape[1] != len(self.header.layer_ids):
            raise IntegrityError(
                f"{self.path.name}: hidden_states is {shape}, expected [T, {len(self.header.layer_ids)}, H]"
            )

    def _require_offsets(self) -> None:
        offsets, rows = self.offsets, self._shapes["hidden_states"][0]
        if not offsets or offsets[0] != 0 or any(b <= a for a, b in pairwise(offsets)):
            raise IntegrityError(f"{self.path.name}: offsets do not ascend from 0: {offsets[:8]}")
        count, tokens = len(offsets) - 1, offsets[-1]
        wanted = {
            "input_ids": (tokens,),
            "loss_mask": (tokens,),
            "sample_id": (count, 16),
            "conversation_id": (count, 16),
            "slice_id": (count,),
            "origin": (count,),
        }
        if self.header.last_hidden != "none":
            wanted["last_hidden"] = (tokens, self._shapes["hidden_states"][2])
        if rows != tokens:
            raise IntegrityError(f"{self.path.name}: hidden_states has {rows} rows for {tokens} token ids")
        for name, shape in wanted.items():
            if self._shapes[name] != shape:
                raise IntegrityError(f"{self.path.name}: {name} is {self._shapes[name]}, expected {shape}")


_DTYPE_OF = {"BF16": "bfloat16", "F32": "float32"}


class StatesShard:
    """Random access to a shard's samples, over all its parts in order.

    Args:
        paths: local files of all parts.

    Raises:
        IntegrityError: if a part is damaged, missing, or of another shard.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.parts = [StatesPart(path) for path in paths]
        if not self.parts:
            raise IntegrityError("a states shard without parts")
        self.header = self.parts[0].header
        for index, part in enumerate(self.parts):
            expected = StatesHeader(**{**self.header.__dict__, "part": index, "parts": len(self.parts)})
            if part.header != expected:
                raise IntegrityError(f"{part.path.name}: header {part.header}, expected {expected}")
        self.hidden_size, self.dtype = self.parts[0].hidden_size, self.parts[0].dtype
        self._place = [(part, i) for part in self.parts for i in range(len(part))]

    def __len__(self) -> int:
        return len(self._place)

    @property
    def sample_lengths(self) -> list[int]:
        """Tokens of each sample."""
        return [b - a for part in self.parts for a, b in pairwise(part.offsets)]

    def sample(self, index: int) -> Sample:
        """Tokens of one sample, without reading its states."""
        part, position = self._place[index]
        return part.sample(position)

    def __getitem__(self, index: int) -> StatesSample:
        part, position = self._place[index]
        return part[position]

    def __iter__(self) -> Iterator[StatesSample]:
        return (self[index] for index in range(len(self)))


def iterate_states(paths: Sequence[Path]) -> Iterator[StatesSample]:
    """All samples of a shard in its order, one in memory at a time.

    Raises:
        IntegrityError: as `StatesShard`.
    """
    yield from StatesShard(paths)
