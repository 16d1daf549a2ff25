"""What an S3 store makes of uploads that fail and of answers that are errors."""

from __future__ import annotations

import gc
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ckptd.errors import CkptdError, Corrupt, InvalidRequest, NotFound, StoreError, Unavailable
from ckptd.store import Store
from ckptd.stores import open_store
from faulty_proxy import Fault, FaultyProxy, Headers, refuse
from s3 import S3Server

MIB = 1024 * 1024
#: Neither botocore nor we try again: a test sees one answer.
AT_ONCE = {"config_kwargs": '{"retries": {"max_attempts": 0}}'}


@pytest.fixture
def prefix() -> str:
    return f"s3-{uuid.uuid4().hex[:8]}"


class SourceError(Exception):
    pass


def test_a_failed_upload_is_aborted_on_the_server(s3_server: S3Server, prefix: str) -> None:
    store = open_store(s3_server.url(prefix), s3_server.options)
    seen: list[list[str]] = []

    def source() -> Iterator[bytes]:
        for _ in range(10):
            yield bytes(4 * MIB)
        seen.append(s3_server.unfinished_uploads(prefix))
        raise SourceError

    with pytest.raises(SourceError):
        store.put("file", source, nbytes_hint=48 * MIB)
    gc.collect()  # fsspec publishes a file that is collected open
    assert seen == [[f"{prefix}/file"]]
    assert s3_server.unfinished_uploads(prefix) == []
    assert s3_server.keys(prefix) == {}


def test_a_failed_upload_below_one_part_is_not_published_by_the_collector(s3_server: S3Server, prefix: str) -> None:
    store = open_store(s3_server.url(prefix), s3_server.options)

    def source() -> Iterator[bytes]:
        yield b"some"
        raise SourceError

    with pytest.raises(SourceError):
        store.put("file", source)
    gc.collect()
    assert s3_server.keys(prefix) == {}


def test_an_upload_that_cannot_be_completed_leaves_no_parts(s3_server: S3Server, prefix: str) -> None:
    store = open_store(s3_server.url(prefix), s3_server.options)

    def source() -> Iterator[bytes]:
        yield bytes(20 * MIB)
        (upload,) = s3_server.client().list_multipart_uploads(Bucket=s3_server.bucket, Prefix=prefix)["Uploads"]
        s3_server.client().abort_multipart_upload(Bucket=s3_server.bucket, Key=upload["Key"], UploadId=upload["UploadId"])

    with pytest.raises(Unavailable):
        store.put("file", source, nbytes_hint=20 * MIB)
    assert s3_server.unfinished_uploads(prefix) == []
    assert s3_server.keys(prefix) == {}


def test_parts_are_as_long_as_the_hint_asks_and_all_alike(s3_server: S3Server, prefix: str) -> None:
    store = open_store(s3_server.url(prefix), s3_server.options)
    sizes: list[int] = []

    def source() -> Iterator[bytes]:
        for _ in range(13):
            yield bytes(3 * MIB)
        (upload,) = s3_server.client().list_multipart_uploads(Bucket=s3_server.bucket, Prefix=prefix)["Uploads"]
        listed = s3_server.client().list_parts(Bucket=s3_server.bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        sizes.extend(part["Size"] for part in listed["Parts"])

    assert store.put("file", source, nbytes_hint=39 * MIB) == 39 * MIB
    assert sizes == [16 * MIB, 16 * MIB]
    assert s3_server.keys(prefix) == {f"{prefix}/file": 39 * MIB}


def test_a_missing_bucket_is_the_operators_and_a_missing_key_is_not_found(s3_server: S3Server) -> None:
    there = open_store(s3_server.url("prefix"), s3_server.options)
    with pytest.raises(NotFound):
        there.get("nothing")
    missing = open_store("s3://no-such-bucket/prefix", s3_server.options)
    calls: list[Callable[[], object]] = [
        lambda: missing.get("nothing"),
        lambda: missing.get("nothing", 0, 5),
        lambda: list(missing.list()),
        lambda: missing.put("a", lambda: [b"1"]),
        lambda: missing.put("a", lambda: [bytes(20 * MIB)], nbytes_hint=20 * MIB),
        lambda: missing.delete(["a"]),
        missing.probe,
    ]
    for call in calls:
        with pytest.raises(StoreError, match=r"create the bucket"):
            call()


def test_a_prefix_that_nobody_wrote_to_is_empty(s3_server: S3Server, prefix: str) -> None:
    assert list(open_store(s3_server.url(prefix), s3_server.options).list()) == []
    assert list(open_store(s3_server.url(f"{prefix}/deep/er"), s3_server.options).list("x/")) == []


def test_a_whole_bucket_is_a_store(s3_server: S3Server) -> None:
    s3_server.client().create_bucket(Bucket="whole")
    store = open_store("s3://whole", s3_server.options)
    store.probe()
    store.put("a/b", lambda: [b"1"])
    assert [found.key for found in store.list()] == ["a/b"]
    assert store.get("a/b") == b"1"


@contextmanager
def answering(status: int, body: str, *, code: str = "", length: int | None = None) -> Iterator[Store]:
    """A store whose server gives this answer to everything."""
    text = (f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>told by a test</Message></Error>" if code else body).encode()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # older ones never say 100-continue, which uploads wait for

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            self.send_header("Content-Length", str(len(text) if length is None else length))
            self.send_header("Connection", "close")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(text)
            self.close_connection = True

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        options = {"endpoint_url": f"http://127.0.0.1:{server.server_port}", "key": "1", "secret": "2", **AT_ONCE}
        yield open_store("s3://bucket/prefix", options, retries=0)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "code", "kind", "hint"),
    [
        (403, "AccessDenied", StoreError, "credentials"),
        (403, "InvalidAccessKeyId", StoreError, "credentials"),
        (403, "SignatureDoesNotMatch", StoreError, "credentials"),
        (403, "", StoreError, "credentials"),
        (404, "NoSuchBucket", StoreError, "create the bucket"),
        (400, "InvalidRequest", StoreError, ""),
        (501, "NotImplemented", StoreError, ""),
        (400, "ExpiredToken", Unavailable, "expired"),
        (403, "RequestTimeTooSkewed", Unavailable, "clock"),
        (400, "RequestTimeout", Unavailable, ""),
        (429, "TooManyRequests", Unavailable, ""),
        (500, "InternalError", Unavailable, ""),
        (503, "ServiceUnavailable", Unavailable, ""),
        (502, "", Unavailable, ""),
    ],
)
def test_answers_are_told_as_what_the_caller_should_do(status: int, code: str, kind: type[CkptdError], hint: str) -> None:
    with answering(status, "", code=code) as store:
        for call in (lambda: store.get("a"), lambda: [*store.list()], lambda: store.put("a", lambda: [b"1"]), store.probe):
            with pytest.raises(kind, match=hint or None) as caught:
                call()
            assert caught.value.__cause__ is not None
            assert "\n" not in str(caught.value)


def test_a_body_shorter_than_announced_is_never_returned() -> None:
    with answering(206, "12345", length=10) as store, pytest.raises(Unavailable):
        store.get("a", 0, 10)


def test_a_body_longer_than_asked_for_is_never_returned() -> None:
    with answering(200, "0123456789") as store, pytest.raises(Corrupt):
        store.get("a", 0, 5)


def test_nobody_at_the_endpoint_may_pass() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    port = server.server_port
    server.server_close()
    store = open_store("s3://bucket/a", {"endpoint_url": f"http://127.0.0.1:{port}", "key": "1", "secret": "2", **AT_ONCE}, retries=0)
    for call in (lambda: store.get("a"), lambda: [*store.list()], lambda: store.put("a", lambda: [b"1"]), store.probe):
        with pytest.raises(Unavailable):
            call()


def test_an_upload_to_a_server_that_says_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptd.s3._REQUEST_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0), backlog=100) as silent:
        options = {"endpoint_url": f"http://127.0.0.1:{silent.getsockname()[1]}", "key": "1", "secret": "2", **AT_ONCE}
        with pytest.raises(Unavailable, match="cannot write"):
            open_store("s3://bucket/a", options, retries=0).put("a", lambda: [b"1"])


def test_options_reach_the_storage_package_and_unknown_ones_are_wrong_use(s3_server: S3Server) -> None:
    for name, value, told in (
        ("frobnicate", "1", "'frobnicate' is unknown; known are"),
        ("endpoint_ur", "http://x", "did you mean endpoint_url"),
        ("max_concurrency", "0", "max_concurrency must be"),
        ("client_kwargs", '{"verfy": false}', "client_kwargs: 'verfy' is unknown; did you mean verify"),
        ("config_kwargs", '{"frobnicate": 1}', "frobnicate"),
        ("config_kwargs", "text", "store-option"),
        ("use_listings_cache", "true", "use_listings_cache"),
    ):
        with pytest.raises(InvalidRequest, match=told):
            open_store(s3_server.url(), {**s3_server.options, name: value})
    # All digits, as an access key may be.
    open_store(s3_server.url("digits"), {**s3_server.options, "key": "123456789012", "secret": "1e5"}).probe()
    open_store(s3_server.url("x"), {**s3_server.options, "client_kwargs": '{"verify": false}', "requester_pays": "true"}).probe()


def test_an_unknown_option_ends_a_command_as_wrong_use(s3_server: S3Server) -> None:
    command = [sys.executable, "-m", "ckptd", "list", "--store", s3_server.url(), "--store-option", "frobnicate=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "frobnicate" in done.stderr


class Guard:
    """A proxy before S3 that takes the access keys it is told, and answers to others as S3 does."""

    def __init__(self, proxy: FaultyProxy) -> None:
        self.taken = ""
        self.code = "InvalidAccessKeyId"
        self.seen: list[str] = []
        self.url = proxy.endpoint
        proxy.judge = self.judge

    def judge(self, _line: str, headers: Headers, _body: bytes) -> Fault | None:
        self.seen.append(headers["Authorization"].partition("Credential=")[2].partition("/")[0])
        return None if self.seen[-1] == self.taken else refuse(400 if self.code == "ExpiredToken" else 403, self.code)


@pytest.fixture
def guard(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Guard]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with FaultyProxy(s3_server.endpoint) as proxy:
        yield Guard(proxy)


@pytest.mark.parametrize("by", ["environment", "profile", "chosen profile", "option"])
def test_credentials_come_from_the_usual_places(
    s3_server: S3Server, guard: Guard, prefix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by: str
) -> None:
    options = {"endpoint_url": guard.url, "region_name": "us-east-1"}
    if by == "environment":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "one")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    elif by == "option":
        options |= {"key": "one", "secret": "secret"}
    else:
        name = "default" if by == "profile" else "mine"
        (tmp_path / "credentials").write_text(f"[{name}]\naws_access_key_id = one\naws_secret_access_key = secret\n")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        if by == "chosen profile":
            options["profile"] = "mine"
    guard.taken = "one"
    open_store(s3_server.url(prefix), options, retries=0).probe()
    assert {*guard.seen} == {"one"}


def test_a_profile_that_is_not_there_is_the_operators(s3_server: S3Server, guard: Guard) -> None:
    with pytest.raises(StoreError, match="profile"):
        open_store(s3_server.url(), {"endpoint_url": guard.url, "profile": "nobody"}).probe()


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId", "InvalidToken"])
def test_credentials_that_end_are_read_anew_where_they_came_from(
    s3_server: S3Server, guard: Guard, prefix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str
) -> None:
    def write(key: str) -> None:
        (tmp_path / "credentials").write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret\n")

    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    guard.code = code
    write("one")
    store = open_store(s3_server.url(prefix), {"endpoint_url": guard.url, "region_name": "us-east-1"}, retries=0)
    guard.taken = "one"
    store.put("a", lambda: [b"1"])
    guard.taken = "two"
    write("two")
    with pytest.raises(Unavailable, match="taken before"):
        store.put("b", lambda: [b"2"])
    store.put("b", lambda: [b"2"])
    assert [found.key for found in store.list()] == ["a", "b"]


def test_credentials_that_were_never_taken_are_the_operators(s3_server: S3Server, guard: Guard, prefix: str) -> None:
    store = open_store(s3_server.url(prefix), {"endpoint_url": guard.url, "region_name": "us-east-1", "key": "one", "secret": "2"})
    with pytest.raises(StoreError, match="credentials"):
        store.probe()
    guard.taken = "one"
    store.probe()
    guard.taken = ""
    with pytest.raises(Unavailable, match="taken before"):
        store.put("a", lambda: [b"1"])
    guard.code = "AccessDenied"  # it is the permission that is missing
    with pytest.raises(StoreError, match="permit"):
        store.put("a", lambda: [b"1"])


def test_without_credentials_the_operator_is_told(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    options = {name: value for name, value in s3_server.options.items() if name not in ("key", "secret")}
    with pytest.raises(StoreError, match="credentials"):
        open_store(s3_server.url(), options).get("a")


def run_python(script: str) -> str:
    return subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.strip()


def test_storage_packages_are_imported_when_a_url_asks_for_them() -> None:
    script = (
        "import sys, ckptd.stores, ckptd.ledger\n"
        "ckptd.stores.open_store('/tmp/x')\n"
        "print([name for name in ('fsspec', 's3fs', 'aiobotocore') if name in sys.modules])"
    )
    assert run_python(script) == "[]"


@pytest.mark.parametrize(("url", "package", "extra"), [("s3://bucket", "s3fs", "s3"), ("gs://bucket", "gcsfs", "gcs")])
def test_a_missing_package_is_told_with_the_extra_that_brings_it(url: str, package: str, extra: str) -> None:
    script = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from ckptd import errors, stores\n"
        f"try: stores.open_store({url!r})\n"
        "except errors.InvalidRequest as exc: print(exc)"
    )
    assert f"pip install 'ckptd[{extra}]'" in run_python(script)
