from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tasks.target.loading import compute_dtype, load_target_folder


def test_the_multimodal_checkpoint_opens_as_its_text_stack(checkpoint: Callable[[str], Path]) -> None:
    target = load_target_folder(checkpoint("qwen3_5_multimodal"))
    assert type(target.model).__name__ == "Qwen3_5ForCausalLM"
    assert not [name for name, _ in target.model.named_parameters() if "visual" in name]
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (8, 64, 512)
    assert target.config.model_type == "qwen3_5_text"


def test_loading_states_what_it_uses_and_keeps_the_libraries_quiet(
    checkpoint: Callable[[str], Path], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """EXT-18: which kernels run is said, once, with the cost."""
    caplog.set_level("INFO")
    folder = checkpoint("qwen3_5")
    capfd.readouterr()
    target = load_target_folder(folder, name="Tiny")
    target.model(input_ids=torch.tensor([[7, 8, 9]]))
    assert (target.attention, target.linear_attention) == ("sdpa", "pytorch")
    assert "target Tiny: qwen3_5_text, 8 layers, hidden size 64, float32 on cpu, attention sdpa" in caplog.text
    assert caplog.text.count("install flash-linear-attention") == 1
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_no_kernels_are_asked_for_without_recurrent_layers(
    checkpoint: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    assert load_target_folder(checkpoint("llama")).linear_attention == "none"
    assert load_target_folder(checkpoint("lfm2")).linear_attention == "none"
    assert not caplog.records


@pytest.mark.slow
def test_state_space_layers_ask_for_their_own_kernels(
    checkpoint: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    assert load_target_folder(checkpoint("jamba")).linear_attention == "pytorch"
    assert "install mamba-ssm" in caplog.text


def test_the_parts_are_the_models_own(checkpoint: Callable[[str], Path]) -> None:
    target = load_target_folder(checkpoint("gemma3"))
    assert target.embedding is target.model.get_input_embeddings()
    assert target.head.weight is target.embedding.weight, "tied"
    assert target.final_norm is target.model.model.norm
    lfm2 = load_target_folder(checkpoint("lfm2"))
    assert lfm2.final_norm is lfm2.model.model.embedding_norm


def test_compute_dtype() -> None:
    assert compute_dtype("auto", "cpu") == torch.float32
    assert compute_dtype("auto", "cuda:0") == torch.bfloat16
    assert compute_dtype("float32", "cuda:0") == torch.float32
    assert compute_dtype("bfloat16", "cpu") == torch.bfloat16
