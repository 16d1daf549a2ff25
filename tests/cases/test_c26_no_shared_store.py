"""C26: several nodes need a store that all of them reach; without one a save says so, and never looks complete."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from ckptd.errors import StoreError
from ckptd_client import wait
from client.states import assert_equal, blank
from hosts import Hosts, until
from joint import load, save, state
from s3 import S3Server

ID = "run/step-1"


@pytest.mark.parametrize("kind", ["directory", "bucket"])
def test_ranks_on_two_nodes_save_into_one_store_and_all_load_it_from_either(kind: str, tmp_path: Path, s3_server: S3Server) -> None:
    store = str(tmp_path / "store") if kind == "directory" else s3_server.url("c26")
    options = [] if kind == "directory" else s3_server.arguments
    with Hosts(2, store, *options, shared=kind == "directory") as hosts:
        a, b = (host.address for host in hosts)
        save([a, a, b, b], ID, 1)
        for address in (a, b):
            wait(ID, address=address, timeout=30)
        hosts[0].lose(wipe=True)  # all that was on A's own disk and in its memory
        assert load(b, ID, 4) == 1
    if kind == "directory":
        shutil.rmtree(tmp_path / "store" / ID / ".ckptd")  # stock needs nothing of it
        found = blank(state(0, 4))
        dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / "store" / ID), no_dist=True)
        assert_equal(found, state(1, 4))


def test_nodes_with_directories_of_their_own_are_refused_and_nothing_looks_complete(tmp_path: Path) -> None:
    with Hosts(1, tmp_path / "a", shared=False) as first, Hosts(1, tmp_path / "b", shared=False) as second:
        a, b = first[0].address, second[0].address
        with pytest.raises(StoreError, match="would not be resumable on other nodes"):
            save([a, a, b, b], ID, 1)
        assert first[0].daemon.list() == second[0].daemon.list() == {}
        assert not list(tmp_path.rglob(".metadata"))
        # The ranks of one node alone may use it.
        save([a, a], ID, 2)
        wait(ID, address=a, timeout=30)
        assert load(a, ID, 2) == 2


def test_nodes_that_only_say_that_they_share_a_directory_are_refused_at_once(tmp_path: Path) -> None:
    with Hosts(1, tmp_path / "a") as first, Hosts(1, tmp_path / "b") as second:
        a, b = first[0], second[0]
        for _ in range(2):  # not the first time alone
            with pytest.raises(StoreError) as caught:
                save([a.address, b.address], ID, 1)
            for word in (a.peer, b.peer, str(tmp_path / "b"), "is it the same directory on all nodes"):
                assert word in str(caught.value)
        assert a.daemon.list() == b.daemon.list() == {}
        # What stays in memory alone needs no store.
        save([a.address, b.address], ID, 2, durable=False)
        assert load(b.address, ID, 2) == 2
        until("nothing is left of it", lambda: not list(tmp_path.rglob(".ckptd-*")))


def test_one_directory_by_two_names_is_one_store_and_nothing_else_stays_in_it(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to("a")
    with Hosts(1, tmp_path / "a") as first, Hosts(1, tmp_path / "b") as second:
        for step in (1, 2):
            save([first[0].address, second[0].address], f"run/step-{step}", step)
            wait(f"run/step-{step}", address=second[0].address, timeout=30)
        assert load(second[0].address, "run/latest", 2) == 2
        until("only checkpoints are there", lambda: [path.name for path in (tmp_path / "a").iterdir()] == ["run"])
