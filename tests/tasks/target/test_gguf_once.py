"""One parse of a GGUF file for all that transformers reads from it."""

from __future__ import annotations

import pytest

gguf = pytest.importorskip("gguf")


def test_a_file_is_parsed_once_inside_and_anew_outside(tmp_path, monkeypatch):
    from tasks.target.gguf_once import gguf_parsed_once

    parsed: list[str] = []

    class Reader:
        def __init__(self, path: str, mode: str = "r") -> None:
            parsed.append(path)

    monkeypatch.setattr(gguf, "GGUFReader", Reader)
    one, other = str(tmp_path / "one.gguf"), str(tmp_path / "other.gguf")
    with gguf_parsed_once():
        assert gguf.GGUFReader(one) is gguf.GGUFReader(tmp_path / "one.gguf")
        gguf.GGUFReader(other)
        assert parsed == [one, other]
    assert gguf.GGUFReader is Reader
    gguf.GGUFReader(one)
    assert parsed == [one, other, one]
