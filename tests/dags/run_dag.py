"""Driver of `test_dag_run.py`: Dag runs in one Airflow process, a JSON line of states for each.

    python run_dag.py DAGS_FOLDER CASES_JSON

A case: conf of the run, behaviour of the stub stages.
"""

import json
import os
import sys

from airflow.dag_processing.dagbag import DagBag
from mlflow import MlflowClient


def main(folder: str, cases: list[dict]) -> None:
    client = MlflowClient()
    experiment = client.create_experiment("drafters")
    for case in cases:
        os.environ["STUB"] = json.dumps(case["stub"])
        mlflow_run = client.create_run(experiment).info.run_id
        os.environ["STUB_MLFLOW_RUN"] = mlflow_run
        dag = DagBag(folder).dags["train_drafter"]
        run = dag.test(run_conf=case["conf"])
        tasks = {}
        for ti in run.get_task_instances():
            name = ti.task_id if ti.map_index < 0 else f"{ti.task_id}-{ti.map_index}"
            tasks[name] = [str(ti.state), ti.try_number, ti.rendered_map_index]
        found = {
            "run": str(run.state),
            "tasks": tasks,
            "mlflow": client.get_run(mlflow_run).info.status,
        }
        print("CASE", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
