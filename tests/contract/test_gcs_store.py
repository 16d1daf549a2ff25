"""What a GCS store makes of uploads, of answers that are errors, and of credentials."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import types
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from ckptd.errors import CkptdError, Corrupt, InvalidRequest, NotFound, StoreError, Unavailable
from ckptd.store import ABSENT, Changed, Store
from ckptd.stores import open_store
from faulty_proxy import Fault, FaultyProxy, Headers, refuse_json
from gcs import GCSServer, only_over

KIB = 1024
LIST = r"GET /storage/v1/b/bucket/o\?"
PART = "PUT .*upload_id"


@pytest.fixture
def proxy(gcs_server: GCSServer) -> Iterator[FaultyProxy]:
    with FaultyProxy(gcs_server.endpoint) as made:
        yield made


@pytest.fixture
def prefix() -> str:
    return f"gcs-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, proxy: FaultyProxy, gcs_server: GCSServer, prefix: str) -> Store:
    """Parts are of 512 KiB; gcsfs tries again without waiting, we do not."""
    monkeypatch.setattr("ckptd.gcs._PART_NBYTES", 512 * KIB)

    async def at_once(_seconds: float) -> None:
        pass

    monkeypatch.setattr("gcsfs.retry.asyncio", types.SimpleNamespace(sleep=at_once))
    return open_store(gcs_server.url(prefix), {**gcs_server.options, "endpoint_url": proxy.endpoint}, retries=0)


def data_of(nbytes: int) -> bytes:
    return bytes(range(251)) * (nbytes // 251) + bytes(nbytes % 251)


class SourceError(Exception):
    pass


def test_a_missing_bucket_is_the_operators_and_a_missing_key_is_not_found(gcs_server: GCSServer) -> None:
    with pytest.raises(NotFound):
        open_store(gcs_server.url("prefix"), gcs_server.options).get("nothing")
    missing = open_store("gs://no-such-bucket/prefix", gcs_server.options)
    calls: list[Callable[[], object]] = [
        lambda: missing.get("nothing"),
        lambda: missing.get("nothing", 0, 5),
        lambda: list(missing.list()),
        missing.children,
        lambda: missing.put("a", lambda: [b"1"]),
        lambda: missing.put("a", lambda: [bytes(17 * KIB * KIB)]),
        lambda: missing.delete(["a"]),
        lambda: missing.delete(["a", "b"]),
        missing.probe,
    ]
    for call in calls:
        with pytest.raises(StoreError, match=r"create the bucket"):
            call()


def test_a_whole_bucket_is_a_store(gcs_server: GCSServer) -> None:
    gcs_server.make_bucket("whole")
    store = open_store("gcs://whole", gcs_server.options)
    store.probe()
    store.put("a/b", lambda: [b"1"])
    assert [found.key for found in store.list()] == ["a/b"]
    assert store.children() == ([], ["a"])
    assert store.get("a/b") == b"1"


@pytest.mark.parametrize("nbytes", [100, 512 * KIB, 2000 * KIB], ids=["one request", "one part", "four parts"])
def test_a_failed_upload_is_aborted_and_nothing_appears(
    store: Store, proxy: FaultyProxy, gcs_server: GCSServer, prefix: str, nbytes: int
) -> None:
    def source() -> Iterator[bytes]:
        yield data_of(nbytes)
        raise SourceError

    with pytest.raises(SourceError):
        store.put("file", source)
    assert gcs_server.keys(prefix) == {}
    assert proxy.count("DELETE .*upload_id") == proxy.count("POST .*uploadType=resumable") == (nbytes > 512 * KIB)


def test_an_object_that_contains_what_separates_parts_of_a_request_is_stored_whole(
    store: Store, gcs_server: GCSServer, prefix: str
) -> None:
    data = b"before\r\n--==0==--\r\n--ckptd-batch--\r\nafter"
    store.put("file", lambda: [data])
    assert gcs_server.read(f"{prefix}/file") == store.get("file") == data


def keeping(nbytes: int) -> Callable[[Headers, bytes], tuple[Headers, bytes]]:
    """The server gets, and so keeps, no more of a part."""

    def rewrite(headers: Headers, body: bytes) -> tuple[Headers, bytes]:
        start, end, _ = re.split("[/-]", headers["Content-Range"].removeprefix("bytes "))
        kept = min(nbytes, int(end) - int(start) + 1)
        return {**headers, "Content-Range": f"bytes {start}-{int(start) + kept - 1}/*"}, body[:kept]

    return rewrite


@pytest.mark.parametrize("kept", [256 * KIB, 256 * KIB * 3])
def test_what_gcs_did_not_keep_of_a_part_is_sent_again(
    store: Store, proxy: FaultyProxy, gcs_server: GCSServer, prefix: str, kept: int
) -> None:
    data = data_of(1500 * KIB)
    proxy.tell(Fault(on=PART, rewrite=keeping(kept), times=1))
    assert store.put("file", lambda: [data]) == len(data)
    assert gcs_server.read(f"{prefix}/file") == data


def test_what_gcs_did_not_keep_of_the_last_part_is_sent_again(store: Store, proxy: FaultyProxy, gcs_server: GCSServer, prefix: str) -> None:
    data = data_of(1000 * KIB)
    proxy.tell(Fault(on=PART, times=1), Fault(on=PART, rewrite=keeping(256 * KIB), times=1))
    assert store.put("file", lambda: [data]) == len(data)
    assert proxy.count(PART) == 3
    assert gcs_server.read(f"{prefix}/file") == data


#: Answers to a part, of two, after which the object must not be taken for stored.
BAD_ANSWERS: dict[str, Callable[[], Fault]] = {
    "nothing kept": lambda: Fault(status=308),
    "forgotten": lambda: refuse_json(404),
    "gone": lambda: refuse_json(410),
    "done, not a word": lambda: Fault(status=200),
    "done, wrong size": lambda: Fault(status=200, body=b'{"size": "5"}'),
    "unavailable": lambda: refuse_json(503),
    "throttled": lambda: refuse_json(429),
    "reset": lambda: Fault(reset_request_after=100 * KIB),
    "done, said to have failed": lambda: refuse_json(503, forwarded=True),
    "done, not answered": lambda: Fault(reset_answer_after=0),
}


@pytest.mark.parametrize("trouble", BAD_ANSWERS)
@pytest.mark.parametrize("at", [0, 1], ids=["first part", "last part"])
def test_an_upload_that_failed_left_a_whole_object_or_none(
    store: Store, proxy: FaultyProxy, gcs_server: GCSServer, prefix: str, trouble: str, at: int
) -> None:
    data = data_of(1000 * KIB)
    fault = BAD_ANSWERS[trouble]()
    fault.on = PART
    proxy.tell(Fault(on=PART, times=at), fault)
    with pytest.raises(Unavailable):
        print(store.put("file", lambda: [data]))
    proxy.tell()
    if gcs_server.keys(prefix):
        assert trouble.startswith("done")
        assert gcs_server.read(f"{prefix}/file") == data
    assert store.put("file", lambda: [data]) == len(data)
    assert gcs_server.read(f"{prefix}/file") == data


OPERATIONS: dict[str, Callable[[Store], object]] = {
    "get": lambda store: store.get("there"),
    "list": lambda store: [*store.list()],
    "children": lambda store: store.children(),
    "put": lambda store: store.put("new", lambda: [b"1"]),
    "parts": lambda store: store.put("new", lambda: [bytes(1000 * KIB)]),
    "delete": lambda store: store.delete(["there"]),
    "deletes": lambda store: store.delete(["there", "other"]),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_may_pass_is_waited_out_or_unavailable(
    store: Store, proxy: FaultyProxy, gcs_server: GCSServer, prefix: str, operation: str
) -> None:
    for trouble in (
        lambda: refuse_json(503),
        lambda: refuse_json(429),
        lambda: refuse_json(500),
        lambda: refuse_json(502),
        lambda: Fault(reset_request_after=0),
    ):
        for key in ("there", "other"):
            gcs_server.write(f"{prefix}/{key}", b"0123456789")
        proxy.tell(trouble())
        with pytest.raises(Unavailable):
            OPERATIONS[operation](store)
        short = trouble()
        short.times = 2
        proxy.tell(short)
        OPERATIONS[operation](store)


@pytest.mark.parametrize(
    ("status", "message", "kind", "hint"),
    [
        (403, "no access to it", StoreError, "credentials"),
        (401, "Invalid Credentials", StoreError, "credentials"),
        (400, "an invalid argument", StoreError, ""),
        (501, "not here", StoreError, ""),
        (408, "too slow", Unavailable, ""),
        (504, "nobody answers", Unavailable, ""),
    ],
)
def test_answers_are_told_as_what_the_caller_should_do(
    store: Store, proxy: FaultyProxy, status: int, message: str, kind: type[CkptdError], hint: str
) -> None:
    proxy.tell(refuse_json(status, message))
    for operation in ("get", "list", "put", "parts", "delete", "deletes"):
        with pytest.raises(kind, match=hint or None) as caught:
            OPERATIONS[operation](store)
        assert caught.value.__cause__ is not None
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("end", [{"reset_answer_after": 1000}, {"close_answer_after": 1000}])
def test_an_answer_that_breaks_off_is_never_returned(
    store: Store, proxy: FaultyProxy, gcs_server: GCSServer, prefix: str, end: Any
) -> None:
    data = data_of(100 * KIB)
    gcs_server.write(f"{prefix}/a", data)
    for start, stop in ((0, None), (5, len(data))):
        proxy.tell(Fault(on="GET", **end))
        with pytest.raises(Unavailable):
            store.get("a", start, stop)
        proxy.tell(Fault(on="GET", **end, times=1))
        assert store.get("a", start, stop) == data[start:stop]
    proxy.tell(Fault(on="GET", shorten_answer_to=3))
    with pytest.raises(Corrupt, match="a in gs://"):
        store.get("a", 5, 100)


def test_listings_are_read_to_their_end_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, store: Store, proxy: FaultyProxy, gcs_server: GCSServer, prefix: str
) -> None:
    monkeypatch.setattr("ckptd.gcs._PAGE_COUNT", 10)
    keys = [f"run/step-1/__{rank}.distcp" for rank in range(12)] + ["run/step-1/.metadata", "run/step-1/.ckptd/x"]
    for key in keys:
        gcs_server.write(f"{prefix}/{key}", b"1")
    assert {found.key for found in store.list()} == {*keys}
    assert proxy.count(LIST) == 2
    assert [len(found) for found in store.children("run/step-1")] == [13, 1]
    assert proxy.count(LIST) == 4
    assert {found.key for found in store.list("run/step-1/.")} == {"run/step-1/.metadata", "run/step-1/.ckptd/x"}
    assert proxy.count(LIST) == 5
    for trouble in (
        refuse_json(503, on="pageToken"),
        Fault(on="pageToken", reset_answer_after=50),
        Fault(on="pageToken", shorten_answer_to=50),
        Fault(on=LIST, shorten_answer_to=0),
        Fault(on=LIST, status=200, body=b"{}"),
    ):
        proxy.tell(trouble)
        with pytest.raises(Unavailable):
            print(len([*store.list()]), trouble)


def test_many_deletes_are_one_request(store: Store, proxy: FaultyProxy, gcs_server: GCSServer, prefix: str) -> None:
    keys = [f"step-1/{name}" for name in ("a", "[ab]*", "ünï", "a&b<c>", "{x}", "100%")]
    for key in keys:
        gcs_server.write(f"{prefix}/{key}", b"1")
    store.delete(keys[1:])
    assert gcs_server.keys(prefix) == {f"{prefix}/step-1/a": 1}
    assert proxy.count("POST /batch/") == proxy.count("") == 1
    store.delete(["step-1/a", "never/was"])
    assert gcs_server.keys(prefix) == {}


@pytest.mark.parametrize("nbytes", [3, 600 * KIB], ids=["whole", "parts"])
def test_a_conditional_put_that_is_sent_again_after_a_lost_answer_is_told_as_changed_and_is_there(
    store: Store, proxy: FaultyProxy, gcs_server: GCSServer, prefix: str, nbytes: int
) -> None:
    proxy.judge = only_over(gcs_server)
    last = "uploadType=media" if nbytes == 3 else "PUT .*upload_id"
    proxy.tell(Fault(on=last, times=int(nbytes > 3)), refuse_json(503, on=last, times=1, forwarded=True))
    with pytest.raises(Changed):
        store.put("a", lambda: [data_of(nbytes)], replacing=ABSENT)
    assert gcs_server.read(f"{prefix}/a") == data_of(nbytes)


def answers(*statuses: int) -> Fault:
    body = "".join(f"--x\r\nContent-Type: application/http\r\n\r\nHTTP/1.1 {status} So\r\n\r\n\r\n" for status in statuses)
    return Fault(on="POST /batch/", rewrite=None, status=200, body=f"{body}--x--\r\n".encode())


@pytest.mark.parametrize("statuses", [(503, 204), (204, 429), (204,), (), (204, 204, 204)])
def test_a_batch_that_was_not_done_in_full_is_not_done(store: Store, proxy: FaultyProxy, statuses: tuple[int, ...]) -> None:
    fault = answers(*statuses)
    fault.content_type = "multipart/mixed; boundary=x"
    proxy.tell(fault)
    with pytest.raises(Unavailable):
        store.delete(["a", "b"])


@pytest.mark.parametrize("status", [400, 404, 501, 403])
def test_where_many_deletes_are_not_offered_each_is_a_request(
    store: Store, proxy: FaultyProxy, gcs_server: GCSServer, prefix: str, status: int
) -> None:
    proxy.tell(refuse_json(status, on="POST /batch/"))
    asked = []
    for _ in range(2):
        for key in ("a", "b", "c"):
            gcs_server.write(f"{prefix}/{key}", b"1")
        store.delete(["a", "b", "never/was"])
        assert gcs_server.keys(prefix) == {f"{prefix}/c": 1}
        asked.append(proxy.count("POST /batch/"))
    assert asked[0] == asked[1] > 0  # it is not asked again


def test_a_server_that_says_nothing_ends_the_call(gcs_server: GCSServer, proxy: FaultyProxy) -> None:
    options = {**gcs_server.options, "endpoint_url": proxy.endpoint, "requests_timeout": "0.3"}
    proxy.tell(Fault(delay_seconds=10.0))
    store = open_store(gcs_server.url("silent"), options, retries=0)
    for operation in ("get", "list", "put", "deletes"):
        with pytest.raises(Unavailable):
            OPERATIONS[operation](store)


def test_options_that_gcsfs_does_not_know_are_wrong_use(gcs_server: GCSServer) -> None:
    with pytest.raises(InvalidRequest, match="did you mean endpoint_url"):
        open_store(gcs_server.url(), {"endpoint_ur": gcs_server.endpoint})
    with pytest.raises(InvalidRequest, match="access must be one of"):
        open_store(gcs_server.url(), {**gcs_server.options, "access": "all"})
    with pytest.raises(StoreError, match=r"no file /nowhere/key\.json"):
        open_store(gcs_server.url(), {**gcs_server.options, "token": "/nowhere/key.json"}).get("a")


def test_without_credentials_the_operator_is_told_and_the_store_is_not_asked(gcs_server: GCSServer, tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import sys
        from ckptd import errors, stores
        store = stores.open_store(sys.argv[1], {"endpoint_url": sys.argv[2]})
        print("opened")
        try: store.probe()
        except errors.StoreError as exc: print(exc)
    """)
    names = ("GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST", "NO_GCE_CHECK", "GOOGLE_CLOUD_PROJECT")
    with FaultyProxy(gcs_server.endpoint) as proxy, FaultyProxy("http://nowhere") as metadata:
        metadata.tell(Fault(status=404))
        host = metadata.endpoint.removeprefix("http://")
        here = {"HOME": str(tmp_path), "CLOUDSDK_CONFIG": str(tmp_path), "GCE_METADATA_HOST": host, "GCE_METADATA_IP": host}
        env = {name: value for name, value in os.environ.items() if name not in names} | here
        command = [sys.executable, "-c", script, gcs_server.url("x"), proxy.endpoint]
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=True, timeout=100)
        assert proxy.lines == []
        assert len(metadata.lines) == 1  # whether this is a machine of Google's is asked once, and not when the store is opened
    opened, told = done.stdout.splitlines()
    assert opened == "opened"
    assert "GOOGLE_APPLICATION_CREDENTIALS" in told
    assert done.stderr == ""


class TokenServer:
    """Google's token endpoint for service accounts: gives the tokens that it is told, and counts."""

    def __init__(self) -> None:
        self.given = 0
        self.seconds = 3600
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
                assert asked["grant_type"] == ["urn:ietf:params:oauth:grant-type:jwt-bearer"]
                outer.given += 1
                body = json.dumps({"access_token": f"token-{outer.given}", "expires_in": outer.seconds, "token_type": "Bearer"}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/token"
        Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def key_file(self, path: Path) -> Path:
        """A service account's key, as Google's console gives it."""
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        told = {"type": "service_account", "project_id": "p", "private_key_id": "1", "client_email": "a@b.iam", "client_id": "1"}
        path.write_text(json.dumps({**told, "private_key": pem.decode(), "token_uri": self.url}))
        return path


@pytest.fixture
def tokens() -> Iterator[TokenServer]:
    made = TokenServer()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.mark.parametrize("by", ["environment", "option"])
def test_credentials_come_from_the_usual_places_and_are_refreshed(
    monkeypatch: pytest.MonkeyPatch, proxy: FaultyProxy, gcs_server: GCSServer, prefix: str, tokens: TokenServer, tmp_path: Path, by: str
) -> None:
    path = str(tokens.key_file(tmp_path / "key.json"))
    options = {"endpoint_url": proxy.endpoint, "project": "another"}
    if by == "environment":
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", path)
    else:
        options["token"] = path
    seen: list[str] = []
    proxy.judge = lambda _line, headers, _body: seen.append(headers.get("Authorization", "")) or None
    store = open_store(gcs_server.url(prefix), options, retries=0)
    store.put("a", lambda: [b"1"])
    assert store.get("a") == b"1"
    assert seen == ["Bearer token-1"] * 2  # as long as it lives, one is enough
    store = open_store(gcs_server.url(prefix), options, retries=0)
    tokens.seconds = 60  # gcsfs takes a fresh one five minutes before the end
    seen.clear()
    store.get("a")
    store.get("a")
    assert len({*seen}) == 2


def test_credentials_that_were_taken_before_may_be_taken_again(
    monkeypatch: pytest.MonkeyPatch, proxy: FaultyProxy, gcs_server: GCSServer, prefix: str, tokens: TokenServer, tmp_path: Path
) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tokens.key_file(tmp_path / "key.json")))

    def judge(_line: str, headers: Headers, _body: bytes) -> Fault | None:
        return None if headers["Authorization"] == f"Bearer token-{valid}" else refuse_json(401, "they are not valid any more")

    proxy.judge = judge
    store = open_store(gcs_server.url(prefix), {"endpoint_url": proxy.endpoint}, retries=0)
    valid = -1
    with pytest.raises(StoreError, match="credentials"):
        store.put("a", lambda: [b"1"])
    valid = tokens.given + 1
    store.put("a", lambda: [b"1"])
    valid += 1
    with pytest.raises(Unavailable, match="taken before"):
        store.get("a")
    assert store.get("a") == b"1"  # with a fresh token, out of the same file
