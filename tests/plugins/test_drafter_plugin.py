"""The plugin as Airflow loads it: a file executed under its stem."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from airflow.plugins_manager import AirflowPlugin

from operators.container import ContainerTaskOperator

FILE = Path(__file__).resolve().parents[2] / "plugins" / "drafter_plugin.py"


def test_plugin_registers_the_links_of_the_operator():
    spec = importlib.util.spec_from_file_location(FILE.stem, FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    plugin = module.DrafterPlugin
    assert issubclass(plugin, AirflowPlugin)
    plugin.validate()
    registered = {type(link) for link in plugin.operator_extra_links}
    assert registered == {type(link) for link in ContainerTaskOperator.operator_extra_links}


def test_plugin_files_replace_no_module():
    """Airflow puts each plugin file into `sys.modules` under its stem: a `yaml.py` would replace PyYAML."""
    stems = [path.stem for path in FILE.parent.glob("*.py")]
    assert stems
    assert all(importlib.util.find_spec(stem) is None for stem in stems)
