from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from operators.joblog import CHUNKS, LINE_CHARACTERS, JobLog


class Scripted:
    """A launcher whose log arrives in given pieces."""

    name = "scripted"

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def logs(self, name: str, cursor: str = "") -> tuple[bytes, str]:
        position = int(cursor or 0)
        return (self.pieces[position], str(position + 1)) if position < len(self.pieces) else (b"", cursor)


def forwarded(pieces: list[bytes]) -> list[str]:
    lines: list[str] = []
    JobLog(Scripted(pieces), "job", lines.append).forward(final=True)
    return lines


@given(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=50), st.data())
def test_lines_are_whole_however_the_bytes_are_cut(text, data):
    whole = f"{text}\nß {text}".encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True) if a < b]
    assert forwarded(pieces) == [text, f"ß {text}"]


@given(st.lists(st.binary(min_size=1), max_size=8))
def test_any_bytes_pass(pieces):
    whole = b"".join(pieces)
    assert len(forwarded(pieces)) == whole.count(b"\n") + (not whole.endswith(b"\n") and bool(whole))


def test_line_is_cut_with_its_length():
    lines = forwarded([b"x" * 1_000_000] * 5 + [b"\nnext"])
    assert lines[0] == "x" * LINE_CHARACTERS + " … (5,000,000 characters; all of it is in the job's log)"
    assert lines[1] == "next"


def test_progress_bar_shows_its_last_state():
    assert forwarded([b"10%\r50%\r100%\nend\r\n"]) == ["100%", "end"]


def test_unfinished_line_waits_and_a_flood_does_not_hold_up():
    lines: list[str] = []
    log = JobLog(Scripted([b"half"] + [b"more\n"] * 100), "job", lines.append)
    log.forward()
    assert lines == ["halfmore"] + ["more"] * (CHUNKS - 2)
    log.forward(final=True)
    assert len(lines) == 100
