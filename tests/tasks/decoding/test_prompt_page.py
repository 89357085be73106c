from __future__ import annotations

from pathlib import Path

import pytest

from tasks.decoding.acceptance import AcceptanceCount, Step
from tasks.decoding.diagnosis import diagnose
from tasks.decoding.figures import acceptance_by_slice, accepted_by_position, accepted_per_step
from tasks.decoding.prompt_page import Row, prompt_page, token_texts


class Bytes:
    """One token a byte of UTF-8, so that characters of several tokens occur."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        assert not skip_special_tokens
        return bytes(ids).decode("utf-8", errors="replace")


def test_every_byte_of_text_is_shown_once() -> None:
    text = "naïve 日本 <b>"
    pieces = token_texts(Bytes(), list(text.encode()))
    assert "".join(pieces) == text
    assert len(pieces) == len(text.encode())
    assert pieces[2:4] == ["", "ï"]  # a character of two tokens stands with the second


def test_text_is_escaped_and_coloured_by_who_wrote_it() -> None:
    answer = "x<i>&y"
    steps = [Step(5, 3, 3, 4), Step(9, 0, 0, 1)]
    page = prompt_page([Row("<id>", "<slice>", list(b"<script>"), list(answer.encode()), steps)], Bytes(), "title <1>")
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert (
        "<span class='target'>x</span><span class='draft'>&lt;i&gt;</span><span class='target'>&amp;</span>"
        "<span class='target'>y</span>" in page
    )
    assert "<td>2.50</td>" in page  # five tokens in two steps
    assert "&lt;slice&gt;" in page
    assert "title &lt;1&gt;" in page


def test_a_prompt_without_steps_has_a_row() -> None:
    assert "no step" in prompt_page([Row("p", "s", [65], [66], [])], Bytes(), "t")


def _count(accepted: int, prompts: int = 3) -> AcceptanceCount:
    count = AcceptanceCount(4)
    for _ in range(prompts):
        count.add_prompt([Step(0, 3, accepted, accepted + 1)] * 5)
    return count


def test_plots_are_written(tmp_path: Path) -> None:
    figures = [
        accepted_by_position(_count(2)),
        accepted_per_step(_count(2)),
        acceptance_by_slice({"code": _count(2), "chat": _count(0), "empty": AcceptanceCount(4)}),
    ]
    for index, figure in enumerate(figures):
        file = tmp_path / f"{index}.png"
        figure.savefig(file)
        assert file.read_bytes().startswith(b"\x89PNG")
    bars = figures[0].axes[0].patches
    assert [bar.get_height() for bar in bars] == [1.0, 1.0, 0.0]
    labels = [label.get_text() for label in figures[2].axes[0].get_yticklabels()]
    assert labels == ["chat (3 prompts)", "code (3 prompts)"]


@pytest.mark.parametrize(
    ("real", "replay", "verification", "found"),
    [
        (_count(0), _count(0), "block", ["acceptance length is 1.000, nearly 1.0"]),
        (_count(2), _count(3), "block", ["replay says 4.000 and real decoding 3.000"]),
        (_count(2), _count(2), "token", ["verified token by token"]),
        (_count(2), _count(2), "block", []),
    ],
)
def test_diagnosis(real: AcceptanceCount, replay: AcceptanceCount, verification: str, found: list[str]) -> None:
    """ACC-05, ACC-13: what would otherwise pass unnoticed is said."""
    lines = diagnose(real, replay, lossless_exact=True, verification=verification, slices=1)
    assert len(lines) == len(found)
    assert all(part in line for part, line in zip(found, lines, strict=True))
