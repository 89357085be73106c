"""Links of a task in the Airflow UI: its MLflow run and its receipt.

The address is pushed as soon as it is known, so that the link works while the stage runs; Airflow asks again at the
end, in the same process, and gets what the operator remembers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperatorLink

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey


class MlflowRunLink(BaseOperatorLink):
    """The run in MLflow that this Dag run logs to."""

    name = "MLflow run"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Empty where MLflow is not configured."""
        return getattr(operator, "mlflow_url", "")


class ReceiptLink(BaseOperatorLink):
    """The receipt of the stage's result in the artifact store."""

    name = "Receipt"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Address below the store's root; there is something once the task has succeeded."""
        return getattr(operator, "receipt_address", "")


def mlflow_run_url(plan_details: Mapping[str, Any]) -> str:
    """Page of the MLflow run, or "" where there is none.

    Args:
        plan_details: of the plan's receipt; `mlflow_url` is the page as the tasks reach it.

    `MLFLOW_PUBLIC_URL` is where a browser reaches MLflow, if that differs.
    """
    url = plan_details.get("mlflow_url") or ""
    public = os.environ.get("MLFLOW_PUBLIC_URL")
    _, separator, page = url.partition("/#/")
    if public and separator:
        url = f"{public.rstrip('/')}/#/{page}"
    return url if url.startswith(("http://", "https://")) else ""
