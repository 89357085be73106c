from __future__ import annotations

import pytest
import torch

from tasks.contract.errors import DecodingMismatch
from tasks.decoding.greedy import greedy_decode
from tasks.decoding.losslessness import check_exact, check_within_margin
from tests.tasks.decoding.families import VOCAB, prompt, tiny_target


def test_equal_texts_pass() -> None:
    assert check_exact("p", 10, [1, 2, 3], [1, 2, 3]).equal


@pytest.mark.parametrize(
    ("found", "expected", "message"),
    [
        ([1, 9, 3], [1, 2, 3], r"prompt p7: answer token 1 \(position 11\) is token 9 .* and token 2 in plain"),
        (
            [1, 2],
            [1, 2, 3],
            r"answer token 2 \(position 12\) is nothing \(the text has ended\) .* token 3 in plain",
        ),
        (
            [1, 2, 3],
            [1, 2],
            r"answer token 2 \(position 12\) is token 3 .* nothing \(the text has ended\) in plain",
        ),
    ],
)
def test_a_difference_names_prompt_position_and_both_tokens(
    found: list[int], expected: list[int], message: str
) -> None:
    with pytest.raises(DecodingMismatch, match=message):
        check_exact("p7", 10, found, expected)


def test_teacher_forcing_passes_bfloat16_and_names_a_wrong_token() -> None:
    """ACC-12: in bfloat16 each token is the first choice or a near tie; anything else is a fault."""
    target, prompt_ids = tiny_target("qwen3", dtype=torch.bfloat16), prompt(12)
    plain = greedy_decode(target, prompt_ids, max_new_tokens=20).tokens
    check = check_within_margin(target, "p7", prompt_ids, plain, plain)
    assert check.equal
    assert check.largest_gap <= check.margin
    wrong = [*plain[:6], (plain[6] + 1) % VOCAB, *plain[7:]]
    message = rf"prompt p7: answer token 6 \(position 18\) is {wrong[6]} .* {plain[6]} in a plain forward"
    with pytest.raises(DecodingMismatch, match=message):
        check_within_margin(target, "p7", prompt_ids, wrong, plain)


def test_near_ties_are_counted() -> None:
    target, prompt_ids = tiny_target("qwen3"), prompt(12)
    with torch.inference_mode():
        logits = target.model(torch.tensor([prompt_ids])).logits[0, -1]
    first, second = logits.topk(2).indices.tolist()
    gap = float(logits[first] - logits[second])
    share = gap / float(logits.abs().max())
    check = check_within_margin(target, "p", prompt_ids, [second], [first], relative_margin=share * 1.01)
    assert (check.equal, check.near_ties) == (False, 1)
    assert check.largest_gap == pytest.approx(gap, rel=1e-4)
    with pytest.raises(DecodingMismatch, match="logits apart"):
        check_within_margin(target, "p", prompt_ids, [second], [first], relative_margin=share * 0.9)
