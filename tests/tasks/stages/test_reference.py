from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tasks.contract.errors import DataError, IntegrityError
from tasks.decoding.greedy import greedy_decode
from tasks.decoding.reference_file import part_name, read_reference, write_reference
from tasks.stages import reference as stage
from tasks.target.loading import load_target_folder
from tests.tasks.stages.decoding_runs import LAYER_IDS, PROMPTS, DecodingRun


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> DecodingRun:
    return DecodingRun(tmp_path_factory.mktemp("reference"))


def test_texts_and_states_are_those_of_the_plain_target(run: DecodingRun) -> None:
    receipt = run.reference()
    sequences = read_reference(run.path(receipt, "reference.safetensors"))
    target = load_target_folder(run.target_folder)
    assert [s.prompt_id for s in sequences] == ["00aa", "01bb", "02cc"]
    assert [s.slice for s in sequences] == ["code", "chat", "code"]
    for sequence, prompt in zip(sequences, PROMPTS, strict=True):
        plain = greedy_decode(target, prompt["input_ids"], max_new_tokens=14)
        assert sequence.prompt_ids == prompt["input_ids"]
        assert sequence.answer == plain.tokens
        assert sequence.ended == plain.ended
        assert sequence.limit == 14
        assert sequence.margins.tolist() == pytest.approx(plain.margins, rel=1e-4)
        with torch.no_grad():
            hidden = target.model(sequence.input_ids[None], output_hidden_states=True).hidden_states
        expected = torch.stack([hidden[i + 1][0] for i in LAYER_IDS], dim=1)
        assert sequence.states.shape == (len(sequence.input_ids), len(LAYER_IDS), 64)
        assert sequence.states.dtype == torch.float32
        torch.testing.assert_close(sequence.states, expected, rtol=1e-5, atol=1e-5)
    assert receipt.counts["prompts"] == 3
    assert receipt.counts["answer_tokens"] == sum(len(s.answer) for s in sequences)
    assert receipt.metrics["plain_tokens_per_second"] > 0
    assert receipt.metrics["plain_tokens_per_second_with_prefill"] > 0
    lines = [json.loads(line) for line in run.path(receipt, "texts.jsonl").read_text().splitlines()]
    assert [line["answer"] for line in lines] == [target.tokenizer.decode(s.answer) for s in sequences]


def test_a_prompt_that_ends_at_once_is_kept(run: DecodingRun, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_target_folder(run.target_folder)
    first = greedy_decode(target, PROMPTS[1]["input_ids"], max_new_tokens=1).tokens[0]
    opened = stage.open_target

    def ending(*args: object, **kwargs: object) -> object:
        found = opened(*args, **kwargs)  # type: ignore[arg-type]
        found.eos_ids = frozenset({first})
        return found

    monkeypatch.setattr(stage, "open_target", ending)
    receipt = run.reference(PROMPTS[1:])
    [ended, _] = read_reference(run.path(receipt, "reference.safetensors"))
    assert (ended.answer, ended.ended) == ([first], True)
    assert receipt.counts["ended_at_once"] == 1


def test_large_sets_are_several_files(run: DecodingRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "PART_BYTES", 1)
    prompts = [{**prompt, "prompt_id": f"part-{i}"} for i, prompt in enumerate(PROMPTS[:2])]
    receipt = run.run(
        "reference",
        {"target": [run.target], "assemble": [run.forge("assemble", "parts", {"prompts.jsonl": _lines(prompts)})]},
    )
    names = [stored.name for stored in receipt.objects]
    assert names == ["reference-00000.safetensors", "reference-00001.safetensors", "texts.jsonl"]
    sequences = read_reference([run.path(receipt, part_name(i, 2)) for i in range(2)])
    assert [s.prompt_id for s in sequences] == ["part-0", "part-1"]


def test_no_prompt_and_broken_prompts_are_refused(run: DecodingRun, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("")
    with pytest.raises(DataError, match=r"prompts.jsonl: found no prompt"):
        stage.read_prompts(file)
    file.write_bytes(_lines(PROMPTS[:1]) + b'{"prompt_id": "x", "slice": "code"}\n')
    with pytest.raises(DataError, match="line 2: not a prompt"):
        stage.read_prompts(file)
    file.write_bytes(_lines([{"prompt_id": "x", "input_ids": [], "slice": "code"}]))
    with pytest.raises(DataError, match="line 1: prompt x has no tokens"):
        stage.read_prompts(file)


def test_a_damaged_file_is_refused(run: DecodingRun, tmp_path: Path) -> None:
    sequences = read_reference(run.path(run.reference(), "reference.safetensors"))
    file = tmp_path / "reference.safetensors"
    write_reference(file, sequences, layer_ids=LAYER_IDS, target="t")
    assert [s.answer for s in read_reference(file)] == [s.answer for s in sequences]
    torch.testing.assert_close(read_reference(file)[2].states, sequences[2].states)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(IntegrityError, match="not a readable safetensors file"):
        read_reference(file)


def _lines(prompts: list[dict[str, object]]) -> bytes:
    return "".join(json.dumps(prompt) + "\n" for prompt in prompts).encode()
