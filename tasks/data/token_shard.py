"""Token shards: samples (token ids, loss mask, who and what they are) in one safetensors file.

Tensors: `input_ids` [T] int32, `loss_mask` [T] uint8, `offsets` [n+1] int64, `sample_id` [n, 16] uint8,
`conversation_id` [n, 16] uint8, `slice_id` [n] int32, `origin` [n] uint8 (0 data, 1 greedy). T counts the tokens of
all samples; sample i has the tokens offsets[i] up to offsets[i+1]. The last token of each sample is supervised.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
from safetensors import SafetensorError, safe_open

from tasks.contract.errors import IntegrityError

ORIGINS = ("data", "greedy")
ID_BYTES = 16
FORMAT = "drafter-tokens"
_TENSORS: dict[str, tuple[str, np.dtype[Any], tuple[int, ...]]] = {
    "offsets": ("I64", np.dtype("<i8"), ()),
    "input_ids": ("I32", np.dtype("<i4"), ()),
    "slice_id": ("I32", np.dtype("<i4"), ()),
    "loss_mask": ("U8", np.dtype("u1"), ()),
    "sample_id": ("U8", np.dtype("u1"), (ID_BYTES,)),
    "conversation_id": ("U8", np.dtype("u1"), (ID_BYTES,)),
    "origin": ("U8", np.dtype("u1"), ()),
}  # name: safetensors dtype, numpy dtype, shape beyond the first axis; widest first, so that each stands aligned


@dataclass(frozen=True)
class Sample:
    """One tokenized conversation, or one turn of it with what came before."""

    input_ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # uint8 [T]
    sample_id: bytes  # 16 bytes, see `sample_digest`
    conversation_id: bytes  # 16 bytes; samples of one conversation share it
    slice_id: int  # index into the shard's `slices`
    origin: str  # "data", or "greedy": the answers are the target's own greedy ones


@dataclass
class TokenShard:
    """Samples with the names of their slices and the header."""

    samples: list[Sample]
    slices: list[str]
    header: dict[str, str] = field(default_factory=dict)


def sample_digest(input_ids: np.ndarray, loss_mask: np.ndarray) -> bytes:
    """Identity of a sample: the first 16 bytes of the SHA-256 over its ids (int32, little endian) and loss mask."""
    data = np.ascontiguousarray(input_ids, dtype="<i4").tobytes() + np.ascontiguousarray(loss_mask, "u1").tobytes()
    return hashlib.sha256(data).digest()[:ID_BYTES]


class TokenShardWriter:
    """Writes a shard sample by sample; memory does not grow with it. Use as a context manager, then `finish`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stack = ExitStack()
        self._parts: dict[str, IO[bytes]] = {}
        self.samples = self.tokens = 0

    def __enter__(self) -> Self:
        for name in _TENSORS:
            part = self._path.with_name(f"{self._path.name}.{name}")
            self._stack.callback(part.unlink, missing_ok=True)
            self._parts[name] = self._stack.enter_context(part.open("w+b"))
        self._write("offsets", 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def add(self, sample: Sample) -> None:
        """Append a sample.

        Raises:
            ValueError: if ids and mask differ in length, or the last token is not supervised.
        """
        if len(sample.input_ids) != len(sample.loss_mask):
            raise ValueError(f"{len(sample.input_ids)} token ids, {len(sample.loss_mask)} loss mask entries")
        if not len(sample.loss_mask) or not sample.loss_mask[-1]:
            raise ValueError("a sample ends with its last supervised token; this one's last token is not supervised")
        self.samples += 1
        self.tokens += len(sample.input_ids)
        self._write("input_ids", sample.input_ids)
        self._write("loss_mask", sample.loss_mask)
        self._write("offsets", self.tokens)
        self._write("sample_id", np.frombuffer(sample.sample_id, "u1", ID_BYTES))
        self._write("conversation_id", np.frombuffer(sample.conversation_id, "u1", ID_BYTES))
        self._write("slice_id", sample.slice_id)
        self._write("origin", ORIGINS.index(sample.origin))

    def finish(self, slices: list[str], header: dict[str, str] | None = None) -> None:
        """Put the file together. The same samples give the same bytes."""
        described: dict[str, Any] = {"__metadata__": _metadata(slices, header or {})}
        position = 0
        for name, (dtype, _, tail) in _TENSORS.items():
            self._parts[name].flush()
            size = self._parts[name].tell()
            rows = self.tokens if name in ("input_ids", "loss_mask") else self.samples + (name == "offsets")
            described[name] = {"dtype": dtype, "shape": [rows, *tail], "data_offsets": [position, position + size]}
            position += size
        text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        with self._path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in _TENSORS:
                self._parts[name].seek(0)
                shutil.copyfileobj(self._parts[name], file, 1 << 20)

    def _write(self, name: str, value: Any) -> None:
        self._parts[name].write(np.ascontiguousarray(value, dtype=_TENSORS[name][1]).tobytes())


class TokenShardFile:
    """Lazy reader: what describes the samples is in memory, their tokens are read when asked for.

    Raises:
        IntegrityError: naming the file and what is wrong with it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = safe_open(str(path), framework="numpy")
        except (SafetensorError, OSError) as error:
            raise self._error(f"not a readable safetensors file ({error})") from error
        metadata = self._file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise self._error(f"header has format {metadata.get('format')!r}, expected {FORMAT!r}")
        self.slices: list[str] = json.loads(metadata["slices"])
        self.header = {name: value for name, value in metadata.items() if name not in ("format", "slices")}
        self._check_shapes()
        self.offsets: np.ndarray = self._file.get_tensor("offsets")
        self._sample_id = self._file.get_tensor("sample_id")
        self._conversation_id = self._file.get_tensor("conversation_id")
        self._slice_id = self._file.get_tensor("slice_id")
        self._origin = self._file.get_tensor("origin")
        self._check_values()
        self._ids, self._mask = self._file.get_slice("input_ids"), self._file.get_slice("loss_mask")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in {self._path.name}")
        start, end = int(self.offsets[index]), int(self.offsets[index + 1])
        sample = Sample(
            input_ids=self._ids[start:end],
            loss_mask=self._mask[start:end],
            sample_id=self._sample_id[index].tobytes(),
            conversation_id=self._conversation_id[index].tobytes(),
            slice_id=int(self._slice_id[index]),
            origin=ORIGINS[int(self._origin[index])],
        )
        if sample_digest(sample.input_ids, sample.loss_mask) != sample.sample_id:
            raise self._error(f"sample {index}: its token ids and loss mask do not give its sample id")
        if sample.loss_mask.max() > 1 or not sample.loss_mask[-1]:
            raise self._error(f"sample {index}: loss mask is not of 0 and 1 with a 1 at the end")
        return sample

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    def _check_shapes(self) -> None:
        names = set(self._file.keys())
        if names != set(_TENSORS):
            raise self._error(f"tensors {sorted(names)}, expected {sorted(_TENSORS)}")
        shapes = {name: tuple(self._file.get_slice(name).get_shape()) for name in _TENSORS}
        samples, tokens = shapes["offsets"][0] - 1, shapes["input_ids"][0]
        for name, (dtype, _, tail) in _TENSORS.items():
            rows = tokens if name in ("input_ids", "loss_mask") else samples + (name == "offsets")
            found = self._file.get_slice(name).get_dtype()
            if shapes[name] != (rows, *tail) or found != dtype:
                raise self._error(f"{name} is {found} {list(shapes[name])}, expected {dtype} {[rows, *tail]}")

    def _check_values(self) -> None:
        tokens = self._file.get_slice("input_ids").get_shape()[0]
        if self.offsets[0] != 0 or self.offsets[-1] != tokens or (np.diff(self.offsets) < 1).any():
            raise self._error(f"offsets do not rise from 0 to the {tokens} tokens")
        if len(self) and not (self._slice_id.min() >= 0 and self._slice_id.max() < len(self.slices)):
            raise self._error(f"slice ids beyond the {len(self.slices)} slices {self.slices}")
        if len(self) and self._origin.max() >= len(ORIGINS):
            raise self._error(f"origin {self._origin.max()}, expected 0 ({ORIGINS[0]}) or 1 ({ORIGINS[1]})")

    def _error(self, found: str) -> IntegrityError:
        return IntegrityError(f"token shard {self._path}: {found}; make it again from its source")


def write_token_shard(path: Path, shard: TokenShard) -> None:
    """Write a shard to a local file."""
    with TokenShardWriter(path) as writer:
        for sample in shard.samples:
            writer.add(sample)
        writer.finish(shard.slices, shard.header)


def read_token_shard(path: Path) -> TokenShard:
    """Read a whole shard and check it.

    Raises:
        IntegrityError: naming the file, the sample and what is wrong.
    """
    file = TokenShardFile(path)
    return TokenShard(list(file), file.slices, file.header)


def _metadata(slices: list[str], header: dict[str, str]) -> dict[str, str]:
    return {**header, "format": FORMAT, "slices": json.dumps(slices, ensure_ascii=False)}
