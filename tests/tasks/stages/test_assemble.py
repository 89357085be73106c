from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tasks.contract.errors import DataError
from tasks.contract.receipt import ReceiptRef
from tasks.data.token_shard import TokenShard, read_token_shard
from tasks.storage.artifact import read_receipt
from tests.tasks.stages.data_runs import Run, chat_rows, make_tiny_target, write_rows


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory) -> Path:
    return make_tiny_target(tmp_path_factory)


def make(tmp_path, tiny_target, **fields) -> Run:
    return Run(tmp_path, tiny_target, **fields)


def shards_of(run: Run, receipt, split: str) -> list[TokenShard]:
    refs = [ReceiptRef(**shard["ref"]) for shard in receipt.details["shards"] if shard["split"] == split]
    return [read_token_shard(run.path(read_receipt(run.store, r.kind, r.key), "tokens.safetensors")) for r in refs]


def samples_of(run: Run, receipt, split: str) -> list:
    return [sample for shard in shards_of(run, receipt, split) for sample in shard.samples]


def test_every_sample_is_in_one_shard_of_one_side(tmp_path, tiny_target):
    run = make(tmp_path, tiny_target)
    receipt = run.assemble(run.tokenize([write_rows(tmp_path / "a.jsonl", chat_rows(60)) + "#slice=code"]))
    train, validation = (samples_of(run, receipt, split) for split in ("train", "validation"))
    assert len(train) == receipt.counts["train_samples"]
    assert len(validation) == receipt.counts["validation_samples"]
    assert len({sample.sample_id for sample in train + validation}) == 60 == receipt.counts["samples"]
    assert not {s.conversation_id for s in train} & {s.conversation_id for s in validation}
    assert sum(shard["tokens"] for shard in receipt.details["shards"]) == receipt.counts["tokens"]
    assert receipt.counts["tokens"] == sum(len(s.input_ids) for s in train + validation)
    assert receipt.details["slices"] == ["code"]
    first = receipt.details["shards"][0]
    tokens = read_receipt(run.store, first["ref"]["kind"], first["ref"]["key"])
    assert (tokens.details["split"], tokens.details["slices"]) == ("train", ["code"])
    assert tokens.counts["samples"] == first["samples"]


def test_prompts_are_held_out_distinct_and_end_where_the_answer_begins(tmp_path, tiny_target):
    run = make(tmp_path, tiny_target, measure_prompts=5)
    receipt = run.assemble(run.tokenize([write_rows(tmp_path / "a.jsonl", chat_rows(60)) + "#slice=code"]))
    prompts = [json.loads(line) for line in run.read(receipt, "prompts.jsonl").splitlines()]
    assert len(prompts) == 5 == receipt.counts["prompts"]
    assert len({prompt["prompt_id"] for prompt in prompts}) == 5
    held_out = [s.input_ids[s.loss_mask == 0].tolist() for s in samples_of(run, receipt, "validation")]
    assert all(prompt["input_ids"] in held_out and prompt["slice"] == "code" for prompt in prompts)


def test_earliest_source_keeps_a_duplicate(tmp_path, tiny_target):
    run = make(tmp_path, tiny_target)
    first = write_rows(tmp_path / "a.jsonl", chat_rows(8) + chat_rows(2))
    second = write_rows(tmp_path / "b.jsonl", chat_rows(12))
    receipt = run.assemble(run.tokenize([f"{first}#slice=one"]), run.tokenize([f"{second}#slice=two"]))
    assert receipt.counts["duplicates"] == 2 + 8
    assert receipt.counts["samples"] == 12
    slices = [
        shard.slices[sample.slice_id]
        for split in ("train", "validation")
        for shard in shards_of(run, receipt, split)
        for sample in shard.samples
    ]
    assert (slices.count("one"), slices.count("two")) == (8, 4)


def test_second_run_with_one_more_file_writes_only_new_shards(tmp_path, tiny_target):
    run = make(tmp_path, tiny_target)
    first = run.tokenize([write_rows(tmp_path / "a.jsonl", chat_rows(80))])
    before = {s["ref"]["key"] for s in run.assemble(first).details["shards"]}
    second = run.tokenize([write_rows(tmp_path / "b.jsonl", chat_rows(20, start=80)) + "#slice=new"])
    after = run.assemble(first, second).details["shards"]
    kept = before & {s["ref"]["key"] for s in after}
    assert len(before) >= 8
    assert len(kept) >= len(before) - 4  # the last shards of each split border the new rows


def test_order_of_rows_does_not_move_a_conversation_to_the_other_side(tmp_path, tiny_target):
    rows = chat_rows(40)
    sides = []
    for seed in (None, 1):
        if seed is not None:
            random.Random(seed).shuffle(rows)
        run = make(tmp_path / str(seed), tiny_target)
        receipt = run.assemble(run.tokenize([write_rows(tmp_path / str(seed) / "a.jsonl", rows)]))
        sides.append({s.sample_id for s in samples_of(run, receipt, "validation")})
    assert sides[0] == sides[1]


def test_sample_limit_counts_in_source_order(tmp_path, tiny_target):
    run = make(tmp_path, tiny_target, max_samples=10)
    receipt = run.assemble(run.tokenize([write_rows(tmp_path / "a.jsonl", chat_rows(30))]))
    assert receipt.counts["samples"] == 10
    assert receipt.details["rejected"] == {"sample_limit": 20}


def test_samples_with_the_mask_token_are_dropped_and_counted(tmp_path, tiny_target):
    rows = chat_rows(10)
    rows[3]["messages"][0]["content"] = "what is <|mask|>?"
    run = make(tmp_path, tiny_target, mask_token=3)
    receipt = run.assemble(run.tokenize([write_rows(tmp_path / "a.jsonl", rows)]))
    assert receipt.counts["samples"] == 9
    assert receipt.details["rejected"] == {"mask_token_in_sample": 1}
    assert "mask token 3" in receipt.details["examples"][0]["detail"]


def test_no_sample_left_fails_with_counts_by_reason(tmp_path, tiny_target):  # ORC-11
    run = make(tmp_path, tiny_target)
    rows = [{"prompt": "only"}] * 3 + [{"messages": [{"role": "robot", "content": "x"}]}]
    tokenized = run.tokenize([write_rows(tmp_path / "a.jsonl", rows)])
    assert tokenized.counts["kept"] == 0
    with pytest.raises(DataError, match=r"4 rows.*no_answer 3, unknown_role 1.*a\.jsonl:1 .*rejects\.jsonl"):
        run.assemble(tokenized)


def test_one_conversation_fails_naming_the_field(tmp_path, tiny_target):
    run = make(tmp_path, tiny_target)
    with pytest.raises(DataError, match="validation_share"):
        run.assemble(run.tokenize([write_rows(tmp_path / "a.jsonl", chat_rows(1))]))


def test_page_for_people(tmp_path, tiny_target):
    run = make(tmp_path, tiny_target)
    rows = [*chat_rows(10), {"prompt": "a|b"}]
    receipt = run.assemble(run.tokenize([write_rows(tmp_path / "a.jsonl", rows)]))
    page = run.read(receipt, "report.md").decode()
    assert "| no_answer | 1 |" in page
    assert "template_digest" in page
    assert run.read(receipt, "lengths.png").startswith(b"\x89PNG")
