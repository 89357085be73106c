"""What an S3 error means and what to set: one sentence for the person who reads the task's log."""

from __future__ import annotations

import os

from botocore.exceptions import (
    ClientError,
    ConnectionError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    SSLError,
)

_KEYS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_CREDENTIALS = f"wrong credentials: set {_KEYS} to a pair that this store knows"
_DIALECT = (
    "the store does not take the client's checksums: set AWS_REQUEST_CHECKSUM_CALCULATION=when_required and "
    "AWS_RESPONSE_CHECKSUM_VALIDATION=when_required"
)
_REGION = "the bucket is in another region: set AWS_DEFAULT_REGION to it"
_FULL = "the store is full or its quota is used up: free space there (retire_artifacts removes what no run needs)"
_ADVICE = {
    "InvalidAccessKeyId": f"the access key is unknown there ({_CREDENTIALS})",
    "SignatureDoesNotMatch": f"the secret key is not that of the access key ({_CREDENTIALS})",
    "ExpiredToken": f"the credentials have expired: set {_KEYS} and AWS_SESSION_TOKEN anew",
    "InvalidToken": f"the session token is not valid: set {_KEYS} and AWS_SESSION_TOKEN anew, or unset the token",
    "RequestTimeTooSkewed": "this machine's clock differs too much from the store's: set it (NTP)",
    "BadDigest": f"the bytes were altered on the way, or {_DIALECT}",
    "XAmzContentSHA256Mismatch": f"the bytes were altered on the way, or {_DIALECT}",
    "MissingContentLength": _DIALECT,
    "NotImplemented": f"the store does not know this request: it lacks conditional writes, or {_DIALECT}",
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "EntityTooLarge": "the store's limit for one object is smaller than this",
    "QuotaExceeded": _FULL,
    "XMinioStorageFull": _FULL,
    "InsufficientStorage": _FULL,
    "SlowDown": "the store asks for fewer requests: run fewer tasks at once, or try later",
    "InternalError": "the store failed: look at its log, then try again",
}


def error_code(error: BaseException | None) -> tuple[int, str]:
    """HTTP status and S3 error code; (0, "") if the error is not an answer of the store."""
    if not isinstance(error, ClientError):
        return 0, ""
    return (
        int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)),
        str(error.response.get("Error", {}).get("Code", "")),
    )


def explain(error: BaseException, bucket: str, bucket_missing: bool = False) -> str:
    """What was wrong and what to do, without any secret."""
    status, code = error_code(error)
    if bucket_missing or code == "NoSuchBucket":
        return f"there is no bucket {bucket!r} at {_endpoint()}: create it, or correct the store's address"
    if isinstance(error, ClientError):
        message = str(error.response.get("Error", {}).get("Message", "")).strip()
        found = f"HTTP {status} {code}{f' ({message})' if message and message != code else ''}"
        return f"{found} from {_endpoint()}: {_ADVICE.get(code) or _by_status(status)}"
    return f"{error}: {_unanswered(error)}"


def _by_status(status: int) -> str:
    if status in (401, 403):
        return (
            f"wrong credentials, or no permission. Set {_KEYS}; they need to read, write, list and delete objects of "
            "the bucket (without the right to list, Amazon answers 403 for a missing object too)"
        )
    if status == 301:
        return _REGION
    if status == 412:
        return "the object was replaced while it was read; try again"
    if status == 409:
        return "other writes of this object did not end; try again"
    if status == 507:
        return _FULL
    return "the store failed: try again, then look at its log" if status >= 500 else "the store refused the request"


def _unanswered(error: BaseException) -> str:
    if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
        return f"no credentials: set {_KEYS} (or a profile, or the machine's role)"
    if isinstance(error, SSLError):
        return "no trusted TLS connection: set AWS_CA_BUNDLE to the certificate of the store's authority"
    if isinstance(error, ParamValidationError):
        return "not a valid request: correct the store's address"
    if isinstance(error, ConnectionError):
        return (
            f"no answer from {_endpoint()}: start the store, or set AWS_ENDPOINT_URL_S3 to an address that this "
            "process can reach (inside a container, localhost is the container)"
        )
    return f"the connection to {_endpoint()} failed: try again; check AWS_ENDPOINT_URL_S3 and proxies if it stays"


def _endpoint() -> str:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "Amazon S3"
