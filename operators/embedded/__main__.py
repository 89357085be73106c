"""Command line of the embedded services: `python -m operators.embedded up|status|demo|stop|clean`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from operators.embedded import stack
from operators.embedded.errors import EmbeddedError
from operators.embedded.settings import Home


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the return value is the exit code (1: it failed, and the last lines say why)."""
    options = _parser().parse_args(arguments)
    if not os.path.exists("/proc/self/stat"):
        print("error: the embedded services need Linux (/proc); elsewhere use docker/", file=sys.stderr)
        return 1
    try:
        return int(COMMANDS[options.command](options))
    except EmbeddedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; services and runs that were started go on: `make status`, `make stop`", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m operators.embedded", description=sys.modules["__main__"].__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up", help="start S3, MLflow and Airflow; leave running what runs")
    commands.add_parser("status", help="what runs, where, and whether it is healthy")
    commands.add_parser("stop", help="end everything that was started, and nothing else")
    commands.add_parser("clean", help="stop, then remove data, databases and logs")
    demo = commands.add_parser("demo", help="start the services, run the Dag train_drafter, show its result")
    demo.add_argument("--conf", type=_conf, default={}, metavar="JSON", help="parameters, e.g. '{\"epochs\": 2}'")
    return parser


def _conf(text: str) -> dict[str, Any]:
    try:
        conf = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"found {text!r}; expected a JSON object: {error}") from error
    if not isinstance(conf, dict):
        raise argparse.ArgumentTypeError(f'found {text!r}; expected a JSON object, e.g. {{"epochs": 2}}')
    return conf


def _up(_: argparse.Namespace) -> int:
    from operators.embedded.demo import login

    settings = stack.up(os.environ, _say)
    _say(f"Airflow {settings.airflow_url} ({login(settings)}); MLflow {settings.mlflow_url}; end with `make stop`")
    return 0


def _demo(options: argparse.Namespace) -> int:
    from operators.embedded.demo import run_demo

    run_demo(stack.up(os.environ, _say), options.conf, say=_say)
    _say("Services go on running: `make status`, `make stop`, `make clean`")
    return 0


def _stop(_: argparse.Namespace) -> int:
    count = stack.stop(os.environ)
    _say(f"{count} processes ended" if count else "nothing was running")
    return 0


def _clean(_: argparse.Namespace) -> int:
    home = Home.of(os.environ).path
    _say(f"{home} removed" if stack.clean(os.environ) else f"{home}: nothing to remove")
    return 0


def _status(_: argparse.Namespace) -> int:
    services = stack.status(os.environ)
    if not services:
        _say("nothing was started yet: `make up` or `make demo`")
    for service in services:
        pid = f"pid {service.pid}" if service.pid else ""
        _say(f"{service.title:<22} {service.state:<10} {pid:<12} {service.address or ''}".rstrip())
        if service.reason:
            _say(f"    {service.reason}; log: {service.log}")
    return int(any(service.state in ("dead", "unhealthy") for service in services))


def _say(text: str) -> None:
    print(text, flush=True)


COMMANDS = {"up": _up, "status": _status, "demo": _demo, "stop": _stop, "clean": _clean}

if __name__ == "__main__":
    sys.exit(main())
