"""Steps of a training: which samples, in which order, in which rows. A function of seed and data alone.

Shards are shuffled, a window of them at a time is shuffled sample by sample, and whole samples fill steps of
`batch_tokens`. So a few windows of shards are on the local disk at most, and the position in the data is the step.
Shuffling is sorting by a hash of (seed, epoch, id): it depends neither on the order of the shards nor on a library.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from queue import Queue

import numpy as np
import torch
from torch import Tensor

from tasks.contract.errors import IntegrityError
from tasks.data.states_shard import StatesSample, StatesShard
from tasks.data.token_shard import Sample
from tasks.drafter.anchors import draw_anchors, legal_anchors

WINDOW = 8  # shards that are shuffled together
ROW_TOKENS = 4096  # a step is computed in rows of at most so many tokens, or one longer sample,
ROW_SLOTS = 8192  # and of at most so many slots of blocks, or one sample of more


@dataclass(frozen=True)
class ShardIndex:
    """What is known of a shard of states without its states."""

    key: str
    sample_ids: tuple[bytes, ...]
    lengths: tuple[int, ...]  # tokens of each sample
    usable: tuple[int, ...]  # samples with at least one legal anchor: the others cannot train a drafter


SampleAddress = tuple[int, int]  # shard, sample
ReadSample = Callable[[SampleAddress], StatesSample]


def index_shard(key: str, samples: Iterable[Sample]) -> ShardIndex:
    """Index of a shard from its tokens."""
    ids, lengths, usable = [], [], []
    for number, sample in enumerate(samples):
        ids.append(sample.sample_id)
        lengths.append(len(sample.input_ids))
        if len(legal_anchors(sample.loss_mask)):
            usable.append(number)
    return ShardIndex(key, tuple(ids), tuple(lengths), tuple(usable))


@dataclass(frozen=True)
class Row:
    """Samples side by side, ready for the drafter. S tokens, A anchors."""

    input_ids: Tensor  # [S] int64
    loss_mask: Tensor  # [S] uint8
    states: Tensor  # [1, S, K, H] stored dtype
    positions: Tensor  # [1, S] int64, restart with each sample
    documents: Tensor  # [1, S] int64, index in `sample_ids`
    anchors: Tensor  # [1, A] int64 indices in the row, ascending
    ends: Tensor  # [A] int64, index after each anchor's sample
    sample_ids: tuple[str, ...]

    def to(self, device: str) -> Row:
        """The same on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Row:
        """The same in page-locked memory, from which copies to a GPU overlap with its work."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, function: Callable[[Tensor], Tensor]) -> Row:
        names = [f.name for f in fields(self) if f.name != "sample_ids"]
        return Row(**{name: function(getattr(self, name)) for name in names}, sample_ids=self.sample_ids)


def epoch_order(shards: Sequence[ShardIndex], seed: int, epoch: int, window: int = WINDOW) -> list[SampleAddress]:
    """Order of all usable samples in one epoch."""
    order = sorted(range(len(shards)), key=lambda s: _rank(seed, epoch, shards[s].key.encode()))
    addresses: list[SampleAddress] = []
    for start in range(0, len(order), window):
        pool = [(s, i) for s in order[start : start + window] for i in shards[s].usable]
        addresses += sorted(pool, key=lambda at: (_rank(seed, epoch, shards[at[0]].sample_ids[at[1]]), at))
    return addresses


def _rank(seed: int, epoch: int, name: bytes) -> bytes:
    return hashlib.blake2b(f"{seed} {epoch} ".encode() + name, digest_size=8).digest()


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
    samples: Iterable[StatesSample],
    *,
    anchors: int,
    block_size: int,
    seed: int,
    epoch: int,
    row_tokens: int = ROW_TOKENS,
    row_slots: int = ROW_SLOTS,
) -> Iterator[Row]:
    """Rows of one step, whole samples each. A sample without a legal anchor is left out.

    Args:
        samples: with their states.
        anchors: at most so many blocks of each sample.
        block_size: B, for `row_slots`.
        seed: of the draw of anchors,
        epoch: likewise.
        row_tokens: bounds on a row.
        row_slots: likewise.
    """
    row: list[tuple[StatesSample, np.ndarray]] = []
    tokens = slots = 0
    for item in samples:
        sample = item.sample
        drawn = draw_anchors(sample.loss_mask, anchors, seed=seed, epoch=epoch, sample_id=sample.sample_id)
        if not len(drawn):
            continue
        length, width = len(sample.input_ids), len(drawn) * block_size
        if row and (tokens + length > row_tokens or slots + width > row_slots):
            yield _row(row)
            row, tokens, slots = [], 0, 0
        row.append((item, drawn))
        tokens, slots = tokens + length, slots + width
    if row:
        yield _row(row)


def validation_rows(
    shards: Sequence[ShardIndex],
    read: ReadSample,
    *,
    samples: int,
    anchors: int,
    block_size: int,
    seed: int,
) -> Iterator[Row]:
    """The same rows at every evaluation: of at most so many samples, with at most so many anchors each."""
    chosen = epoch_order(shards, seed, 0, window=len(shards) or 1)[:samples]
    return make_rows(map(read, sorted(chosen)), anchors=anchors, block_size=block_size, seed=seed, epoch=0)


def _row(items: Sequence[tuple[StatesSample, np.ndarray]]) -> Row:
    anchors, ends, positions, documents = [], [], [], []
    start = 0
    for number, (item, drawn) in enumerate(items):
        length = len(item.sample.input_ids)
        anchors.append(torch.from_numpy(drawn).long() + start)
        ends.append(torch.full((len(drawn),), start + length))
        positions.append(torch.arange(length))
        documents.append(torch.full((length,), number))
        start += length
    samples = [item.sample for item, _ in items]
    return Row(
        input_ids=torch.cat([torch.from_numpy(np.asarray(s.input_ids, dtype=np.int64)) for s in samples]),
        loss_mask=torch.cat([torch.from_numpy(np.array(s.loss_mask, dtype=np.uint8)) for s in samples]),
        states=torch.cat([item.hidden_states for item, _ in items])[None],
        positions=torch.cat(positions)[None],
        documents=torch.cat(documents)[None],
        anchors=torch.cat(anchors)[None],
        ends=torch.cat(ends),
        sample_ids=tuple(s.sample_id.hex() for s in samples),
    )


class StatesSource:
    """Samples of verified shards, fetched when they are needed; at most two windows of shards stay on the disk."""

    def __init__(
        self, shards: Sequence[ShardIndex], fetch: Callable[[int], list[Path]], keep: int = 2 * WINDOW
    ) -> None:
        """`fetch`: local, verified files of a shard by its number."""
        self._shards, self._fetch, self._keep = shards, fetch, keep
        self._open: dict[int, tuple[StatesShard, list[Path]]] = {}

    def __call__(self, address: SampleAddress) -> StatesSample:
        """One sample with its states.

        Raises:
            IntegrityError: if the states are of another sample than the token shard has there.
        """
        shard, index = address
        if shard not in self._open:
            paths = self._fetch(shard)
            self._open[shard] = (StatesShard(paths), paths)
            self._evict()
        self._open[shard] = self._open.pop(shard)  # most recently used stands last
        found = self._open[shard][0][index]
        expected = self._shards[shard].sample_ids[index]
        if found.sample.sample_id != expected:
            raise IntegrityError(
                f"states of token shard {self._shards[shard].key}, sample {index}: found sample id "
                f"{found.sample.sample_id.hex()}, expected {expected.hex()}; extract this shard again"
            )
        return found

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
