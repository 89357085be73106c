from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.data.chat_format import ChatFormat, detect_format, parse_row, repair_unicode
from tasks.data.rejection import RejectReason, RowRejected
from tasks.data.samples import conversation_digest

QA = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    ("row", "chat_format"),
    [
        ({"messages": QA}, ChatFormat.MESSAGES),
        ({"conversations": QA}, ChatFormat.MESSAGES),
        ({"traj": QA, "reward": 1.0}, ChatFormat.MESSAGES),
        ({"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}, ChatFormat.SHAREGPT),
        ({"messages": [{"role": "User", "text": "Q"}, {"role": "AI", "text": "A"}]}, ChatFormat.MESSAGES),
        ({"instruction": "Q", "input": "", "output": "A"}, ChatFormat.ALPACA),
        ({"prompt": "Q", "completion": "A"}, ChatFormat.PROMPT_COMPLETION),
        ({"prompt": QA[:1], "completion": QA[1:]}, ChatFormat.PROMPT_COMPLETION),
        ({"question": "Q", "answer": "A"}, ChatFormat.PROMPT_COMPLETION),
        ({"instruction": "Q", "instances": [{"input": "", "output": "A"}]}, ChatFormat.SELF_INSTRUCT),
        (
            {"messages": [
                {"role": "user", "content": [{"type": "text", "text": "Q"}]},
                {"role": "assistant", "content": [{"type": "text", "value": "A"}]},
            ]},
            ChatFormat.MESSAGES,
        ),
    ],
)  # fmt: skip
def test_formats_give_the_same_conversation(row, chat_format):
    [conversation] = parse_row(row)
    assert detect_format(row) is chat_format
    assert conversation.messages == QA
    assert conversation.trained == [False, True]


def test_instruction_with_input_and_history():
    [conversation] = parse_row(
        {"instruction": "Add.", "input": "1 2", "output": "3", "history": [["a", "b"]], "system": "Be brief."}
    )
    assert [(m["role"], m["content"]) for m in conversation.messages] == [
        ("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "Add.\n1 2"), ("assistant", "3"),
    ]  # fmt: skip


def test_several_instances_are_several_conversations():
    conversations = parse_row(
        {"instruction": "Add.", "instances": [{"input": "1 2", "output": "3"}, {"input": "2 2", "output": "4"}]}
    )
    assert [c.messages[-1]["content"] for c in conversations] == ["3", "4"]


@pytest.mark.parametrize(
    "message",
    [
        {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
        {"role": "assistant", "content": [{"type": "tool_call", "value": '{"name": "f", "arguments": {"a": 1}}'}]},
        {"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {"a": 1}}]},
    ],
)
def test_tool_calls_in_all_their_forms(message):
    first = {"from": "human", "value": "Q"} if "from" in message else QA[0]
    [conversation] = parse_row({"conversations": [first, message]})
    assert conversation.messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}


def test_reasoning_parts_stand_apart_from_the_answer():
    parts = [{"type": "reasoning", "value": "hm"}, {"type": "text", "value": "A"}]
    [conversation] = parse_row({"messages": [QA[0], {"role": "assistant", "content": parts}]})
    assert conversation.messages[1] == {"role": "assistant", "content": "A", "reasoning_content": "hm"}


@pytest.mark.parametrize("as_text", [True, False])
def test_tools_are_wrapped_as_a_server_has_them(as_text):
    tools = [{"name": "f", "parameters": {"type": "object"}}]
    [conversation] = parse_row({"messages": QA, "tools": json.dumps(tools) if as_text else tools})
    assert conversation.tools == [{"type": "function", "function": tools[0]}]
    assert parse_row({"messages": QA, "tools": "[]"})[0].tools is None


def _message(**fields):
    return {"messages": [QA[0], {"role": "assistant", **fields}]}


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        ({"messages": [QA[0], {"role": "my-model-7b", "content": "A"}]}, "unknown_role", "'my-model-7b'"),  # TOK-15
        ({"messages": [*QA, QA[0], QA[0]]}, "consecutive_user_turns", "messages 2 and 3"),  # TOK-13
        ({"messages": QA[:1]}, "no_answer", "1 messages"),
        ({"messages": []}, "no_answer", "empty"),
        (_message(content=None), "no_answer", "none of them"),
        ({"prompt": "Q"}, "no_answer", "'prompt'"),
        ({"question": [[QA[0]]], "function": []}, "no_answer", "'question'"),
        ({"prompt": {"text": "Q", "replies": []}}, "unknown_format", "tree"),
        ({"history": [{"action": "run"}], "instruction": "Q"}, "unknown_format", "'history'"),
        ({"text": "hello"}, "unknown_format", "text"),
        (_message(content=[{"type": "image_url", "image_url": "x"}]), "unsupported_content", "image_url"),
        (_message(content={"a": 1}), "unsupported_content", "dict"),
        (_message(content="", tool_calls=[{"function": {"name": "f", "arguments": "{"}}]), "bad_tool_call", "'f'"),
        (_message(content="", tool_calls=[{"function": {"name": "f", "arguments": [1]}}]), "bad_tool_call", "list"),
        (_message(content="", tool_calls=[{"function": {}}]), "bad_tool_call", "name"),
        ({"messages": QA, "tools": "{"}, "bad_tools", "JSON"),
        ({"messages": [*QA, "x"]}, "unknown_format", "message 2"),
    ],
)
def test_what_is_not_understood_is_rejected_by_name(row, reason, detail):
    with pytest.raises(RowRejected) as caught:
        parse_row(row)
    assert caught.value.rejection.reason == RejectReason(reason)
    assert detail in caught.value.rejection.detail


def test_origin_is_carried():
    assert parse_row({"messages": QA, "origin": "greedy"})[0].origin == "greedy"
    assert parse_row({"messages": QA, "origin": "web"})[0].origin == "data"


def test_near_copies_share_their_conversation():
    rows = [{"prompt": p, "completion": "A"} for p in ("Who  are you?", "who are\nyou?", "Who is she?")]
    first, second, other = (conversation_digest(parse_row(row)[0]) for row in rows)
    assert first == second != other


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["role", "from", "content", "value", "messages", "conversations", "prompt", "answer", "type",
                         "tool_calls", "function", "name", "arguments", "tools", "instruction", "output", "text"]),
        inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


FIELDS = ["messages", "conversations", "prompt", "completion", "tools", "instruction", "output", "instances", "history",
          "question", "answer"]  # fmt: skip


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
def test_any_object_is_a_conversation_or_a_rejection(row):
    row, _ = repair_unicode(row)
    conversations = []
    with contextlib.suppress(RowRejected):
        conversations = parse_row(row)
    for conversation in conversations:
        assert all(isinstance(m["content"], str) for m in conversation.messages)
        assert any(conversation.trained) or any(m["role"] == "assistant" for m in conversation.messages)
        json.dumps(conversation.messages).encode()
