"""RunSpec, presets and the content keys made from them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.contract.errors import ConfigurationError
from tasks.contract.presets import PRESETS, spec_from_form
from tasks.contract.receipt import ReceiptRef
from tasks.contract.spec import SECTIONS, RunSpec, field_section, field_stages
from tasks.contract.stages import STAGES, stage_key
from tasks.parameters import markdown_table


def ref(identity: str, digest: str = "d" * 64) -> ReceiptRef:
    return ReceiptRef(kind="target", key=identity, identity=identity, digest=digest)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_a_legal_spec(preset):
    spec = spec_from_form({"preset": preset})
    assert RunSpec(**json.loads(spec.model_dump_json())) == spec


def test_every_field_has_a_section_and_known_stages():
    for name, info in RunSpec.model_fields.items():
        assert field_section(info) in SECTIONS, name
        assert set(field_stages(info)) <= set(STAGES), name
        assert info.title, name
        assert info.description, name


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"blokc_size": 9}, "did you mean 'block_size'"),
        ({"block_size": 1}, "block_size: found 1"),
        ({"block_size": 16.5}, "block_size: found 16.5"),
        ({"validation_share": 0}, "validation_share: found 0"),
        ({"validation_share": 1}, "validation_share: found 1"),
        ({"validation_share": "0,05"}, "validation_share: found '0,05'"),
        ({"layer_ids": []}, "layer_ids: found"),
        ({"layer_ids": [1, 1]}, "layer_ids: found"),
        ({"layer_ids": [-1]}, "layer_ids: found"),
        ({"learning_rate": 0}, "learning_rate: found 0"),
        ({"states_dtype": "float16"}, "states_dtype: found 'float16'"),
        ({"sources": []}, "sources: found"),
        ({"draft_layers": 2, "sliding_layers": 3}, "sliding_layers"),
        ({"preset": "dmeo"}, "preset: found 'dmeo'"),
    ],
)
def test_wrong_values_are_refused_with_their_field(values, message):
    with pytest.raises(ConfigurationError, match=message):
        spec_from_form(values)


def test_all_wrong_fields_are_reported_together():
    with pytest.raises(ConfigurationError) as caught:
        spec_from_form({"block_size": 1, "validation_share": 1, "seed": -1})
    assert sorted(p.field for p in caught.value.problems) == ["block_size", "seed", "validation_share"]


def test_null_means_as_in_the_preset():
    spec = spec_from_form({"preset": "reference", "block_size": None, "learning_rate": 0.0003})
    assert (spec.block_size, spec.learning_rate, spec.draft_layers) == (16, 0.0003, 5)


EXECUTION = [name for name, info in RunSpec.model_fields.items() if not field_stages(info)]


@given(st.sampled_from(sorted(STAGES)))
def test_execution_fields_never_change_a_key(stage):
    if STAGES[stage].per_run:
        return
    changed = RunSpec(device="cpu", extract_groups=7, extract_batch_tokens=99, store="/elsewhere", checkpoint_steps=1)
    assert stage_key(stage, changed, {}) == stage_key(stage, RunSpec(), {})


def test_semantic_fields_change_the_keys_of_their_stages_and_of_no_other():
    base, changed = RunSpec(), RunSpec(layer_ids=[1, 2])
    differing = {s for s, d in STAGES.items() if not d.per_run and stage_key(s, base, {}) != stage_key(s, changed, {})}
    assert differing == {"extract", "states", "smoke", "reference", "train"}


def test_inputs_and_arguments_go_into_the_key():
    spec = RunSpec()
    keys = {
        stage_key("tokenize", spec, {"target": [ref("a")]}, {"files": [1]}),
        stage_key("tokenize", spec, {"target": [ref("b")]}, {"files": [1]}),
        stage_key("tokenize", spec, {"target": [ref("a")]}, {"files": [2]}),
    }
    assert len(keys) == 3
    assert len(next(iter(keys))) == 32


def test_judging_stages_take_the_bytes_and_others_the_identity():
    spec = RunSpec()
    one, other = ref("a", "0" * 64), ref("a", "1" * 64)
    assert stage_key("train", spec, {"target": [one]}) == stage_key("train", spec, {"target": [other]})
    assert stage_key("verify", spec, {"extract": [one]}) != stage_key("verify", spec, {"extract": [other]})


def test_per_run_stages_need_the_run():
    with pytest.raises(ValueError, match="run id"):
        stage_key("plan", RunSpec(), {})
    assert stage_key("plan", RunSpec(), {}, run_id="a") != stage_key("plan", RunSpec(), {}, run_id="b")


def test_an_input_the_stage_does_not_take_is_refused():
    with pytest.raises(ValueError, match="takes inputs"):
        stage_key("extract", RunSpec(), {"check": [ref("a")]})


def test_the_table_of_parameters_has_every_field():
    table = markdown_table()
    for name in RunSpec.model_fields:
        assert f"| `{name}` |" in table
