"""Why a row, or a sample made of it, is not trained on. The reasons are an enumeration: reports count by them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RejectReason(StrEnum):
    """Every reason for which `tokenize` and `assemble` leave something out."""

    # the row cannot be read
    BAD_ENCODING = "bad_encoding"  # not UTF-8
    BAD_JSON = "bad_json"
    NOT_AN_OBJECT = "not_an_object"  # JSON, but not an object
    # the row is no conversation that can be trained on
    UNKNOWN_FORMAT = "unknown_format"
    UNKNOWN_ROLE = "unknown_role"
    UNSUPPORTED_CONTENT = "unsupported_content"  # an image, say
    BAD_TOOL_CALL = "bad_tool_call"
    BAD_TOOLS = "bad_tools"
    CONSECUTIVE_USER_TURNS = "consecutive_user_turns"
    NO_ANSWER = "no_answer"
    # the target's template cannot say it
    TEMPLATE_ERROR = "template_error"  # the template raises
    TEMPLATE_REWRITES_PROMPT = "template_rewrites_prompt"  # the turn's render does not start with its prompt's
    TEMPLATE_ALTERS_ANSWER = "template_alters_answer"  # the answer, or one of its tool calls, is not in the render
    MARKERS_DISAGREE = "markers_disagree"  # the answer is outside the template's own generation markers
    CONTROL_TOKEN_IN_ANSWER = "control_token_in_answer"  # the target would have stopped inside
    # nothing is left to train on
    NO_SUPERVISED_TOKENS = "no_supervised_tokens"
    TOO_SHORT = "too_short"  # no anchor with a supervised token after it
    # found when all sources are put together
    MASK_TOKEN_IN_SAMPLE = "mask_token_in_sample"
    HELD_OUT_PROMPT = "held_out_prompt"  # a training sample asks what is held out for measuring
    SAMPLE_LIMIT = "sample_limit"


@dataclass(frozen=True)
class Rejection:
    """One reason with what was found."""

    reason: RejectReason
    detail: str


class RowRejected(Exception):
    """Raised while a row is taken apart; becomes a `Rejection` with the row's line number."""

    def __init__(self, reason: RejectReason, detail: str) -> None:
        self.rejection = Rejection(reason, detail)
        super().__init__(f"{reason}: {detail}")
