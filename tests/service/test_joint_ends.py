"""What becomes of attempts that several nodes hold: deleted, superseded, failed or given up, and which of them is the latest."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

import saved
from ckptd.errors import CkptdError
from ckptd.ledger import Ledger
from ckptd.localstore import LocalStore
from ckptd.model import CheckpointId, mint_attempt
from ckptd.v1.manifest_pb2 import Receipt, Record, Summary
from ckptd.v1.peer_pb2 import AbandonRequest, AdoptRequest, PrepareRequest, TellRequest
from ckptd.v1.peer_pb2_grpc import PeerStub
from ckptd_client import metadata as pickles
from ckptd_client import wait
from ckptd_client.channel import connect
from ckptd_client.shard import write_metadata
from hosts import Host, Hosts, Troubled, until
from joint import Save, addresses, assert_stock_reads, listed, load, save

# What the store's troubles make the daemons say to the next save.
pytestmark = pytest.mark.filterwarnings("ignore:ckptd. :UserWarning")

ID = "run/step-1"
#: `program` of a daemon whose clock is an hour ahead.
AHEAD = (
    "-c",
    "import sys, time as t; n = t.time_ns; t.time_ns = lambda: n() + 3600 * 10**9; import ckptd.cli.main as c; sys.exit(c.main())",
)


def record_of(written: Save, coordinator: Host, id: str) -> Record:
    """The record that the coordinator's daemon would now make of the save, and have all participants adopt."""
    receipts = [Receipt.FromString(result.storage_data) for (result,) in written.results]
    pickle = write_metadata(connect(coordinator.address), checkpoint_id=id, rank=0, data=pickles.dump(written.metadata))
    now_us = time.time_ns() // 1000
    summary = Summary(id=id, attempt=mint_attempt(now_us, None), accepted_us=now_us, world_size=len(receipts), codec="none")
    return Record(summary=summary, shards=receipts, metadata=pickle, durable=True)


@contextmanager
def peer(host: Host) -> Iterator[Any]:
    """The host's daemon, as others of its kind call it."""
    with grpc.insecure_channel(host.peer) as channel:
        stub: Any = PeerStub(channel)
        yield stub


def prepare_and_adopt(daemon: Any, record: Record) -> None:
    """What the coordinator's daemon asks of a participant that is rank 1 before it accepts the attempt itself."""
    id = record.summary.id
    daemon.Prepare(PrepareRequest(id=id, shards=record.shards[1:], metadata=record.metadata, durable=True), timeout=20)
    daemon.Adopt(AdoptRequest(record=record), timeout=20)


def test_what_cannot_become_durable_on_one_node_fails_on_all(tmp_path: Path) -> None:
    store = Troubled(tmp_path)
    with store.hosts(2) as hosts:
        store.tell(**{"raise": "EACCES"})
        save(addresses(hosts), ID, 1)
        for host in hosts:
            with pytest.raises(CkptdError, match="could not be made durable"):
                wait(ID, address=host.address, timeout=30)


def test_a_deletion_reaches_the_nodes_that_still_hold_it(tmp_path: Path) -> None:
    store = Troubled(tmp_path)
    with store.hosts(2) as hosts:
        save(addresses(hosts), ID, 1)
        done = hosts[1].daemon.cli("delete", ID)
        assert done.returncode == 0, done.stderr
        store.works()
        until("nobody holds it", lambda: all(listed(host, ID) in ("", "aborted") for host in hosts))
        time.sleep(1.0)
        assert not (store.path / ID / ".metadata").exists()


@pytest.mark.slow
def test_a_lost_nodes_save_does_not_keep_memory_from_later_ones(tmp_path: Path) -> None:
    store = Troubled(tmp_path)
    with store.hosts(2, memory="32MiB") as hosts:
        save(addresses(hosts), ID, 1, 4_000_000)  # 16 MB on each
        hosts[1].lose(wipe=True)
        store.works()
        for step in (2, 3, 4):
            save([hosts[0].address], f"run/step-{step}", step, 4_000_000)
            wait(f"run/step-{step}", address=hosts[0].address, timeout=30)
        assert load(hosts[0].address, "run/latest", 1, 4_000_000) == 4


@pytest.mark.slow
def test_what_was_superseded_or_deleted_on_one_node_does_not_come_back_from_a_copy(tmp_path: Path) -> None:
    store = Troubled(tmp_path)
    with store.hosts(2, replicas=1) as hosts:
        save(addresses(hosts), ID, 1)
        for host in hosts:
            host.daemon.until(ID, "replicated")
        hosts[1].stop()
        store.works()
        save([hosts[0].address], ID, 2, overwrite=True)
        wait(ID, address=hosts[0].address, timeout=30)
        done = hosts[0].daemon.cli("delete", ID)
        assert done.returncode == 0, done.stderr
        hosts[1].cont()
        until("both know", lambda: [listed(host, ID) for host in hosts] == ["", ""], timeout=30)
        time.sleep(12)  # longer than it takes to step in for a node that is gone
        assert not (store.path / ID / ".metadata").exists()


def test_a_node_that_takes_no_part_deletes_what_others_hold(tmp_path: Path) -> None:
    store = Troubled(tmp_path)
    with store.hosts(3) as hosts:
        save(addresses(hosts)[:2], ID, 1)
        done = hosts[2].daemon.cli("delete", ID)
        assert done.returncode == 0, done.stderr
        store.works()
        until("nobody holds it", lambda: all(listed(host, ID) in ("", "aborted") for host in hosts))
        time.sleep(1.0)
        assert not (store.path / ID / ".metadata").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("away", "moved"), [(0, False), (1, False), (1, True)], ids=["coordinator", "participant", "elsewhere"])
def test_what_was_given_up_for_lost_goes_on_when_its_node_is_back(tmp_path: Path, away: int, moved: bool) -> None:
    store = Troubled(tmp_path)
    with store.hosts(2) as hosts:
        save(addresses(hosts), ID, 1)
        hosts[away].kill()
        store.works()  # the other uploads its shard, and waits
        there = hosts[1 - away]
        there.daemon.until(ID, "lost", timeout=90)
        drained = there.daemon.cli("drain")
        assert drained.returncode == 1, drained.stdout
        assert ID in drained.stdout
        if moved:  # nobody finds it there; what it puts into the store they see
            hosts[away].listen_at(hosts[away].port + 10_000, [there.peer])
        hosts[away].start()
        for host in hosts:
            host.daemon.until(ID, "durable", timeout=60)
        assert_stock_reads(store.path, ID, 1, 2)


def test_an_adoption_that_comes_to_nothing_or_too_late_takes_nothing_from_the_save_before_it(tmp_path: Path) -> None:
    store = Troubled(tmp_path)
    with store.hosts(2) as hosts:
        save(addresses(hosts), ID, 1)
        late = Save(addresses(hosts), ID, 2, overwrite=True)
        late.write()
        record = record_of(late, hosts[0], ID)
        with peer(hosts[1]) as daemon:
            prepare_and_adopt(daemon, record)
            assert load(hosts[0].address, ID, 2) == 1
            daemon.Abandon(AbandonRequest(attempt=record.summary.attempt, reason="told by a test"), timeout=20)
            assert [load(host.address, "run/latest", 2) for host in hosts] == [1, 1]
            with pytest.raises(grpc.RpcError, match=r"is over here|abandoned"):
                daemon.Adopt(AdoptRequest(record=record), timeout=20)
        store.works()
        for host in hosts:
            host.daemon.until(ID, "durable")
        assert_stock_reads(store.path, ID, 1, 2)


@pytest.mark.slow
def test_what_a_node_adopted_counts_once_the_store_shows_that_all_have_accepted_it(tmp_path: Path) -> None:
    abandoned, uploaded, committed = ids = ["run/step-1", "run/step-2", "run/step-3"]
    store = Troubled(tmp_path)
    store.works()
    with store.hosts(2) as hosts:
        coordinator, participant = hosts
        save([participant.address], abandoned, 1, durable=False)
        records = {}
        for id in ids:
            written = Save(addresses(hosts), id, 2, overwrite=True)
            written.write()
            records[id] = record_of(written, coordinator, id)
            with peer(participant) as daemon:
                prepare_and_adopt(daemon, records[id])
        participant.kill()  # nobody tells it that all have adopted the second and the third
        with peer(coordinator) as daemon:
            daemon.Adopt(AdoptRequest(record=records[uploaded]), timeout=20)
            daemon.Tell(TellRequest(attempt=records[uploaded].summary.attempt, accepted=True), timeout=20)
        until("it has put its part", lambda: list((store.path / uploaded / ".ckptd").glob("*.part")))
        coordinator.lose(wipe=True)
        there = LocalStore(store.path)
        whole = saved.contents(committed, records[committed].summary.attempt, ranks=2)
        saved.upload(there, whole)
        Ledger(there).commit(CheckpointId.parse(committed), whole, saved.PICKLE)
        participant.start()
        # `list` would ask the store. The first, which is older, was looked at before the others; and there is what was saved before it.
        until("it has found out", lambda: participant.status()["accepted"] == 2)
        assert [listed(participant, id) for id in (uploaded, committed)] == ["durable", "durable"]
        assert_stock_reads(store.path, uploaded, 2, 2)
        assert not (store.path / abandoned).exists()
        assert load(participant.address, abandoned, 1) == 1


def test_a_node_that_was_away_while_its_checkpoint_was_deleted_finds_nothing_to_commit(tmp_path: Path) -> None:
    store = Troubled(tmp_path)
    own = store.path / ID / ".ckptd"
    with store.hosts(2) as hosts:
        save(addresses(hosts), ID, 1)
        hosts[1].stop()
        store.works()
        until("the committer waits for the other's part", lambda: list(own.glob("*-0-*.part")))
        hosts[0].kill()
        hosts[1].cont()
        until("that is there", lambda: list(own.glob("*-1-*.part")))
        done = hosts[1].daemon.cli("delete", ID)
        assert done.returncode == 0, done.stderr
        hosts[1].kill()  # nobody tells the committer
        hosts[0].start()
        until("it finds a note in the store", lambda: hosts[0].status()["accepted"] == 0)
        assert not list(own.glob("*.part"))
        assert not (store.path / ID / ".metadata").exists()


def test_a_node_that_is_started_again_tries_what_failed_whatever_one_that_is_not_yet_says_of_it(tmp_path: Path) -> None:
    store = Troubled(tmp_path)
    with store.hosts(2) as hosts:
        store.raises("EACCES")
        save(addresses(hosts), ID, 1)
        until("it has failed on both", lambda: [host.status()["failed"] for host in hosts] == [1, 1])
        store.works()
        hosts[0].restart()
        until("its shard is there", lambda: list((store.path / ID / ".ckptd").glob("*-0-*.part")))
        assert [host.status()["failed"] for host in hosts] == [0, 1]
        hosts[1].restart()
        for host in hosts:
            host.daemon.until(ID, "durable")
        assert_stock_reads(store.path, ID, 1, 2)


def test_a_save_is_the_latest_though_the_clock_of_a_node_before_it_was_ahead(tmp_path: Path) -> None:
    hosts = Hosts(3, tmp_path / "store")
    ahead, behind, other = hosts
    ahead.daemon.program = AHEAD
    with hosts:

        def hasty(run: str) -> None:
            """A checkpoint that is in memory alone: the store tells nobody of it."""
            save([ahead.address], f"{run}/step-1", 1, durable=False)

        def latest(run: str, world: int = 1) -> list[int]:
            return [load(host.address, f"{run}/latest", world) for host in hosts]

        hasty("loaded")
        assert load(behind.address, "loaded/latest", 1) == 1
        save([behind.address], "loaded/step-2", 2)
        assert latest("loaded") == [2, 2, 2]

        hasty("listed")
        assert listed(behind, "listed/step-1") == "accepted"
        save([behind.address], "listed/step-2", 2)
        assert latest("listed") == [2, 2, 2]

        hasty("seen-by-another")
        assert load(other.address, "seen-by-another/latest", 1) == 1
        save([behind.address, other.address], "seen-by-another/step-2", 2)
        assert latest("seen-by-another", 2) == [2, 2, 2]
