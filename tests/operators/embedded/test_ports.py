from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from operators.embedded import ports
from operators.embedded.errors import EmbeddedError, PortTaken


@pytest.fixture
def taken() -> Iterator[int]:
    """A port below 55000 on which this process listens."""
    for candidate in range(23_000, 30_000):
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind(("127.0.0.1", candidate))
                server.listen(1)
            except OSError:
                continue
            yield candidate
            return
    pytest.fail("no free port")


def test_named_port_that_is_taken_is_refused_with_its_holder(tmp_path: Path, taken: int) -> None:
    with pytest.raises(PortTaken, match=rf"DRAFTER_AIRFLOW_PORT: port {taken} is taken by process {os.getpid()} "):
        ports.resolve(tmp_path / "ports.json", {"DRAFTER_AIRFLOW_PORT": str(taken)}, ours=[])
    assert not (tmp_path / "ports.json").exists()


def test_grpc_port_of_seaweedfs_counts_too(tmp_path: Path, taken: int) -> None:
    base = taken - ports.GRPC_OFFSET
    with pytest.raises(PortTaken, match=rf"DRAFTER_S3_PORT: port {taken} \(gRPC of {base}"):
        ports.resolve(tmp_path / "ports.json", {"DRAFTER_S3_PORT": str(base)}, ours=[])


def test_named_port_held_by_our_own_service_is_accepted(tmp_path: Path, taken: int) -> None:
    found = ports.resolve(tmp_path / "ports.json", {"DRAFTER_MLFLOW_PORT": str(taken)}, ours=[os.getpid()])
    assert found["mlflow"] == taken


@pytest.mark.parametrize("text", ["0", "65536", "80a", "-1", " "])
def test_what_is_no_port_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(EmbeddedError, match=r"DRAFTER_AIRFLOW_PORT: found .* expected a port number from 1 to 65535"):
        ports.resolve(tmp_path / "ports.json", {"DRAFTER_AIRFLOW_PORT": text}, ours=[])


def test_port_whose_grpc_port_would_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedError, match="DRAFTER_S3_PORT: found '55536'; expected a port number from 1 to 55535"):
        ports.resolve(tmp_path / "ports.json", {"DRAFTER_S3_PORT": "55536"}, ours=[])


def test_the_same_port_twice_is_refused(tmp_path: Path) -> None:
    given = {"DRAFTER_AIRFLOW_PORT": "23999", "DRAFTER_MLFLOW_PORT": "23999"}
    with pytest.raises(EmbeddedError, match="DRAFTER_MLFLOW_PORT: found 23999"):
        ports.resolve(tmp_path / "ports.json", given, ours=[])


def test_chosen_ports_are_distinct_recorded_and_kept(tmp_path: Path) -> None:
    first = ports.resolve(tmp_path / "ports.json", {}, ours=[])
    assert set(first) == set(ports.VARIABLES)
    assert len(set(first.values())) == len(first)
    assert all(ports.is_free(port) for port in first.values())
    assert json.loads((tmp_path / "ports.json").read_text()) == first
    assert ports.resolve(tmp_path / "ports.json", {}, ours=[]) == first


def test_recorded_port_that_somebody_took_meanwhile_is_replaced(tmp_path: Path, taken: int) -> None:
    record = tmp_path / "ports.json"
    first = ports.resolve(record, {}, ours=[])
    record.write_text(json.dumps({**first, "mlflow": taken}))
    again = ports.resolve(record, {}, ours=[])
    assert again["mlflow"] != taken
    assert {**again, "mlflow": 0} == {**first, "mlflow": 0}
    # the same port held by our own server stays
    record.write_text(json.dumps({**first, "mlflow": taken}))
    assert ports.resolve(record, {}, ours=[os.getpid()])["mlflow"] == taken


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::1")]
)
def test_listeners_are_seen_with_their_address(family: socket.AddressFamily, host: str) -> None:
    with socket.socket(family) as server:
        try:
            server.bind((host, 0))
        except OSError:
            pytest.skip(f"this machine has no {host}")
        server.listen(1)
        port = server.getsockname()[1]
        found = [listener for listener in ports.listeners_of([os.getpid()]) if listener.port == port]
        assert [listener.address for listener in found] == [host]
        assert ports.holders(port) == {os.getpid()}
    assert ports.holders(port) == set()


def test_port_of_a_wildcard_listener_is_not_free() -> None:
    with socket.socket() as server:
        server.bind(("0.0.0.0", 0))
        server.listen(1)
        assert not ports.is_free(server.getsockname()[1])
