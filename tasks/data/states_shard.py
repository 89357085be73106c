"""Hidden-state shard: the format, and reading it. Safetensors parts of whole samples (`states_writer` writes them).

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tasks.contract.errors import IntegrityError
from tasks.contract.layers import LAYER_CONVENTION
from tasks.data.token_shard import ORIGINS, Sample

LAST_HIDDEN = ("none", "pre_norm", "post_norm")

_DTYPE_OF = {"BF16": "bfloat16", "F32": "float32"}


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
