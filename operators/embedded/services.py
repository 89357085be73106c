"""What each embedded service is: its command, its environment, and how to see that it works."""

from __future__ import annotations

import datetime
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from operators.embedded.airflow_client import AirflowClient, ApiError, request_json
from operators.embedded.errors import EmbeddedError
from operators.embedded.ports import GRPC_OFFSET, LOOPBACK
from operators.embedded.settings import ADMIN, ARTIFACT_BUCKET, GPU_POOL, MLFLOW_BUCKET, Settings

Check = Callable[[float], str | None]  # (time of the start) -> what is wrong, None if nothing
S3, MLFLOW, MIGRATION, API_SERVER = "s3", "mlflow", "airflow-migration", "airflow-api-server"
_LISTENERS_OF_AIRFLOW = ("airflow-scheduler", "airflow-dag-processor", "airflow-triggerer")


@dataclass(frozen=True)
class Service:
    """One process to start (or, for `once`, one command to run to its end)."""

    name: str
    title: str
    command: list[str]
    environment: Mapping[str, str]  # what is special to it; the caller's is added at the start
    check: Check
    after: tuple[str, ...] = ()
    once: bool = False
    address: str | None = None
    prepare: Callable[[], None] = lambda: None  # done once it is healthy, after each start

    def fingerprint(self) -> str:
        """Digest of what it is started with: a running service with another one must start again."""
        return hashlib.sha256(json.dumps([self.command, sorted(self.environment.items())]).encode()).hexdigest()


def all_services(settings: Settings) -> list[Service]:
    """The services in an order in which they can start."""
    return [_s3(settings), _mlflow(settings), *_airflow(settings)]


def require_installed(settings: Settings) -> None:
    """Check that both environments are there.

    Raises:
        EmbeddedError: naming what is missing and how to get it.
    """
    if util.find_spec("airflow") is None or util.find_spec("boto3") is None:
        raise EmbeddedError(f"{sys.executable} has no Airflow: run `make install`, then use .venv/airflow/bin/python")
    for program in (settings.tasks_python, _beside(settings.tasks_python, "mlflow"), _weed()):
        if not program.exists():
            raise EmbeddedError(f"{program} is missing: run `make install`")
    if not settings.dags_folder.is_dir():
        raise EmbeddedError(f"DRAFTER_DAGS_FOLDER: found {settings.dags_folder}; expected a folder")


def _beside(python: Path, program: str) -> Path:
    return python.parent / program


def _weed() -> Path:
    beside = _beside(Path(sys.executable), "weed")
    found = shutil.which("weed")
    return beside if beside.exists() or not found else Path(found)


# ---- S3 -------------------------------------------------------------------------------------------------------------


def _s3(settings: Settings) -> Service:
    ports, home = settings.ports, settings.home
    options = {
        "dir": home.s3,
        "ip": LOOPBACK,
        "ip.bind": LOOPBACK,
        "filer": "true",
        "s3": "true",
        "master.port": ports["s3_master"],
        "volume.port": ports["s3_volume"],
        "filer.port": ports["s3_filer"],
        "s3.port": ports["s3"],
        "s3.config": home.path / "s3.json",
        "s3.iam": "false",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        # Relative to the working folder: the default is in /tmp, and a socket's path may be 107 bytes at most.
        "filer.localSocket": "filer.sock",
        "s3.localSocket": "s3.sock",
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": 1024,
        # One server needs no long election: a restart takes 3 s instead of 15.
        "master.electionTimeout": "1s",
        "master.heartbeatInterval": "200ms",
        "volume.max": 0,
        "volume.preStopSeconds": 0,
    }
    command = [str(_weed()), "-logtostderr=true", "server", *(f"-{name}={value}" for name, value in options.items())]
    return Service(
        name=S3,
        title="S3 (SeaweedFS)",
        command=command,
        environment=settings.base_environment(),
        check=lambda _: check_s3(settings.s3_url),
        address=settings.s3_url,
        prepare=lambda: create_buckets(settings),
    )


def remove_s3_sockets(ports: Mapping[str, int]) -> None:
    """Remove the gRPC sockets that SeaweedFS puts into /tmp (fixed in its code) and leaves there when it is killed."""
    for part, name in (("master", "s3_master"), ("volume", "s3_volume"), ("filer", "s3_filer"), ("s3", "s3")):
        path = Path(f"/tmp/seaweedfs-{part}-grpc-{ports[name] + GRPC_OFFSET}.sock")
        if path.is_socket():
            path.unlink()


def check_s3(url: str) -> str | None:
    """An anonymous request must be refused with 403: then the gateway and its access control work."""
    try:
        request_json("GET", url, timeout=5)
    except ApiError as error:
        return None if error.status == 403 else str(error)
    except OSError as error:
        return f"{url}: {error}"
    return f"{url} lets anonymous requests in: expected HTTP 403"


def create_buckets(settings: Settings) -> None:
    """Create the buckets that are missing."""
    import boto3
    from botocore.config import Config

    names = {name.removesuffix("_S3").lower(): value for name, value in settings.s3_environment().items()}
    client = boto3.client(
        "s3",
        endpoint_url=names["aws_endpoint_url"],
        aws_access_key_id=names["aws_access_key_id"],
        aws_secret_access_key=names["aws_secret_access_key"],
        region_name=names["aws_default_region"],
        config=Config(proxies={}, retries={"max_attempts": 10, "mode": "standard"}),
    )
    present = {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}
    for bucket in (ARTIFACT_BUCKET, MLFLOW_BUCKET):
        if bucket not in present:
            client.create_bucket(Bucket=bucket)


# ---- MLflow ---------------------------------------------------------------------------------------------------------


def _mlflow(settings: Settings) -> Service:
    url = settings.mlflow_url
    return Service(
        name=MLFLOW,
        title="MLflow",
        command=[
            str(_beside(settings.tasks_python, "mlflow")),
            "server",
            f"--backend-store-uri=sqlite:///{settings.home.mlflow / 'mlflow.db'}",
            f"--artifacts-destination=s3://{MLFLOW_BUCKET}/artifacts",
            f"--host={LOOPBACK}",
            f"--port={settings.ports['mlflow']}",
            "--workers=1",
        ],
        environment=settings.mlflow_environment(),
        check=lambda _: check_mlflow(url),
        address=url,
    )


def check_mlflow(url: str) -> str | None:
    """The server answers."""
    try:
        answer = request_json("GET", f"{url}/health", timeout=5)
    except (OSError, ApiError) as error:
        return f"{url}/health: {error}"
    return None if answer == "OK" else f"{url}/health: found {answer!r}; expected 'OK'"


# ---- Airflow --------------------------------------------------------------------------------------------------------


def _airflow(settings: Settings) -> list[Service]:
    program = str(_beside(Path(sys.executable), "airflow"))
    environment = settings.airflow_environment()
    url = settings.airflow_url
    stamp = settings.home.airflow / "migrated"
    version = airflow_version()

    def check_migration(_: float) -> str | None:
        done = stamp.exists() and stamp.read_text() == version
        return None if done else "the database is not migrated"

    def api(name: str, title: str, *arguments: str) -> Service:
        return Service(
            name=name,
            title=title,
            command=[program, name.removeprefix("airflow-"), *arguments],
            environment=environment,
            check=lambda started: check_airflow_job(url, name.removeprefix("airflow-").replace("-", "_"), started),
            after=(MIGRATION,),
        )

    migration = Service(
        name=MIGRATION,
        title="Airflow database",
        command=[program, "db", "migrate"],
        environment=environment,
        check=check_migration,
        once=True,
        prepare=lambda: _write(stamp, version),
    )
    api_server = Service(
        name=API_SERVER,
        title="Airflow API and UI",
        command=[program, "api-server"],
        environment=environment,
        check=lambda _: check_api_server(url),
        after=(MIGRATION,),
        address=url,
        prepare=lambda: airflow_client(settings).ensure_pool(
            GPU_POOL, settings.gpu_slots, "Tasks that hold a GPU of this host"
        ),
    )
    return [
        migration,
        api_server,
        api("airflow-scheduler", "Airflow scheduler", "--skip-serve-logs"),
        api("airflow-dag-processor", "Airflow Dag processor"),
        api("airflow-triggerer", "Airflow triggerer", "--skip-serve-logs"),
    ]


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def airflow_version() -> str:
    """Version of the installed Airflow; empty without one."""
    try:
        return metadata.version("apache-airflow")
    except metadata.PackageNotFoundError:
        return ""


def airflow_client(settings: Settings) -> AirflowClient:
    """A client logged in as the administrator."""
    return AirflowClient(settings.airflow_url, ADMIN, settings.credentials.airflow_password)


def check_api_server(url: str) -> str | None:
    """The API answers and reaches its database."""
    try:
        health = request_json("GET", f"{url}/api/v2/monitor/health", timeout=10)
    except (OSError, ApiError, ValueError) as error:
        return f"{url}/api/v2/monitor/health: {error}"
    status = health["metadatabase"]["status"]
    return None if status == "healthy" else f"Airflow's database is {status}"


def check_airflow_job(url: str, job: str, started: float) -> str | None:
    """The job's heartbeat is fresh, and younger than its start: the one before may just have ended."""
    try:
        health = request_json("GET", f"{url}/api/v2/monitor/health", timeout=10)
    except (OSError, ApiError, ValueError) as error:
        return f"{url}/api/v2/monitor/health: {error}"
    entry = health.get(job) or {}
    beat = entry.get(f"latest_{job}_heartbeat")
    if entry.get("status") != "healthy" or not beat:
        return f"status {entry.get('status')!r}, last heartbeat {beat!r}"
    seconds = datetime.datetime.fromisoformat(beat).timestamp()
    return None if seconds >= started else f"no heartbeat since its start (the last one: {beat})"
