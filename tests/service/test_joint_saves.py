"""Saves whose shards lie on several nodes: accepted by all or by none, committed by whoever is left."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import grpc
import pytest

from ckptd.errors import InvalidRequest, StoreError, Unavailable, WrongPhase
from ckptd.v1.daemon_pb2 import ResolveRequest, WaitRequest
from ckptd.v1.daemon_pb2_grpc import DaemonStub
from ckptd_client import wait
from daemons import DaemonProcess
from hosts import Hosts, Troubled, until
from joint import Save, addresses, assert_stock_reads, listed, load, save, save_replicated
from s3 import S3Server

# What the store's troubles make the daemons say to the next save.
pytestmark = pytest.mark.filterwarnings("ignore:ckptd. :UserWarning")

ID = "run/step-1"
#: `program` of a daemon whose machine sleeps for a minute between any two looks at the clock that goes on meanwhile.
ASLEEP = (
    "-c",
    """
import itertools, sys, time
now, naps = time.clock_gettime, itertools.count()
time.clock_gettime = lambda clock: now(clock) + (60 * next(naps) if clock == time.CLOCK_BOOTTIME else 0)
from ckptd.cli.main import main
sys.exit(main())
""",
)


@pytest.mark.parametrize("asks", ["of many ids", "one id many times"])
def test_questions_that_wait_for_a_store_that_hangs_hold_up_no_save_and_no_load_from_memory(tmp_path: Path, asks: str) -> None:
    store = Troubled(tmp_path)
    store.works()
    with store.hosts(2) as hosts:
        save(addresses(hosts), "run/step-0", 9)
        for host in hosts:
            wait("run/step-0", address=host.address, timeout=60)
        store.tell(list_hangs=True, **{"raise": "EIO"})
        save(addresses(hosts), ID, 1)
        for host in hosts:
            with grpc.insecure_channel(host.address) as channel:
                stub = DaemonStub(channel)  # type: ignore[no-untyped-call]
                if asks == "of many ids":
                    calls = [stub.Resolve.future(ResolveRequest(id=f"run/step-{100 + n}"), timeout=1) for n in range(20)]
                else:
                    calls = [stub.Wait.future(WaitRequest(id="run/step-100"), timeout=1) for _ in range(20)]
                for call in calls:
                    assert call.exception() is not None
        for host in hosts:
            assert load(host.address, ID, 2) == 1
        save(addresses(hosts), "run/step-2", 2)
        store.works()
        for host in hosts:
            wait("run/step-2", address=host.address, timeout=60)


def test_three_nodes_save_together_and_stock_reads_it(tmp_path: Path) -> None:
    with Hosts(3, tmp_path / "store") as hosts:
        save(addresses(hosts), ID, 1)
        for host in hosts:
            wait(ID, address=host.address, timeout=60)
        assert_stock_reads(tmp_path / "store", ID, 1, 3)
        save(addresses(hosts), ID, 2, overwrite=True)
        for host in hosts:
            wait(ID, address=host.address, timeout=60)
        assert_stock_reads(tmp_path / "store", ID, 2, 3)
        assert not list((tmp_path / "store").rglob("*.part"))
        verified = hosts[1].daemon.cli("verify", ID)
        assert verified.returncode == 0, verified.stdout + verified.stderr


def test_nodes_that_cannot_reach_each_other_are_told_of_listen(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    with DaemonProcess(store) as alone, DaemonProcess(store) as other, Hosts(1, store) as hosts:
        for pair in ([alone.address, other.address], [hosts[0].address, alone.address], [alone.address, hosts[0].address]):
            with pytest.raises(InvalidRequest, match="--listen"):
                save(pair, ID, 1)
        assert alone.list() == {}
        # Each still works by itself.
        save([alone.address], "run/step-2", 1)
        wait("run/step-2", address=alone.address, timeout=60)


def test_a_directory_of_one_node_is_no_store_for_several(tmp_path: Path) -> None:
    with Hosts(2, tmp_path / "store", shared=False) as hosts:
        with pytest.raises(StoreError, match=r"not be resumable on other nodes.*--shared-store"):
            save(addresses(hosts), ID, 1)
        assert [listed(host, ID) for host in hosts] == ["", ""]
        # What is to stay in memory needs no store.
        save(addresses(hosts), ID, 1, durable=False)
        assert [load(host.address, ID, 2) for host in hosts] == [1, 1]


def test_different_stores_are_refused(s3_server: S3Server) -> None:
    first, second = (Hosts(1, s3_server.url(prefix), *s3_server.arguments, shared=False) for prefix in ("joint-a", "joint-b"))
    with first, second, pytest.raises(StoreError, match="different stores"):
        save([first[0].address, second[0].address], ID, 1)


def test_a_participant_that_is_gone_fails_the_save_and_is_named(tmp_path: Path) -> None:
    with Hosts(2, tmp_path / "store") as hosts:
        with pytest.raises(Unavailable, match=hosts[1].peer):
            save(addresses(hosts), ID, 1, between=hosts[1].kill)
        assert listed(hosts[0], ID) == ""
        hosts[1].start()
        save(addresses(hosts), ID, 2)
        wait(ID, address=hosts[0].address, timeout=60)
        assert [load(host.address, ID, 2) for host in hosts] == [2, 2]


@pytest.mark.slow
def test_a_participant_that_stalls_fails_the_save_in_time_and_never_brings_back_older_state(tmp_path: Path) -> None:
    with Hosts(3, tmp_path / "store") as hosts:
        late = Save(addresses(hosts), ID, 1)
        late.write()
        hosts[2].stop()
        began = time.monotonic()
        with pytest.raises(Unavailable, match=hosts[2].peer):
            late.finish()
        assert time.monotonic() - began < 30
        save(addresses(hosts)[:2], ID, 2)
        wait(ID, address=hosts[0].address, timeout=60)
        hosts[2].cont()  # what it was asked meanwhile it does now
        time.sleep(1.0)
        assert [load(host.address, "run/latest", 2) for host in hosts] == [2, 2, 2]
        assert_stock_reads(tmp_path / "store", ID, 2, 2)
        save(addresses(hosts), ID, 3, overwrite=True)
        for host in hosts:
            wait(ID, address=host.address, timeout=60)
        assert_stock_reads(tmp_path / "store", ID, 3, 3)


def test_a_coordinator_that_stood_still_before_it_accepted_says_so_and_the_others_give_it_up(tmp_path: Path) -> None:
    hosts = Hosts(2, tmp_path / "store")
    asleep, other = hosts
    asleep.daemon.program = ASLEEP
    with hosts:
        save([other.address, asleep.address], ID, 1)
        with pytest.raises(Unavailable, match=f"outcome unknown: this daemon stood still .* given {ID} up; save again"):
            save(addresses(hosts), ID, 2, overwrite=True)
        assert f"of {ID} is abandoned" in other.daemon.log.read_text()
        assert not list(other.daemon.shm_dir.glob("*.adopted.record"))
        assert [load(host.address, "run/latest", 2) for host in hosts] == [1, 1]
        save([other.address, asleep.address], ID, 3, overwrite=True)
        assert [load(host.address, "run/latest", 2) for host in hosts] == [3, 3]


@pytest.mark.parametrize("killed", [0, 1], ids=["coordinator", "participant"])
def test_a_daemon_that_is_killed_after_the_save_goes_on_where_it_was(tmp_path: Path, killed: int) -> None:
    store = Troubled(tmp_path)
    with store.hosts(2) as hosts:
        save(addresses(hosts), ID, 1)
        hosts[killed].restart()
        store.works()
        for host in hosts:
            host.daemon.until(ID, "durable")
        assert_stock_reads(store.path, ID, 1, 2)
        assert load(hosts[killed].address, ID, 2) == 1


@pytest.mark.parametrize("lost", [0, 1], ids=["coordinator", "participant"])
def test_what_a_node_held_that_is_lost_after_replication_is_loaded_from_its_copies(tmp_path: Path, lost: int) -> None:
    with Troubled(tmp_path).hosts(3, replicas=1) as hosts:
        save_replicated(hosts, ID, 1)
        hosts[lost].lose(wipe=True)
        assert [load(host.address, "run/latest", 3) for host in hosts if host.running] == [1, 1]
        assert hosts.bytes_from()["store"] == 0


def test_saves_of_several_nodes_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    with Hosts(2, tmp_path / "store") as hosts:
        failures: list[BaseException] = []

        def saves(run: str, order: list[str]) -> None:
            try:
                for step in range(5):
                    save(order, f"{run}/step-{step}", step)
            except BaseException as exc:  # noqa: BLE001 - DCP raises one that is no Exception
                failures.append(exc)

        threads = [threading.Thread(target=saves, args=(f"run{number}", addresses(hosts)[:: 1 - 2 * number])) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        for run in ("run0", "run1"):
            for host in hosts:
                wait(f"{run}/step-4", address=host.address, timeout=60)
            assert load(hosts[0].address, f"{run}/latest", 2) == 4


def test_a_save_in_memory_only_does_not_stop_one_of_other_nodes_that_is_on_its_way(tmp_path: Path) -> None:
    store = Troubled(tmp_path)
    with store.hosts(3) as hosts:
        save(addresses(hosts)[:2], ID, 1)
        with pytest.raises(WrongPhase, match="on its way to the store"):
            save([hosts[2].address, hosts[1].address], ID, 2, durable=False, overwrite=True)
        store.works()
        for host in hosts[:2]:
            host.daemon.until(ID, "durable")
        assert_stock_reads(store.path, ID, 1, 2)


def test_a_file_that_is_swept_before_the_commit_is_uploaded_again(tmp_path: Path) -> None:
    store = Troubled(tmp_path)
    with store.hosts(2) as hosts:
        store.tell(hold_after=2)  # of each daemon: the committer holds the manifest
        save(addresses(hosts), ID, 1)
        until("both shards are there", lambda: len(list((store.path / ID).glob("__*.distcp"))) == 2)
        until("with their parts", lambda: len(list((store.path / ID / ".ckptd").glob("*.part"))) == 2)
        next((store.path / ID).glob("__1_*.distcp")).unlink()
        store.works()
        for host in hosts:
            wait(ID, address=host.address, timeout=60)
        assert_stock_reads(store.path, ID, 1, 2)
