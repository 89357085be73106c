"""Which folder may import what (design, section 2): by the syntax trees, and by what a fresh interpreter has loaded."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = {"torch", "transformers", "mlflow", "safetensors"}
OURS = {"dags", "operators", "plugins", "tasks"}
STANDARD = set(sys.stdlib_module_names)

# What the modules of a folder must not import at module level; what they must not import at all; and, of ours and of
# the rest, all that they may import at module level (None: no such list).
RULES: dict[str, tuple[set[str], set[str], set[str] | None]] = {
    "tasks/contract": (set(), HEAVY | {"airflow", "boto3", "dags", "operators", "plugins"}, STANDARD | {"pydantic"}),
    "tasks/storage": (set(), HEAVY | {"airflow", "dags", "operators", "plugins"}, None),
    "tasks": (set(), {"airflow", "dags", "operators", "plugins"}, None),
    "operators": (HEAVY, {"torch", "transformers", "dags", "plugins"}, None),
    "dags": (HEAVY, {"torch", "transformers", "plugins"}, None),
    "plugins": (HEAVY, {"torch", "transformers", "dags"}, None),
}
# The task side that the Airflow side may use.
SHARED = ("tasks.contract", "tasks.storage")


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path: Path, *, everywhere: bool) -> Iterator[str]:
    """Modules that a file imports; those under `if TYPE_CHECKING` never run and do not count."""
    pending: list[ast.AST] = [ast.parse(path.read_text(), filename=str(path))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            pending += node.orelse
        elif everywhere or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending += ast.iter_child_nodes(node)


@pytest.mark.parametrize("folder", list(RULES))
def test_folder_imports_only_what_it_may(folder):
    at_module_level, at_all, allowed = RULES[folder]
    broken = []
    for path in files(folder):
        where = path.relative_to(ROOT)
        for name in imports(path, everywhere=True):
            if name.partition(".")[0] in at_all:
                broken.append(f"{where} imports {name}")
        for name in imports(path, everywhere=False):
            top = name.partition(".")[0]
            if top in at_module_level:
                broken.append(f"{where} imports {name} at module level")
            if allowed is not None and top not in {*allowed, "tasks"}:
                broken.append(f"{where} imports {name}")
    assert broken == []


def test_contract_imports_nothing_else_of_tasks():
    for path in files("tasks/contract"):
        for name in imports(path, everywhere=True):
            if name.startswith("tasks"):
                assert name.startswith("tasks.contract"), f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("folder", ["operators", "dags", "plugins"])
def test_airflow_side_takes_only_contract_and_storage_of_tasks(folder):
    for path in files(folder):
        for name in imports(path, everywhere=True):
            if name.partition(".")[0] == "tasks" and name != "tasks":
                assert name.startswith(SHARED), f"{path.relative_to(ROOT)} imports {name}"


def test_rules_catch_what_they_are_for(tmp_path):
    """A rule that cannot fail protects nothing."""
    file = tmp_path / "module.py"
    file.write_text(
        "import torch.nn\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import mlflow\n"
        "class A:\n    import airflow\ndef f():\n    from tasks import stages\n"
    )
    assert {"torch.nn", "airflow"} <= set(imports(file, everywhere=False))
    assert "mlflow" not in set(imports(file, everywhere=True))
    assert "tasks.stages" in set(imports(file, everywhere=True)) - set(imports(file, everywhere=False))


def test_tasks_package_costs_nothing():
    assert (ROOT / "tasks" / "__init__.py").read_text() == ""


def test_docker_folder_shadows_no_package():
    """With the project's root on the path, any Python file in it would hide docker-py."""
    assert list((ROOT / "docker").rglob("*.py")) == []


def loaded(code: str, tmp_path: Path) -> set[str]:
    """Top-level modules of a fresh interpreter after `code`."""
    script = f"{code}\nimport sys; print('LOADED', *sorted({{name.partition('.')[0] for name in sys.modules}}))"
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "AIRFLOW_HOME": str(tmp_path),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    }
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    return set(done.stdout.rpartition("LOADED")[2].split())


def test_contract_and_storage_load_no_heavy_library(tmp_path):
    modules = " ".join(
        f"import {'.'.join(path.relative_to(ROOT).with_suffix('').parts)};".replace(".__init__", "")
        for folder in ("tasks/contract", "tasks/storage")
        for path in files(folder)
    )
    found = loaded(modules, tmp_path)
    assert "pydantic" in found
    assert not found & (HEAVY | {"airflow", "numpy"})


@pytest.mark.skipif(importlib.util.find_spec("airflow") is None, reason="needs the Airflow environment")
def test_loading_all_dags_loads_no_heavy_library(tmp_path):
    code = (
        "from airflow.dag_processing.dagbag import DagBag\n"
        f"bag = DagBag({str(ROOT / 'dags')!r})\n"
        "assert bag.import_errors == {}, bag.import_errors\n"
        "assert 'train_drafter' in bag.dags\n"
        "import docker; assert hasattr(docker, 'DockerClient'), docker\n"
    )
    assert not loaded(code, tmp_path) & (HEAVY | {"torch", "numpy"})
