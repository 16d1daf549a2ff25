"""Deletions of what several nodes hold: whoever is away, stopped, started again or just about to commit, it does not come back."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from ckptd_client import wait
from hosts import Troubled, until
from joint import addresses, assert_stock_reads, listed, load, save

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
        until("nothing but .metadata is missing", lambda: list((store.path / ID / ".ckptd").glob("*.manifest")))
        if committer == "is stopped":
            commits.stop()
        done = deletes.daemon.cli("delete", ID)
        assert done.returncode == 0, done.stderr
        store.works(on=commits)
        if committer == "is stopped":
            commits.cont()
        until("the commit has given way", lambda: "has been deleted" in commits.daemon.log.read_text())
        assert not (store.path / ID / ".metadata").exists()
        assert [listed(host, ID) for host in hosts] == ["", ""]
        for host in hosts:
            with pytest.raises(CheckpointException, match="no checkpoint"):
                load(host.address, "run/latest", 2)
        save(addresses(hosts), ID, 2)
        wait(ID, address=commits.address, timeout=60)
        assert_stock_reads(store.path, ID, 2, 2)


def test_a_deletion_that_neither_all_nodes_nor_the_store_hear_of_says_so_and_once_repeated_it_lasts(tmp_path: Path) -> None:
    store = Troubled(tmp_path)
    with store.hosts(2, replicas=1) as hosts:
        there, away = hosts
        save(addresses(hosts), ID, 1)
        for host in hosts:
            host.daemon.until(ID, "replicated")
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
        save(addresses(hosts), ID, 1)
        for host in hosts:
            host.daemon.until(ID, "replicated")
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
