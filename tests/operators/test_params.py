"""The trigger form: every value a person may give, and the ones the form must refuse (ORC-22)."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
from airflow.sdk import Param
from airflow.sdk.exceptions import ParamValidationError

from operators.params import form_params
from tasks.contract.presets import PRESETS
from tasks.contract.spec import SECTIONS, RunSpec, field_section

FORM = form_params()


def accept(name: str, value: Any) -> Any:
    return copy.copy(FORM[name]).resolve(value)


def test_form_is_the_preset_and_every_field_in_order():
    assert list(FORM) == ["preset", *RunSpec.model_fields]
    assert accept("preset", "reference") == "reference"
    with pytest.raises(ParamValidationError):
        accept("preset", "nonesuch")


@pytest.mark.parametrize("name", list(RunSpec.model_fields))
def test_field_may_be_empty_and_takes_the_default_and_every_presets_value(name):
    assert FORM[name].resolve() is None
    values = [RunSpec.model_fields[name].default, *(preset[name] for preset in PRESETS.values() if name in preset)]
    for value in [None, *values]:
        assert accept(name, value) == value


@pytest.mark.parametrize("name", list(RunSpec.model_fields))
def test_field_has_what_the_form_shows(name):
    schema = FORM[name].schema
    assert "anyOf" not in schema
    assert schema["type"][0] == "null"
    assert len(schema["type"]) == 2
    assert schema["title"]
    assert "Default: " in schema["description_md"]
    assert schema["section"] == field_section(RunSpec.model_fields[name])
    assert schema["section"] in SECTIONS


def test_description_says_what_other_presets_use():
    assert FORM["block_size"].schema["description_md"].endswith("Default: `4`; reference: `16`.")
    assert "Default: resolved by `plan`." in FORM["layer_ids"].schema["description_md"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", 6e-4),
        ("learning_rate", 1),
        ("validation_share", 0.05),
        ("layer_ids", [1, 16, 31]),
        ("sources", ["s3://bucket/chats/*.jsonl#slice=code", "sample:x"]),
        ("thinking", "on"),
        ("trust_remote_code", True),
        ("target", "Qwen/Qwen3.6-27B"),
    ],
)
def test_good_values_arrive_as_they_are(name, value):
    found = accept(name, value)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", "0.05"),
        ("learning_rate", 0),
        ("learning_rate", 1.5),
        ("validation_share", 0),
        ("validation_share", 1),
        ("validation_share", "0.05"),
        ("block_size", 1),
        ("block_size", -1),
        ("block_size", 8.5),
        ("block_size", 65),
        ("layer_ids", []),
        ("layer_ids", [1, 1]),
        ("layer_ids", ["1"]),
        ("layer_ids", "1, 16"),
        ("sources", []),
        ("sources", "one"),
        ("thinking", "maybe"),
        ("model_name", "a/b"),
        ("target", ""),
        ("max_samples", 1),
        ("trust_remote_code", "yes"),
        ("device", "tpu"),
    ],
)
def test_wrong_values_are_refused_in_the_form(name, value):
    with pytest.raises(ParamValidationError):
        accept(name, value)


def test_every_limit_of_the_spec_is_in_the_form():
    limits = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "minItems", "pattern", "enum"}
    for name, schema in RunSpec.model_json_schema()["properties"].items():
        for part in schema.get("anyOf", [schema]):
            for limit in limits & set(part):
                stated = FORM[name].schema[limit]
                assert (set(stated) - {None} == set(part[limit])) if limit == "enum" else stated == part[limit], name


def test_arrays_choose_the_right_input():
    """Strings: one a line. `examples` would turn it into a list that takes nothing else. Numbers: a JSON field."""
    assert FORM["sources"].schema["items"] == {"type": "string"}
    assert "examples" not in FORM["sources"].schema
    assert FORM["layer_ids"].schema["items"] == {"type": "integer"}


def test_form_survives_serialization():
    for name, param in FORM.items():
        stored = json.loads(json.dumps(param.serialize()))
        again = Param.deserialize(stored, version=1)
        assert again.schema == param.schema, name
        assert not re.search("NaN|Infinity", json.dumps(stored))
