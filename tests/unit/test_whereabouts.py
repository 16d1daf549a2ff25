"""Who holds what: what several nodes say of attempts, put together; and which node reads which data file."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd import manifest
from ckptd.attempt import MEMORY_ONLY, Attempt
from ckptd.blocks import BlockShard, HeldShard, StoredBlock, cut, raw_ranges, spans
from ckptd.codec import Raw
from ckptd.errors import InvalidRequest
from ckptd.model import BLOCK_NBYTES, CheckpointId, mint_attempt
from ckptd.nearby import owner_of
from ckptd.sighting import Sighting, merged, not_reached
from ckptd.v1.daemon_pb2 import Checkpoint
from ckptd.v1.manifest_pb2 import Item, Receipt, Record, Stored, StoredShard, Summary, Table
from ckptd.v1.peer_pb2 import Holding

ATTEMPT = mint_attempt(1_000_000, None)
A, B, C = "a:1", "b:1", "c:1"


def record(nodes: str = "ab", name: str = "run/step-1") -> Record:
    """A save by one rank per node; the first coordinates."""
    shards = [Receipt(node=node, address=f"{node}:1", token=f"shard-{node}", rank=rank) for rank, node in enumerate(nodes)]
    metadata = Receipt(node=nodes[0], address=f"{nodes[0]}:1", token="pickle")
    return Record(durable=True, summary=Summary(id=name, attempt=ATTEMPT), shards=shards, metadata=metadata)


def says(*held: str, state: Checkpoint.State = Checkpoint.ACCEPTED, of: Record | None = None, whole: bool = True) -> list[Holding]:
    """What a node answers."""
    found = of or record()
    return [Holding(summary=found.summary, state=state, held=held, record=found if whole else None)]


def seen(**told: list[Holding]) -> Sighting:
    return merged([], {f"{node}:1": holdings for node, holdings in told.items()})[ATTEMPT]


def test_what_all_nodes_together_hold_can_be_restored() -> None:
    found = seen(a=says("shard-a", "pickle"), b=says("shard-b", "pickle"))
    assert found.restorable
    assert found.holders == {"shard-a": [A], "shard-b": [B], "pickle": [A, B]}
    assert (found.line().state, found.line().reason) == (Checkpoint.ACCEPTED, "")


@pytest.mark.parametrize("told", [{"a": says("shard-a", "pickle")}, {"a": says("pickle"), "b": says("shard-b", "pickle")}])
def test_a_part_that_nobody_holds_makes_it_unrestorable_and_the_reason_names_node_and_rank(told: dict[str, list[Holding]]) -> None:
    found = seen(**told)
    assert not found.restorable
    node, rank = ("b", 1) if len(told) == 1 else ("a", 0)
    assert f"rank {rank} " in found.line().reason
    assert f"node {node} at {node}:1" in found.line().reason
    assert found.line().state == Checkpoint.ACCEPTED


def test_the_metadata_pickle_is_a_part_too() -> None:
    found = seen(a=says("shard-a"), b=says("shard-b"))
    assert not found.restorable
    assert [receipt.token for receipt in found.missing] == ["pickle"]


def test_a_commit_that_never_ended_is_not_restorable_though_one_node_calls_it_accepted() -> None:
    """The other one has sealed its shard, and knows of no attempt: it says nothing of it."""
    assert not merged([], {B: says("shard-b", "pickle"), A: []})[ATTEMPT].restorable


def test_a_copy_elsewhere_stands_in_for_a_node_that_is_gone() -> None:
    assert seen(b=says("shard-a", "shard-b", "pickle")).restorable


@pytest.mark.parametrize("end", [Checkpoint.ABORTED, Checkpoint.DURABLE])
def test_what_one_node_calls_ended_or_durable_no_memory_gives_back(end: Checkpoint.State) -> None:
    found = seen(a=says("shard-a", "pickle"), b=says("shard-b", "pickle"), c=says(state=end))
    assert not found.restorable
    assert found.state == end


def test_a_lost_part_that_is_held_again_is_not_lost() -> None:
    lost = says("shard-a", "pickle", state=Checkpoint.LOST)
    assert seen(a=lost).state == Checkpoint.LOST
    found = seen(a=lost, b=says("shard-b", "pickle"))
    assert found.restorable
    assert found.state == Checkpoint.ACCEPTED


@pytest.mark.parametrize("state", Checkpoint.State.values())
def test_who_loads_an_older_one_hears_of_a_newer_that_is_cut_off_and_not_of_one_that_is_gone(state: Checkpoint.State) -> None:
    found = merged([], {A: says("shard-a", "pickle", state=state)})
    told = not_reached(found, mint_attempt(999_999, None))
    assert bool(told) is (state not in (Checkpoint.ABORTED, Checkpoint.DURABLE))
    assert all("run/step-1 was accepted later: " in why and f"node b at {B}" in why for why in told)
    assert not not_reached(found, ATTEMPT)
    assert not not_reached(merged([], {A: says("shard-a", "pickle", state=state), B: says("shard-b")}), "")


def test_of_a_save_that_not_all_have_accepted_nobody_hears() -> None:
    """It is on its way, or its trainer has heard that it failed."""
    (adopted,) = says("shard-b")
    adopted.adopted = True
    assert not not_reached(merged([], {B: [adopted]}), "0")
    (told,) = not_reached(
        merged([], {B: [adopted]}), "0", [A]
    )  # its coordinator may have told the trainer, and was gone before it told anybody else
    assert "was begun later, and may have been accepted" in told
    (adopted,) = says("shard-a")
    adopted.adopted = True
    assert not_reached(merged([], {A: [adopted], B: says("shard-b")}), "0")  # the other one knows that it was accepted
    own = Attempt(record(), CheckpointId("run", "step-1"), Checkpoint.LOST, held={"shard-a"}, confirmed=False)
    assert not not_reached(merged([own], {}), "0")
    own.confirmed = True
    assert not_reached(merged([own], {}), "0")


def test_the_newest_few_that_cannot_be_read_are_named() -> None:
    seen: dict[str, Sighting] = {}
    for step in range(1, 6):
        of = record(name=f"run/step-{step}")
        of.summary.attempt = mint_attempt(1_000_000 + step, None)
        seen |= merged([], {A: says("shard-a", "pickle", of=of)})
    told = not_reached(seen, "0")
    assert [text.split()[3] for text in told[:3]] == ["run/step-5", "run/step-4", "run/step-3"]
    assert told[3:] == ["2 more that were, or may have been, accepted later cannot be read either"]


def test_what_another_node_says_of_a_node_that_is_missed_is_said_once() -> None:
    (of_b,) = says("shard-a", "pickle")
    of_b.reason = "the shard of rank 1 was held by node b at b:1 alone, which is there and does not hold it any more"
    found = merged([], {A: [of_b]})[ATTEMPT]
    assert found.line().reason == f"the daemon at {A} says: {of_b.reason}"
    assert "start the daemon" not in not_reached({ATTEMPT: found}, "0", [B])[0]  # that would not bring it back
    of_b.reason = "not durable yet"
    assert "what rank 1 saved is in no memory that can be reached: node b" in merged([], {A: [of_b]})[ATTEMPT].line().reason


def test_without_its_record_nobody_knows_what_it_consists_of() -> None:
    assert not seen(a=says("shard-a", "shard-b", "pickle", whole=False)).restorable


def test_what_this_node_holds_counts_like_what_others_hold() -> None:
    own = Attempt(record(), CheckpointId("run", "step-1"), Checkpoint.ACCEPTED, held={"shard-a", "pickle"})
    assert not merged([own], {})[ATTEMPT].restorable
    found = merged([own], {B: says("shard-b", whole=False)})[ATTEMPT]
    assert found.restorable
    assert found.holders == {"shard-a": [""], "pickle": [""], "shard-b": [B]}


def test_of_what_stays_in_memory_only_is_said_too_that_a_node_is_missed_and_since_when() -> None:
    of = record()
    of.durable = False
    away = "the shard of rank 1 was held by node b at b:1 alone, which has not been reached for 12 s"
    own = Attempt(of, CheckpointId("run", "step-1"), Checkpoint.ACCEPTED, reason=away, held={"shard-a", "pickle"}, doubtful=True)
    assert merged([own], {})[ATTEMPT].line().reason == f"{away}; {MEMORY_ONLY}"
    own.doubtful, own.reason = False, ""
    assert merged([own], {B: says("shard-b", whole=False)})[ATTEMPT].line().reason == MEMORY_ONLY


def test_another_id_under_the_same_attempt_is_not_mixed_in() -> None:
    """A peer that is out of its mind."""
    other = says("shard-b", of=record(name="run/step-2"))
    assert not merged([], {A: says("shard-a", "pickle"), B: other})[ATTEMPT].restorable


def test_a_record_that_is_none_is_not_believed() -> None:
    broken = Holding(summary=record().summary, state=Checkpoint.ACCEPTED, held=["pickle"], record=Record(summary=record().summary))
    assert merged([], {A: [broken]})[ATTEMPT].record is None


# -- owners ---------------------------------------------------------------------------------------------------------

addresses = st.lists(st.from_regex(r"\Ahost-[a-z]{1,4}:[0-9]{1,4}\Z"), unique=True, min_size=1, max_size=8)


@given(addresses, st.permutations(range(8)), st.text(min_size=1, max_size=30))
def test_all_nodes_name_the_same_owner(nodes: list[str], order: list[int], key: str) -> None:
    shuffled = [nodes[number] for number in order if number < len(nodes)]
    assert owner_of(key, nodes) == owner_of(key, shuffled)
    assert owner_of(key, nodes) in nodes


@given(addresses, st.text(min_size=1, max_size=30))
def test_only_files_of_a_node_that_leaves_change_hands(nodes: list[str], key: str) -> None:
    owner = owner_of(key, nodes)
    for gone in nodes:
        if gone != owner:
            assert owner_of(key, [node for node in nodes if node != gone]) == owner


def test_files_are_shared_out() -> None:
    owners = [owner_of(f"run/step-1/__{rank}_x.distcp", [A, B, C]) for rank in range(300)]
    assert all(owners.count(node) > 50 for node in (A, B, C))


def test_what_is_in_no_file_and_nobody_else_loads_has_no_owner() -> None:
    assert owner_of("", [A, B]) == ""
    assert owner_of("key", []) == ""


# -- blocks ---------------------------------------------------------------------------------------------------------

sizes = st.lists(st.tuples(st.integers(0, 3 * BLOCK_NBYTES), st.booleans()), min_size=1, max_size=5)


def table_of(items: list[tuple[int, bool]]) -> Table:
    """Items one after another; raw ones have gaps around their bytes."""
    table, at = Table(), 0
    for number, (nbytes, raw) in enumerate(items):
        lead, tail = (700, 300) if raw else (0, 0)
        kind = Item.RAW if raw else Item.OPAQUE_OBJECT
        table.items.append(Item(fqn=b"t%d" % number, kind=kind, at=at, raw_at=at + lead, nbytes=nbytes))
        at += lead + nbytes + tail
    table.end = at
    return table


def stored(table: Table) -> BlockShard:
    """The same shard in an uncompressed data file."""
    shard = StoredShard(file="__0_x.distcp", nbytes=table.end, table=table)
    for item, end in zip(table.items, manifest.item_ends(table), strict=True):
        lengths = [stop - start for start, stop in manifest.block_spans(item.at, end, BLOCK_NBYTES)]
        shard.stored.append(Stored(offset=item.at, lengths=lengths, hashes=bytes(16 * len(lengths))))
    return BlockShard(shard, "key", Raw(), BLOCK_NBYTES)


@given(sizes, st.data())
def test_a_block_is_the_same_in_memory_and_in_the_store(items: list[tuple[int, bool]], data: st.DataObject) -> None:
    table = table_of(items)
    number = data.draw(st.integers(0, len(items) - 1))
    start = data.draw(st.integers(0, items[number][0]))
    end = data.draw(st.integers(start, items[number][0]))
    held = HeldShard(table).find([number], [start], [end])
    there = stored(table).find([number], [start], [end])
    assert [(block.key, block.span) for block in held] == [(block.key, block.span) for block in there]
    keys = [block.key for block in there]
    assert [block.key for block in stored(table).find(*raw_ranges(table, keys, BLOCK_NBYTES))] == keys


@pytest.mark.parametrize("key", [(0, 1), (1, 0), (2, 0)])
def test_blocks_that_are_not_there_are_refused(key: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest):
        raw_ranges(table_of([(100, True), (0, True)]), [key], BLOCK_NBYTES)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 50)), max_size=20), st.integers(1, 100))
def test_groups_hold_all_blocks_in_their_order_and_spans_all_their_bytes(pieces: list[tuple[int, int]], nbytes: int) -> None:
    blocks, at = [], 0
    for number, (gap, length) in enumerate(pieces):
        at += gap
        blocks.append(StoredBlock((number, 0), at, length, at, length, b""))
        at += length
    groups = cut(blocks, nbytes)
    assert [block for group in groups for block in group] == blocks
    assert all(groups)
    assert all(sum(block.nbytes for block in group[:-1]) < nbytes for group in groups)
    covered = [position for start, end in spans(blocks) for position in range(start, end)]
    assert covered == [position for block in blocks for position in range(*block.span)]
    assert all(end < start for (_, end), (start, _) in zip(spans(blocks), spans(blocks)[1:], strict=False))
