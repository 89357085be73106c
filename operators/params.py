"""The trigger form, derived from `RunSpec`.

First `preset`, then every field as an optional override: empty means "as in the preset". So the form always opens
valid, and a Dag that also runs on a schedule has complete defaults.
"""

from __future__ import annotations

import json
from typing import Any, cast

from airflow.sdk import Param

from tasks.contract.presets import DEFAULT_PRESET, PRESETS, PURPOSES
from tasks.contract.spec import RunSpec, field_section

_LIMITS = (
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "pattern", "minItems",
)  # fmt: skip


def form_params() -> dict[str, Param]:
    """Parameters of the Dag, in the order of the form."""
    properties = RunSpec.model_json_schema()["properties"]
    return {"preset": _preset(), **{name: _override(name, properties[name]) for name in RunSpec.model_fields}}


def _preset() -> Param:
    lines = [f"- **{name}**: {PURPOSES[name]}" for name in PRESETS]
    return Param(
        DEFAULT_PRESET,
        type="string",
        enum=list(PRESETS),
        title="Preset",
        description_md="Starting point; every field below that is not empty overrides it.\n\n" + "\n".join(lines),
    )


def _override(name: str, schema: dict[str, Any]) -> Param:
    """One field as an optional override.

    pydantic writes an optional field as `anyOf: [T, null]`; the form chooses its input by `type` alone, so that becomes
    a list of types.
    """
    info = RunSpec.model_fields[name]
    kind = next((part for part in schema.get("anyOf", [schema]) if part.get("type") != "null"), schema)
    form: dict[str, Any] = {"type": ["null", kind["type"]]}
    form.update({limit: kind[limit] for limit in _LIMITS if limit in kind})
    if "enum" in kind:
        form["enum"] = [None, *kind["enum"]]  # JSON schema checks null against the enum too
        form["values_display"] = {"null": "as in the preset", **{value: value for value in kind["enum"]}}
    if kind["type"] == "array":
        form.update(_array(kind))
    elif "examples" in schema:  # of an array they would make a list that takes nothing else
        form["examples"] = schema["examples"]
    return Param(None, title=info.title, description_md=_description(name), section=field_section(info), **form)


def _array(kind: dict[str, Any]) -> dict[str, Any]:
    """Strings: one a line. Anything else: a JSON field, which the form chooses when `items` has another type."""
    items = kind["items"]
    if items["type"] == "string":
        return {"items": {"type": "string"}}
    return {"items": items, "minItems": kind.get("minItems", 1), "uniqueItems": True}


def _description(name: str) -> str:
    info = RunSpec.model_fields[name]
    default = "resolved by `plan`" if info.default is None else _shown(info.default)
    others = {preset: values[name] for preset, values in PRESETS.items() if name in values}
    stated = "; ".join([f"Default: {default}", *(f"{preset}: {_shown(value)}" for preset, value in others.items())])
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    examples = cast(list[Any], extra.get("examples", []))
    shown = f" Example: {_shown(examples[0])}." if examples else ""
    return f"{info.description}{shown}\n\n{stated}."


def _shown(value: Any) -> str:
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"
