"""Saves whose shards lie on several nodes: accepted by all or by none, committed by whoever is left."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch.distributed.checkpoint as dcp

from ckptd.errors import CkptdError, InvalidRequest, StoreError, Unavailable, WrongPhase
from ckptd.v1.manifest_pb2 import Receipt, Record, Summary
from ckptd.v1.peer_pb2 import AbandonRequest, AdoptRequest, PrepareRequest
from ckptd.v1.peer_pb2_grpc import PeerStub
from ckptd_client import metadata as pickles
from ckptd_client import wait
from ckptd_client.channel import connect
from ckptd_client.shard import write_metadata
from client.states import assert_equal, blank
from daemons import FAULTY, DaemonProcess
from hosts import Host, Hosts, until
from joint import Save, load, save, state
from s3 import S3Server

# What the store's troubles make the daemons say to the next save.
pytestmark = pytest.mark.filterwarnings("ignore:ckptd. :UserWarning")

ID = "run/step-1"


def addresses(hosts: Hosts) -> list[str]:
    return [host.address for host in hosts]


def states(host: Host, id: str = ID) -> str:
    found = host.daemon.list().get(id)
    return "" if found is None else found["state"]


def assert_stock_reads(store: Path, id: str, value: int, world: int) -> None:
    found = blank(state(0, world))
    dcp.load(found, storage_reader=dcp.FileSystemReader(store / id), no_dist=True)
    assert_equal(found, state(value, world))


def test_three_nodes_save_together_and_stock_reads_it(tmp_path: Path) -> None:
    with Hosts(3, tmp_path / "store") as hosts:
        save(addresses(hosts), ID, 1)
        for host in hosts:
            wait(ID, address=host.address, timeout=30)
        assert_stock_reads(tmp_path / "store", ID, 1, 3)
        save(addresses(hosts), ID, 2, overwrite=True)
        for host in hosts:
            wait(ID, address=host.address, timeout=30)
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
        wait("run/step-2", address=alone.address, timeout=30)


def test_a_directory_of_one_node_is_no_store_for_several(tmp_path: Path) -> None:
    with Hosts(2, tmp_path / "store", shared=False) as hosts:
        with pytest.raises(StoreError, match=r"not be resumable on other nodes.*--shared-store"):
            save(addresses(hosts), ID, 1)
        assert [states(host) for host in hosts] == ["", ""]
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
        assert states(hosts[0]) == ""
        hosts[1].start()
        save(addresses(hosts), ID, 2)
        wait(ID, address=hosts[0].address, timeout=30)
        assert [load(host.address, ID, 2) for host in hosts] == [2, 2]


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
        wait(ID, address=hosts[0].address, timeout=30)
        hosts[2].cont()  # what it was asked meanwhile it does now
        time.sleep(1.0)
        assert [load(host.address, "run/latest", 2) for host in hosts] == [2, 2, 2]
        assert_stock_reads(tmp_path / "store", ID, 2, 2)
        save(addresses(hosts), ID, 3, overwrite=True)
        for host in hosts:
            wait(ID, address=host.address, timeout=30)
        assert_stock_reads(tmp_path / "store", ID, 3, 3)


@pytest.mark.parametrize("killed", [0, 1], ids=["coordinator", "participant"])
def test_a_daemon_that_is_killed_after_the_save_goes_on_where_it_was(tmp_path: Path, killed: int) -> None:
    store = tmp_path / "store"
    control = tmp_path / "control"
    control.write_text('{"raise": "EIO"}')
    with Hosts(2, f"faulty://{store}", program=FAULTY, env={"FAULTY_CONTROL": str(control)}) as hosts:
        save(addresses(hosts), ID, 1)
        hosts[killed].restart()
        control.write_text("{}")
        for host in hosts:
            host.daemon.until(ID, "durable")
        assert_stock_reads(store, ID, 1, 2)
        assert load(hosts[killed].address, ID, 2) == 1


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.slow)], ids=["coordinator", "participant"])
def test_a_node_that_is_lost_after_replication_loses_nothing(tmp_path: Path, lost: int) -> None:
    store = tmp_path / "store"
    control = tmp_path / "control"
    control.write_text('{"raise": "EIO"}')
    with Hosts(3, f"faulty://{store}", program=FAULTY, env={"FAULTY_CONTROL": str(control)}, replicas=1) as hosts:
        save(addresses(hosts), ID, 1)
        for host in hosts:
            host.daemon.until(ID, "replicated")
        hosts[lost].lose(wipe=True)
        left = [host for host in hosts if host.running]
        assert [load(host.address, "run/latest", 3) for host in left] == [1, 1]
        assert hosts.bytes_from()["store"] == 0
        control.write_text("{}")
        for host in left:
            host.daemon.until(ID, "durable", timeout=60)
        assert_stock_reads(store, ID, 1, 3)
        hosts[lost].start()  # another node, with nothing
        assert load(hosts[lost].address, "run/latest", 3) == 1


@pytest.mark.slow
def test_two_nodes_that_upload_one_shard_do_no_harm(tmp_path: Path) -> None:
    store = tmp_path / "store"
    control = tmp_path / "control"
    control.write_text('{"raise": "EIO"}')
    with Hosts(3, f"faulty://{store}", program=FAULTY, env={"FAULTY_CONTROL": str(control)}, replicas=1) as hosts:
        save(addresses(hosts), ID, 1)
        for host in hosts:
            host.daemon.until(ID, "replicated")
        hosts[1].stop()
        control.write_text("{}")
        for host in (hosts[0], hosts[2]):
            host.daemon.until(ID, "durable", timeout=60)
        hosts[1].cont()
        hosts[1].daemon.until(ID, "durable", timeout=60)
        assert_stock_reads(store, ID, 1, 3)
        assert [load(host.address, ID, 3) for host in hosts] == [1, 1, 1]


def test_what_cannot_become_durable_on_one_node_fails_on_all(tmp_path: Path) -> None:
    store = tmp_path / "store"
    control = tmp_path / "control"
    control.write_text("{}")
    with Hosts(2, f"faulty://{store}", program=FAULTY, env={"FAULTY_CONTROL": str(control)}) as hosts:
        control.write_text('{"raise": "EACCES"}')
        save(addresses(hosts), ID, 1)
        for host in hosts:
            with pytest.raises(CkptdError, match="could not be made durable"):
                wait(ID, address=host.address, timeout=30)


def test_a_deletion_reaches_the_nodes_that_still_hold_it(tmp_path: Path) -> None:
    store = tmp_path / "store"
    control = tmp_path / "control"
    control.write_text('{"raise": "EIO"}')
    with Hosts(2, f"faulty://{store}", program=FAULTY, env={"FAULTY_CONTROL": str(control)}) as hosts:
        save(addresses(hosts), ID, 1)
        done = hosts[1].daemon.cli("delete", ID)
        assert done.returncode == 0, done.stderr
        control.write_text("{}")
        until("nobody holds it", lambda: all(states(host) in ("", "aborted") for host in hosts))
        time.sleep(1.0)
        assert not (store / ID / ".metadata").exists()


@pytest.mark.slow
def test_a_lost_nodes_save_does_not_keep_memory_from_later_ones(tmp_path: Path) -> None:
    store = tmp_path / "store"
    control = tmp_path / "control"
    control.write_text('{"raise": "EIO"}')
    with Hosts(2, f"faulty://{store}", program=FAULTY, env={"FAULTY_CONTROL": str(control)}, memory="32MiB") as hosts:
        save(addresses(hosts), ID, 1, 4_000_000)  # 16 MB on each
        hosts[1].lose(wipe=True)
        control.write_text("{}")
        for step in (2, 3, 4):
            save([hosts[0].address], f"run/step-{step}", step, 4_000_000)
            wait(f"run/step-{step}", address=hosts[0].address, timeout=30)
        assert load(hosts[0].address, "run/latest", 1, 4_000_000) == 4


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
                wait(f"{run}/step-4", address=host.address, timeout=30)
            assert load(hosts[0].address, f"{run}/latest", 2) == 4


@pytest.mark.slow
def test_what_was_superseded_or_deleted_on_one_node_does_not_come_back_from_a_copy(tmp_path: Path) -> None:
    store = tmp_path / "store"
    control = tmp_path / "control"
    control.write_text('{"raise": "EIO"}')
    with Hosts(2, f"faulty://{store}", program=FAULTY, env={"FAULTY_CONTROL": str(control)}, replicas=1) as hosts:
        save(addresses(hosts), ID, 1)
        for host in hosts:
            host.daemon.until(ID, "replicated")
        hosts[1].stop()
        control.write_text("{}")
        save([hosts[0].address], ID, 2, overwrite=True)
        wait(ID, address=hosts[0].address, timeout=30)
        done = hosts[0].daemon.cli("delete", ID)
        assert done.returncode == 0, done.stderr
        hosts[1].cont()
        until("both know", lambda: [states(host) for host in hosts] == ["", ""], timeout=30)
        time.sleep(12)  # longer than it takes to step in for a node that is gone
        assert not (store / ID / ".metadata").exists()


def test_a_save_in_memory_only_does_not_stop_one_of_other_nodes_that_is_on_its_way(tmp_path: Path) -> None:
    store = tmp_path / "store"
    control = tmp_path / "control"
    control.write_text('{"raise": "EIO"}')
    with Hosts(3, f"faulty://{store}", program=FAULTY, env={"FAULTY_CONTROL": str(control)}) as hosts:
        save(addresses(hosts)[:2], ID, 1)
        with pytest.raises(WrongPhase, match="on its way to the store"):
            save([hosts[2].address, hosts[1].address], ID, 2, durable=False, overwrite=True)
        control.write_text("{}")
        for host in hosts[:2]:
            host.daemon.until(ID, "durable")
        assert_stock_reads(store, ID, 1, 2)


def test_a_file_that_is_swept_before_the_commit_is_uploaded_again(tmp_path: Path) -> None:
    store = tmp_path / "store"
    control = tmp_path / "control"
    control.write_text("{}")
    with Hosts(2, f"faulty://{store}", program=FAULTY, env={"FAULTY_CONTROL": str(control)}) as hosts:
        control.write_text('{"hold_after": 2}')  # of each daemon: the committer holds the manifest
        save(addresses(hosts), ID, 1)
        until("both shards are there", lambda: len(list((store / ID).glob("__*.distcp"))) == 2)
        until("with their parts", lambda: len(list((store / ID / ".ckptd").glob("*.part"))) == 2)
        next((store / ID).glob("__1_*.distcp")).unlink()
        control.write_text("{}")
        for host in hosts:
            wait(ID, address=host.address, timeout=60)
        assert_stock_reads(store, ID, 1, 2)


def test_a_node_that_takes_no_part_deletes_what_others_hold(tmp_path: Path) -> None:
    store = tmp_path / "store"
    control = tmp_path / "control"
    control.write_text('{"raise": "EIO"}')
    with Hosts(3, f"faulty://{store}", program=FAULTY, env={"FAULTY_CONTROL": str(control)}) as hosts:
        save(addresses(hosts)[:2], ID, 1)
        done = hosts[2].daemon.cli("delete", ID)
        assert done.returncode == 0, done.stderr
        control.write_text("{}")
        until("nobody holds it", lambda: all(states(host) in ("", "aborted") for host in hosts))
        time.sleep(1.0)
        assert not (store / ID / ".metadata").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("away", "moved"), [(0, False), (1, False), (1, True)], ids=["coordinator", "participant", "elsewhere"])
def test_what_was_given_up_for_lost_goes_on_when_its_node_is_back(tmp_path: Path, away: int, moved: bool) -> None:
    store = tmp_path / "store"
    control = tmp_path / "control"
    control.write_text('{"raise": "EIO"}')
    with Hosts(2, f"faulty://{store}", program=FAULTY, env={"FAULTY_CONTROL": str(control)}) as hosts:
        save(addresses(hosts), ID, 1)
        hosts[away].kill()
        control.write_text("{}")  # the other uploads its shard, and waits
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
        assert_stock_reads(store, ID, 1, 2)


def test_an_adoption_that_comes_to_nothing_or_too_late_takes_nothing_from_the_save_before_it(tmp_path: Path) -> None:
    store = tmp_path / "store"
    control = tmp_path / "control"
    control.write_text('{"raise": "EIO"}')
    with Hosts(2, f"faulty://{store}", program=FAULTY, env={"FAULTY_CONTROL": str(control)}) as hosts:
        save(addresses(hosts), ID, 1)
        late = Save(addresses(hosts), ID, 2, overwrite=True)
        late.write()
        receipts = [Receipt.FromString(result.storage_data) for (result,) in late.results]
        pickle = write_metadata(connect(hosts[0].address), checkpoint_id=ID, rank=0, data=pickles.dump(late.metadata))
        attempt = f"{time.time_ns() // 1000:016x}{'0' * 8}"
        summary = Summary(id=ID, attempt=attempt, accepted_us=time.time_ns() // 1000, world_size=2, codec="none")
        record = Record(summary=summary, shards=receipts, metadata=pickle, durable=True)
        with grpc.insecure_channel(hosts[1].peer) as channel:
            peer: Any = PeerStub(channel)  # type: ignore[no-untyped-call]
            peer.Prepare(PrepareRequest(id=ID, shards=receipts[1:], metadata=pickle, durable=True), timeout=20)
            peer.Adopt(AdoptRequest(record=record), timeout=20)
            assert load(hosts[0].address, ID, 2) == 1
            peer.Abandon(AbandonRequest(attempt=attempt, reason="told by a test"), timeout=20)
            assert [load(host.address, "run/latest", 2) for host in hosts] == [1, 1]
            with pytest.raises(grpc.RpcError, match=r"is over here|abandoned"):
                peer.Adopt(AdoptRequest(record=record), timeout=20)
        control.write_text("{}")
        for host in hosts:
            host.daemon.until(ID, "durable")
        assert_stock_reads(store, ID, 1, 2)
