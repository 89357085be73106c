"""Where jobs run. `DRAFTER_LAUNCHER` chooses: `process` (default) needs nothing installed."""

from __future__ import annotations

import os

from operators.launchers.base import Launcher
from operators.launchers.process import ProcessLauncher
from tasks.contract.errors import ConfigurationError, Problem

LAUNCHERS = {"process": ProcessLauncher.from_environment}


def get_launcher(name: str | None = None) -> Launcher:
    """The launcher of that name, configured from the environment.

    Args:
        name: `None` means `DRAFTER_LAUNCHER`, or `process`.

    Raises:
        ConfigurationError: for a name that does not exist, or an environment that lacks what the launcher needs.
    """
    name = name or os.environ.get("DRAFTER_LAUNCHER") or "process"
    if name not in LAUNCHERS:
        raise ConfigurationError(Problem("DRAFTER_LAUNCHER", name, f"one of {sorted(LAUNCHERS)}"))
    return LAUNCHERS[name]()
