"""The MLflow model registry: versions of a drafter, found again by digest, and the aliases that serve it."""

from __future__ import annotations

import datetime
import logging
from dataclasses import dataclass
from typing import Any

from tasks.tracking import Tracker, registry_client

log = logging.getLogger("tasks")
CHALLENGER, CHAMPION = "challenger", "champion"
TAG_DIGEST, TAG_ADDRESS, TAG_ACCEPTANCE = "drafter.digest", "drafter.address", "drafter.acceptance_length"


@dataclass(frozen=True)
class Candidate:
    """A drafter that asks for a version."""

    model_name: str
    digest: str  # SHA-256 of the weights
    address: str  # of the retained copy in the artifact store
    acceptance_length: float
    lossless: bool
    lineage: dict[str, Any]


def register_version(tracker: Tracker, candidate: Candidate, minimum: float) -> dict[str, Any]:
    """Create the version, or find the one with the same digest; move the aliases.

    Args:
        tracker: of the run the version belongs to.
        candidate: the drafter.
        minimum: acceptance length that `champion` must exceed.

    Returns:
        `registered`, `model`, `version`, `promoted` and `reason`, all JSON values.
    """
    client = registry_client()
    name = candidate.model_name
    _ensure_model(client, name)
    version = _find(client, name, candidate.digest)
    if version is None:
        tags = {
            TAG_DIGEST: candidate.digest,
            TAG_ADDRESS: candidate.address,
            TAG_ACCEPTANCE: f"{candidate.acceptance_length:.6f}",
            "drafter.lossless": str(candidate.lossless).lower(),
            "drafter.target_digest": candidate.lineage["target"]["digest"],
        }
        created = client.create_model_version(
            name,
            f"runs:/{tracker.run_id}/drafter",
            run_id=tracker.run_id,
            tags=tags,
            description=f"Acceptance length {candidate.acceptance_length:.3f}; weights at {candidate.address}",
        )
        version = str(created.version)
    client.set_registered_model_alias(name, CHALLENGER, version)
    promoted, reason = _gate(client, name, version, candidate, minimum)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    if promoted:
        previous = _champion(client, name)
        client.set_registered_model_alias(name, CHAMPION, version)
        client.set_model_version_tag(name, version, "drafter.promoted_at", now)
        client.set_model_version_tag(name, version, "drafter.promoted_reason", reason)
        if previous is not None and str(previous.version) != version:
            client.set_model_version_tag(name, version, "drafter.previous_champion", str(previous.version))
    return {"registered": True, "model": name, "version": version, "promoted": promoted, "reason": reason}


def _gate(client: Any, name: str, version: str, candidate: Candidate, minimum: float) -> tuple[bool, str]:
    own = candidate.acceptance_length
    if not candidate.lossless:
        return False, f"version {version} is not promoted: decoding with it is not lossless"
    if own <= minimum:
        return False, f"version {version} is not promoted: acceptance length {own:.3f}, above {minimum:.3f} needed"
    champion = _champion(client, name)
    if champion is None:
        return True, f"version {version} is the first champion, acceptance length {own:.3f}"
    if str(champion.version) == version:
        return False, f"version {version} is the champion already, acceptance length {own:.3f}"
    other = float(champion.tags[TAG_ACCEPTANCE])
    if own <= other:
        return False, f"version {version} is not promoted: {own:.3f} against the champion's {other:.3f}"
    return True, f"version {version} is the champion: {own:.3f} against version {champion.version}'s {other:.3f}"


def _ensure_model(client: Any, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name, description="DFlash drafters; weights stand in the artifact store.")
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _find(client: Any, name: str, digest: str) -> str | None:
    quoted = name.replace("'", "''")
    found = client.search_model_versions(f"name = '{quoted}' and tags.`{TAG_DIGEST}` = '{digest}'")
    return str(found[0].version) if found else None


def _champion(client: Any, name: str) -> Any | None:
    from mlflow.exceptions import MlflowException

    try:
        return client.get_model_version_by_alias(name, CHAMPION)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):  # no such alias
            return None
        raise
