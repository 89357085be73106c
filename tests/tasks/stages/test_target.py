from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import tasks.storage
from tasks.contract.errors import ConfigurationError, IntegrityError
from tasks.contract.spec import RunSpec
from tasks.storage.folder import FolderStore
from tasks.target.extraction import Extractor
from tasks.target.loading import open_target, open_tokenizer
from tasks.target.source import target_fingerprint
from tests.tasks.stages.states_case import StatesCase
from tests.tasks.target.families import build


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen3", tmp_path_factory.mktemp("built"))


@pytest.fixture
def case(tmp_path: Path, tiny: Path) -> StatesCase:
    return StatesCase(tmp_path, Path(shutil.copytree(tiny, tmp_path / "tiny-qwen3")))


def test_a_local_folder_is_digested_not_copied(case: StatesCase) -> None:
    receipt = case.target()
    assert receipt.objects == []
    assert receipt.details["location"] == {"kind": "folder", "path": str(case.target_folder)}
    assert (receipt.details["name"], receipt.details["num_layers"]) == ("tiny-qwen3", 4)
    assert len(receipt.identity) == 64
    with case.context("extract", {"target": [receipt]}) as ctx:
        target = open_target(ctx, receipt)
        assert (target.num_layers, target.hidden_size, target.vocab_size) == (4, 64, 512)
        assert target.eos_ids == {2}
        assert target.pad_id == 0
        assert target.dtype == torch.float32
        assert not target.model.training
        assert not any(p.requires_grad for p in target.model.parameters())
        assert open_target(ctx, receipt, dtype=torch.bfloat16).dtype == torch.bfloat16
        assert open_tokenizer(ctx, receipt).decode([9]) == target.tokenizer.decode([9])


def test_identity_follows_the_content_only(case: StatesCase) -> None:
    """TOK-19: the weights alone would let tokenized data of another tokenizer or template pass for this one's."""
    before = case.target().identity
    os.utime(case.target_folder / "model.safetensors")
    (case.target_folder / "README.md").write_text("words")
    config = case.target_folder / "config.json"
    config.write_text(config.read_text().replace('"transformers_version": "5', '"transformers_version": "9'))
    assert case.target().identity == before
    seen = {before}
    for name in ("chat_template.jinja", "tokenizer_config.json", "config.json", "model.safetensors"):
        path = case.target_folder / name
        data = path.read_bytes()
        changed = data[:-1] + bytes([data[-1] ^ 1]) if name == "model.safetensors" else data.replace(b"64", b"65")
        changed = data + b" " if changed == data else changed
        if name == "config.json":
            changed = data.replace(b'"rms_norm_eps": 1e-06', b'"rms_norm_eps": 1e-05')
        assert changed != data
        path.write_bytes(changed)
        seen.add(case.target().identity)
        path.write_bytes(data)
    assert len(seen) == 5
    assert case.target().identity == before


def test_a_target_that_changed_since_plan_is_refused(case: StatesCase) -> None:
    fingerprint = target_fingerprint(case.spec)
    (case.target_folder / "chat_template.jinja").write_text("other")
    with pytest.raises(ConfigurationError, match="changed since"):
        case.run("target", {}, fingerprint=fingerprint)


def test_files_that_changed_since_the_import_are_named(case: StatesCase) -> None:
    receipt = case.target()
    path = case.target_folder / "model.safetensors"
    os.utime(path)
    with case.context("extract", {"target": [receipt]}) as ctx:
        open_target(ctx, receipt)  # touched, not changed
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
        with pytest.raises(IntegrityError, match=r"model\.safetensors is not the file imported"):
            open_target(ctx, receipt)
        path.unlink()
        with pytest.raises(IntegrityError, match=r"missing"):
            open_target(ctx, receipt)
        open_tokenizer(ctx, receipt)  # needs no weights
        shutil.rmtree(case.target_folder)
        with pytest.raises(ConfigurationError, match="a folder that every task sees"):
            open_tokenizer(ctx, receipt)


def test_a_target_in_s3_stays_there(case: StatesCase, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = case.target()
    monkeypatch.setattr(tasks.storage, "open_store", lambda root: FolderStore(tiny))
    case.spec = case.spec.model_copy(update={"target": "s3://bucket/tiny-qwen3"})
    receipt = case.target()
    assert receipt.details["location"] == {"kind": "s3", "path": "s3://bucket/tiny-qwen3"}
    assert receipt.identity == local.identity
    assert receipt.key != local.key
    with case.context("extract", {"target": [receipt]}) as ctx:
        assert open_target(ctx, receipt).name == "tiny-qwen3"
        monkeypatch.setattr(tasks.storage, "open_store", None)
        assert open_target(ctx, receipt).num_layers == 4, "the local copy is used again"


@pytest.mark.slow
def test_the_demos_gguf_is_dequantized_once_into_the_store(tmp_path: Path) -> None:
    case = StatesCase(tmp_path, tmp_path)
    case.spec = RunSpec(layer_ids=[1, 8, 14, 20, 27], compute_dtype="float32")
    receipt = case.target()
    assert receipt.details["location"] == {"kind": "store"}
    sizes = {o.name: o.size for o in receipt.objects}
    assert sizes["model.safetensors"] == 269_060_552
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= set(sizes)
    assert receipt.counts["parameters"] == 134_515_008
    with case.context("extract", {"target": [receipt]}) as ctx:
        target = open_target(ctx, receipt)
        tokenizer = open_tokenizer(ctx, receipt)
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        with torch.inference_mode():
            answer = target.model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids) :]
        assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
        with Extractor(target, [1, 27], "none", torch.bfloat16) as extractor:
            [[found]] = extractor.extract([np.array(ids, dtype=np.int32)])
        assert found.hidden_states.shape == (len(ids), 2, 576)
