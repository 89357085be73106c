"""Train a drafter: triggered by hand from a form that is derived from `RunSpec`."""

from __future__ import annotations

from airflow.sdk import DAG

from operators.params import form_params
from operators.pipeline import build_pipeline, default_args

DOC = """
### Train a drafter for speculative decoding

Tokenizes chats, extracts hidden states of the target model, checks them, trains a DFlash drafter on them, and measures
its **acceptance length** by real speculative decoding on held-out prompts.

- **Trigger** it with a preset; every further field of the form overrides the preset and may stay empty.
- **Results** are in MLflow: the link *MLflow run* of any task. What a task made is in the artifact store: *Receipt*.
- **Nothing is done twice**: a task whose inputs are unchanged finds its result and ends at once.
- **Errors** stand framed at the end of the failed task's log, with what was found and what is expected.
"""

with DAG(
    "train_drafter",
    description="Chats and a target model in, a measured and registered drafter out.",
    doc_md=DOC,
    schedule=None,
    catchup=False,
    max_active_runs=4,
    params=form_params(),
    default_args=default_args(),
    tags=["drafter", "training"],
) as dag:
    build_pipeline()
