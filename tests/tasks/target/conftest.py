from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.tasks.target.families import build


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder with a tiny checkpoint of a family, built once."""
    return cache(lambda family: build(family, tmp_path_factory.mktemp(family)))
