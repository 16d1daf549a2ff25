"""Deletions of what several nodes hold: whoever is away, stopped, started again or just about to commit, it does not come back."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from ckptd.errors import NotFound, Unavailable
from ckptd.ledger import Ledger
from ckptd.localstore import LocalStore
from ckptd.model import CheckpointId
from ckptd.sweeper import Sweeper
from ckptd_client import wait
from hosts import Troubled, until
from joint import addresses, assert_stock_reads, listed, load, save, save_replicated

# What the store's troubles make the daemons say to the next save.
pytestmark = pytest.mark.filterwarnings("ignore:ckptd. :UserWarning")

ID = "run/step-1"


@pytest.mark.parametrize("committer", ["hears of it", "is stopped"])
def test_a_commit_that_is_at_its_last_put_does_not_undo_a_deletion_on_another_node(tmp_path: Path, committer: str) -> None:
    store = Troubled(tmp_path)
    with store.hosts(2) as hosts:
        commits, deletes = hosts
        store.works(on=deletes)
        store.tell(on=commits, hold_after=3)  # its shard, its part, the manifest
        save(addresses(hosts), ID, 1)
        until("nothing but .metadata is missing", lambda: store.has_held(f"{ID}/.metadata", on=commits))
        if committer == "is stopped":
            commits.stop()
        done = deletes.daemon.cli("delete", ID)
        assert done.returncode == 0, done.stderr
        store.works(on=commits)
        if committer == "is stopped":
            commits.cont()
        until("the commit has given way", lambda: "has been deleted" in commits.daemon.log.read_text())
        until("what it has put is gone again", lambda: not (store.path / ID / ".metadata").exists())
        assert [listed(host, ID) for host in hosts] == ["", ""]
        for host in hosts:
            with pytest.raises(CheckpointException, match="no checkpoint"):
                load(host.address, "run/latest", 2)
        save(addresses(hosts), ID, 2)
        wait(ID, address=commits.address, timeout=60)
        assert_stock_reads(store.path, ID, 2, 2)


def test_a_deletion_of_what_memory_alone_has_says_so_if_a_node_that_holds_it_does_not_hear(tmp_path: Path) -> None:
    """It is on its way to no store, so nobody would find a note there."""
    with Troubled(tmp_path).hosts(2) as hosts:
        there, away = hosts
        save(addresses(hosts), ID, 1, durable=False)
        away.kill()
        for _ in range(2):
            done = there.daemon.cli("delete", ID)
            assert (done.returncode, "delete it again" in done.stderr) == (3, True), done
            assert listed(there, ID) == ""
        away.start()
        until("it can be told", lambda: there.daemon.cli("delete", ID).returncode == 0)
        assert [listed(host, ID) for host in hosts] == ["", ""]
        there.restart()  # which remembers nothing of it
        assert [listed(host, ID) for host in hosts] == ["", ""]


def test_a_pin_that_comes_while_a_deletion_waits_for_a_node_holds(tmp_path: Path) -> None:
    store = Troubled(tmp_path)
    with store.hosts(2) as hosts:
        there, silent = hosts
        store.works()
        save(addresses(hosts), ID, 1)
        wait(ID, address=there.address, timeout=60)
        silent.stop()  # for some seconds nobody knows whether it will answer
        deletion = subprocess.Popen(
            [sys.executable, "-m", "ckptd", "delete", ID, "--address", there.address], stderr=subprocess.PIPE, text=True
        )
        time.sleep(1.0)
        try:
            Ledger(LocalStore(store.path)).pin(CheckpointId.parse(ID))
            pinned = True
        except (NotFound, Unavailable):  # too late, on a slow machine
            pinned = False
        _, said = deletion.communicate(timeout=60)
        silent.cont()
        assert (deletion.returncode, "is pinned" in said) == ((1, True) if pinned else (0, False)), said
        assert (store.path / ID / ".metadata").exists() == pinned


def test_a_save_of_several_nodes_that_is_accepted_while_a_deletion_waits_for_the_store_stays(tmp_path: Path) -> None:
    store = Troubled(tmp_path)
    with store.hosts(2) as hosts:
        deletes = hosts[0]
        store.works()
        save(addresses(hosts), ID, 1)
        for host in hosts:
            wait(ID, address=host.address, timeout=60)
        store.tell(on=deletes, hold_after=0)
        with subprocess.Popen([sys.executable, "-m", "ckptd", "delete", ID, "--address", deletes.address]) as deleting:
            try:
                until("its tombstone is on its way", lambda: store.has_held(f"{ID}/.ckptd/*.deleted", on=deletes))
                save(addresses(hosts), ID, 2, durable=False, overwrite=True)
            finally:
                store.works()
            assert deleting.wait(60) == 0
        assert not (store.path / ID / ".metadata").exists()
        assert [load(host.address, ID, 2) for host in hosts] == [2, 2]
        assert deletes.daemon.cli("delete", ID).returncode == 0
        assert [listed(host, ID) for host in hosts] == ["", ""]


def test_a_deletion_that_waits_for_an_upload_of_its_node_takes_nothing_that_another_has_made_durable_meanwhile(tmp_path: Path) -> None:
    store = Troubled(tmp_path)
    with store.hosts(2) as hosts:
        deletes, other = hosts
        store.works()
        store.tell(on=deletes, hold_after=0)
        save([deletes.address], ID, 1)
        until("it is uploaded", lambda: store.has_held(f"{ID}/*", on=deletes))
        listed_there = tmp_path / "listed"
        store.tell(on=deletes, hold_after=0, list_log=str(listed_there))
        with subprocess.Popen([sys.executable, "-m", "ckptd", "delete", ID, "--address", deletes.address]) as deleting:
            try:
                until("it looks what is there", lambda: listed_there.exists() and ID in listed_there.read_text())
                time.sleep(1.0)  # and has seen it
                save([other.address], ID, 2, overwrite=True)
                wait(ID, address=other.address, timeout=60)
            finally:
                store.works()
            assert deleting.wait(60) == 0
        assert_stock_reads(store.path, ID, 2, 1)


def test_a_deletion_that_neither_all_nodes_nor_the_store_hear_of_says_so_and_once_repeated_it_lasts(tmp_path: Path) -> None:
    store = Troubled(tmp_path)
    with store.hosts(2, replicas=1) as hosts:
        there, away = hosts
        save_replicated(hosts, ID, 1)
        away.kill()
        done = there.daemon.cli("delete", ID)
        assert done.returncode == 3
        assert "delete it again" in done.stderr
        assert listed(there, ID) == ""
        store.works()
        done = there.daemon.cli("delete", ID)
        assert done.returncode == 0, done.stderr
        assert there.daemon.cli("delete", ID).returncode == 1
        there.restart()  # what it knows of the deletion is in the store alone
        away.start()
        until("it finds the note", lambda: away.status()["accepted"] == 0)
        assert not (store.path / ID / ".metadata").exists()
        assert [listed(host, ID) for host in hosts] == ["", ""]


def test_what_a_deleted_checkpoint_had_superseded_does_not_come_back_with_a_node_that_was_away(tmp_path: Path) -> None:
    store = Troubled(tmp_path)
    with store.hosts(2, replicas=1) as hosts:
        there, away = hosts
        save_replicated(hosts, ID, 1)
        away.kill()
        store.works()
        save([there.address], ID, 2, overwrite=True)
        wait(ID, address=there.address, timeout=60)
        done = there.daemon.cli("delete", ID)
        assert done.returncode == 0, done.stderr
        there.restart()
        away.start()
        until("it finds the note", lambda: away.status()["accepted"] == 0)
        assert not (store.path / ID / ".metadata").exists()
        with pytest.raises(CheckpointException, match="no checkpoint"):
            load(away.address, "run/latest", 2)


def test_a_deletion_that_a_commit_meets_while_the_store_fails_is_made_good_when_it_answers(tmp_path: Path) -> None:
    store = Troubled(tmp_path)
    with store.hosts(2) as hosts:
        commits, deletes = hosts
        store.works(on=deletes)
        store.tell(on=commits, hold_after=3)
        save(addresses(hosts), ID, 1)
        until("nothing but .metadata is missing", lambda: store.has_held(f"{ID}/.metadata", on=commits))
        done = deletes.daemon.cli("delete", ID)
        assert done.returncode == 0, done.stderr
        store.tell(on=commits, list_raises="EIO")
        until("the put has landed", (store.path / ID / ".metadata").exists)
        until("nobody knows", lambda: "ended while it was committed" in commits.daemon.log.read_text())
        store.works(on=commits)
        until("it is gone again", lambda: not (store.path / ID / ".metadata").exists())
        assert [listed(host, ID) for host in hosts] == ["", ""]


def test_what_another_node_alone_saved_and_is_not_durable_yet_is_deleted_too(tmp_path: Path) -> None:
    store = Troubled(tmp_path)
    with store.hosts(2) as hosts:
        alone, deletes = hosts
        save(addresses(hosts), "run/step-0", 0)  # they know each other from here on
        save([alone.address], ID, 1)
        assert listed(deletes, ID) == "accepted"
        store.works(on=deletes)
        done = deletes.daemon.cli("delete", ID)
        assert done.returncode == 0, done.stderr
        store.works()
        for host in hosts:
            wait("run/step-0", address=host.address, timeout=60)
            assert listed(host, ID) == ""
        assert not (store.path / ID / ".metadata").exists()


def test_what_one_node_alone_commits_after_another_has_deleted_it_goes_again(tmp_path: Path) -> None:
    store = Troubled(tmp_path)
    with store.hosts(1) as hosts:
        (alone,) = hosts
        store.tell(hold_after=2)  # its shard and the manifest
        save([alone.address], ID, 1)
        until("nothing but .metadata is missing", lambda: store.has_held(f"{ID}/.metadata", on=alone))
        (manifest,) = (store.path / ID / ".ckptd").glob("*.manifest")
        there = LocalStore(store.path)
        Sweeper(there, Ledger(there)).refuse(CheckpointId.parse(ID), manifest.name[:24])  # the note of a node that does not reach this one
        store.works()
        until("the commit has given way", lambda: "has been deleted" in alone.daemon.log.read_text())
        until("it is gone again", lambda: not (store.path / ID / ".metadata").exists())
        assert listed(alone, ID) == ""


def test_what_is_in_the_memory_of_others_after_a_deletion_is_no_reason_to_wait_for_it(tmp_path: Path) -> None:
    store = Troubled(tmp_path)
    store.works()
    with store.hosts(2) as hosts:
        for id in (ID, "run/step-2"):
            save(addresses(hosts), id, 1)
            for host in hosts:
                wait(id, address=host.address, timeout=60)
        pruned = hosts[0].daemon.cli("prune", "--run", "run", "--keep-last", "1")
        assert pruned.returncode == 0, pruned.stderr
        assert not (store.path / ID / ".metadata").exists()
        hosts[0].daemon.terminate()
        hosts[0].start()
        for host in hosts:
            with pytest.raises(CheckpointException, match=r"no checkpoint.* shows what is there"):
                load(host.address, ID, 2)


@pytest.mark.slow
def test_a_node_that_was_away_while_its_checkpoint_became_durable_and_was_deleted_does_not_bring_it_back(tmp_path: Path) -> None:
    store = Troubled(tmp_path)
    with store.hosts(2, replicas=1) as hosts:
        there, away = hosts
        for value in range(1, 5):
            save(addresses(hosts), ID, value, overwrite=True)
        for host in hosts:
            host.daemon.until(ID, "replicated")
        away.kill()
        store.works()
        wait(ID, address=there.address, timeout=60)
        there.daemon.terminate()
        there.start()
        done = there.daemon.cli("delete", ID)
        assert done.returncode == 0, done.stderr
        assert len(list((store.path / ID / ".ckptd").glob("*.refused"))) == 1
        swept = there.daemon.cli("prune", "--run", "run", "--delete-grace", "0s", "--orphan-age", "0s")
        assert swept.returncode == 0, swept.stderr
        there.restart()
        away.start()
        until("it finds the note", lambda: away.status()["accepted"] == 0)
        assert not (store.path / ID / ".metadata").exists()
