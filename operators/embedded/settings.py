"""Where the embedded services keep their state, their generated credentials, and the environment of each.

Nothing here is constant that should be secret: access keys, passwords and signing keys are drawn at the first start and
kept in files of mode 0600. They reach processes through the environment or those files, never the command line.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from operators.embedded.errors import EmbeddedError
from operators.embedded.ports import LOOPBACK, resolve
from operators.embedded.processes import MARKER, ProcessStat, owned, read_records

PROJECT = Path(__file__).resolve().parents[2]
ADMIN = "admin"
REGION = "us-east-1"
ARTIFACT_BUCKET, MLFLOW_BUCKET = "drafters", "mlflow"
GPU_POOL = "gpu"
# What a caller has set for another Airflow, MLflow or S3 must not reach ours: a migration of somebody's production
# database, say. AWS_CA_BUNDLE only says whom to trust.
_FOREIGN = ("AIRFLOW", "_AIRFLOW", "MLFLOW_", "AWS_", "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV")
_KEPT = ("AWS_CA_BUNDLE",)
_CREATED = "created-by-drafter-pipeline"
_OVERRIDE = "DRAFTER_AIRFLOW__"  # DRAFTER_AIRFLOW__SECTION__KEY becomes AIRFLOW__SECTION__KEY


@dataclass(frozen=True)
class Credentials:
    """Everything secret, and the marker by which our processes are known."""

    instance: str
    s3_access_key: str
    s3_secret_key: str
    airflow_password: str
    airflow_fernet_key: str
    airflow_jwt_secret: str
    airflow_secret_key: str

    @classmethod
    def generate(cls) -> Self:
        """Fresh ones, from the system's random source."""
        return cls(
            instance=secrets.token_hex(16),
            s3_access_key=secrets.token_hex(10),
            s3_secret_key=secrets.token_hex(20),
            airflow_password=secrets.token_urlsafe(15),
            airflow_fernet_key=base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
            airflow_jwt_secret=secrets.token_urlsafe(48),
            airflow_secret_key=secrets.token_urlsafe(32),
        )


@dataclass(frozen=True)
class Home:
    """The state folder."""

    path: Path

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self:
        """`.drafter/` in the project, or DRAFTER_HOME."""
        given = environment.get("DRAFTER_HOME")
        return cls(Path(given).expanduser().absolute() if given else PROJECT / ".drafter")

    @property
    def credentials_file(self) -> Path:
        """Everything secret; its presence means that this is a state folder."""
        return self.path / "credentials.json"

    @property
    def ports_file(self) -> Path:
        """The ports chosen."""
        return self.path / "ports.json"

    @property
    def records(self) -> Path:
        """Folder of the process records."""
        return self.path / "processes"

    @property
    def logs(self) -> Path:
        """Folder of what the services print."""
        return self.path / "logs"

    @property
    def airflow(self) -> Path:
        """AIRFLOW_HOME: database, task logs, passwords."""
        return self.path / "airflow"

    @property
    def mlflow(self) -> Path:
        """Folder of MLflow's database."""
        return self.path / "mlflow"

    @property
    def s3(self) -> Path:
        """Folder of the objects in S3."""
        return self.path / "s3"

    @property
    def passwords_file(self) -> Path:
        """Airflow's users and passwords."""
        return self.airflow / "passwords.json"

    def create(self) -> None:
        """Make the folder, readable by its owner only: logs and databases stand in it."""
        if not self.path.exists():
            self.path.mkdir(parents=True, mode=0o700)
            (self.path / _CREATED).touch()
        for folder in (self.records, self.logs, self.airflow, self.mlflow, self.s3, self.path / "run"):
            folder.mkdir(exist_ok=True)

    def is_created_by_us(self) -> bool:
        """Whether the folder was not there before the first start, so that nothing else can stand in it."""
        return (self.path / _CREATED).exists()

    def read_credentials(self) -> Credentials | None:
        """Those drawn at the first start; None before it."""
        if not self.credentials_file.exists():
            return None
        return Credentials(**json.loads(self.credentials_file.read_text()))

    def processes(self) -> dict[int, ProcessStat]:
        """Every running process of these services, by pid."""
        credentials = self.read_credentials()
        if credentials is None:
            return {}
        return owned(read_records(self.records).values(), credentials.instance, self.path)


def write_private(path: Path, text: str) -> None:
    """Write a file of mode 0600, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    temporary.replace(path)


@dataclass(frozen=True)
class Settings:
    """One set of embedded services."""

    home: Home
    ports: dict[str, int]
    credentials: Credentials
    dags_folder: Path
    tasks_python: Path
    gpu_slots: int
    inherited: dict[str, str]  # the caller's environment, without what is meant for other deployments
    overrides: dict[str, str]  # AIRFLOW__... settings of the caller's

    @classmethod
    def load(cls, environment: Mapping[str, str]) -> Self:
        """Read the state folder, creating it and what is missing in it.

        Raises:
            PortTaken: if a port that the caller named is held by another process.
            EmbeddedError: if a variable has no usable value.
        """
        home = Home.of(environment)
        home.create()
        credentials = home.read_credentials()
        if credentials is None:
            credentials = Credentials.generate()
            write_private(home.credentials_file, json.dumps(asdict(credentials), indent=1))
        return cls._of(home, credentials, resolve(home.ports_file, environment, home.processes()), environment)

    @classmethod
    def recorded(cls, environment: Mapping[str, str]) -> Self:
        """As of the last start; chooses and writes nothing.

        Raises:
            EmbeddedError: if there was no start.
        """
        home = Home.of(environment)
        credentials = home.read_credentials()
        if credentials is None or not home.ports_file.exists():
            raise EmbeddedError(f"nothing was started from {home.path} yet: run `make up`")
        return cls._of(home, credentials, json.loads(home.ports_file.read_text()), environment)

    @classmethod
    def _of(cls, home: Home, credentials: Credentials, ports: dict[str, int], environment: Mapping[str, str]) -> Self:
        return cls(
            home=home,
            ports=ports,
            credentials=credentials,
            dags_folder=Path(environment.get("DRAFTER_DAGS_FOLDER") or PROJECT / "dags").absolute(),
            tasks_python=Path(environment.get("DRAFTER_TASKS_PYTHON") or PROJECT / ".venv/tasks/bin/python").absolute(),
            gpu_slots=_gpu_slots(environment),
            inherited=_inherited(environment),
            overrides={
                name.removeprefix("DRAFTER_"): value
                for name, value in environment.items()
                if name.startswith(_OVERRIDE)
            },
        )

    @property
    def airflow_url(self) -> str:
        """Address of Airflow: interface and API."""
        return f"http://{LOOPBACK}:{self.ports['airflow']}"

    @property
    def mlflow_url(self) -> str:
        """Address of MLflow."""
        return f"http://{LOOPBACK}:{self.ports['mlflow']}"

    @property
    def s3_url(self) -> str:
        """Endpoint of the S3 server."""
        return f"http://{LOOPBACK}:{self.ports['s3']}"

    @property
    def store_root(self) -> str:
        """Root of the artifact store."""
        return f"s3://{ARTIFACT_BUCKET}/pipeline"

    def s3_environment(self) -> dict[str, str]:
        """How boto3 reaches the S3 server."""
        return {
            "AWS_ENDPOINT_URL_S3": self.s3_url,
            "AWS_ACCESS_KEY_ID": self.credentials.s3_access_key,
            "AWS_SECRET_ACCESS_KEY": self.credentials.s3_secret_key,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def pipeline_environment(self) -> dict[str, str]:
        """What a stage needs to work with these services; also right for `python -m tasks` by hand."""
        return {
            **self.s3_environment(),
            "DRAFTER_STORE": self.store_root,
            "DRAFTER_HOME": str(self.home.path),
            "DRAFTER_LAUNCHER": "process",
            "DRAFTER_GPU_SLOTS": str(self.gpu_slots),
            "DRAFTER_TASKS_PYTHON": str(self.tasks_python),
            "MLFLOW_TRACKING_URI": self.mlflow_url,
        }

    def base_environment(self) -> dict[str, str]:
        """Common to all services."""
        return {MARKER: self.credentials.instance, "PYTHONUNBUFFERED": "1"}

    def mlflow_environment(self) -> dict[str, str]:
        """Of the tracking server. It serves artifacts itself, so clients need no key of its bucket."""
        return {
            **self.base_environment(),
            **self.s3_environment(),
            "MLFLOW_S3_ENDPOINT_URL": self.s3_url,
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # its job workers are for LLM evaluation: not used here
        }

    def airflow_environment(self) -> dict[str, str]:
        """Of all Airflow processes, hence of the tasks that they run."""
        home, credentials = self.home.airflow, self.credentials
        return {
            **self.base_environment(),
            **self.pipeline_environment(),
            "PYTHONPATH": str(PROJECT),
            "AIRFLOW_HOME": str(home),
            "AIRFLOW__CORE__DAGS_FOLDER": str(self.dags_folder),
            "AIRFLOW__CORE__PLUGINS_FOLDER": str(PROJECT / "plugins"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
            "AIRFLOW__CORE__PARALLELISM": "4",  # so many workers are forked at start, about 130 MB each
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{self.airflow_url}/execution/",
            "AIRFLOW__CORE__FERNET_KEY": credentials.airflow_fernet_key,
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": f"{ADMIN}:admin",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(self.home.passwords_file),
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home / 'airflow.db'}",
            "AIRFLOW__API__HOST": LOOPBACK,
            "AIRFLOW__API__PORT": str(self.ports["airflow"]),
            "AIRFLOW__API__BASE_URL": self.airflow_url,
            "AIRFLOW__API__WORKERS": "1",
            "AIRFLOW__API__SECRET_KEY": credentials.airflow_secret_key,
            "AIRFLOW__API_AUTH__JWT_SECRET": credentials.airflow_jwt_secret,
            "AIRFLOW__FAB__ENABLE_PROXY_FIX": "False",
            "AIRFLOW__LOGGING__BASE_LOG_FOLDER": str(home / "logs"),
            # Logs are read from the folder that all processes share; nobody serves them over the network.
            "AIRFLOW__SCHEDULER__ENABLE_HEALTH_CHECK": "False",
            "AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_SERVER_HOST": LOOPBACK,
            # After `stop` in mid-run, tasks of the dead scheduler are taken up at once and not after five minutes.
            "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "30",
            "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "15",
            "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "60",
            "AIRFLOW__DAG_PROCESSOR__PARSING_PROCESSES": "1",
            "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
            **self.overrides,
        }

    def process_environment(self, own: Mapping[str, str]) -> dict[str, str]:
        """Complete environment of a service: the caller's, then the service's own."""
        return {**self.inherited, **own}

    def write_files(self) -> None:
        """Write the files through which services take their secrets."""
        write_private(self.home.passwords_file, json.dumps({ADMIN: self.credentials.airflow_password}))
        identity = {
            "name": "drafter-pipeline",
            "credentials": [{"accessKey": self.credentials.s3_access_key, "secretKey": self.credentials.s3_secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        write_private(self.home.path / "s3.json", json.dumps({"identities": [identity]}))


def _inherited(environment: Mapping[str, str]) -> dict[str, str]:
    kept = {
        name: value
        for name, value in environment.items()
        if name in _KEPT or not name.startswith((*_FOREIGN, _OVERRIDE))
    }
    local = ",".join(filter(None, [kept.get("NO_PROXY") or kept.get("no_proxy"), LOOPBACK, "localhost"]))
    return {**kept, "NO_PROXY": local, "no_proxy": local}


def _gpu_slots(environment: Mapping[str, str]) -> int:
    """Size of the pool `gpu`: DRAFTER_GPU_SLOTS, or the number of NVIDIA GPUs, at least 1."""
    given = environment.get("DRAFTER_GPU_SLOTS")
    if given:
        if not given.isdigit() or int(given) < 1:
            raise EmbeddedError(f"DRAFTER_GPU_SLOTS: found {given!r}; expected a number from 1")
        return int(given)
    return max(1, count_gpus())


def count_gpus() -> int:
    """NVIDIA GPUs of this host as nvidia-smi lists them; 0 without it."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
