"""What every Store promises, told by a witness that reads back through nothing of ours."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from ckptd.errors import Corrupt, InvalidRequest, NotFound
from ckptd.store import ABSENT, Changed, Store

if TYPE_CHECKING:
    from conftest import Bench

MIB = 1024 * 1024
#: fsspec's own file systems put whatever is there.
conditional = pytest.mark.parametrize("bench", ["local", "s3", "gcs"], indirect=True)


class SourceError(Exception):
    """What a source of bytes may raise: nothing that a store knows."""


def pattern(nbytes: int, salt: int = 0) -> bytes:
    """Bytes of which no two neighbouring kilobytes are equal."""
    return b"".join((at + salt).to_bytes(8, "little") for at in range(0, nbytes, 8))[:nbytes]


def failing(nbytes: int, piece: int = MIB) -> Iterator[bytes]:
    """Yields `nbytes` bytes, then raises."""
    data = pattern(nbytes)
    for at in range(0, nbytes, piece):
        yield data[at : at + piece]
    raise SourceError


def version(store: Store, key: str) -> str:
    """What a listing tells; ABSENT if the key is not listed."""
    return next((found.version for found in store.list(key) if found.key == key), ABSENT)


def listed(store: Store, prefix: str = "") -> dict[str, int]:
    return {found.key: found.nbytes for found in store.list(prefix)}


@pytest.mark.parametrize("nbytes", [0, 1, 262143, 262144, 262145, 16 * MIB - 1, 16 * MIB, 16 * MIB + 1])
def test_what_is_put_is_what_the_witness_reads(bench: Bench, store: Store, nbytes: int) -> None:
    data = pattern(nbytes)
    pieces = [data[at : at + 3 * MIB + 7] for at in range(0, nbytes, 3 * MIB + 7)]
    assert store.put("run-a/step-1/__0_x.distcp", lambda: pieces, nbytes_hint=nbytes) == nbytes
    assert bench.witness.read("run-a/step-1/__0_x.distcp") == data
    assert bench.witness.keys() == {"run-a/step-1/__0_x.distcp": nbytes}


def test_pieces_may_be_any_bytes_like_object_also_empty(bench: Bench, store: Store) -> None:
    pieces = [b"", b"bytes ", bytearray(b"bytearray "), memoryview(b"a view")[2:], memoryview(bytearray(4)).cast("I")]
    assert store.put("a", lambda: pieces) == 24
    assert bench.witness.read("a") == b"bytes bytearray view\0\0\0\0"


@pytest.mark.parametrize("nbytes", [0, 1, 17 * MIB, 33 * MIB], ids=["at once", "early", "after a part", "after two parts"])
def test_a_source_that_raises_leaves_nothing(bench: Bench, store: Store, nbytes: int) -> None:
    with pytest.raises(SourceError):
        store.put("step-1/file", lambda: failing(nbytes), nbytes_hint=40 * MIB)
    assert bench.witness.keys() == {}
    assert listed(store) == {}


def test_a_source_that_raises_leaves_the_old_object_whole(bench: Bench, store: Store) -> None:
    bench.witness.plant("step-1/.metadata", b"old")
    with pytest.raises(SourceError):
        store.put("step-1/.metadata", lambda: failing(3))
    assert bench.witness.keys() == {"step-1/.metadata": 3}
    assert bench.witness.read("step-1/.metadata") == b"old"


def test_an_interrupt_leaves_nothing_and_closes_the_source(bench: Bench, store: Store) -> None:
    closed = []

    def source() -> Iterator[bytes]:
        try:
            yield b"some"
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    with pytest.raises(KeyboardInterrupt):
        store.put("a", source)
    assert bench.witness.keys() == {}
    assert closed == [True]


def test_the_source_is_asked_afresh_by_each_put(bench: Bench, store: Store) -> None:
    contents = iter([b"one", b"two"])
    for _ in range(2):
        store.put("a", lambda: [next(contents)])
    assert bench.witness.read("a") == b"two"


def test_a_reader_sees_the_old_or_the_new_object_and_no_mixture(store: Store) -> None:
    store.put("a", lambda: [b"0" * 100_000])
    done = threading.Event()

    def read_on() -> set[bytes]:
        seen = set()
        while not done.is_set():
            data = store.get("a")
            assert len(data) == 100_000
            seen.add(data)
        return seen

    with ThreadPoolExecutor(1) as threads:
        reader = threads.submit(read_on)
        try:
            for number in range(1, 10):
                store.put("a", lambda digit=b"%d" % number: [digit * 50_000, digit * 50_000])
        finally:
            done.set()
        assert all(len(set(data)) == 1 for data in reader.result())


def test_only_stores_whose_writes_have_conditions_say_so_and_tell_versions(bench: Bench, store: Store) -> None:
    store.put("a", lambda: [b"1"])
    assert store.conditional == bool(version(store, "a")) == (bench.kind != "memory")


@conditional
def test_a_version_is_another_after_each_put_and_the_same_in_every_listing(bench: Bench, store: Store) -> None:
    seen = []
    for data in (b"1", b"2", b"33"):
        store.put("run/a", lambda data=data: [data])
        seen.append(version(store, "run/a"))
        assert [found.version for found in bench.open().children("run")[0]] == [seen[-1]]
    bench.witness.plant("run/a", b"44")
    assert len({*seen, version(store, "run/a"), ABSENT}) == 5


@conditional
def test_a_conditional_put_takes_place_only_over_what_it_was_to_replace(guarded: Bench) -> None:
    store = guarded.open()
    assert store.put("run/a", lambda: [b"one"], replacing=ABSENT) == 3
    first = version(store, "run/a")
    with pytest.raises(Changed, match="run/a"):
        store.put("run/a", lambda: [b"not"], replacing=ABSENT)
    assert store.put("run/a", lambda: [b"two"], replacing=first) == 3
    second = version(store, "run/a")
    for stale in (first, ABSENT):
        with pytest.raises(Changed, match="run/a"):
            store.put("run/a", lambda: [b"not"], replacing=stale)
    assert guarded.witness.read("run/a") == b"two"
    store.delete(["run/a"])
    with pytest.raises(Changed, match="run/a"):
        store.put("run/a", lambda: [b"not"], replacing=second)
    assert guarded.witness.keys() == {}


@conditional
def test_a_conditional_put_whose_answer_was_lost_finds_its_own_bytes_there(guarded: Bench) -> None:
    store = guarded.open()
    store.put("a", lambda: [b"old"])
    there = version(store, "a")
    store.put("a", lambda: [b"new"], replacing=there)
    with pytest.raises(Changed):
        store.put("a", lambda: [b"new"], replacing=there)
    assert guarded.witness.read("a") == b"new"


@conditional
@pytest.mark.parametrize("nbytes", [3, 17 * MIB], ids=["whole", "parts"])
def test_what_appears_while_a_conditional_put_is_on_its_way_stays(guarded: Bench, nbytes: int) -> None:
    store = guarded.open()

    def overtaken() -> Iterator[bytes]:
        data = pattern(nbytes)
        yield data[: nbytes - 1]
        guarded.witness.plant("run/a", b"newer")
        yield data[nbytes - 1 :]

    with pytest.raises(Changed, match="run/a"):
        store.put("run/a", overtaken, nbytes_hint=nbytes, replacing=ABSENT)
    assert guarded.witness.keys() == {"run/a": 5}
    assert guarded.witness.read("run/a") == b"newer"


def test_a_put_without_a_condition_replaces_whatever_is_there(bench: Bench, store: Store) -> None:
    for data in (b"1", b"2"):
        store.put("a", lambda data=data: [data], replacing=None)
    assert bench.witness.read("a") == b"2"
    if not store.conditional:  # nor does one with a condition, where there are none
        store.put("a", lambda: [b"3"], replacing=ABSENT)
        assert bench.witness.read("a") == b"3"


def test_get_gives_the_range_that_was_asked_for(bench: Bench, store: Store) -> None:
    bench.witness.plant("a", b"0123456789")
    assert store.get("a") == b"0123456789"
    assert store.get("a", 3) == b"3456789"
    assert store.get("a", 3, 5) == b"34"
    assert store.get("a", 0, 10) == b"0123456789"
    assert store.get("a", 5, 5) == b""
    assert store.get("a", 10) == b""
    assert store.get("a", 11) == b""
    bench.witness.plant("empty", b"")
    assert store.get("empty") == b""


@pytest.mark.parametrize(("start", "end"), [(3, 11), (10, 11), (20, 30)])
def test_a_range_that_is_not_all_there_is_damage_and_names_the_object(bench: Bench, store: Store, start: int, end: int) -> None:
    bench.witness.plant("run-a/step-1/file", b"0123456789")
    with pytest.raises(Corrupt, match="run-a/step-1/file"):
        store.get("run-a/step-1/file", start, end)


def test_a_missing_object_is_not_found(bench: Bench, store: Store) -> None:
    bench.witness.plant("a/b", b"1")
    for key in ("nothing", "a", "a/c", "a/b/c"):
        with pytest.raises(NotFound, match=key):
            store.get(key)
        with pytest.raises(NotFound, match=key):
            store.get(key, 1, 2)


def test_list_shows_every_object_with_its_size_and_time(bench: Bench, store: Store) -> None:
    for key in ("step-1/.metadata", "step-1/.ckptd/x.manifest", "run-a/step-2/__0_1.distcp", "top"):
        bench.witness.plant(key, key.encode())
    found = {entry.key: entry for entry in store.list()}
    assert {key: entry.nbytes for key, entry in found.items()} == bench.witness.keys()
    assert all(abs(entry.modified - time.time()) < 24 * 3600 for entry in found.values())


def test_list_takes_the_beginning_of_a_key(bench: Bench, store: Store) -> None:
    for key in ("step-1/a", "step-1/ab", "step-10/a", "step-1", "run/step-1/a"):
        if not (key == "step-1" and bench.kind != "s3"):  # a file and a directory of one name
            bench.witness.plant(key, b"")
    assert {*listed(store, "step-1/")} == {"step-1/a", "step-1/ab"}
    assert {*listed(store, "step-1/a")} == {"step-1/a", "step-1/ab"}
    assert {*listed(store, "step-1/ab")} == {"step-1/ab"}
    assert {*listed(store, "step-1")} >= {"step-1/a", "step-1/ab", "step-10/a"}
    assert listed(store, "step-2/") == {}
    assert listed(store, "step-2/a/b") == {}


def test_list_sees_what_others_write_and_delete_at_once(bench: Bench) -> None:
    one, other = bench.open(), bench.open()
    one.put("step-10/.metadata", lambda: [b"10"])
    assert listed(one) == listed(other) == {"step-10/.metadata": 2}
    bench.witness.plant("step-20/.metadata", b"twenty")
    assert listed(one) == listed(other) == {"step-10/.metadata": 2, "step-20/.metadata": 6}
    other.delete(["step-10/.metadata"])
    assert listed(one) == {"step-20/.metadata": 6}
    with pytest.raises(NotFound):
        one.get("step-10/.metadata")
    bench.witness.remove("step-20/.metadata")
    assert listed(one) == listed(other) == {}


def test_list_leaves_out_temporary_names_of_ours_and_no_others(bench: Bench, store: Store) -> None:
    for name in (".ckptd-0123456789abcdef.tmp", "x.tmp", ".ckptd-1.tmp", ".hidden"):
        bench.witness.plant(f"step-1/{name}", b"")
    assert {*listed(store)} == {"step-1/x.tmp", "step-1/.ckptd-1.tmp", "step-1/.hidden"}


def test_temporary_names_are_listed_for_whoever_asks(bench: Bench, store: Store) -> None:
    for key in ("step-1/.ckptd-0123456789abcdef.tmp", "step-1/a", ".ckptd-0123456789abcdef.tmp/.ckptd-fedcba9876543210.tmp"):
        bench.witness.plant(key, b"1")
    assert {found.key for found in store.list(temporary=True)} == {*bench.witness.keys()}
    assert {found.key for found in store.list("step-1/.", temporary=True)} == {"step-1/.ckptd-0123456789abcdef.tmp"}
    assert {*listed(store)} == {"step-1/a"}


def children(store: Store, directory: str = "") -> tuple[dict[str, int], list[str]]:
    objects, directories = store.children(directory)
    return {found.key: found.nbytes for found in objects}, directories


def test_children_are_what_is_directly_below(bench: Bench, store: Store) -> None:
    for key in ("top", "run/step-1/.metadata", "run/step-1/.ckptd/x.manifest", "run/step-1/a", "run/step-10/a", "run/notes", "other/a"):
        bench.witness.plant(key, key.encode())
    assert children(store) == ({"top": 3}, ["other", "run"])
    assert children(store, "run") == ({"run/notes": 9}, ["step-1", "step-10"])
    assert children(store, "run/step-1") == ({"run/step-1/.metadata": 20, "run/step-1/a": 12}, [".ckptd"])
    assert all(abs(found.modified - time.time()) < 24 * 3600 for found in store.children("run")[0])
    for nothing in ("ru", "nothing", "run/nothing", "top", "run/notes", "top/a"):
        assert children(store, nothing) == ({}, [])


def test_children_see_what_others_write_and_delete_at_once_and_leave_out_temporary_names(bench: Bench, store: Store) -> None:
    assert children(store) == ({}, [])
    bench.witness.plant("run/step-1/.metadata", b"1")
    bench.witness.plant("run/.ckptd-0123456789abcdef.tmp", b"1")
    bench.witness.plant("run/.ckptd-fedcba9876543210.tmp/a", b"1")
    assert children(store) == ({}, ["run"])
    assert children(store, "run") == ({}, ["step-1"])
    assert children(store, "run/step-1") == ({"run/step-1/.metadata": 1}, [])
    bench.witness.remove("run/step-1/.metadata")
    assert children(store, "run/step-1") == ({}, [])


@pytest.mark.parametrize("name", ["[ab]*", "a?b", "ünï çødé 漢字", "100%", "a b+c=d", "~", "**", "#x"])
def test_names_of_directories_are_taken_literally(bench: Bench, store: Store, name: str) -> None:
    bench.witness.plant(f"{name}/{name}/{name}", b"1")
    bench.witness.plant("axb/a/a", b"1")
    bench.witness.plant("a/a/a", b"1")
    assert children(store)[1] == sorted([name, "axb", "a"])
    assert children(store, f"{name}/{name}") == ({f"{name}/{name}/{name}": 1}, [])


def test_nothing_outside_the_root_is_listed(bench: Bench) -> None:
    bench.open().put("a", lambda: [b"1"])
    inner = inside(bench, "step")
    beside = inside(bench, "step-2")
    beside.probe()
    beside.put("b", lambda: [b"2"])
    inner.probe()
    inner.put("c", lambda: [b"3"])
    assert children(inner) == ({"c": 1}, [])
    assert listed(inner) == {"c": 1}
    assert listed(beside) == {"b": 1}


def inside(bench: Bench, name: str) -> Store:
    from ckptd.stores import open_store

    return open_store(f"{bench.url}/{name}", bench.options)


@pytest.mark.parametrize("name", ["[ab]*", "a?b", "ünï çødé 漢字", "{x,y}", "100%", "a b+c=d", "~", "**", "#x"])
def test_names_are_taken_literally(bench: Bench, store: Store, name: str) -> None:
    bench.witness.plant("a/other", b"other")
    bench.witness.plant("axb", b"other")
    store.put(f"{name}/{name}", lambda: [b"1"])
    assert bench.witness.read(f"{name}/{name}") == b"1"
    assert listed(store, f"{name}/") == {f"{name}/{name}": 1}
    assert store.get(f"{name}/{name}") == b"1"
    store.delete([f"{name}/{name}"])
    assert bench.witness.keys() == {"a/other": 5, "axb": 5}


def test_delete_takes_what_it_is_given_and_missing_keys_are_fine(bench: Bench, store: Store) -> None:
    for number in range(12):
        bench.witness.plant(f"step-{number}/a", b"1")
    store.delete(f"step-{number}/a" for number in range(1, 12))
    assert bench.witness.keys() == {"step-0/a": 1}
    store.delete([])
    store.delete(["step-1/a"])
    store.delete(["step-0/a", "step-1/a", "never/was", "step-0/a/b"])
    assert listed(store) == {}


@conditional
def test_only_the_version_that_is_meant_is_removed_and_a_missing_object_is_fine(guarded: Bench) -> None:
    store = guarded.open()
    store.put("run/a", lambda: [b"one"])
    first = version(store, "run/a")
    store.put("run/a", lambda: [b"two"])
    with pytest.raises(Changed, match="run/a"):
        store.remove("run/a", first)
    assert guarded.witness.read("run/a") == b"two"
    second = version(store, "run/a")
    for _ in range(2):
        store.remove("run/a", second)
        assert guarded.witness.keys() == {}
    assert children(store) == ({}, [])


def test_where_there_are_no_versions_whatever_is_there_is_removed(bench: Bench, store: Store) -> None:
    store.put("run/a", lambda: [b"1"])
    store.remove("run/a", version(store, "run/a"))
    assert bench.witness.keys() == {}


@pytest.mark.parametrize("key", ["", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/./b", "a\0b"])
def test_keys_that_lead_elsewhere_are_refused(bench: Bench, store: Store, key: str) -> None:
    bench.witness.plant("b", b"1")
    with pytest.raises(InvalidRequest):
        store.put(key, lambda: [b"2"])
    with pytest.raises(InvalidRequest):
        store.get(key)
    with pytest.raises(InvalidRequest):
        store.delete(["b", key])
    assert bench.witness.keys() == {"b": 1}


@pytest.mark.parametrize("prefix", ["/", "/a", "../", "a/../", "a//", "../../x"])
def test_prefixes_that_lead_elsewhere_are_refused(store: Store, prefix: str) -> None:
    with pytest.raises(InvalidRequest):
        list(store.list(prefix))
    with pytest.raises(InvalidRequest):
        store.children(prefix)


def test_probe_says_nothing_and_leaves_nothing(bench: Bench, store: Store) -> None:
    store.probe()
    store.probe()
    assert bench.witness.keys() == {}
    assert listed(store) == {}


def test_many_threads_may_use_one_store(bench: Bench, store: Store) -> None:
    def work(number: int) -> None:
        data = pattern(50_000, salt=number)
        for turn in range(3):
            key = f"step-{number}/{turn}"
            store.put(key, lambda: [data[:7], data[7:]])
            assert store.get(key) == data
            assert listed(store, f"step-{number}/")[key] == 50_000
            if turn:
                store.delete([key])

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(work, number) for number in range(8)]:
            done.result()
    assert bench.witness.keys() == {f"step-{number}/0": 50_000 for number in range(8)}


def test_the_url_is_for_people(bench: Bench, store: Store) -> None:
    assert store.url == bench.url
    assert not re.search(r"test-secret", f"{store.url}{store!r}")
