"""Telling a request to stop from an outage of Airflow itself.

A task's supervisor sends SIGTERM both when people or a timeout end the task and when it has lost Airflow's API for
some seconds. In the first case the job must go. In the second it must go on: the retry adopts it.
"""

from __future__ import annotations

import urllib.error
import urllib.request

from airflow.sdk.configuration import conf

ANSWER_SECONDS = 1.0


def airflow_answers() -> bool:
    """Whether Airflow's execution API answers, whatever it says. True where its address is not configured."""
    address = conf.get("core", "execution_api_server_url", fallback="") or ""
    if not address.startswith(("http://", "https://")):
        return True
    try:
        urllib.request.urlopen(f"{address.rstrip('/')}/health", timeout=ANSWER_SECONDS).close()
    except urllib.error.HTTPError:
        return True
    except OSError:  # refused, timed out, unknown host
        return False
    return True
