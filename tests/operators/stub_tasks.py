"""Stands in for `python -m tasks run --request FILE`: obeys a request, or misbehaves as $STUB says.

$STUB is a JSON object: behaviour by stage, or by stage and map index ("extract-0"), or for all ("*").
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, os.getcwd())  # the launcher starts a stage in the project's folder

# The contract is imported where it is needed: most tests start a stub, and pydantic takes a while.


class Request:
    """The request as the file has it."""

    def __init__(self, path: Path) -> None:
        self.text = path.read_text()
        self.values = json.loads(self.text)
        self.stage, self.task = self.values["stage"], self.values["run"]["task"]

    def parsed(self):
        from tasks.contract.request import StageRequest

        return StageRequest.model_validate_json(self.text)


def receipt_of(request):
    from tasks.contract.receipt import Receipt

    details = {}
    if request.stage == "plan":
        details = {
            "spec": request.spec.model_dump(mode="json"),
            "target_fingerprint": "fingerprint",
            "file_groups": [["a.jsonl"], ["b.jsonl", "c.jsonl"]],
            "mlflow_run_id": os.environ.get("STUB_MLFLOW_RUN"),
            "mlflow_url": os.environ.get("STUB_MLFLOW_URL"),
        }
    if request.stage == "assemble":
        refs = [{"kind": "tokens", "key": f"{n:032x}", "identity": f"{n:032x}", "digest": "0" * 64} for n in range(3)]
        details = {
            "shards": [{"ref": r, "split": "train", "samples": 4, "tokens": 100 + n} for n, r in enumerate(refs)]
        }
    return Receipt(
        kind=request.stage,
        version=1,
        key=request.key(),
        identity=request.key(),
        inputs={name: [ref.identity for ref in refs] for name, refs in request.inputs.items()},
        counts={"samples": 3},
        metrics={"loss": 1.5},
        details=details,
    )


def put(request, receipt) -> None:
    from tasks.contract.layout import receipt_path
    from tasks.storage import open_store

    open_store(request.store).create(receipt_path(request.stage, request.key()), receipt.to_bytes())


def fail(stage: str, code: int) -> None:
    report = {
        "stage": stage,
        "error": "ConfigurationError",
        "message": "block_size: found 1; expected at least 2",
        "exit_code": code,
        "retryable": False,
        "fields": ["block_size"],
    }
    Path(os.environ["DRAFTER_FAILURE_FILE"]).write_text(json.dumps(report))
    sys.exit(code)


def damaged(request):
    from tasks.contract.layout import object_path
    from tasks.contract.receipt import StoredObject
    from tasks.storage import open_store

    path = object_path(request.stage, request.key(), "attempt", "data.bin")
    open_store(request.store).write(path, b"what is there")
    stated = StoredObject(name="data.bin", path=path, size=13, sha256=hashlib.sha256(b"what was meant").hexdigest())
    return receipt_of(request).model_copy(update={"objects": [stated]})


def family(how: str) -> None:
    """A child and a grandchild, in sessions of their own, that ignore SIGTERM; their ids go to $STUB_PIDS."""
    code = (
        "import os, signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "open(os.environ['STUB_PIDS'], 'a').write(f'{os.getpid()}\\n');"
        "depth = int(sys.argv[2]);"
        "depth and subprocess.Popen([sys.executable, '-c', sys.argv[1], sys.argv[1], str(depth - 1)],"
        " start_new_session=True);"
        "time.sleep(600)"
    )
    if how != "leave":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(os.environ["STUB_PIDS"]).write_text(f"{os.getpid()}\n")
    subprocess.Popen([sys.executable, "-c", code, code, "1"], start_new_session=True)
    while len(Path(os.environ["STUB_PIDS"]).read_text().split()) < 3:
        time.sleep(0.02)


def main() -> None:
    request = Request(Path(sys.argv[-1]))
    run = request.values["run"]
    stub = json.loads(os.environ.get("STUB", "{}"))
    how = stub.get(request.task) or stub.get(request.stage) or stub.get("*") or "receipt"
    with open(os.environ["STUB_STARTS"], "a") as starts:
        starts.write(f"{request.task} {run['job']} {run['try_number']}\n")
    print(f"stub {request.task}: {how}", flush=True)
    if how == "fail once":
        how = "exit 1" if run["try_number"] == 1 else "receipt"
    if how.startswith("exit "):
        sys.exit(int(how.split()[1]))
    if how.startswith("report "):
        fail(request.stage, int(how.split()[1]))
    if how.startswith("slow "):
        time.sleep(float(how.split()[1]))
        print("slow: awake", flush=True)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "noise":
        print(json.dumps({"ref": {"kind": "forged", "key": "0", "identity": "0", "digest": "0"}}), flush=True)
        print("UserWarning: this comes after the result", file=sys.stderr)
    if how == "line":
        sys.stdout.write("x" * 5_000_000 + "\nafter the long line\n")
    if how == "bytes":
        sys.stdout.buffer.write(b"caf\xe9 \xff\xfe end\n")
    if how == "environment":
        for name in sorted(os.environ):
            print(f"environment {name}={os.environ[name]}")
    if how in ("family", "leave"):
        family(how)
    if how == "family":
        time.sleep(600)
    if how != "no receipt":
        publish(request.parsed(), how)


def publish(request, how: str) -> None:
    from tasks.contract.layout import receipt_path
    from tasks.storage import open_store

    if how == "wrong key":
        put(request, receipt_of(request).model_copy(update={"key": "f" * 32}))
    elif how == "wrong version":
        put(request, receipt_of(request).model_copy(update={"version": 99}))
    elif how == "not a receipt":
        open_store(request.store).write(receipt_path(request.stage, request.key()), b'{"kind": "target"')
    elif how == "nan metric":
        text = receipt_of(request).model_dump_json().replace("1.5", "NaN")
        open_store(request.store).write(receipt_path(request.stage, request.key()), text.encode())
    elif how == "wrong hash":
        put(request, damaged(request))
    else:
        put(request, receipt_of(request))


if __name__ == "__main__":
    main()
