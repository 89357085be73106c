"""Steps of a training: which samples, in which order, in which rows. A function of seed and data alone.

Shards are shuffled, a window of them at a time is shuffled sample by sample, and whole samples fill steps of
`batch_tokens`. So at most a window of shards is on the local disk, and the position in the data is just the step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

import numpy as np
import torch
from torch import Tensor

from tasks.data.states_shard import StatesSample, StatesShard
from tasks.drafter.anchors import draw_anchors, legal_anchors

WINDOW = 8  # shards that are shuffled together
ROW_TOKENS = 4096  # a step is computed in rows of at most so many tokens, or one longer sample


@dataclass(frozen=True)
class ShardIndex:
    """What is known of a shard of states without its states."""

    key: str
    lengths: tuple[int, ...]  # tokens of each sample


SampleAddress = tuple[int, int]  # shard, sample


@dataclass(frozen=True)
class Row:
    """Samples side by side, ready for the drafter. S tokens, A anchors."""

    input_ids: Tensor  # [S] int64
    loss_mask: Tensor  # [S] uint8
    states: Tensor  # [1, S, K, H] stored dtype
    positions: Tensor  # [1, S] int64, restart with each sample
    documents: Tensor  # [1, S] int64
    anchors: Tensor  # [1, A] int64 indices in the row
    ends: Tensor  # [A] int64, index after each anchor's sample
    sample_ids: tuple[str, ...]

    def to(self, device: str) -> Row:
        """The same on a device."""
        return Row(
            *(getattr(self, n).to(device, non_blocking=True) for n in tuple(self.__dataclass_fields__)[:-1]),
            self.sample_ids,
        )


def epoch_order(shards: Sequence[ShardIndex], seed: int, epoch: int, window: int = WINDOW) -> list[SampleAddress]:
    """Order of all samples in one epoch."""
    generator = np.random.default_rng([seed, epoch])
    order = generator.permutation(len(shards))
    addresses: list[SampleAddress] = []
    for start in range(0, len(order), window):
        pool = [(int(s), i) for s in order[start : start + window] for i in range(len(shards[s].lengths))]
        addresses += [pool[i] for i in generator.permutation(len(pool))]
    return addresses


def epoch_steps(
    shards: Sequence[ShardIndex], seed: int, epoch: int, batch_tokens: int, window: int = WINDOW
) -> list[list[SampleAddress]]:
    """Samples of each step of an epoch: whole samples up to `batch_tokens`, at least one."""
    steps: list[list[SampleAddress]] = []
    tokens = batch_tokens + 1
    for address in epoch_order(shards, seed, epoch, window):
        length = shards[address[0]].lengths[address[1]]
        if tokens + length > batch_tokens:
            steps.append([])
            tokens = 0
        steps[-1].append(address)
        tokens += length
    return steps


def make_rows(
    samples: Sequence[StatesSample], *, anchors: int, seed: int, epoch: int, row_tokens: int = ROW_TOKENS
) -> list[Row]:
    """Rows of one step. Samples without a legal anchor are left out; there may be no row at all."""
    rows: list[list[StatesSample]] = []
    tokens = row_tokens + 1
    for sample in samples:
        if not len(legal_anchors(sample.sample.loss_mask)):
            continue
        length = len(sample.sample.input_ids)
        if tokens + length > row_tokens:
            rows.append([])
            tokens = 0
        rows[-1].append(sample)
        tokens += length
    return [_row(row, anchors, seed, epoch) for row in rows]


def _row(samples: Sequence[StatesSample], count: int, seed: int, epoch: int) -> Row:
    anchors, ends, positions, documents = [], [], [], []
    start = 0
    for number, item in enumerate(samples):
        sample = item.sample
        length = len(sample.input_ids)
        drawn = draw_anchors(sample.loss_mask, count, seed=seed, epoch=epoch, sample_id=sample.sample_id)
        anchors.append(torch.from_numpy(drawn).long() + start)
        ends.append(torch.full((len(drawn),), start + length))
        positions.append(torch.arange(length))
        documents.append(torch.full((length,), number))
        start += length
    return Row(
        input_ids=torch.cat([torch.from_numpy(np.asarray(s.sample.input_ids, dtype=np.int64)) for s in samples]),
        loss_mask=torch.cat([torch.from_numpy(np.array(s.sample.loss_mask, dtype=np.uint8)) for s in samples]),
        states=torch.cat([s.hidden_states for s in samples])[None],
        positions=torch.cat(positions)[None],
        documents=torch.cat(documents)[None],
        anchors=torch.cat(anchors)[None],
        ends=torch.cat(ends),
        sample_ids=tuple(s.sample.sample_id.hex() for s in samples),
    )


class StatesSource:
    """Samples of verified shards, fetched when they are needed; at most two windows of shards stay on the disk."""

    def __init__(self, fetch: Callable[[int], list[Path]], keep: int = 2 * WINDOW) -> None:
        """`fetch`: local, verified files of a shard by its number."""
        self._fetch, self._keep = fetch, keep
        self._open: dict[int, tuple[StatesShard, list[Path]]] = {}

    def __call__(self, address: SampleAddress) -> StatesSample:
        """One sample with its states."""
        shard, index = address
        if shard not in self._open:
            paths = self._fetch(shard)
            self._open[shard] = (StatesShard(paths), paths)
            self._evict()
        self._open[shard] = self._open.pop(shard)  # most recently used stands last
        return self._open[shard][0][index]

    def _evict(self) -> None:
        while len(self._open) > self._keep:
            _, paths = self._open.pop(next(iter(self._open)))
            for path in paths:
                path.unlink(missing_ok=True)


def prefetch(steps: Iterator[list[Row]], depth: int = 2) -> Iterator[list[Row]]:
    """The same steps, made by a thread that is `depth` ahead. An error in the thread is raised here."""
    queue: Queue[list[Row] | BaseException | None] = Queue(depth)
    stop = threading.Event()

    def fill() -> None:
        try:
            for rows in steps:
                if stop.is_set():
                    return
                queue.put(rows)
            queue.put(None)
        except BaseException as error:  # handed to the consumer, which raises it
            queue.put(error)

    thread = threading.Thread(target=fill, name="prefetch", daemon=True)
    thread.start()
    try:
        while (item := queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        while thread.is_alive():  # it may wait for room in the queue
            while not queue.empty():
                queue.get()
            thread.join(0.05)
