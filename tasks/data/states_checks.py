"""Checks of stored states that need no model: structure against the token shard, values, repetition, digests.

Each check returns faults instead of raising, so that one pass names everything that is wrong.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tasks.data.faults import Fault
from tasks.data.state_digest import row_digests, sample_digests
from tasks.data.states_shard import StatesSample, StatesShard
from tasks.data.token_shard import Sample, TokenShard

_ENVELOPE_SAMPLES = 8  # fewer tell nothing
_ENVELOPE_FACTOR = 4.0
_ENVELOPE_DEVIATIONS = 12.0


def compare_samples(key: str, shard: StatesShard, tokens: TokenShard) -> list[Fault]:
    """Sample ids, token ids, masks and lengths against the token shard; only exact equality passes."""
    faults: list[Fault] = []
    if len(shard) != len(tokens.samples):
        detail = f"{len(shard)} samples, the token shard has {len(tokens.samples)}"
        faults.append(Fault(key, "samples", detail))
    if list(shard.header.slices) != tokens.slices:
        faults.append(Fault(key, "header", f"slices {list(shard.header.slices)}, expected {tokens.slices}"))
    for index, expected in enumerate(tokens.samples[: len(shard)]):
        faults.extend(_compare_sample(key, index, shard.sample(index), expected))
    return faults


def _compare_sample(key: str, index: int, found: Sample, expected: Sample) -> Iterator[Fault]:
    name = expected.sample_id.hex()
    if found.sample_id != expected.sample_id:
        yield Fault(key, "sample_id", f"position {index} holds sample {found.sample_id.hex()}", name)
    if len(found.input_ids) != len(expected.input_ids):
        yield Fault(key, "rows", f"{len(expected.input_ids)} token ids, {len(found.input_ids)} rows", name)
        return
    for what, one, other in (
        ("token_ids", found.input_ids, expected.input_ids),
        ("loss_mask", found.loss_mask, expected.loss_mask),
    ):
        if not np.array_equal(one, other):
            where = int(np.flatnonzero(one != other)[0])
            yield Fault(key, what, f"row {where} is {one[where]}, expected {other[where]}", name)
    for what in ("conversation_id", "slice_id", "origin"):
        if getattr(found, what) != getattr(expected, what):
            yield Fault(key, what, f"found {getattr(found, what)!r}, expected {getattr(expected, what)!r}", name)


@dataclass
class ValueChecks:
    """Reads the values of the samples given to it, one after the other, and remembers what later checks need.

    Args:
        layers: names of the columns: layer ids, and "last_hidden" where there is one.
    """

    layers: list[int | str]
    faults: list[Fault] = field(default_factory=list)
    samples: int = 0
    # (shard, sample, median row RMS by layer), for the envelope
    scales: list[tuple[str, str, list[float]]] = field(default_factory=list)
    _seen: dict[bytes, tuple[str, str, bytes]] = field(default_factory=dict)

    def read(self, key: str, found: StatesSample) -> np.ndarray:
        """Check one sample's values.

        Returns:
            Joint digests of its rows over all layers, [T] int64.
        """
        name = found.sample.sample_id.hex()
        states = found.hidden_states
        if found.last_hidden is not None:
            states = torch.cat([states, found.last_hidden[:, None]], dim=1)
        scale = self._values(key, name, states)
        self.scales.append((key, name, scale))
        rows = row_digests(states)
        digests = sample_digests(rows[None])[0]
        for column in torch.nonzero(digests != found.layer_digest).flatten().tolist():
            detail = "the values are not those that left the device (digest differs)"
            self.faults.append(Fault(key, "digest", detail, name, self.layers[column]))
        self._whole_sample(key, name, found.sample, digests)
        self.samples += 1
        return sample_digests(rows.T[None].contiguous())[0].numpy()

    def _values(self, key: str, name: str, states: Tensor) -> list[float]:
        values = states.float()
        mean_square = values.square().mean(-1)  # [T, K]
        spread = values.amax(-1) - values.amin(-1)
        if not bool(torch.isfinite(mean_square).all()):
            self._not_finite(key, name, values)
        # A row is counted once: zero, else constant.
        zero = (values.amax(-1) == 0) & (spread == 0)
        for kind, wrong in (("zero", zero), ("constant", (spread == 0) & ~zero)):
            for column, count in enumerate(wrong.sum(0).tolist()):
                if count:
                    first = int(torch.nonzero(wrong[:, column])[0])
                    detail = f"{count} of {len(states)} rows, the first is row {first}"
                    self.faults.append(Fault(key, kind, detail, name, self.layers[column]))
        return [float(v) for v in mean_square.sqrt().median(0).values]

    def _not_finite(self, key: str, name: str, values: Tensor) -> None:
        nan, infinite = values.isnan(), values.isinf()
        for column, layer in enumerate(self.layers):
            counts = int(nan[:, column].sum()), int(infinite[:, column].sum())
            if any(counts):
                first = int(torch.nonzero((nan | infinite)[:, column].any(-1))[0])
                detail = f"{counts[0]} NaN and {counts[1]} infinite values, the first in row {first}"
                self.faults.append(Fault(key, "not_finite", detail, name, layer))

    def _whole_sample(self, key: str, name: str, sample: Sample, digests: Tensor) -> None:
        tokens = sample.input_ids.tobytes()
        for column, digest in enumerate(digests.tolist()):
            mark = f"{column}:{digest}".encode()
            other = self._seen.setdefault(mark, (key, name, tokens))
            if other[2] != tokens:
                detail = f"the states of sample {other[1]} of shard {other[0]}, whose token ids differ"
                self.faults.append(Fault(key, "duplicate_sample", detail, name, self.layers[column]))

    def envelope(self) -> list[Fault]:
        """Samples whose typical row norm in a layer is far from the run's own.

        Typical: the median over rows, which the first token's huge norm does not move. Far: by a factor of 4 and by
        12 median absolute deviations of the logarithm.
        """
        if len(self.scales) < _ENVELOPE_SAMPLES:
            return []
        faults = []
        for column, layer in enumerate(self.layers):
            logs = np.array([math.log(max(s[2][column], 1e-30)) for s in self.scales])
            finite = np.isfinite(logs)
            middle = float(np.median(logs[finite])) if finite.any() else 0.0
            deviation = float(np.median(np.abs(logs[finite] - middle))) if finite.any() else 0.0
            limit = max(math.log(_ENVELOPE_FACTOR), _ENVELOPE_DEVIATIONS * deviation)
            for place in np.flatnonzero(finite & (np.abs(logs - middle) > limit)):
                key, name, scale = self.scales[place]
                detail = f"median row RMS {scale[column]:.4g}, the run's is {math.exp(middle):.4g}"
                faults.append(Fault(key, "outlier", detail, name, layer))
        return faults

    def statistics(self) -> dict[str, dict[str, float]]:
        """Of each layer: smallest, median and largest of the samples' median row RMS."""
        found = {}
        for column, layer in enumerate(self.layers):
            values = np.array([s[2][column] for s in self.scales])
            found[str(layer)] = {
                "rms_min": float(values.min()),
                "rms_median": float(np.median(values)),
                "rms_max": float(values.max()),
            }
        return found if self.scales else {}


def repeated_rows(
    key: str, names: Sequence[str], joint: Sequence[np.ndarray], tokens: Sequence[np.ndarray]
) -> list[Fault]:
    """Rows of a shard that are equal in all layers although they stand at different tokens.

    Equal states at equal tokens with different prefixes can be right: convolution and sliding-window layers see a few
    tokens only, and a run of one token gives attention nothing to tell its positions apart.

    Args:
        key: of the states.
        names: sample ids.
        joint: digests of the rows over all layers, [T] int64 by sample.
        tokens: token ids of the rows, [T] int32 by sample.
    """
    if not names:
        return []
    rows, context = np.concatenate(joint), np.concatenate(tokens)
    sample = np.repeat(np.arange(len(names)), [len(j) for j in joint])
    position = np.concatenate([np.arange(len(j)) for j in joint])
    order = np.argsort(rows, kind="stable")
    same = np.flatnonzero((rows[order][1:] == rows[order][:-1]) & (context[order][1:] != context[order][:-1]))
    found: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for first, second in zip(order[same], order[same + 1], strict=True):
        found[(int(sample[first]), int(sample[second]))].append((int(position[first]), int(position[second])))
    return [
        Fault(
            key,
            "duplicate_rows",
            f"{len(pairs)} rows equal rows of sample {names[one]} in all layers although their tokens differ, "
            f"the first is row {pairs[0][1]} = row {pairs[0][0]}",
            names[other],
        )
        for (one, other), pairs in found.items()
    ]
