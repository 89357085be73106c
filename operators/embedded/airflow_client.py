"""A small client of Airflow's REST API (v2), on the standard library, never through a proxy."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from operators.embedded.errors import EmbeddedError

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_STALE_SECONDS = 20.0  # an import error may be an earlier version's, until the file has been read again
_PAGE = 100  # the API's own limit ([api] maximum_page_limit)


class ApiError(EmbeddedError):
    """The API refused a request. `status` is the HTTP status, `detail` its explanation."""

    def __init__(self, method: str, url: str, status: int, detail: Any) -> None:
        self.status, self.detail = status, detail
        super().__init__(f"{method} {url}: HTTP {status}: {detail if isinstance(detail, str) else json.dumps(detail)}")


def request_json(
    method: str, url: str, body: Any = None, *, headers: Mapping[str, str] | None = None, timeout: float = 30.0
) -> Any:
    """Send one request; JSON in, JSON out (None for an empty answer, text for another content type).

    Raises:
        ApiError: for a status of 400 and above.
        OSError: if nobody answers.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, method=method)
    for name, value in {"Accept": "application/json", "Content-Type": "application/json", **(headers or {})}.items():
        request.add_header(name, value)
    try:
        with _DIRECT.open(request, timeout=timeout) as answer:
            return _decode(answer.read(), answer.headers.get_content_type())
    except urllib.error.HTTPError as error:
        with error:
            content = _decode(error.read(), error.headers.get_content_type())
        detail = content.get("detail", content) if isinstance(content, dict) else content
        raise ApiError(method, url, error.code, detail) from error


def _decode(content: bytes, content_type: str) -> Any:
    text = content.decode(errors="replace")
    if content_type == "application/json" and text:
        return json.loads(text)
    return text or None


class AirflowClient:
    """Logged-in access to one Airflow."""

    def __init__(self, url: str, user: str, password: str) -> None:
        self.url = url.rstrip("/")
        self._user, self._password = user, password
        self._token: str | None = None

    def rest(self, method: str, path: str, body: Any = None, *, timeout: float = 30.0) -> Any:
        """Call `/api/v2` + path. Logs in when needed.

        Raises:
            ApiError: if the API refuses.
            OSError: if nobody answers.
        """
        if self._token is None:
            self._log_in()
        try:
            return self._send(method, path, body, timeout)
        except ApiError as error:
            if error.status != 401:
                raise
            self._log_in()  # the token has run out
            return self._send(method, path, body, timeout)

    def _log_in(self) -> None:
        answer = request_json("POST", f"{self.url}/auth/token", {"username": self._user, "password": self._password})
        self._token = answer["access_token"]

    def _send(self, method: str, path: str, body: Any, timeout: float) -> Any:
        headers = {"Authorization": f"Bearer {self._token}"}
        return request_json(method, f"{self.url}/api/v2{path}", body, headers=headers, timeout=timeout)

    def rest_all(self, path: str, field: str) -> list[dict[str, Any]]:
        """All entries of a paged listing."""
        entries: list[dict[str, Any]] = []
        while True:
            joint = "&" if "?" in path else "?"
            page = self.rest("GET", f"{path}{joint}limit={_PAGE}&offset={len(entries)}")
            entries += page[field]
            if not page[field] or len(entries) >= page["total_entries"]:
                return entries

    def ensure_pool(self, name: str, slots: int, description: str) -> None:
        """Create a pool, or give it that many slots. A pool that is right is left as it is."""
        body = {"name": name, "slots": slots, "description": description}
        try:
            pool = self.rest("GET", f"/pools/{name}")
        except ApiError as error:
            if error.status != 404:
                raise
            self.rest("POST", "/pools", body)
            return
        if pool["slots"] != slots:
            self.rest("PATCH", f"/pools/{name}?update_mask=slots", {"pool": name, **body})

    def wait_for_dag(self, dag_id: str, timeout_seconds: float) -> None:
        """Wait until the Dag processor has read a Dag.

        Raises:
            EmbeddedError: if it does not appear; with Airflow's import errors, if there are any.
        """
        deadline = time.monotonic() + timeout_seconds
        believed = time.monotonic() + min(timeout_seconds, _STALE_SECONDS)
        while True:
            try:
                self.rest("GET", f"/dags/{dag_id}")
                return
            except ApiError as error:
                if error.status != 404:
                    raise
            broken = self.rest_all("/importErrors", "import_errors")
            if time.monotonic() > (believed if broken else deadline):
                causes = "".join(f"\n{entry['filename']}:\n{entry['stack_trace']}" for entry in broken)
                reason = f"import errors:{causes}" if broken else f"not seen within {timeout_seconds:.0f} s"
                raise EmbeddedError(f"Airflow does not offer Dag {dag_id!r}: {reason}")
            time.sleep(1)

    def trigger(self, dag_id: str, run_id: str, conf: Mapping[str, Any]) -> dict[str, Any]:
        """Unpause a Dag and start a run of it.

        Raises:
            ApiError: with status 400 and the reason, if a parameter is refused.
        """
        self.rest("PATCH", f"/dags/{dag_id}?update_mask=is_paused", {"is_paused": False})
        body = {"dag_run_id": run_id, "logical_date": None, "conf": dict(conf)}
        return dict(self.rest("POST", f"/dags/{dag_id}/dagRuns", body))

    def run(self, dag_id: str, run_id: str) -> dict[str, Any]:
        """One Dag run, with its `state`."""
        return dict(self.rest("GET", f"/dags/{dag_id}/dagRuns/{_quoted(run_id)}"))

    def task_instances(self, dag_id: str, run_id: str) -> list[dict[str, Any]]:
        """All task instances of a run, mapped ones with their map index."""
        return self.rest_all(f"/dags/{dag_id}/dagRuns/{_quoted(run_id)}/taskInstances", "task_instances")

    def xcom(self, dag_id: str, run_id: str, task_id: str, map_index: int = -1) -> Any:
        """What a task returned.

        Raises:
            ApiError: with status 404 if it returned nothing.
        """
        path = f"/dags/{dag_id}/dagRuns/{_quoted(run_id)}/taskInstances/{task_id}/xcomEntries/return_value"
        value = self.rest("GET", f"{path}?map_index={map_index}&deserialize=false")["value"]
        return json.loads(value) if isinstance(value, str) else value

    def log_lines(self, dag_id: str, run_id: str, task_id: str, map_index: int, try_number: int) -> list[str]:
        """The text of a task's log, one entry per event."""
        path = f"/dags/{dag_id}/dagRuns/{_quoted(run_id)}/taskInstances/{task_id}/logs/{try_number}"
        content = self.rest("GET", f"{path}?map_index={map_index}&full_content=true")["content"]
        if isinstance(content, str):
            return content.splitlines()
        return [str(entry["event"]) if isinstance(entry, dict) else str(entry) for entry in content]

    def run_page(self, dag_id: str, run_id: str) -> str:
        """Address of a run in the web interface."""
        return f"{self.url}/dags/{dag_id}/runs/{_quoted(run_id)}"

    def task_page(self, dag_id: str, run_id: str, task_id: str, map_index: int = -1) -> str:
        """Address of a task instance, with its log, in the web interface."""
        mapped = f"/mapped/{map_index}" if map_index >= 0 else ""
        return f"{self.run_page(dag_id, run_id)}/tasks/{task_id}{mapped}"


def _quoted(run_id: str) -> str:
    return urllib.parse.quote(run_id, safe="")
