"""The file of reference sequences: prompts, the target's own greedy answers, and the states of both.

Tensors (n sequences, T tokens of all of them, K layers, hidden size H):

    offsets        [n+1] int64      rows of sequence i are offsets[i] .. offsets[i+1]
    input_ids      [T] int32        prompt and answer
    prompt_length  [n] int32
    slice_id       [n] int32        index into the header's `slices`
    ended          [n] uint8        1: the answer ends with an end token; 0: it reached the limit
    margins        [T] float32      logit margin of each answer token over the runner-up; 0 at prompt tokens
    hidden_states  [T, K, H]        bfloat16 or float32, of one plain forward over prompt and answer

The header states `layer_convention`, `layer_ids`, `target` (identity), `slices`, `prompt_ids`, `limit` (JSON where not
text). A set of sequences is one file, or several of about 1 GiB.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tasks.contract.errors import IntegrityError
from tasks.contract.layers import LAYER_CONVENTION
from tasks.decoding.replay import ReferenceSequence

NAME = "reference.safetensors"
_TENSORS = frozenset({"offsets", "input_ids", "prompt_length", "slice_id", "ended", "margins", "hidden_states"})


def part_name(index: int, parts: int) -> str:
    """Object name of a part: `reference.safetensors` if it is the only one."""
    return NAME if parts == 1 else f"reference-{index:05d}.safetensors"


def write_reference(
    path: Path, sequences: Sequence[ReferenceSequence], *, layer_ids: Sequence[int], target: str
) -> None:
    """Write one file.

    Args:
        path: the new file.
        sequences: at least one; all of one limit and one dtype of states.
        layer_ids: `layer_output` ids of the states.
        target: identity of the target.
    """
    slices = sorted({sequence.slice for sequence in sequences})
    lengths = torch.tensor([0, *(len(sequence.input_ids) for sequence in sequences)])
    tensors = {
        "offsets": lengths.cumsum(0),
        "input_ids": torch.cat([sequence.input_ids for sequence in sequences]).to(torch.int32),
        "prompt_length": torch.tensor([sequence.prompt_length for sequence in sequences], dtype=torch.int32),
        "slice_id": torch.tensor([slices.index(sequence.slice) for sequence in sequences], dtype=torch.int32),
        "ended": torch.tensor([sequence.ended for sequence in sequences], dtype=torch.uint8),
        "margins": torch.cat(
            [torch.cat([torch.zeros(sequence.prompt_length), sequence.margins]) for sequence in sequences]
        ),
        "hidden_states": torch.cat([sequence.states for sequence in sequences]),
    }
    limits = {sequence.limit for sequence in sequences}
    if len(limits) != 1:
        raise ValueError(f"sequences: found limits {sorted(limits)}; expected one")
    header = {
        "layer_convention": LAYER_CONVENTION,
        "layer_ids": json.dumps(list(layer_ids)),
        "target": target,
        "slices": json.dumps(slices),
        "prompt_ids": json.dumps([sequence.prompt_id for sequence in sequences]),
        "limit": str(limits.pop()),
    }
    save_file(tensors, path, metadata=header)


def read_reference(path: Path | Sequence[Path]) -> list[ReferenceSequence]:
    """Sequences of one file, or of several in order. States stay in the files until they are asked for.

    Raises:
        IntegrityError: naming the file, what was found and what was expected.
    """
    paths = [path] if isinstance(path, Path) else list(path)
    return [sequence for one in paths for sequence in _read_file(one)]


def _read_file(path: Path) -> list[ReferenceSequence]:
    try:
        file: Any = safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise IntegrityError(f"{path.name}: not a readable safetensors file ({error})") from error
    names, header = set(file.keys()), file.metadata() or {}
    if names != _TENSORS:
        raise IntegrityError(f"{path.name}: found tensors {sorted(names)}; expected {sorted(_TENSORS)}")
    if header.get("layer_convention") != LAYER_CONVENTION:
        raise IntegrityError(
            f"{path.name}: layer_convention: found {header.get('layer_convention')!r}; expected {LAYER_CONVENTION!r}"
        )
    small = {name: file.get_tensor(name) for name in _TENSORS - {"hidden_states"}}
    offsets = small["offsets"].tolist()
    rows = file.get_slice("hidden_states").get_shape()[0]
    if offsets[0] != 0 or offsets[-1] != rows or len(small["input_ids"]) != rows:
        raise IntegrityError(
            f"{path.name}: offsets end at {offsets[-1]}, {len(small['input_ids'])} token ids, {rows} rows of states; "
            "expected equal numbers"
        )
    slices, prompt_ids, limit = json.loads(header["slices"]), json.loads(header["prompt_ids"]), int(header["limit"])
    sequences = []
    for index, (start, end) in enumerate(pairwise(offsets)):
        prompt_length = int(small["prompt_length"][index])
        sequences.append(
            ReferenceSequence(
                input_ids=small["input_ids"][start:end].long(),
                prompt_length=prompt_length,
                load_states=partial(_states, file, start, end),
                slice=slices[int(small["slice_id"][index])],
                ended=bool(small["ended"][index]),
                prompt_id=prompt_ids[index],
                limit=limit,
                margins=small["margins"][start + prompt_length : end],
            )
        )
    return sequences


def _states(file: Any, start: int, end: int) -> Tensor:
    states: Tensor = file.get_slice("hidden_states")[start:end]
    return states
