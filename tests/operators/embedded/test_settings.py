from __future__ import annotations

import dataclasses
import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from operators.embedded import stack
from operators.embedded.errors import EmbeddedError
from operators.embedded.processes import MARKER
from operators.embedded.services import all_services
from operators.embedded.settings import PROJECT, Home, Settings


def load(tmp_path: Path, **variables: str) -> Settings:
    return Settings.load({"DRAFTER_HOME": str(tmp_path / "home"), "PATH": "/usr/bin", "HOME": "/root", **variables})


def test_credentials_are_drawn_once_and_private(tmp_path: Path) -> None:
    first, again = load(tmp_path), load(tmp_path)
    other = Settings.load({"DRAFTER_HOME": str(tmp_path / "other")})
    assert first.credentials == again.credentials
    for name, value in dataclasses.asdict(first.credentials).items():
        assert len(value) >= 20, name
        assert getattr(other.credentials, name) != value
    first.write_files()
    home = first.home
    for path in (home.credentials_file, home.passwords_file, home.path / "s3.json"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE(home.path.stat().st_mode) == 0o700
    assert json.loads(home.passwords_file.read_text()) == {"admin": first.credentials.airflow_password}


def test_no_secret_on_a_command_line_or_in_a_record(tmp_path: Path) -> None:
    settings = load(tmp_path)
    secrets = dataclasses.asdict(settings.credentials).values()
    for service in all_services(settings):
        line = " ".join(service.command)
        assert not [secret for secret in secrets if secret in line], service.name


def test_everything_listens_on_loopback_by_its_settings(tmp_path: Path) -> None:
    settings = load(tmp_path)
    by_name = {service.name: service for service in all_services(settings)}
    assert {"-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3.port.iceberg=0", "-s3.port.lance=0"} <= set(
        by_name["s3"].command
    )
    assert "--host=127.0.0.1" in by_name["mlflow"].command
    assert by_name["airflow-api-server"].environment["AIRFLOW__API__HOST"] == "127.0.0.1"
    for name in ("airflow-scheduler", "airflow-triggerer"):
        assert "--skip-serve-logs" in by_name[name].command


def test_settings_for_other_deployments_do_not_reach_ours(tmp_path: Path) -> None:
    foreign = {
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": "postgresql://production/airflow",
        "AIRFLOW_HOME": "/elsewhere",
        "AWS_PROFILE": "work",
        "AWS_ENDPOINT_URL": "https://s3.example.com",
        "MLFLOW_TRACKING_URI": "https://mlflow.example.com",
        "PYTHONPATH": "/elsewhere",
    }
    settings = load(tmp_path, **foreign, AWS_CA_BUNDLE="/ca.pem", SSL_CERT_FILE="/ca.pem")
    for service in all_services(settings):
        environment = settings.process_environment(service.environment)
        for name, value in foreign.items():
            assert environment.get(name) != value, (service.name, name)
        assert environment["AWS_CA_BUNDLE"] == environment["SSL_CERT_FILE"] == "/ca.pem"
        assert environment[MARKER] == settings.credentials.instance


def test_airflow_settings_can_be_overridden_by_name(tmp_path: Path) -> None:
    name = "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT"
    assert name not in load(tmp_path).airflow_environment()
    assert load(tmp_path, **{f"DRAFTER_{name}": "45"}).airflow_environment()[name] == "45"


def test_a_proxy_of_the_caller_is_not_used_for_our_services(tmp_path: Path) -> None:
    environment = load(tmp_path, HTTP_PROXY="http://proxy:3128", NO_PROXY="intranet").process_environment({})
    assert environment["NO_PROXY"] == environment["no_proxy"] == "intranet,127.0.0.1,localhost"


def test_tasks_get_what_the_stages_need(tmp_path: Path) -> None:
    settings = load(tmp_path, DRAFTER_GPU_SLOTS="3")
    environment = settings.airflow_environment()
    assert environment["DRAFTER_STORE"] == "s3://drafters/pipeline"
    assert environment["AWS_ENDPOINT_URL_S3"] == settings.s3_url
    assert environment["MLFLOW_TRACKING_URI"] == settings.mlflow_url
    assert environment["DRAFTER_TASKS_PYTHON"] == str(PROJECT / ".venv/tasks/bin/python")
    assert environment["DRAFTER_HOME"] == str(tmp_path / "home")
    assert (environment["DRAFTER_LAUNCHER"], environment["DRAFTER_GPU_SLOTS"]) == ("process", "3")


@pytest.mark.parametrize("slots", ["0", "two", "-1"])
def test_wrong_number_of_gpu_slots_is_refused(tmp_path: Path, slots: str) -> None:
    with pytest.raises(EmbeddedError, match="DRAFTER_GPU_SLOTS: found"):
        load(tmp_path, DRAFTER_GPU_SLOTS=slots)


def test_fingerprint_follows_the_settings_only(tmp_path: Path) -> None:
    first = {s.name: s.fingerprint() for s in all_services(load(tmp_path))}
    same = {s.name: s.fingerprint() for s in all_services(load(tmp_path, EDITOR="vi"))}
    other = {s.name: s.fingerprint() for s in all_services(load(tmp_path, DRAFTER_GPU_SLOTS="7"))}
    assert first == same
    changed = {name for name in first if first[name] != other[name]}
    assert changed == {name for name in first if name.startswith("airflow")}


def test_clean_removes_only_what_it_wrote(tmp_path: Path) -> None:
    own = {"DRAFTER_HOME": str(tmp_path / "own")}
    Settings.load(own).write_files()
    assert stack.clean(own)
    assert not (tmp_path / "own").exists()
    assert not stack.clean(own)

    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "thesis.txt").write_text("years of work")
    with pytest.raises(EmbeddedError, match=r"no credentials\.json"):
        stack.clean({"DRAFTER_HOME": str(shared)})
    Settings.load({"DRAFTER_HOME": str(shared)}).write_files()
    assert stack.clean({"DRAFTER_HOME": str(shared)})
    assert [path.name for path in shared.iterdir()] == ["thesis.txt"]


def test_status_and_stop_before_any_start(tmp_path: Path) -> None:
    environment = {"DRAFTER_HOME": str(tmp_path / "none")}
    assert stack.status(environment) == []
    assert stack.stop(environment) == 0
    assert not Home.of(environment).path.exists()


def test_stop_status_and_clean_need_the_standard_library_only(tmp_path: Path) -> None:
    """`make stop` works without the environments: isolated from all installed packages."""
    for command in ("status", "stop", "clean"):
        done = subprocess.run(
            [sys.executable, "-S", "-m", "operators.embedded", command],
            cwd=PROJECT,
            env={"DRAFTER_HOME": str(tmp_path / "none"), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
