from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tasks.contract.errors import IntegrityError
from tasks.data.state_digest import row_digests, sample_digests
from tasks.data.states_shard import StatesHeader, StatesShard, iterate_states
from tasks.data.states_writer import StatesShardWriter, part_bounds, part_name
from tasks.data.token_shard import Sample

HEADER = StatesHeader((1, 4), "none", "t" * 64, "k" * 32, ("chat", "code"))
HIDDEN = 12


def make_samples(lengths: list[int], seed: int = 0) -> list[Sample]:
    random = np.random.default_rng(seed)
    return [
        Sample(
            random.integers(0, 1000, n).astype(np.int32), random.integers(0, 2, n).astype(np.uint8), random.bytes(16),
            random.bytes(16), int(random.integers(2)), ("data", "greedy")[int(random.integers(2))],
        )
        for n in lengths
    ]  # fmt: skip


def write(folder: Path, samples: list[Sample], header: StatesHeader, dtype: str, part_bytes: int, seed: int = 0):
    """Write in a shuffled order; the states by sample, as written."""
    torch.manual_seed(seed)
    kind = {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]
    has_last = header.last_hidden != "none"
    states = [torch.randn(len(s.input_ids), len(header.layer_ids) + has_last, HIDDEN).to(kind) for s in samples]
    writer = StatesShardWriter(folder, samples, header, HIDDEN, dtype, part_bytes)
    for index in torch.randperm(len(samples)).tolist():
        digest = sample_digests(row_digests(states[index])[None])[0]
        last = states[index][:, -1] if has_last else None
        writer.put(index, states[index][:, : len(header.layer_ids)], last, digest)
    return writer.close(), states


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("last", ["none", "pre_norm", "post_norm"])
def test_what_is_written_in_any_order_is_read_in_the_shards(tmp_path: Path, dtype: str, last: str) -> None:
    samples = make_samples([3, 9, 1, 5, 7])
    header = StatesHeader((1, 4), last, HEADER.target, HEADER.tokens, HEADER.slices)
    row = HIDDEN * (2 + (last != "none")) * (2 if dtype == "bfloat16" else 4)
    paths, states = write(tmp_path, samples, header, dtype, part_bytes=10 * row)
    assert [p.name for p in paths] == [part_name(i) for i in range(4)], "[3] [9 1] [5] [7]"
    shard = StatesShard(paths)
    assert (len(shard), shard.sample_lengths, shard.hidden_size, shard.dtype) == (5, [3, 9, 1, 5, 7], HIDDEN, dtype)
    for index, found in enumerate(iterate_states(paths)):
        sample, expected = found.sample, samples[index]
        assert np.array_equal(sample.input_ids, expected.input_ids)
        assert np.array_equal(sample.loss_mask, expected.loss_mask)
        assert sample.input_ids.dtype == np.int32
        assert (sample.sample_id, sample.conversation_id) == (expected.sample_id, expected.conversation_id)
        assert (sample.slice_id, sample.origin) == (expected.slice_id, expected.origin)
        assert torch.equal(found.hidden_states, states[index][:, :2])
        assert (found.last_hidden is None) == (last == "none")
        if found.last_hidden is not None:
            assert torch.equal(found.last_hidden, states[index][:, 2])
        assert torch.equal(found.layer_digest, sample_digests(row_digests(states[index])[None])[0])
    assert torch.equal(shard[3].hidden_states, states[3][:, :2])


def test_parts_are_plain_safetensors_with_a_header_that_says_what_they_are(tmp_path: Path) -> None:
    """EXT-07."""
    [path], states = write(tmp_path, make_samples([4, 2]), HEADER, "bfloat16", 1 << 30)
    with safe_open(str(path), "pt") as file:
        assert file.metadata() == {
            "layer_convention": "layer_output", "layer_ids": "[1, 4]", "last_hidden": "none", "target": "t" * 64,
            "tokens": "k" * 32, "slices": '["chat", "code"]', "part": "0", "parts": "1",
        }  # fmt: skip
        assert torch.equal(file.get_tensor("hidden_states"), torch.cat(states))
        assert file.get_tensor("offsets").tolist() == [0, 4, 6]


def test_a_shard_without_samples_is_readable(tmp_path: Path) -> None:
    """INT-04."""
    paths, _ = write(tmp_path, [], HEADER, "bfloat16", 100)
    assert len(StatesShard(paths)) == 0
    assert list(iterate_states(paths)) == []


def test_forgotten_and_misshapen_samples_are_refused(tmp_path: Path) -> None:
    writer = StatesShardWriter(tmp_path, make_samples([4, 2]), HEADER, HIDDEN, "float32")
    digest = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"\(3, 2, 12\).*expected \(4, 2, 12\)"):
        writer.put(0, torch.zeros(3, 2, HIDDEN), None, digest)
    with pytest.raises(ValueError, match="bfloat16"):
        writer.put(0, torch.zeros(4, 2, HIDDEN, dtype=torch.bfloat16), None, digest)
    with pytest.raises(ValueError, match="last_hidden"):
        writer.put(0, torch.zeros(4, 2, HIDDEN), torch.zeros(4, HIDDEN), digest)
    writer.put(0, torch.zeros(4, 2, HIDDEN), None, digest)
    with pytest.raises(RuntimeError, match="1 samples were never written, the first is 1"):
        writer.close()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_convention", "hidden_states"),
        ("layer_convention", None),
        ("layer_ids", "[4, 1]"),
        ("layer_ids", "[-1, 4]"),
        ("layer_ids", "[1]"),
        ("layer_ids", "what"),
        ("last_hidden", "normed"),
        ("last_hidden", "pre_norm"),
        ("part", "1"),
        ("parts", "2"),
        ("target", None),
    ],
)
def test_headers_are_read_strictly(tmp_path: Path, field: str, value: str | None) -> None:
    [path], _ = write(tmp_path, make_samples([4, 2]), HEADER, "float32", 1 << 30)
    metadata = {**HEADER.to_metadata(), field: value}
    save_file(load_file(path), path, {k: v for k, v in metadata.items() if v is not None})
    with pytest.raises(IntegrityError, match=path.name):
        StatesShard([path])


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("offsets", lambda t: t.flip(0), "offsets do not ascend"),
        ("offsets", lambda t: t - 1, "offsets do not ascend"),
        ("offsets", lambda t: torch.tensor([0, 4, 4, 6]), "offsets do not ascend"),
        ("hidden_states", lambda t: t[:-1], "5 rows for 6 token ids"),  # EXT-05
        ("hidden_states", lambda t: t.half(), "dtype F16"),  # EXT-19
        ("hidden_states", lambda t: t[:, :1], r"expected \[T, 2, H\]"),
        ("input_ids", lambda t: t[:-1], r"input_ids is \(5,\)"),
        ("sample_id", lambda t: t[:, :8], "sample_id"),
        ("layer_digest", lambda t: t[:1], "layer_digest"),
        ("loss_mask", None, r"missing tensors \['loss_mask'\]"),
        ("surplus", lambda t: torch.zeros(1), r"unknown \['surplus'\]"),
    ],
)
def test_structure_is_checked(tmp_path: Path, name: str, change, expected: str) -> None:
    [path], _ = write(tmp_path, make_samples([4, 2]), HEADER, "float32", 1 << 30)
    tensors = load_file(path)
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors.get(name)).contiguous()
    save_file(tensors, path, HEADER.to_metadata())
    with pytest.raises(IntegrityError, match=expected):
        StatesShard([path])


def test_parts_of_different_shards_do_not_mix(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    one, _ = write(first, make_samples([4, 2]), HEADER, "float32", 1)
    other = StatesHeader((1, 4), "none", "u" * 64, "k" * 32, HEADER.slices)
    two, _ = write(second, make_samples([4, 2]), other, "float32", 1)
    for paths in ([one[0], two[1]], [one[1], one[0]], [one[0]], []):
        with pytest.raises(IntegrityError):
            StatesShard(paths)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 120))
def test_parts_hold_whole_samples_in_order(sizes: list[int], limit: int) -> None:
    bounds = part_bounds(sizes, limit)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == len(sizes)
    assert all(a[1] == b[0] for a, b in pairwise(bounds))
    for start, end in bounds:
        assert end - start <= 1 or sum(sizes[start:end]) <= limit
        assert end > start or not sizes


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_single_changed_bit_changes_the_digest(data: st.DataObject) -> None:
    rows, layers = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    hidden = data.draw(st.sampled_from([1, 3, 4, 7, 64]))
    kind = data.draw(st.sampled_from([torch.bfloat16, torch.float32]))
    torch.manual_seed(rows)
    states = torch.randn(rows, layers, hidden).to(kind)
    before = sample_digests(row_digests(states)[None])[0]
    bits = states.view(torch.int16 if kind is torch.bfloat16 else torch.int32)
    place = tuple(data.draw(st.integers(0, n - 1)) for n in (rows, layers, hidden))
    bits[place] ^= 1 << data.draw(st.integers(0, 14))
    after = sample_digests(row_digests(states)[None])[0]
    assert (before != after).tolist() == [layer == place[1] for layer in range(layers)]


def test_digests_see_order_and_ignore_padding() -> None:
    torch.manual_seed(0)
    states = torch.randn(2, 5, 3, 8)
    rows = row_digests(states)
    swapped = states[:, [1, 0, 2, 3, 4]]
    assert (sample_digests(row_digests(swapped)) != sample_digests(rows)).all()
    states[1, 3:] = 9
    padded = sample_digests(row_digests(states), torch.tensor([5, 3]))
    assert torch.equal(padded[1], sample_digests(row_digests(states[1:, :3]))[0])
    # The definition, in Python integers.
    from tasks.data import state_digest as d

    words = states[0, 0, 0].view(torch.int64).tolist()
    weights = d._weights(len(words), d._ROW_SEED, torch.device("cpu")).tolist()
    assert all(w % 2 for w in weights)
    total = sum(a * b for a, b in zip(words, weights, strict=True)) % (1 << 64)
    total = (total ^ (total >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
    total = (total ^ (total >> 27)) * 0x94D049BB133111EB % (1 << 64)
    assert (total ^ (total >> 31)) == int(rows[0, 0, 0]) % (1 << 64)
