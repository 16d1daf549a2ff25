"""An S3 store over a network and a service that fail: the right error, nothing cut short, nothing left behind."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest

from ckptd.errors import Corrupt, StoreError, Unavailable
from ckptd.store import ABSENT, Changed, Store, is_temporary
from ckptd.stores import open_store
from faulty_proxy import Fault, FaultyProxy, Headers, refuse
from s3 import S3Server

MIB = 1024 * 1024
#: Neither botocore nor we try again: a test sees one answer.
AT_ONCE = {"config_kwargs": '{"retries": {"max_attempts": 0}}'}
#: Nor is one waited for that takes longer than a second.
HASTY = {"config_kwargs": '{"retries": {"max_attempts": 0}, "read_timeout": 1}'}
LIST = "GET .*list-type=2"


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3_server.endpoint) as made:
        yield made


@pytest.fixture
def prefix() -> str:
    return f"faults-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def store(proxy: FaultyProxy, s3_server: S3Server, prefix: str) -> Store:
    return open_store(s3_server.url(prefix), {**s3_server.options, "endpoint_url": proxy.endpoint, **AT_ONCE}, retries=0)


@pytest.fixture
def hasty(proxy: FaultyProxy, s3_server: S3Server, prefix: str) -> Store:
    """The same, for answers that do not come."""
    return open_store(s3_server.url(prefix), {**s3_server.options, "endpoint_url": proxy.endpoint, **HASTY}, retries=0)


@pytest.fixture
def crowd(s3_server: S3Server, prefix: str) -> None:
    """A checkpoint of more data files than a page of a listing holds, once `short_pages` is told."""
    keys = [f"run/step-1/__{rank}_0123456789abcdef.distcp" for rank in range(12)]
    keys += ["run/step-1/.metadata", "run/step-1/.ckptd/x.manifest", "run/step-2/.metadata"]
    for key in keys:
        s3_server.client().put_object(Bucket=s3_server.bucket, Key=f"{prefix}/{key}", Body=b"1")


def short_pages() -> Fault:
    """Listings come in pages of ten, not a thousand."""
    return Fault(on=LIST, query="&max-keys=10")


@pytest.mark.usefixtures("crowd")
def test_a_listing_asks_for_its_prefix_alone_whatever_else_a_checkpoint_holds(store: Store, proxy: FaultyProxy) -> None:
    proxy.tell(short_pages())

    def requests(call: Callable[[], object]) -> tuple[object, int]:
        before = len(proxy.lines)
        return call(), len(proxy.lines) - before

    own = ["run/step-1/.ckptd/x.manifest", "run/step-1/.metadata"]
    assert requests(lambda: sorted(found.key for found in store.list("run/step-1/."))) == (own, 1)
    assert requests(store.children) == (([], ["run"]), 1)
    assert requests(lambda: store.children("run")) == (([], ["step-1", "step-2"]), 1)
    assert requests(lambda: [len(found) for found in store.children("run/step-1")]) == ([13, 1], 2)
    assert requests(lambda: len([*store.list()])) == (15, 2)
    assert {line.partition(" ")[0] for line in proxy.lines} == {"GET"}


@pytest.mark.parametrize(
    "trouble",
    [
        lambda: refuse(503, "SlowDown", on="continuation-token"),
        lambda: Fault(on="continuation-token", reset_answer_after=100),
        lambda: Fault(on="continuation-token", close_answer_after=100),
        lambda: Fault(on="continuation-token", shorten_answer_to=0),
        lambda: Fault(on=LIST, close_answer_after=500),
        lambda: Fault(on=LIST, shorten_answer_to=500),
        lambda: Fault(on=LIST, shorten_answer_to=0),
        lambda: Fault(on=LIST, status=200, body=b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>"),
    ],
    ids=["refused", "reset", "closed", "empty page", "closed at once", "broken", "empty", "no way on"],
)
@pytest.mark.usefixtures("crowd")
def test_half_a_listing_is_an_error_and_never_a_listing(store: Store, proxy: FaultyProxy, trouble: Callable[[], Fault]) -> None:
    for call in (lambda: [*store.list()], lambda: store.children("run/step-1")):
        proxy.tell(trouble(), short_pages())
        with pytest.raises((Unavailable, StoreError)):
            call()
        assert proxy.count("continuation-token") <= 2


OPERATIONS: dict[str, Callable[[Store], object]] = {
    "get": lambda store: store.get("there"),
    "put": lambda store: store.put("new", lambda: [b"1"]),
    "list": lambda store: [*store.list()],
    "range": lambda store: store.get("there", 2, 4),
    "children": lambda store: store.children(),
    "parts": lambda store: store.put("new", lambda: [bytes(17 * MIB)]),
    "delete": lambda store: store.delete(["there"]),
    "deletes": lambda store: store.delete(["there", "other"]),
    "abort": lambda store: store.abort_uploads(3600),
    "probe": lambda store: store.probe(),
}
TROUBLES: dict[str, Callable[[], Fault]] = {
    "503": lambda: refuse(503, "SlowDown"),
    "reset": lambda: Fault(reset_request_after=0),
    "not answered": lambda: Fault(reset_answer_after=0),
    "429": lambda: refuse(429, "TooManyRequests"),
    "500": lambda: refuse(500, "InternalError"),
    "502": lambda: refuse(502),
    "token": lambda: refuse(400, "ExpiredToken"),
    "clock": lambda: refuse(403, "RequestTimeTooSkewed"),
    "slow": lambda: Fault(delay_seconds=5.0),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_may_pass_is_unavailable_and_passes(
    store: Store, hasty: Store, proxy: FaultyProxy, s3_server: S3Server, prefix: str, operation: str
) -> None:
    # Every trouble of the three first operations, the three first troubles of every operation.
    for name in [*TROUBLES][: len(TROUBLES) if operation in [*OPERATIONS][:3] else 3]:
        for key in ("there", "other"):
            s3_server.client().put_object(Bucket=s3_server.bucket, Key=f"{prefix}/{key}", Body=b"0123456789")
        proxy.tell(TROUBLES[name]())
        with pytest.raises(Unavailable):
            print(name, OPERATIONS[operation](hasty if name == "slow" else store))
        shown = {key for key in s3_server.keys(prefix) if not is_temporary(key)}
        assert shown <= {f"{prefix}/{key}" for key in ("there", "other", "new")}, name
        proxy.tell()
        OPERATIONS[operation](store)


def test_a_burst_is_waited_out(proxy: FaultyProxy, s3_server: S3Server, prefix: str) -> None:
    s3_server.client().put_object(Bucket=s3_server.bucket, Key=f"{prefix}/a", Body=b"1")
    store = open_store(s3_server.url(prefix), {**s3_server.options, "endpoint_url": proxy.endpoint})
    proxy.tell(refuse(503, "SlowDown", on=LIST, times=3))
    assert [found.key for found in store.list()] == ["a"]
    assert proxy.count(LIST) == 4
    proxy.tell(refuse(429, "TooManyRequests", on="GET .*/a", times=1), Fault(on="GET .*/a", reset_answer_after=0, times=1))
    assert store.get("a") == b"1"
    proxy.tell(refuse(503, "SlowDown", on="PUT", times=2))
    assert store.put("b", lambda: [b"2"]) == 1
    assert store.get("b") == b"2"


@pytest.mark.parametrize("after", [1, 3 * MIB])
@pytest.mark.parametrize("end", ["reset_answer_after", "close_answer_after"])
def test_an_answer_that_breaks_off_is_never_returned(
    store: Store, proxy: FaultyProxy, s3_server: S3Server, prefix: str, end: str, after: int
) -> None:
    data = bytes(range(256)) * (4 * MIB // 256)
    s3_server.client().put_object(Bucket=s3_server.bucket, Key=f"{prefix}/a", Body=data)
    for start, stop in ((0, None), (0, len(data)), (5, None)):
        proxy.tell(Fault(on="GET", **{end: after}, times=1))
        with pytest.raises(Unavailable):
            store.get("a", start, stop)
        assert store.get("a", start, stop) == data[start:stop]


def test_a_whole_answer_that_is_not_what_was_asked_for_is_damage(
    store: Store, proxy: FaultyProxy, s3_server: S3Server, prefix: str
) -> None:
    s3_server.client().put_object(Bucket=s3_server.bucket, Key=f"{prefix}/a", Body=b"0123456789")
    proxy.tell(Fault(on="GET", shorten_answer_to=3))
    with pytest.raises(Corrupt, match="a in s3://"):
        store.get("a", 2, 9)


#: Of an object of three parts: where an upload meets trouble.
STEPS = {
    "begin": "POST .*uploads",
    "first part": "PUT .*partNumber=1",
    "second part": "PUT .*partNumber=2",
    "last part": "PUT .*partNumber=3",
    "end": "POST .*uploadId",
}


@pytest.mark.parametrize(
    "trouble",
    [
        lambda on: refuse(503, "SlowDown", on=on),
        lambda on: Fault(on=on, reset_request_after=MIB // 2),
        lambda on: refuse(500, "InternalError", on=on, forwarded=True),
        lambda on: Fault(on=on, reset_answer_after=0),
    ],
    ids=["refused", "reset", "done, said to have failed", "done, not answered"],
)
def test_an_upload_that_failed_left_a_whole_object_or_none_and_no_parts(
    monkeypatch: pytest.MonkeyPatch, store: Store, proxy: FaultyProxy, s3_server: S3Server, prefix: str, trouble: Callable[[str], Fault]
) -> None:
    monkeypatch.setattr("ckptd.s3._SMALLEST_PART", 5 * MIB)  # S3's own; less to carry
    data = bytes(range(256)) * (11 * MIB // 256)
    pieces = [data[at : at + 3 * MIB] for at in range(0, len(data), 3 * MIB)]
    for step, line in STEPS.items():
        proxy.tell(trouble(line))
        with pytest.raises(Unavailable):
            print(step, store.put(f"{step}/file", lambda: pieces, nbytes_hint=len(data)))
        proxy.tell()
        found = s3_server.keys(f"{prefix}/{step}")
        if found:
            assert step == "end"
            assert found == {f"{prefix}/{step}/file": len(data)}
            assert s3_server.read(f"{prefix}/{step}/file") == data
        if step == "begin":  # that the upload has begun was never told: a sweep gives it up
            store.abort_uploads(0)
        assert s3_server.unfinished_uploads(prefix) == []
    assert store.put("end/file", lambda: pieces, nbytes_hint=len(data)) == len(data)
    assert s3_server.read(f"{prefix}/end/file") == data


def test_uploads_that_nobody_ended_are_given_up_when_they_are_old_and_only_below_the_root(
    store: Store, s3_server: S3Server, prefix: str
) -> None:
    client = s3_server.client()
    for key in (f"{prefix}/step-1/a", f"{prefix}/b", f"{prefix}-other/a", f"elsewhere-{prefix}"):
        client.create_multipart_upload(Bucket=s3_server.bucket, Key=key)
    try:
        assert store.abort_uploads(100 * 365 * 24 * 3600) == 0  # moto's uploads all began in 2010
        assert store.abort_uploads(0) == 2
        assert sorted(key for key in s3_server.unfinished_uploads() if prefix in key) == [f"elsewhere-{prefix}", f"{prefix}-other/a"]
        assert store.abort_uploads(0) == 0
    finally:
        open_store(f"s3://{s3_server.bucket}", s3_server.options).abort_uploads(0)


def test_many_deletes_are_one_request(store: Store, proxy: FaultyProxy, s3_server: S3Server, prefix: str) -> None:
    keys = [f"step-1/{name}" for name in ("a", "[ab]*", "ünï", "a&b<c>", "{x}")]
    for key in keys:
        s3_server.client().put_object(Bucket=s3_server.bucket, Key=f"{prefix}/{key}", Body=b"1")
    store.delete([*keys[1:], "never/was"])
    assert s3_server.keys(prefix) == {f"{prefix}/step-1/a": 1}
    assert proxy.count("POST .*delete") == proxy.count("") == 1


@pytest.mark.parametrize(
    ("status", "code"),
    [(501, "NotImplemented"), (400, "MalformedXML"), (400, "InvalidRequest"), (405, "MethodNotAllowed"), (403, "AccessDenied")],
)
def test_where_many_deletes_are_not_offered_each_is_a_request(
    store: Store, proxy: FaultyProxy, s3_server: S3Server, prefix: str, status: int, code: str
) -> None:
    proxy.tell(refuse(status, code, on="POST .*delete"))
    for _ in range(2):
        for key in ("a", "b", "c"):
            s3_server.client().put_object(Bucket=s3_server.bucket, Key=f"{prefix}/{key}", Body=b"1")
        store.delete(["a", "b", "never/was"])
        assert s3_server.keys(prefix) == {f"{prefix}/c": 1}
    assert proxy.count("POST .*delete") == 1  # it is not asked again


@pytest.mark.parametrize(("code", "kind"), [("AccessDenied", StoreError), ("InternalError", Unavailable), ("SlowDown", Unavailable)])
def test_what_a_bulk_delete_says_of_one_key_is_raised(
    store: Store, proxy: FaultyProxy, prefix: str, code: str, kind: type[Exception]
) -> None:
    answer = f"<DeleteResult><Error><Key>{prefix}/a</Key><Code>{code}</Code><Message>no</Message></Error></DeleteResult>".encode()
    proxy.tell(Fault(on="POST .*delete", status=200, body=answer), refuse(403, "AccessDenied", on="DELETE"))
    with pytest.raises(kind, match=rf"{prefix}/a|delete a"):
        store.delete(["a", "b"])


def test_a_conditional_put_that_is_sent_again_after_a_lost_answer_is_told_as_changed_and_is_there(
    proxy: FaultyProxy, s3_server: S3Server, prefix: str
) -> None:
    twice = {"config_kwargs": '{"retries": {"max_attempts": 1}}'}
    store = open_store(s3_server.url(prefix), {**s3_server.options, "endpoint_url": proxy.endpoint, **twice}, retries=0)
    proxy.tell(Fault(on="PUT .*/a", times=1, reset_answer_after=0))
    with pytest.raises(Changed):
        store.put("a", lambda: [b"1"], replacing=ABSENT)
    assert proxy.count("PUT .*/a") == 2
    assert s3_server.read(f"{prefix}/a") == b"1"


def test_writers_that_meet_in_s3_may_try_again(store: Store, proxy: FaultyProxy) -> None:
    proxy.tell(refuse(409, "ConditionalRequestConflict", on="PUT"))
    with pytest.raises(Unavailable):
        store.put("a", lambda: [b"1"], replacing=ABSENT)


@pytest.mark.parametrize("nbytes", [3, 17 * MIB], ids=["whole", "parts"])
def test_the_condition_goes_with_the_request_that_makes_the_object_appear(store: Store, proxy: FaultyProxy, nbytes: int) -> None:
    store.put("a", lambda: [b"old"])
    (there,) = store.list()
    conditions = []

    def judge(line: str, headers: Headers, body: bytes) -> Fault | None:
        appears = line.startswith("PUT") if nbytes == 3 else line.startswith("POST") and "uploadId=" in line
        conditions.extend([headers.get("If-Match")] if appears else [])
        return refuse(412, "PreconditionFailed") if appears else None

    proxy.judge = judge
    with pytest.raises(Changed):
        store.put("a", lambda: [bytes(nbytes)], nbytes_hint=nbytes, replacing=there.version)
    assert conditions == [there.version]
    assert store.get("a") == b"old"


@pytest.mark.parametrize("nbytes", [3, 17 * MIB], ids=["whole", "parts"])
def test_where_there_are_no_conditions_puts_go_without_and_the_store_says_so(
    store: Store, proxy: FaultyProxy, s3_server: S3Server, prefix: str, nbytes: int
) -> None:
    def judge(line: str, headers: Headers, body: bytes) -> Fault | None:
        return refuse(501, "NotImplemented") if "If-None-Match" in headers else None

    proxy.judge = judge
    assert store.conditional
    for _ in range(2):
        assert store.put("a", lambda: [bytes(nbytes)], nbytes_hint=nbytes, replacing=ABSENT) == nbytes
    assert not store.conditional
    assert s3_server.keys(prefix) == {f"{prefix}/a": nbytes}
    assert s3_server.read(f"{prefix}/a") == bytes(nbytes)


def test_where_deletions_have_no_conditions_they_go_without(store: Store, proxy: FaultyProxy, s3_server: S3Server, prefix: str) -> None:
    def judge(line: str, headers: Headers, body: bytes) -> Fault | None:
        return refuse(501, "NotImplemented") if line.startswith("DELETE") and "If-Match" in headers else None

    store.put("a", lambda: [b"1"])
    (there,) = store.list()
    proxy.judge = judge
    store.remove("a", there.version)
    assert store.conditional
    assert s3_server.keys(prefix) == {}
