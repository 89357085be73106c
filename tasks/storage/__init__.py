"""Artifact storage: S3 or a folder behind one interface (`base.Store`), and artifacts with receipts on top of it."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from tasks.contract.errors import ConfigurationError, Problem
from tasks.storage.base import Store

__all__ = ["Store", "open_store"]

_EXPECTED = "s3://bucket/prefix, a folder, or file:///folder"


def open_store(root: str) -> Store:
    """The store at `root`; nothing is contacted or created yet.

    S3 is configured by the AWS client's own environment variables: AWS_ENDPOINT_URL_S3 (or AWS_ENDPOINT_URL) for
    anything but Amazon's, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_DEFAULT_REGION, AWS_CA_BUNDLE.

    Args:
        root: `s3://bucket/prefix`, a folder (a relative one counts from the working folder), or `file:///folder`.

    Raises:
        ConfigurationError: if it is none of these.
    """
    if not root.strip():
        raise ConfigurationError(Problem("store", root, _EXPECTED))
    scheme, separator, rest = root.partition("://")
    if not separator:
        return _folder(Path(root).expanduser())
    if scheme == "s3":
        bucket, _, prefix = rest.partition("/")
        if not bucket:
            raise ConfigurationError(Problem("store", root, "s3://bucket/prefix, with a bucket"))
        return _s3(root, bucket, prefix.strip("/"))
    if scheme == "file":
        url = urlsplit(root)
        if url.netloc not in ("", "localhost") or not url.path:
            raise ConfigurationError(Problem("store", root, "file:///folder, three slashes and an absolute path"))
        return _folder(Path(unquote(url.path)))
    raise ConfigurationError(Problem("store", root, _EXPECTED))


# The two are imported when asked for: a folder needs no boto3, which takes half a second to import.


def _folder(root: Path) -> Store:
    from tasks.storage.folder import FolderStore

    return FolderStore(root)


def _s3(root: str, bucket: str, prefix: str) -> Store:
    from tasks.storage.paths import check_path
    from tasks.storage.s3 import S3Store

    if prefix:
        try:
            check_path(prefix)
        except ValueError as error:
            raise ConfigurationError(Problem("store", root, f"a plain prefix ({error})")) from error
    return S3Store(bucket, prefix)
