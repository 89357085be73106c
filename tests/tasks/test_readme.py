"""The README's table of parameters is the code's."""

from pathlib import Path

from tasks.parameters import markdown_table

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_table_of_parameters_is_the_generated_one():
    text = README.read_text()
    start, end = text.index("; a test compares -->\n"), text.index("<!-- /parameters -->")
    assert text[start:end].partition("\n")[2].strip() == markdown_table().strip()
