"""Airflow plugin of the pipeline: the links of a task to its MLflow run and to its receipt."""

from __future__ import annotations

from airflow.plugins_manager import AirflowPlugin

from operators.links import MlflowRunLink, ReceiptLink


class DrafterPlugin(AirflowPlugin):
    """Registered by Airflow from the plugins folder."""

    name = "drafter"
    operator_extra_links = [MlflowRunLink(), ReceiptLink()]  # noqa: RUF012 - Airflow reads a plain list
