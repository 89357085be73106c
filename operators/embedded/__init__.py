"""The services a laptop needs: S3, MLflow and Airflow, started, checked and stopped as ordinary local processes.

    python -m operators.embedded up | status | demo | stop | clean

Linux only: processes are identified by their start time in /proc. Nothing listens beyond loopback. Everything that is
written stands in one folder, `.drafter/` in the project root or the one named by DRAFTER_HOME.
"""
