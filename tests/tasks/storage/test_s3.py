"""What only S3 can get wrong: connections that break, credentials, dialects, uploads in parts."""

from __future__ import annotations

import os
import re
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from boto3.s3.transfer import TransferConfig

from tasks.contract.errors import StorageError
from tasks.storage import open_store
from tasks.storage.s3 import S3Store

pytestmark = pytest.mark.services
MIB = 1 << 20


def _in_small_parts(store: S3Store) -> S3Store:
    # S3's smallest part is 5 MiB.
    store._transfer = TransferConfig(multipart_threshold=5 * MIB, multipart_chunksize=5 * MIB, max_concurrency=4)
    return store


def _unfinished(store: S3Store) -> list[str]:
    uploads = store.client.list_multipart_uploads(Bucket="tests").get("Uploads", [])
    return [upload["Key"] for upload in uploads]


def test_upload_and_download_in_parts(s3_store: S3Store, tmp_path: Path) -> None:
    # STO-05: 20 MB in parts; the tag is no MD5, and nothing takes it for one.
    store = _in_small_parts(s3_store)
    source = tmp_path / "source"
    source.write_bytes(os.urandom(20_000_000))
    store.write("big/from-file", source)
    assert re.search(r"-\d+\"?$", store.stat("big/from-file").tag)
    store.download("big/from-file", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()
    assert store.read("big/from-file", 5 * MIB - 2, 4) == source.read_bytes()[5 * MIB - 2 : 5 * MIB + 2]
    assert _unfinished(store) == []


def test_failed_uploads_leave_no_parts(s3_store: S3Store, tmp_path: Path) -> None:
    # STO-07: the third part fails.
    store = _in_small_parts(s3_store)
    source = tmp_path / "source"
    source.write_bytes(bytes(20 * MIB))
    started = []

    def fail(params: dict[str, Any], **_: Any) -> None:
        started.extend(_unfinished(store))
        if params["url_path"] and params["query_string"].get("partNumber") == 3:
            raise OSError(5, "Input/output error")

    store.client.meta.events.register("before-call.s3.UploadPart", fail)
    with pytest.raises(OSError, match="Input/output error"):
        store.write("big/failing", source)
    assert started  # an upload was under way
    assert _unfinished(store) == []
    assert not store.exists("big/failing")


def test_refused_parts_are_reported_and_leave_none(s3_store: S3Store, tmp_path: Path) -> None:
    store = _in_small_parts(s3_store)
    source = tmp_path / "source"
    source.write_bytes(bytes(12 * MIB))

    def spoil(request: Any, **_: Any) -> None:
        if "partNumber=2" in request.url:
            request.headers["Authorization"] = request.headers["Authorization"].replace(b"Signature=", b"Signature=0")

    store.client.meta.events.register("before-send.s3.UploadPart", spoil)
    with pytest.raises(StorageError, match="cannot write big/refused: HTTP 403 SignatureDoesNotMatch"):
        store.write("big/refused", source)
    assert _unfinished(store) == []


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("AWS_SECRET_ACCESS_KEY", "wrong-secret", "SignatureDoesNotMatch.*set AWS_ACCESS_KEY_ID and AWS_SECRET_ACC"),
        ("AWS_ACCESS_KEY_ID", "wrong-key", "InvalidAccessKeyId.*set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    ],
)
def test_wrong_credentials(
    s3_store: S3Store, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str
) -> None:
    monkeypatch.setenv(variable, value)
    store = open_store(s3_store.root)
    for use in (lambda: store.write("a/x", b"1"), lambda: store.read("a/x"), lambda: list(store.list("a/"))):
        with pytest.raises(StorageError, match=f"^{re.escape(store.root)}: cannot .* a/.*{words}") as caught:
            use()
        assert "wrong-secret" not in str(caught.value)
    with pytest.raises(StorageError, match=r"HTTP 403.*wrong credentials"):  # HEAD: an answer without a body
        store.exists("a/x")
    with pytest.raises(StorageError, match=words):
        store.probe()


def test_no_credentials(s3_store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StorageError, match=r"cannot read x: .*no credentials: set AWS_ACCESS_KEY_ID"):
        open_store(s3_store.root).read("x")


def test_unreachable_endpoint(s3_environment: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", address)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(StorageError, match=rf"s3://tests/p: cannot read x: .*no answer from {address}: start the stor"):
        open_store("s3://tests/p").read("x")


def test_absent_bucket(s3_environment: object) -> None:
    store = open_store("s3://no-such-bucket/p")
    for use in (
        lambda: store.read("x"),
        lambda: store.exists("x"),
        lambda: list(store.list("")),
        store.probe,  # before it writes: SeaweedFS makes buckets that are written to
    ):
        with pytest.raises(StorageError, match="there is no bucket 'no-such-bucket' at http://127"):
            use()


def test_names_that_are_no_bucket(s3_environment: object) -> None:
    with pytest.raises(StorageError, match=r"Invalid bucket name.*correct the store's address"):
        open_store("s3://not a bucket/p").read("x")


def test_lost_answer_to_a_conditional_write(s3_store: S3Store) -> None:
    # The first try arrives, its answer does not; botocore sends it again and meets its own object.
    with _proxy(s3_store, cut=lambda request, answer: b"" if request.startswith(b"PUT ") else answer) as store:
        assert store.create("receipt.json", b"ours") is True
    assert s3_store.read("receipt.json") == b"ours"
    assert s3_store.create("receipt.json", b"ours") is False


def test_answers_cut_short_are_read_again(s3_store: S3Store, tmp_path: Path) -> None:
    # STO-01: the connection closes after half the body of 3 MB.
    content = os.urandom(3_000_000)
    s3_store.write("shard", content)

    def half(request: bytes, answer: bytes) -> bytes:
        return answer[: len(answer) // 2] if request.startswith(b"GET ") else answer

    with _proxy(s3_store, cut=half) as store:
        assert store.read("shard") == content
    with _proxy(s3_store, cut=half) as store:
        store.download("shard", tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == content
    with _proxy(s3_store, cut=half, times=1000) as store:
        with pytest.raises(StorageError, match="cannot read shard: "):
            store.read("shard")
        with pytest.raises(StorageError, match="cannot read shard: "):
            store.download("shard", tmp_path / "never")
    assert [p.name for p in tmp_path.iterdir()] == ["copy"]


def test_object_replaced_during_a_download(s3_store: S3Store, tmp_path: Path) -> None:
    # STO-06: between two ranges.
    store = _in_small_parts(s3_store)
    store.write("shard", bytes(12 * MIB))
    replaced = threading.Event()

    def replace(params: dict[str, Any], **_: Any) -> None:
        if not replaced.is_set():
            replaced.set()
            open_store(store.root).write("shard", b"\1" * (12 * MIB))

    store.client.meta.events.register("before-call.s3.GetObject", replace)
    with pytest.raises(StorageError, match=r"cannot read shard: HTTP 412.*replaced while it was read; try again"):
        store.download("shard", tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []


def test_probe_names_a_store_without_conditional_writes(s3_store: S3Store) -> None:
    # Such stores ignore the two headers: the proxy takes the place of one by leaving them out.
    def ignore(request: Any, **_: Any) -> None:
        for header in ("If-None-Match", "If-Match"):
            if header in request.headers:
                del request.headers[header]

    s3_store.client.meta.events.register("before-sign.s3.PutObject", ignore)
    faults = list(s3_store.probe())
    assert len(faults) == 2
    assert "second conditional write (If-None-Match: *) replaced the first" in faults[0]
    assert "stale tag (If-Match) was accepted" in faults[1]
    assert list(s3_store.list("")) == []


def test_probe_names_a_store_that_keeps_checksum_framing(s3_store: S3Store) -> None:
    # STO-02: what such a store holds after a write of "hello\n".
    def frame(params: dict[str, Any], **_: Any) -> None:
        if params["Body"] == b"hello\n":
            params["Body"] = b"6\r\nhello\n\r\n0\r\nx-amz-checksum-crc32:NjcKxQ==\r\n\r\n"

    s3_store.client.meta.events.register("provide-client-params.s3.PutObject", frame)
    faults = list(s3_store.probe())
    assert len(faults) == 1
    assert "AWS_REQUEST_CHECKSUM_CALCULATION=when_required" in faults[0]


def test_checksum_mode_is_settable(s3_store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    store = open_store(s3_store.root)
    assert isinstance(store, S3Store)
    sent: list[str] = []
    store.client.meta.events.register("before-send.s3.PutObject", lambda request, **_: sent.extend(request.headers))
    store.write("x", b"hello\n")
    assert sent
    assert not any("checksum" in name.lower() or name.lower() == "x-amz-trailer" for name in sent)
    assert store.read("x") == b"hello\n"


def test_a_bucket_without_prefix(s3_store: S3Store) -> None:
    store = open_store("s3://tests")
    name = f"{uuid.uuid4().hex}/x"
    store.write(name, b"1")
    assert [i.path for i in store.list(name[:32])] == [name]
    assert store.root == "s3://tests"


# ---- a proxy that loses answers -------------------------------------------------------------------------------------


@contextmanager
def _proxy(store: S3Store, cut: Callable[[bytes, bytes], bytes], times: int = 1) -> Iterator[S3Store]:
    """The same store through a proxy that closes the connection after `cut(request, answer)`, the first `times` that
    this is shorter than the answer."""
    upstream = store.client.meta.endpoint_url.removeprefix("http://").split(":")
    left = [times]
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.MonkeyPatch.context() as patch:
        thread = threading.Thread(target=_serve, args=(listener, (upstream[0], int(upstream[1])), cut, left))
        thread.start()
        patch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{listener.getsockname()[1]}")
        proxied = open_store(store.root)
        assert isinstance(proxied, S3Store)
        try:
            yield proxied
            assert left[0] < times  # it did cut
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def _serve(
    listener: socket.socket, upstream: tuple[str, int], cut: Callable[[bytes, bytes], bytes], left: list[int]
) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:  # shut down: the test is over
            return
        threading.Thread(target=_relay, args=(client, upstream, cut, left), daemon=True).start()


def _relay(
    client: socket.socket, upstream: tuple[str, int], cut: Callable[[bytes, bytes], bytes], left: list[int]
) -> None:
    """One request per connection: the server is told to close it, so that the answer's end is known."""
    with client, socket.create_connection(upstream) as server, client.makefile("rb") as requests:
        head = b"".join(iter(requests.readline, b"\r\n"))
        if not head:
            return
        line, _, headers = head.partition(b"\r\n")
        headers = re.sub(rb"(?im)^(connection|expect):.*\r\n", b"", headers)
        length = re.search(rb"(?im)^content-length: *(\d+)", headers)
        body = requests.read(int(length[1])) if length else b""
        server.sendall(line + b"\r\nConnection: close\r\n" + headers + b"\r\n" + body)
        with server.makefile("rb") as answers:
            answer = answers.read()
        kept = cut(line, answer)
        if len(kept) < len(answer) and left[0] > 0:
            left[0] -= 1
            answer = kept
        with suppress(BrokenPipeError, ConnectionResetError):  # the client may have given up
            client.sendall(answer)
