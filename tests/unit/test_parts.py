"""Parts: what is noted is found again, damage counts as nothing, and they go when nobody needs them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd import debris, parts
from ckptd.debris import Directory, Live
from ckptd.errors import Corrupt
from ckptd.localstore import LocalStore
from ckptd.model import CheckpointId
from ckptd.store import Object
from ckptd.v1.manifest_pb2 import Part, StoredShard

ID = CheckpointId("run", "step-1")
OLDER, ATTEMPT, NEWER = (f"{number:024x}" for number in (1, 2, 3))


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def shard(rank: int, file: str = "") -> StoredShard:
    return StoredShard(rank=rank, file=file or f"__{rank}_{rank:016x}.distcp", nbytes=10)


def test_what_several_nodes_note_is_found_together(store: LocalStore) -> None:
    for node, rank in (("a", 0), ("a", 1), ("b", 12)):
        parts.put(store, ID, ATTEMPT, node, shard(rank))
    parts.put(store, ID, NEWER, "a", shard(3))
    assert parts.listed(store, ID, ATTEMPT).keys() == {0, 1, 12}
    assert parts.find(store, ID, ATTEMPT).shards == {rank: shard(rank) for rank in (0, 1, 12)}
    assert parts.find(store, ID, ATTEMPT, ranks=[12]).shards == {12: shard(12)}
    assert all(debris.attempt_of(one.key.removeprefix(f"{ID}/")) in (ATTEMPT, NEWER) for one in store.list(f"{ID}/.ckptd/"))


def test_of_two_that_note_the_same_shard_all_take_the_same_one(store: LocalStore) -> None:
    for number in range(8):
        parts.put(store, ID, ATTEMPT, "a", shard(0, f"__0_{number:016x}.distcp"))
    first = min(one.key for one in store.list(f"{ID}/.ckptd/"))
    assert parts.listed(store, ID, ATTEMPT)[0][0] == first
    assert parts.find(store, ID, ATTEMPT).shards == {0: parts.decode(store.get(first)).shard}


def test_a_damaged_part_counts_as_none_and_another_stands_in_for_it(store: LocalStore, tmp_path: Path) -> None:
    parts.put(store, ID, ATTEMPT, "a", shard(0))
    parts.put(store, ID, ATTEMPT, "b", shard(1))
    (key,) = parts.listed(store, ID, ATTEMPT)[0]
    path = tmp_path / key
    path.write_bytes(path.read_bytes()[:-1])
    found = parts.find(store, ID, ATTEMPT)
    assert found.shards == {1: shard(1)}
    assert found.damaged == [key]
    parts.put(store, ID, ATTEMPT, "a", shard(0, "__0_again.distcp"))
    assert parts.find(store, ID, ATTEMPT).shards == {0: shard(0, "__0_again.distcp"), 1: shard(1)}


def test_a_part_of_a_copied_directory_counts_for_its_own_id_alone(store: LocalStore, tmp_path: Path) -> None:
    parts.put(store, ID, ATTEMPT, "a", shard(0))
    (tmp_path / str(ID)).rename(tmp_path / "run" / "step-2")
    assert parts.find(store, CheckpointId("run", "step-2"), ATTEMPT).shards == {}


@given(st.binary(min_size=1, max_size=200), st.data())
def test_any_change_of_a_part_is_seen(node: bytes, data: st.DataObject) -> None:
    whole = bytearray(parts.encode(Part(id="run/step-1", attempt=ATTEMPT, node=node.hex(), shard=shard(0))))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(Corrupt):
        parts.decode(bytes(whole))


@pytest.mark.parametrize(("attempt", "goes"), [(OLDER, True), (ATTEMPT, True), (NEWER, False)])
def test_a_part_is_debris_once_its_attempt_or_a_newer_one_is_durable(attempt: str, *, goes: bool) -> None:
    now = 1_000_000.0
    name = f".ckptd/{attempt}-7-{'0' * 16}.part"
    manifest = f".ckptd/{ATTEMPT}-{'1' * 16}.manifest"
    objects = {key: Object(f"{ID}/{key}", 10, now - 60) for key in (name, manifest)}
    live = Live(ATTEMPT, manifest.removeprefix(".ckptd/"), now - 60, frozenset({manifest}))
    found = Directory(ID, objects, live, manifests={manifest: frozenset()})
    plan = debris.plan(found, grace_seconds=3600.0, orphan_age_seconds=86400.0, now=now)
    assert plan.condemn == ([name] if goes else [])
    # What nobody commits goes when it is old.
    assert debris.plan(found, grace_seconds=3600.0, orphan_age_seconds=1.0, now=now).condemn == [name]
