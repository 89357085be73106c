from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from tasks.contract.errors import IntegrityError
from tasks.data.token_shard import (
    Sample,
    TokenShard,
    TokenShardFile,
    read_token_shard,
    sample_digest,
    write_token_shard,
)


def sample(ids, supervised=2, conversation=b"c" * 16, slice_id=0, origin="data"):
    ids = np.array(ids, dtype=np.int32)
    mask = np.zeros(len(ids), dtype=np.uint8)
    mask[-supervised:] = 1
    return Sample(ids, mask, sample_digest(ids, mask), conversation, slice_id, origin)


SAMPLES = st.lists(
    st.builds(
        sample,
        st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=12),
        st.integers(1, 12),
        st.binary(min_size=16, max_size=16),
        st.integers(0, 1),
        st.sampled_from(["data", "greedy"]),
    ),
    max_size=6,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SAMPLES)
def test_round_trip(tmp_path, samples):
    path = tmp_path / "tokens.safetensors"
    write_token_shard(path, TokenShard(samples, ["a", "bé"], {"template_digest": "x"}))
    shard = read_token_shard(path)
    assert shard.slices == ["a", "bé"]
    assert shard.header == {"template_digest": "x"}
    assert len(shard.samples) == len(samples)
    for found, given_ in zip(shard.samples, samples, strict=True):
        np.testing.assert_array_equal(found.input_ids, given_.input_ids)
        np.testing.assert_array_equal(found.loss_mask, given_.loss_mask)
        assert found.input_ids.dtype == np.int32
        assert found.loss_mask.dtype == np.uint8
        assert replace(found, input_ids=None, loss_mask=None) == replace(given_, input_ids=None, loss_mask=None)
    again = tmp_path / "again.safetensors"
    write_token_shard(again, shard)
    assert again.read_bytes() == path.read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {"tokens.safetensors", "again.safetensors"}


def test_the_safetensors_library_reads_it(tmp_path):
    path = tmp_path / "tokens.safetensors"
    write_token_shard(path, TokenShard([sample([1, 2, 3]), sample([4, 5])], ["a"]))
    tensors = load_file(path)
    assert tensors["input_ids"].tolist() == [1, 2, 3, 4, 5]
    assert tensors["offsets"].tolist() == [0, 3, 5]
    assert tensors["sample_id"].shape == (2, 16)
    assert {name: str(tensor.dtype) for name, tensor in tensors.items()} == {
        "input_ids": "int32", "loss_mask": "uint8", "offsets": "int64", "sample_id": "uint8",
        "conversation_id": "uint8", "slice_id": "int32", "origin": "uint8",
    }  # fmt: skip


def _damage(tmp_path, change):
    path = tmp_path / "tokens.safetensors"
    write_token_shard(path, TokenShard([sample([1, 2, 3]), sample([4, 5])], ["a"]))
    tensors = {name: tensor.copy() for name, tensor in load_file(path).items()}
    metadata = {"format": "drafter-tokens", "slices": json.dumps(["a"])}
    change(tensors, metadata)
    save_file(tensors, path, metadata)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, m: t["input_ids"].__setitem__(0, 9), "sample 0: its token ids"),
        (lambda t, m: t["loss_mask"].__setitem__(4, 0), "sample 1"),
        (lambda t, m: t["offsets"].__setitem__(1, 5), "offsets"),
        (lambda t, m: t["slice_id"].__setitem__(0, 3), "slice ids"),
        (lambda t, m: t["origin"].__setitem__(0, 7), "origin 7"),
        (lambda t, m: t.update(input_ids=t["input_ids"].astype(np.int64)), "input_ids is I64"),
        (lambda t, m: t.update(loss_mask=t["loss_mask"][:-1]), "loss_mask is U8"),
        (lambda t, m: t.pop("origin"), "tensors"),
        (lambda t, m: m.update(format="other"), "format 'other'"),
    ],
)
def test_damage_is_named(tmp_path, change, message):
    with pytest.raises(IntegrityError, match=message):
        read_token_shard(_damage(tmp_path, change))


def test_cut_file_and_bad_samples(tmp_path):
    path = _damage(tmp_path, lambda t, m: None)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(IntegrityError, match="not a readable safetensors"):
        TokenShardFile(path)
    good = sample([1, 2, 3])
    for bad in (replace(good, loss_mask=good.loss_mask[:-1]), replace(good, loss_mask=np.array([1, 1, 0], np.uint8))):
        with pytest.raises(ValueError, match=r"loss mask|last token"):
            write_token_shard(tmp_path / "bad.safetensors", TokenShard([bad], ["a"]))
