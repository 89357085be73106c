"""The whole stack for end-to-end tests: S3, MLflow and Airflow, on free ports, from a state folder of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from operators.embedded import stack as embedded
from operators.embedded.airflow_client import AirflowClient
from operators.embedded.errors import EmbeddedError
from operators.embedded.ports import VARIABLES
from operators.embedded.services import airflow_client
from operators.embedded.settings import Settings
from tasks.storage import Store, open_store

HEARTBEAT = "DRAFTER_AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT"


@dataclass(frozen=True)
class Stack:
    """A running stack. `environment` is for subprocesses (stages by hand, clients); it holds the store's keys."""

    settings: Settings
    client: AirflowClient
    environment: dict[str, str]

    @property
    def airflow_url(self) -> str:
        return self.settings.airflow_url

    @property
    def mlflow_url(self) -> str:
        return self.settings.mlflow_url

    @property
    def store_root(self) -> str:
        return self.settings.store_root

    def store(self) -> Store:
        """The artifact store, connected. The test's own environment is left as it is."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.settings.s3_environment().items():
                patch.setenv(name, value)
            patch.delenv("AWS_PROFILE", raising=False)
            store = open_store(self.store_root)
            store.exists("connect")  # the client reads its keys now
        return store

    def rest(self, method: str, path: str, json: Any = None) -> Any:
        """Call Airflow's `/api/v2` + path as the administrator; ApiError says what it refuses."""
        return self.client.rest(method, path, json)


@pytest.fixture(scope="session")
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Started once per session, ended with everything below it. Logs of a failed session stay in its folder."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES.values()}
    environment["DRAFTER_HOME"] = str(tmp_path_factory.mktemp("stack") / "home")
    # Tests kill tasks: five minutes until Airflow notices are too long. Below one a loaded machine gives false alarms.
    environment.setdefault(HEARTBEAT, "60")
    # Tiny models: more threads only wait for each other, on a loaded machine for seconds a token.
    environment.setdefault("OMP_NUM_THREADS", "1")
    try:
        settings = embedded.up(environment)
    except EmbeddedError as error:
        if os.environ.get("DRAFTER_REQUIRE_SERVICES") == "1" or "make install" not in str(error):
            raise
        pytest.skip(f"the services are not installed: {error}")
    own = {**settings.base_environment(), **settings.pipeline_environment()}
    try:
        yield Stack(settings, airflow_client(settings), settings.process_environment(own))
    finally:
        if request.session.testsfailed:
            embedded.stop(environment, s3_grace_seconds=0.0)
            print(f"logs of the services and tasks: {environment['DRAFTER_HOME']}")
        else:
            embedded.clean(environment)
