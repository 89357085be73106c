from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from operators.embedded import processes
from operators.embedded.processes import MARKER, Record, end, launch, owned, read_records, read_stat

# Starts a grandchild, and a great-grandchild in a session of its own; then all three wait. With "stubborn" none of
# them minds SIGTERM.
TREE = """
import os, signal, subprocess, sys, time
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
depth = int(sys.argv[1])
if depth:
    subprocess.Popen([sys.executable, __file__, str(depth - 1), *sys.argv[2:]], start_new_session=depth == 1)
open(f"{sys.argv[2]}/{depth}", "w").write(str(os.getpid()))
time.sleep(120)
"""


@dataclasses.dataclass
class Tree:
    record: Record
    pids: list[int]


@pytest.fixture
def plant(tmp_path: Path) -> Iterator[Callable[..., Tree]]:
    """Launch a tree of three processes under a marker; none survives the test."""
    script = tmp_path / "tree.py"
    script.write_text(TREE)
    pids: list[int] = []

    def start(marker: str, *options: str) -> Tree:
        notes = tmp_path / f"pids-{marker}"
        notes.mkdir()
        record = launch(
            marker,
            [sys.executable, str(script), "2", str(notes), *options],
            {**os.environ, MARKER: marker},
            cwd=tmp_path / "home" / "run",
            log=tmp_path / "home" / "logs" / f"{marker}.log",
            folder=tmp_path / "home" / "processes",
            fingerprint="f",
        )
        deadline = time.monotonic() + 20
        while len([p for p in notes.iterdir() if p.read_text()]) < 3:
            assert time.monotonic() < deadline, "the tree did not grow"
            time.sleep(0.02)
        found = [int((notes / str(depth)).read_text()) for depth in (2, 1, 0)]
        pids.extend(found)
        return Tree(record, found)

    yield start
    for pid in pids:
        if read_stat(pid):
            os.kill(pid, signal.SIGKILL)
            processes.reap(pid)


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if pid in processes.running_processes()]


def test_stat_survives_a_name_with_blanks_and_parentheses(tmp_path: Path) -> None:
    odd = tmp_path / "a) R 1 (b"
    odd.symlink_to("/bin/sleep")
    child = subprocess.Popen([str(odd), "60"])
    try:
        deadline = time.monotonic() + 5
        while (stat := read_stat(child.pid)) is not None and stat.name != odd.name:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert stat is not None
        assert (stat.parent, stat.state in "SRD") == (os.getpid(), True)
    finally:
        child.kill()
        child.wait()


def test_record_round_trip_and_identity(plant: Callable[..., Tree], tmp_path: Path) -> None:
    tree = plant("one")
    assert read_records(tmp_path / "home" / "processes") == {"one": tree.record}
    leader = tree.record.leader()
    assert leader is not None
    assert (leader.pid, leader.session, leader.group) == (tree.pids[0],) * 3


def test_reused_pid_is_not_ours(plant: Callable[..., Tree], tmp_path: Path) -> None:
    """A record whose number another process has got meanwhile: other start time, or from before a reboot."""
    tree = plant("other")
    reused = dataclasses.replace(tree.record, start_ticks=tree.record.start_ticks - 1)
    rebooted = dataclasses.replace(tree.record, boot_id="00000000-0000-0000-0000-000000000000")
    for record in (reused, rebooted):
        assert record.leader() is None
        assert owned([record], "not-the-marker", tmp_path / "home") == {}
    stat = read_stat(tree.pids[0])
    assert stat is not None
    assert not processes.send(dataclasses.replace(stat, start_ticks=stat.start_ticks - 1), signal.SIGKILL)
    assert alive(tree.pids) == tree.pids


def test_stop_ends_the_whole_tree_and_nothing_else(plant: Callable[..., Tree], tmp_path: Path) -> None:
    ours, other = plant("ours"), plant("other")
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    try:
        home = tmp_path / "home"
        assert set(owned([ours.record], "ours", home)) == set(ours.pids)
        assert end(lambda: owned([ours.record], "ours", home), grace_seconds=10) == 3
        assert alive(ours.pids) == []
        assert alive(other.pids) == other.pids
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_stubborn_processes_are_killed_after_the_grace(plant: Callable[..., Tree], tmp_path: Path) -> None:
    tree = plant("stubborn", "stubborn")
    started = time.monotonic()
    end(lambda: owned([tree.record], "stubborn", tmp_path / "home"), grace_seconds=0.5)
    assert 0.5 <= time.monotonic() - started < 5
    assert alive(tree.pids) == []


def test_orphans_of_a_killed_leader_are_found(plant: Callable[..., Tree], tmp_path: Path) -> None:
    tree = plant("orphans")
    os.kill(tree.pids[0], signal.SIGKILL)
    deadline = time.monotonic() + 5
    while tree.record.leader() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    home = tmp_path / "home"
    assert set(owned([tree.record], "orphans", home)) == set(tree.pids[1:])
    # Airflow's workers overwrite their environment: then session and working folder tell, and descent
    assert set(owned([tree.record], "not-the-marker", home)) == set(tree.pids[1:])
    # the same session, but somebody who works elsewhere: not ours
    assert owned([tree.record], "not-the-marker", tmp_path / "elsewhere") == {}


def test_this_process_and_its_ancestors_are_never_ours() -> None:
    code = (
        "import os; from pathlib import Path; from operators.embedded.processes import owned;"
        "print(sorted(owned([], 'inside', Path('/nowhere'))) == [])"
    )
    command = ["sh", "-c", f'{sys.executable} -c "{code}"; true']  # the shell carries the marker, and is its parent
    output = subprocess.run(command, env={**os.environ, MARKER: "inside"}, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "True", output.stderr


def test_exit_status_of_a_service_that_died_and_its_last_words(tmp_path: Path) -> None:
    record = launch(
        "dies",
        [sys.executable, "-c", "print('first'); print('no such thing'); raise SystemExit(3)"],
        dict(os.environ),
        cwd=tmp_path,
        log=tmp_path / "dies.log",
        folder=tmp_path,
        fingerprint="f",
    )
    deadline = time.monotonic() + 10
    while record.leader() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert processes.reap(record.pid) == 3
    assert processes.last_lines(Path(record.log), 1) == "    no such thing"
