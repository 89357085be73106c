"""What both sides of the pipeline agree on: run specification, artifact keys and layout, receipts, errors.

Standard library and pydantic only: Airflow's processes and the GPU containers import the same files.
"""
