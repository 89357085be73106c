"""The table of parameters, generated from `RunSpec`: what the README shows."""

from __future__ import annotations

from typing import Any

from tasks.contract.presets import PRESETS
from tasks.contract.spec import SECTIONS, RunSpec, field_section


def markdown_table() -> str:
    """Markdown: one table a section, a row a field with its default and what it means."""
    reference = PRESETS["reference"]
    lines: list[str] = []
    for section in SECTIONS:
        lines += [f"**{section}**", "", "| parameter | default (demo) | reference | meaning |", "|---|---|---|---|"]
        for name, info in RunSpec.model_fields.items():
            if field_section(info) == section:
                other = _cell(reference[name]) if name in reference else "same"
                lines.append(f"| `{name}` | {_cell(info.default)} | {other} | {info.description} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return "<br>".join(f"`{item}`" for item in value)
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
