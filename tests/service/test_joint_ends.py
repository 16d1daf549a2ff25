"""What becomes of attempts that several nodes hold: deleted, superseded, failed or given up, and which of them is the latest."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from torch.distributed.checkpoint import CheckpointException

from ckptd.codec import block_hash
from ckptd.errors import CkptdError, NotFound
from ckptd.model import mint_token
from ckptd.v1.daemon_pb2 import Checkpoint
from ckptd.v1.peer_pb2 import (
    AbandonRequest,
    AdoptRequest,
    Bytes,
    PullRequest,
    TellReply,
    TellRequest,
    WatchReply,
    WatchRequest,
)
from ckptd.v1.peer_pb2_grpc import PeerServicer, add_PeerServicer_to_server
from ckptd_client import wait
from hosts import Hosts, Troubled, until
from joint import Save, addresses, adopted, assert_stock_reads, listed, load, peer, prepare_and_adopt, record_of, save

# What the store's troubles make the daemons say to the next save.
pytestmark = pytest.mark.filterwarnings("ignore:ckptd. :UserWarning")

ID = "run/step-1"
#: `program` of a daemon whose clock is an hour ahead.
AHEAD = (
    "-c",
    "import sys, time as t; n = t.time_ns; t.time_ns = lambda: n() + 3600 * 10**9; import ckptd.cli.main as c; sys.exit(c.main())",
)


def test_what_cannot_become_durable_on_one_node_fails_on_all(tmp_path: Path) -> None:
    store = Troubled(tmp_path)
    with store.hosts(2) as hosts:
        store.works(on=hosts[0])
        store.raises("EACCES", on=hosts[1])
        save(addresses(hosts), ID, 1)
        for host, reason in zip(hosts, ("another node says: .*Permission denied", "Permission denied"), strict=True):
            with pytest.raises(CkptdError, match=f"could not be made durable: .*{reason}"):
                wait(ID, address=host.address, timeout=60)


def test_nobody_waits_for_what_has_failed_and_is_gone_with_the_memory_of_a_node_that_is_back(tmp_path: Path) -> None:
    store = Troubled(tmp_path)
    with store.hosts(2) as hosts:
        store.raises("EACCES")
        save(addresses(hosts), ID, 1)
        for host in hosts:
            until("it has failed", lambda host=host: listed(host, ID) == "failed")  # type: ignore[misc]
        hosts[1].lose(wipe=True)
        store.works(on=hosts[1])  # else it does not start
        hosts[1].start()

        def finds_nothing() -> bool:
            with pytest.raises(CheckpointException) as failed:
                load(hosts[0].address, "run/latest", 2)
            return any(isinstance(error, NotFound) for error, _ in failed.value.failures.values())

        until("a job may start from nothing", finds_nothing)


@pytest.mark.slow
def test_what_failed_on_several_nodes_is_tried_again_on_all_when_one_of_them_is_restarted(tmp_path: Path) -> None:
    store = Troubled(tmp_path)
    with store.hosts(4) as hosts:
        store.raises("EACCES")
        save(addresses(hosts)[:3], ID, 1)
        for host in hosts[:3]:
            host.daemon.until(ID, "failed")
        told = hosts[3].daemon.list()[ID]
        assert told["state"] == "failed"
        assert "Permission denied" in told["reason"]  # though it took no part

        def failures() -> list[int]:
            return [host.daemon.log.read_text().count(f"{ID} cannot be made durable") for host in hosts[:3]]

        before = failures()
        store.works(on=hosts[0])
        hosts[0].restart()  # while the others still cannot
        until("they have tried again", lambda: all(failures()[number] > before[number] for number in (1, 2)))
        until("it has failed again", lambda: [host.status()["failed"] for host in hosts[:3]] == [1, 1, 1])
        time.sleep(5.0)  # they ask each other every other second
        assert max(now - then for now, then in zip(failures(), before, strict=True)) <= 3
        store.works()
        hosts[1].restart()
        for host in hosts[:3]:
            host.daemon.until(ID, "durable", timeout=60)
        assert_stock_reads(store.path, ID, 1, 3)


@pytest.mark.parametrize("deletes", [1, 2], ids=["a participant", "another node"])
def test_a_deletion_on_any_node_reaches_those_that_still_hold_it(tmp_path: Path, deletes: int) -> None:
    store = Troubled(tmp_path)
    with store.hosts(3) as hosts:
        save(addresses(hosts)[:2], ID, 1)
        done = hosts[deletes].daemon.cli("delete", ID)
        assert done.returncode == 0, done.stderr
        store.works()
        until("nobody holds it", lambda: all(listed(host, ID) in ("", "aborted") for host in hosts))
        time.sleep(1.0)
        assert not (store.path / ID / ".metadata").exists()


class Insisting(PeerServicer):
    """A coordinator's daemon that is done with every attempt: it says "durable"."""

    def __init__(self) -> None:
        self.asked = 0

    def Pull(self, request: PullRequest, context: object) -> Iterator[Bytes]:
        (whole,) = request.ranges
        data = bytes(whole.nbytes)
        yield Bytes(data=data, hash=block_hash(data))

    def Watch(self, request: WatchRequest, context: object) -> WatchReply:
        self.asked += bool(request.attempts)
        return WatchReply(fates=[WatchReply.Fate(attempt=name, state=Checkpoint.DURABLE) for name in request.attempts])

    def Tell(self, request: TellRequest, context: object) -> TellReply:
        return TellReply()


@contextmanager
def insisting() -> Iterator[tuple[Insisting, str]]:
    """One that runs, and its address."""
    there, server = Insisting(), grpc.server(ThreadPoolExecutor(2))
    add_PeerServicer_to_server(there, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield there, address
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize("seen", ["nothing", "an error"])
def test_what_another_node_calls_durable_and_the_store_does_not_show_is_looked_for_now_and_then(tmp_path: Path, seen: str) -> None:
    store, listings = Troubled(tmp_path), tmp_path / "listings"
    store.works()
    with store.hosts(1) as hosts, peer(hosts[0]) as daemon, insisting() as (coordinator, address):
        written = Save(2 * addresses(hosts), ID, 1)
        written.write()
        record = record_of(written, hosts[0])
        for receipt in (record.shards[0], record.metadata):
            receipt.node, receipt.address, receipt.token = "elsewhere", address, mint_token()
        prepare_and_adopt(daemon, record)
        trouble: dict[str, Any] = {"list_raises": "EIO"} if seen == "an error" else {}
        store.tell(list_log=str(listings), **trouble)
        daemon.Tell(TellRequest(attempt=record.summary.attempt, accepted=True), timeout=20)
        until("it has asked, and been told", lambda: coordinator.asked)
        until("it has looked", listings.exists)
        time.sleep(2.0)
        assert coordinator.asked < 10
        assert 0 < len(listings.read_text().splitlines()) < 60


def test_an_adoption_that_comes_to_nothing_or_too_late_takes_nothing_from_the_save_before_it(tmp_path: Path) -> None:
    store = Troubled(tmp_path)
    with store.hosts(2) as hosts:
        save(addresses(hosts), ID, 1)
        record = adopted(hosts, ID, 2)
        assert load(hosts[0].address, ID, 2) == 1
        with peer(hosts[1]) as daemon:
            daemon.Abandon(AbandonRequest(attempt=record.summary.attempt, reason="told by a test"), timeout=20)
            assert [load(host.address, "run/latest", 2) for host in hosts] == [1, 1]
            with pytest.raises(grpc.RpcError, match=r"is over here|abandoned"):
                daemon.Adopt(AdoptRequest(record=record), timeout=20)
        store.works()
        for host in hosts:
            host.daemon.until(ID, "durable")
        assert_stock_reads(store.path, ID, 1, 2)


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
