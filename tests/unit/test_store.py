"""Opening stores, keys, retries: what needs no storage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.errors import CkptdError, InvalidRequest, NotFound, StoreError, Unavailable
from ckptd.s3 import part_nbytes
from ckptd.store import Children, Object, Source, is_temporary, temporary_name
from ckptd.stores import Retrying, open_store

MIB = 1024 * 1024


class Faulty:
    """A Store that raises what it is told before it answers."""

    url = "faulty://"
    conditional = True

    def __init__(self, *failures: CkptdError) -> None:
        self.failures = list(failures)
        self.calls: list[str] = []

    def _fail(self, call: str) -> None:
        self.calls.append(call)
        if self.failures:
            raise self.failures.pop(0)

    def put(self, key: str, source: Source, *, nbytes_hint: int | None = None, replacing: str | None = None) -> int:
        self._fail(f"put {key} {nbytes_hint} {replacing}")
        return sum(len(piece) for piece in source())

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self._fail(f"get {key} {start} {end}")
        return b"data"

    def list(self, prefix: str = "", *, temporary: bool = False) -> Iterator[Object]:
        yield Object("a", 1, 0.0)
        self._fail(f"list {prefix} {temporary}")
        yield Object("b", 2, 0.0)

    def children(self, directory: str = "") -> Children:
        self._fail(f"children {directory}")
        return [Object("a", 1, 0.0)], ["b"]

    def abort_uploads(self, older_than_seconds: float) -> int:
        self._fail(f"abort_uploads {older_than_seconds}")
        return 3

    def delete(self, keys: Iterable[str]) -> None:
        self._fail(f"delete {sorted(keys)}")

    def remove(self, key: str, version: str) -> None:
        self._fail(f"remove {key} {version}")

    def probe(self) -> None:
        self._fail("probe")


CALLS: list[Callable[[Retrying], object]] = [
    lambda store: store.get("a", 1, 2),
    lambda store: [*store.list("a", temporary=True)],
    lambda store: store.children("a"),
    lambda store: store.abort_uploads(1.5),
    lambda store: store.delete(key for key in "ab"),
    lambda store: store.remove("a", "version"),
    lambda store: store.probe(),
]
NAMES = ["get", "list", "children", "abort_uploads", "delete", "remove", "probe"]


@pytest.mark.parametrize("call", CALLS, ids=NAMES)
def test_what_may_pass_is_tried_again(call: Callable[[Retrying], object]) -> None:
    untroubled = call(Retrying(Faulty()))
    slept: list[float] = []
    faulty = Faulty(*[Unavailable("503")] * 3)
    assert call(Retrying(faulty, retries=3, sleep=slept.append)) == untroubled
    assert len(faulty.calls) == 4
    assert len({*faulty.calls}) == 1
    assert len(slept) == 3


@pytest.mark.parametrize("call", CALLS, ids=NAMES)
def test_what_does_not_pass_is_raised_in_the_end(call: Callable[[Retrying], object]) -> None:
    faulty = Faulty(*[Unavailable("503")] * 9)
    with pytest.raises(Unavailable, match="503"):
        call(Retrying(faulty, retries=2, sleep=lambda _: None))
    assert len(faulty.calls) == 3


@pytest.mark.parametrize("call", CALLS, ids=NAMES)
@pytest.mark.parametrize("failure", [StoreError("denied"), NotFound("nothing")])
def test_what_is_final_is_raised_at_once(call: Callable[[Retrying], object], failure: CkptdError) -> None:
    faulty = Faulty(failure)
    with pytest.raises(type(failure)):
        call(Retrying(faulty, sleep=lambda _: pytest.fail("slept")))
    assert len(faulty.calls) == 1


def test_a_put_is_not_tried_again_because_only_its_caller_has_a_fresh_name() -> None:
    faulty = Faulty(Unavailable("503"))
    store = Retrying(faulty, sleep=lambda _: pytest.fail("slept"))
    with pytest.raises(Unavailable):
        store.put("a", lambda: [b"1"])
    assert store.put("a", lambda: [b"12"], nbytes_hint=2, replacing="version") == 2
    assert faulty.calls == ["put a None None", "put a 2 version"]


def test_a_listing_that_is_tried_again_does_not_repeat_itself() -> None:
    store = Retrying(Faulty(Unavailable("503")), sleep=lambda _: None)
    assert [found.key for found in store.list()] == ["a", "b"]


def test_pauses_grow_up_to_a_limit_and_are_drawn_from_zero() -> None:
    drawn: list[tuple[float, float]] = []

    def jitter(low: float, high: float) -> float:
        drawn.append((low, high))
        return high / 2

    slept: list[float] = []
    with pytest.raises(Unavailable):
        Retrying(Faulty(*[Unavailable("503")] * 9), retries=8, sleep=slept.append, jitter=jitter).probe()
    assert [low for low, _ in drawn] == [0.0] * 8
    assert [high for _, high in drawn] == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0])
    assert slept == [high / 2 for _, high in drawn]


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("", "names no store"),
        ("frob://bucket", "'frob' is unknown"),
        ("s3:/bucket/prefix", "s3://"),
        ("s3:bucket", "s3://"),
        ("file:relative", "file://"),
        ("file://relative/path", "file:///"),
        ("s3://", "names no bucket"),
        ("simplecache::s3://bucket", "names no store"),
    ],
)
def test_a_url_that_names_no_store_is_refused_with_what_to_do(url: str, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told) as caught:
        open_store(url)
    assert "\n" not in str(caught.value)


def test_credentials_in_a_url_are_never_shown() -> None:
    store = open_store("memory://user:secret@host/path")
    assert store.url == "memory://***@host/path"
    with pytest.raises(InvalidRequest) as caught:
        open_store("frob://user:secret@host/path")
    assert "secret" not in str(caught.value)


@given(st.integers(0, 5 * 1024**4))
def test_parts_fit_every_object_that_s3_takes(nbytes: int) -> None:
    part = part_nbytes(nbytes)
    assert part % (256 * 1024) == 0
    assert 5 * MIB <= part <= 1024 * MIB
    assert nbytes <= 10_000 * part


def test_temporary_names_are_fresh_and_known() -> None:
    names = {temporary_name() for _ in range(100)}
    assert len(names) == 100
    assert all(is_temporary(f"run/step-1/{name}") and is_temporary(name) for name in names)
    assert not is_temporary("run/.ckptd/pin")
