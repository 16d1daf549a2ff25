"""What the participants of an attempt make of its record, and of each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.ring import LOST_SECONDS, TAKEOVER_SECONDS, View, copies, judge, keepers, participants
from ckptd.v1.daemon_pb2 import Checkpoint
from ckptd.v1.manifest_pb2 import Receipt, Record
from ckptd.v1.peer_pb2 import WatchReply

AWAY = TAKEOVER_SECONDS + 1


def record_of(*nodes: str, replicas: int = 0, host: str = "10.0.0.{}") -> Record:
    """One rank per node; rank 0 is the coordinator's."""
    shards = [
        Receipt(node=node, address=f"{host.format(number)}:7", token=f"{number:016x}", rank=number) for number, node in enumerate(nodes)
    ]
    return Record(shards=shards, metadata=Receipt(node=nodes[0], address=shards[0].address, token="f" * 16), replicas=replicas)


def token(number: int) -> str:
    return f"{number:016x}"


def there(*tokens: str, state: Checkpoint.State = Checkpoint.ACCEPTED) -> View:
    return View(WatchReply.Fate(state=state, held=tokens))


def gone(seconds: float = AWAY) -> View:
    return View(WatchReply.Fate(state=Checkpoint.ACCEPTED, held=[token(1)]), seconds)


def test_the_coordinator_comes_first_and_then_the_order_of_the_ranks() -> None:
    record = record_of("a", "b", "c")
    record.metadata.node, record.metadata.address = "b", "10.0.0.1:7"
    assert list(participants(record)) == ["b", "a", "c"]


@given(st.integers(1, 9), st.integers(0, 9))
def test_every_shard_has_as_many_keepers_as_there_can_be_and_never_its_own_node(count: int, replicas: int) -> None:
    nodes = [f"n{number}" for number in range(count)]
    record = record_of(*nodes, replicas=replicas)
    kept = {node: {receipt.token for receipt in copies(record, node)} for node in nodes}
    for number, node in enumerate(nodes):
        assert token(number) not in kept[node]
        assert sum(token(number) in tokens for tokens in kept.values()) == min(replicas, count - 1)
        assert {other for other in nodes if token(number) in kept[other]} == set(keepers(record, node))
    # Nobody has to keep more than another.
    assert {len(tokens) for tokens in kept.values()} == {min(replicas, count - 1)}


def test_copies_go_to_another_host_first() -> None:
    record = record_of("a", "b", "c", replicas=1, host="10.0.0.9")
    record.shards[2].address = "10.0.0.3:7"
    assert keepers(record, "a") == ["c"]
    assert keepers(record, "b") == ["c"]
    assert keepers(record, "c") == ["a"]


def test_only_the_coordinator_commits_while_it_is_there() -> None:
    record = record_of("a", "b", "c")
    assert judge(record, "a", {token(0)}, {"b": there(token(1)), "c": there(token(2))}, None).commits
    assert not judge(record, "b", {token(1)}, {"a": there(token(0)), "c": there(token(2))}, None).commits
    assert not judge(record, "b", {token(1)}, {"a": gone(TAKEOVER_SECONDS - 1), "c": there(token(2))}, None).commits


def test_the_next_one_commits_when_all_before_it_are_gone() -> None:
    record = record_of("a", "b", "c")
    assert judge(record, "b", {token(1)}, {"a": gone(), "c": there(token(2))}, None).commits
    assert not judge(record, "c", {token(2)}, {"a": gone(), "b": there(token(1))}, None).commits
    assert judge(record, "c", {token(2)}, {"a": gone(), "b": gone()}, None).commits


def test_the_first_that_holds_a_copy_uploads_it_when_its_node_is_gone() -> None:
    record = record_of("a", "b", "c", replicas=2)
    views = {"b": gone(), "c": there(token(1), token(2))}
    assert judge(record, "a", {token(0), token(1)}, views, None).for_others == {token(1)}
    assert judge(record, "c", {token(2), token(1)}, {"a": there(token(0), token(1)), "b": gone()}, None).for_others == set()
    assert judge(record, "a", {token(0), token(1)}, {**views, "b": there(token(1))}, None).for_others == set()


@pytest.mark.parametrize("replicas", [1, 2, 5])
def test_replicated_means_that_so_many_others_hold_each_shard(replicas: int) -> None:
    record = record_of("a", "b", "c", replicas=replicas)
    every = (token(0), token(1), token(2))
    assert judge(record, "a", every, {"b": there(*every), "c": there(*every)}, None).replicated
    alone = judge(record, "a", {token(0)}, {"b": there(token(1)), "c": there(token(2))}, None)
    assert not alone.replicated


def test_without_replicas_nothing_is_replicated() -> None:
    record = record_of("a", "b")
    every = (token(0), token(1))
    assert not judge(record, "a", every, {"b": there(*every)}, None).replicated


def test_what_only_a_node_held_that_is_gone_is_missing_unless_it_is_in_the_store() -> None:
    record = record_of("a", "b")
    found = judge(record, "a", {token(0)}, {"b": gone(LOST_SECONDS + 1)}, None)
    assert list(found.missing) == ["b"]
    assert found.missing_seconds > LOST_SECONDS
    assert judge(record, "a", {token(0)}, {"b": gone()}, [1]).missing
    assert not judge(record, "a", {token(0)}, {"b": gone()}, []).missing
    assert not judge(record, "a", {token(0), token(1)}, {"b": gone()}, None).missing


def test_one_that_says_durable_or_failed_is_heard() -> None:
    record = record_of("a", "b")
    assert judge(record, "a", {token(0)}, {"b": there(token(1), state=Checkpoint.DURABLE)}, None).durable
    failed = View(WatchReply.Fate(state=Checkpoint.FAILED, reason="access denied", held=[token(1)]))
    assert judge(record, "a", {token(0)}, {"b": failed}, None).failed == "access denied"
