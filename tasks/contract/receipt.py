"""Receipts: the small JSON object written last, whose presence means that an artifact is complete.

Readers start from receipts only. A receipt names every object with its size and SHA-256; nothing without a receipt
is ever read.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

SCHEMA_VERSION = 1


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys and no blanks. NaN and infinity are refused: they are not JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


class StoredObject(BaseModel):
    """One object of an artifact."""

    model_config = ConfigDict(frozen=True)

    name: str = Field(description="Name inside the artifact, e.g. states-00000.safetensors.")
    path: str = Field(description="Path below the store's root.")
    size: int = Field(ge=0, description="Bytes.")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Receipt(BaseModel):
    """Proof that one artifact is complete."""

    schema_version: int = SCHEMA_VERSION
    kind: str = Field(description="Stage or artifact kind; also the first folder of its path.")
    version: int = Field(description="Version of the stage that made it.")
    key: str = Field(description="Content key: digest of the stage version, its part of the spec and its inputs.")
    identity: str = Field(description="What downstream keys take of it; the key, unless the content itself is named.")
    spec: dict[str, Any] = Field(default_factory=dict, description="The semantic fields that went into the key.")
    inputs: dict[str, list[str]] = Field(default_factory=dict, description="Identities of the inputs, by name.")
    objects: list[StoredObject] = []
    counts: dict[str, int] = {}
    metrics: dict[str, float] = {}
    details: dict[str, Any] = {}
    versions: dict[str, str] = {}
    device: str = "cpu"
    attempt: str = ""
    started_at: str = Field(default="", description="UTC, ISO 8601.")
    seconds: float = Field(default=0.0, ge=0)

    @field_validator("metrics")
    @classmethod
    def _finite(cls, metrics: dict[str, float]) -> dict[str, float]:
        bad = {name: value for name, value in metrics.items() if not math.isfinite(value)}
        if bad:
            raise ValueError(f"metrics must be finite numbers, found {bad}")
        return metrics

    def to_bytes(self) -> bytes:
        """What is stored: canonical JSON."""
        return canonical_json(self.model_dump(mode="json"))

    def digest(self) -> str:
        """SHA-256 of the stored bytes."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def ref(self) -> ReceiptRef:
        """Reference that another task starts from."""
        return ReceiptRef(kind=self.kind, key=self.key, identity=self.identity, digest=self.digest())

    def object(self, name: str) -> StoredObject:
        """The object of that name.

        Raises:
            KeyError: naming what the artifact does hold.
        """
        for stored in self.objects:
            if stored.name == name:
                return stored
        raise KeyError(f"{self.kind}/{self.key} has no object {name!r}; it has {[o.name for o in self.objects]}")


class ReceiptRef(BaseModel):
    """Address and digest of a receipt: what one task hands to the next (through XCom) instead of data."""

    model_config = ConfigDict(frozen=True)

    kind: str
    key: str
    identity: str
    digest: str
