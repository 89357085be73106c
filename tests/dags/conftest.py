"""All Dag files, loaded once, without a database."""

from __future__ import annotations

from pathlib import Path

import pytest
from airflow.dag_processing.dagbag import DagBag

DAGS = Path(__file__).resolve().parents[2] / "dags"


@pytest.fixture(scope="session")
def dagbag() -> DagBag:
    return DagBag(str(DAGS))
