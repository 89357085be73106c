"""Ports of the embedded services: chosen once, recorded, and refused with the holder's name when taken."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from operators.embedded.errors import EmbeddedError, PortTaken
from operators.embedded.processes import read_stat

LOOPBACK = "127.0.0.1"
GRPC_OFFSET = 10_000  # SeaweedFS listens for gRPC at each of its ports plus this
# With their gRPC ports these stay below the kernel's ephemeral ports (from 32768), so that no outgoing connection can
# come to sit on one of them between its choice and its use.
_FIRST, _LAST = 20_000, 22_700
_LISTEN = "0A"

VARIABLES = {
    "airflow": "DRAFTER_AIRFLOW_PORT",
    "mlflow": "DRAFTER_MLFLOW_PORT",
    "s3": "DRAFTER_S3_PORT",
    "s3_filer": "DRAFTER_S3_FILER_PORT",
    "s3_master": "DRAFTER_S3_MASTER_PORT",
    "s3_volume": "DRAFTER_S3_VOLUME_PORT",
}


@dataclass(frozen=True)
class Listener:
    """A TCP socket that accepts connections."""

    address: str
    port: int
    inode: str


def listeners() -> list[Listener]:
    """All listening TCP sockets of this network namespace."""
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        path = Path("/proc/net") / table
        if not path.exists():  # a kernel without IPv6
            continue
        for line in path.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN:
                host, port = fields[1].split(":")
                found.append(Listener(_address(host, family), int(port, 16), fields[9]))
    return found


def _address(digits: str, family: socket.AddressFamily) -> str:
    """The kernel prints addresses as little-endian words of four bytes."""
    words = [bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8)]
    return socket.inet_ntop(family, b"".join(words))


def sockets_of(pid: int) -> set[str]:
    """Inodes of the sockets a process has open; empty if we may not look."""
    inodes = set()
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{name}")
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return inodes
    return inodes


def listeners_of(pids: Collection[int]) -> list[Listener]:
    """Listening sockets that any of these processes holds."""
    inodes = set().union(*(sockets_of(pid) for pid in pids))
    return [listener for listener in listeners() if listener.inode in inodes]


def is_free(port: int) -> bool:
    """Whether a server could listen on this port of loopback now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT can be listened on
        try:
            probe.bind((LOOPBACK, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def holders(port: int) -> set[int]:
    """Pids of the processes that listen on a port, as far as we may look."""
    inodes = {listener.inode for listener in listeners() if listener.port == port}
    if not inodes:
        return set()
    return {int(entry) for entry in os.listdir("/proc") if entry.isdigit() and inodes & sockets_of(int(entry))}


def describe_holder(port: int) -> str:
    """In words, who listens on a port."""
    names = []
    for pid in sorted(holders(port)):
        stat = read_stat(pid)
        if stat is not None:
            names.append(f"process {pid} ({stat.name})")
    return " and ".join(names) or "a process of another user"


def _occupied(name: str, port: int) -> list[int]:
    """Ports that a service needs beside `port` itself, and it, that are not free."""
    needed = [port, port + GRPC_OFFSET] if name.startswith("s3") else [port]
    return [number for number in needed if not is_free(number)]


def resolve(record: Path, given: Mapping[str, str], ours: Collection[int]) -> dict[str, int]:
    """Ports of all services, by name in `VARIABLES`; written to `record`.

    A port that the user named (environment variable) is taken or refused, never replaced. One chosen earlier stays as
    long as it is free or held by our own service. Any other is drawn at random among the free ones.

    Args:
        record: JSON file of the ports chosen earlier.
        given: the caller's environment.
        ours: pids of our own processes, which may hold their ports.

    Raises:
        PortTaken: naming variable, port and holder.
        EmbeddedError: if a variable holds no usable port number.
    """
    earlier = json.loads(record.read_text()) if record.exists() else {}
    ports: dict[str, int] = {}
    for name, variable in VARIABLES.items():
        if given.get(variable):
            ports[name] = _named(name, variable, given[variable], ours, ports)
    for name in VARIABLES:
        if name not in ports:
            kept = earlier.get(name)
            if kept is None or kept in ports.values() or not _usable(name, kept, ours):
                kept = _draw(name, ports.values())
            ports[name] = kept
    if ports != earlier:
        temporary = record.with_suffix(".new")
        temporary.write_text(json.dumps(ports, indent=1))
        temporary.replace(record)
    return ports


def _usable(name: str, port: int, ours: Collection[int]) -> bool:
    """Whether a service of ours could listen there, or does."""
    return all(holders(number) and holders(number) <= set(ours) for number in _occupied(name, port))


def _named(name: str, variable: str, text: str, ours: Collection[int], others: Mapping[str, int]) -> int:
    highest = 65_535 - GRPC_OFFSET if name.startswith("s3") else 65_535
    if not text.isdigit() or not 1 <= int(text) <= highest:
        raise EmbeddedError(f"{variable}: found {text!r}; expected a port number from 1 to {highest}")
    port = int(text)
    if port in others.values():
        raise EmbeddedError(
            f"{variable}: found {port}, which another DRAFTER_..._PORT names too; expected distinct ports"
        )
    for number in _occupied(name, port):
        if not holders(number) or not holders(number) <= set(ours):
            purpose = "" if number == port else f" (gRPC of {port}: SeaweedFS takes port + {GRPC_OFFSET})"
            raise PortTaken(
                f"{variable}: port {number}{purpose} is taken by {describe_holder(number)}; "
                f"end it, name another port, or unset {variable} to have a free one chosen"
            )
    return port


def _draw(name: str, taken: Collection[int]) -> int:
    used = set(taken)
    for _ in range(1000):
        port = _FIRST + secrets.randbelow(_LAST - _FIRST)
        if port not in used and not _occupied(name, port):
            return port
    raise EmbeddedError(f"no free port for {name} between {_FIRST} and {_LAST}; name one in {VARIABLES[name]}")
