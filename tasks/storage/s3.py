"""A store in S3 or anything that speaks its protocol, through boto3."""

from __future__ import annotations

import io
import logging
import os
import random
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import botocore.session
from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from s3transfer.exceptions import S3DownloadFailedError

from tasks.contract.errors import StorageError
from tasks.storage.base import ObjectInfo
from tasks.storage.paths import check_path, check_prefix, copied_to
from tasks.storage.probe import probe_store
from tasks.storage.s3_errors import error_code, explain

log = logging.getLogger("tasks")

_PART_BYTES = 32 << 20
_MULTIPART_BYTES = 64 << 20  # one request up to here
_SMALL_BYTES = 64 << 10
_READ_ATTEMPTS = 4  # of a body that breaks off; botocore's own retries end when the headers are in
_CONFLICT_ATTEMPTS = 8
_WRITER = "writer"  # metadata of a conditional write: tells our own write from another's after a lost answer


class S3Store:
    """Objects under `s3://bucket/prefix`. Configured by the AWS client's standard environment variables and files.

    Safe between threads; a forked process gets a client of its own.
    """

    def __init__(self, bucket: str, prefix: str) -> None:
        self._bucket = bucket
        self._base = f"{prefix}/" if prefix else ""
        self._root = f"s3://{bucket}/{prefix}".rstrip("/")
        self._clients: dict[int, Any] = {}  # by process: sockets must not be shared over a fork
        self._connecting = threading.Lock()
        self._transfer = TransferConfig(
            multipart_threshold=_MULTIPART_BYTES, multipart_chunksize=_PART_BYTES, max_concurrency=8
        )

    @property
    def root(self) -> str:
        """`s3://bucket/prefix`, without a slash at the end."""
        return self._root

    @property
    def client(self) -> Any:
        """The boto3 client of this process."""
        process = os.getpid()
        if process not in self._clients:
            with self._connecting, self._reported("configure", ""):
                if process not in self._clients:
                    self._clients[process] = _connect()
        return self._clients[process]

    # ---- reading ----------------------------------------------------------------------------------------------------

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes from `start`, at most `length`; fewer at the end of the object."""
        if start < 0 or (length is not None and length < 0):
            raise ValueError(f"read of {path}: start {start} and length {length} must not be negative")
        if length == 0:  # a range cannot say this
            self.stat(path)
            return b""
        if start == 0 and length is None:
            return self._get(path)[0]
        last = "" if length is None else str(start + length - 1)
        try:
            return self._get(path, Range=f"bytes={start}-{last}")[0]
        except _PastTheEnd:
            return b""

    def read_with_tag(self, path: str) -> tuple[bytes, str]:
        """Content and ETag, from one answer."""
        return self._get(path)

    def _get(self, path: str, **options: str) -> tuple[bytes, str]:
        key = self._key(path)
        with self._reported("read", path):
            for attempt in range(_READ_ATTEMPTS):
                answer = self.client.get_object(Bucket=self._bucket, Key=key, **options)
                try:
                    # Reading checks the length against the header, and the checksum where the store sent one.
                    return answer["Body"].read(), answer["ETag"]
                except BotoCoreError:
                    if attempt == _READ_ATTEMPTS - 1:
                        raise
                    log.warning("%s: the answer for %s broke off; reading it again", self.root, path)
                    time.sleep(_pause(attempt))
        raise AssertionError("unreachable: the last attempt returns or raises")

    def download(self, path: str, target: Path) -> None:
        """Copy to a local file, in parallel parts of one version; it appears whole or not at all."""
        key = self._key(path)
        with self._reported("read", path), copied_to(target, self.root, path) as temporary:
            size = self._head(key)["ContentLength"]
            self.client.download_file(self._bucket, key, str(temporary), Config=self._transfer)
            if (found := temporary.stat().st_size) != size:
                raise StorageError(
                    f"{self.root}: got {found:,} of the {size:,} bytes of {path}: the transfer was cut short, or the "
                    "object was replaced meanwhile; try again"
                )

    def stat(self, path: str) -> ObjectInfo:
        """Size, ETag and time of one object."""
        key = self._key(path)
        with self._reported("read", path):
            head = self._head(key)
        return ObjectInfo(
            path=path, size=head["ContentLength"], tag=head["ETag"], modified=head["LastModified"].timestamp()
        )

    def exists(self, path: str) -> bool:
        """Whether an object of that path is there."""
        try:
            self.stat(path)
        except FileNotFoundError:
            return False
        return True

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose path starts with `prefix`, in path order.

        The listing is read to its end first: not every store sends keys in order.
        """
        start = f"{self._base}{check_prefix(prefix)}"
        found = []
        with self._reported("list", prefix):
            for page in self.client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=start):
                for entry in page.get("Contents", ()):
                    if not entry["Key"].endswith("/"):  # folder markers that consoles leave
                        path = entry["Key"].removeprefix(self._base)
                        modified = entry["LastModified"].timestamp()
                        found.append(ObjectInfo(path, entry["Size"], entry["ETag"], modified))
        yield from sorted(found, key=lambda info: info.path.encode())

    # ---- writing ----------------------------------------------------------------------------------------------------

    def write(self, path: str, data: bytes | Path) -> None:
        """Write an object, large ones in parts. A failed upload is aborted: no part of it is kept or billed."""
        key = self._key(path)
        size = data.stat().st_size if isinstance(data, Path) else len(data)
        with self._reported("write", path):
            if isinstance(data, Path):
                self.client.upload_file(str(data), self._bucket, key, Config=self._transfer)
            elif size > _MULTIPART_BYTES:
                self.client.upload_fileobj(io.BytesIO(data), self._bucket, key, Config=self._transfer)
            else:
                self.client.put_object(Bucket=self._bucket, Key=key, Body=data)
                return
            if (found := self._head(key)["ContentLength"]) != size:
                raise StorageError(
                    f"{self.root}: {path} has {found:,} bytes after the upload of {size:,}: the source changed "
                    "meanwhile, or the store alters content (set AWS_REQUEST_CHECKSUM_CALCULATION=when_required)"
                )

    def create(self, path: str, data: bytes) -> bool:
        """Write if nothing is there (`If-None-Match: *`)."""
        return self._conditional(path, data, IfNoneMatch="*")

    def replace(self, path: str, data: bytes, tag: str) -> bool:
        """Write if the object still has this ETag (`If-Match`)."""
        return self._conditional(path, data, IfMatch=tag)

    def _conditional(self, path: str, data: bytes, **condition: str) -> bool:
        key, writer = self._key(path), uuid.uuid4().hex
        request = {"Bucket": self._bucket, "Key": key, "Body": data, "Metadata": {_WRITER: writer}, **condition}
        with self._reported("write", path):
            for attempt in range(_CONFLICT_ATTEMPTS):
                try:
                    self.client.put_object(**request)
                    return True
                except ClientError as error:
                    status, code = error_code(error)
                    if status == 412:
                        # A repeated request can meet what its own first try wrote.
                        return self._resent(error) and self._wrote(key, writer)
                    if status == 404 and code != "NoSuchBucket" and "IfMatch" in condition:
                        return False
                    if status != 409 or attempt == _CONFLICT_ATTEMPTS - 1:
                        raise
                    time.sleep(_pause(attempt))  # another conditional write of this key is under way
        raise AssertionError("unreachable: the last attempt returns or raises")

    @staticmethod
    def _resent(error: ClientError) -> bool:
        return bool(error.response.get("ResponseMetadata", {}).get("RetryAttempts"))

    def _wrote(self, key: str, writer: str) -> bool:
        try:
            return bool(self._head(key)["Metadata"].get(_WRITER) == writer)
        except ClientError as error:
            if error_code(error)[0] == 404:
                return False
            raise

    def delete(self, path: str) -> None:
        """Remove an object."""
        key = self._key(path)
        with self._reported("delete", path):
            self.client.delete_object(Bucket=self._bucket, Key=key)

    def probe(self) -> Sequence[str]:
        """What of the interface's promises this store or its configuration does not hold, in words."""
        # Some stores (SeaweedFS) make a bucket when something is written to it: a mistyped name would go unnoticed.
        with self._reported("reach", ""):
            self._require_bucket()
        return probe_store(self)

    # ---- below ------------------------------------------------------------------------------------------------------

    def _key(self, path: str) -> str:
        return f"{self._base}{check_path(path)}"

    def _head(self, key: str) -> Any:
        try:
            return self.client.head_object(Bucket=self._bucket, Key=key)
        except ClientError as error:
            if error_code(error)[0] == 404:
                # The answer to HEAD has no body that says what is missing, the object or the bucket.
                self._require_bucket()
            raise

    def _require_bucket(self) -> None:
        try:
            self.client.head_bucket(Bucket=self._bucket)
        except ClientError as error:
            if error_code(error)[0] == 404:
                raise self._failed("reach", "", explain(error, self._bucket, bucket_missing=True)) from error
            # Credentials for objects only are not allowed to ask.
            log.debug("%s: HEAD of the bucket: %s", self.root, error)

    @contextmanager
    def _reported(self, action: str, path: str) -> Iterator[None]:
        try:
            yield
        except (ClientError, BotoCoreError, Boto3Error, S3DownloadFailedError) as error:
            # The transfer layer puts the service's answer into a message of its own; it is still in the context.
            cause = error.__context__ if isinstance(error, (Boto3Error, S3DownloadFailedError)) else error
            status, code = error_code(cause)
            if code == "InvalidRange" or status == 416:
                raise _PastTheEnd(path) from error
            if code in ("NoSuchKey", "404", "NotFound"):
                raise FileNotFoundError(2, f"no such object in {self.root}", path) from error
            raise self._failed(action, path, explain(cause or error, self._bucket)) from error

    def _failed(self, action: str, path: str, words: str) -> StorageError:
        return StorageError(f"{self.root}: cannot {action} {path or 'it'}: {words}")


class _PastTheEnd(Exception):
    """A range that starts at or after the end of the object."""


def _connect() -> Any:
    core = botocore.session.get_session()
    endpoint = (
        os.environ.get("AWS_ENDPOINT_URL_S3")
        or os.environ.get("AWS_ENDPOINT_URL")
        or core.get_scoped_config().get("endpoint_url")
    )
    settings: dict[str, Any] = {
        "signature_version": "s3v4",
        # Stores of one's own have rarely a host name for each bucket.
        "s3": {"addressing_style": "path" if endpoint else "auto"},
        "connect_timeout": 5,
        "read_timeout": 60,
        "max_pool_connections": 32,
        "tcp_keepalive": True,
    }
    if not {"AWS_RETRY_MODE", "AWS_MAX_ATTEMPTS"} & os.environ.keys():
        settings["retries"] = {"mode": "standard", "total_max_attempts": 5}
    client = boto3.Session(botocore_session=core).client("s3", config=Config(**settings))
    client.meta.events.register("before-send.s3.PutObject", _send_small_bodies_at_once)
    return client


def _send_small_bodies_at_once(request: Any, **_: object) -> None:
    """Drop `Expect: 100-continue`, for which botocore waits up to a second: what it saves is sending a large body in
    vain. It is not part of the signature."""
    size = request.headers.get("X-Amz-Decoded-Content-Length") or request.headers.get("Content-Length")
    if "Expect" in request.headers and size is not None and int(size) < _SMALL_BYTES:
        del request.headers["Expect"]


def _pause(attempt: int) -> float:
    """Seconds before the next try: doubling from 0.05, half of it random, so that rivals do not stay in step."""
    return min(0.05 * 2**attempt, 2.0) * random.uniform(0.5, 1.0)
