"""Loads through several daemons: out of each other's memory, each data file read by one for all, and nodes that fail meanwhile."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import joint
from ckptd_client import CkptdError, DaemonStorageReader, NotFound, Unavailable, WrongPhase, introduce, wait
from client.states import assert_equal, blank
from daemons import FAULTY
from hosts import Host, Hosts, Troubled, until
from s3 import S3Server

#: Ranks of a save, and what each of them saves: about 6 MiB.
WORLD = 3
NUMEL = 1_500_000
NBYTES = WORLD * NUMEL * 4


def save(host: Host, id: str, value: int, **options: Any) -> None:
    """By three ranks of one host."""
    joint.save([host.address] * WORLD, id, value, NUMEL, **options)


def load(host: Host, id: str, *, world: int = WORLD, fallback: bool = False) -> int:
    return joint.load(host.address, id, world, NUMEL, fallback=fallback)


class Pausing(DefaultLoadPlanner):
    """Does something when the first tensor has been loaded, and others have not."""

    def __init__(self, then: Callable[[], object]) -> None:
        super().__init__()
        self.then: Callable[[], object] | None = then

    def commit_tensor(self, read_item: Any, tensor: Any) -> None:
        super().commit_tensor(read_item, tensor)
        if tensor.numel() == NUMEL and self.then is not None:
            then, self.then = self.then, None
            then()


def load_while(host: Host, id: str, then: Callable[[], object]) -> int:
    """A load in the middle of which something happens. In batches of about one shard: see `MEMORY`."""
    found = blank(joint.state(0, WORLD, NUMEL))
    planner = Pausing(then)
    dcp.load(found, storage_reader=DaemonStorageReader(id, address=host.address), planner=planner, no_dist=True)
    assert planner.then is None
    assert_equal(found, joint.state(found["r0"]["value"], WORLD, NUMEL))
    return int(found["r0"]["value"])


#: A batch is an eighth of it, and two blocks at least.
MEMORY = "64MiB"


def load_together(hosts: Sequence[Host], id: str, *, world: int = WORLD) -> list[int | CkptdError]:
    """One rank per host, each loads all of it at the same time."""
    return joint.load_together([host.address for host in hosts], id, world, NUMEL)


def causes(error: CheckpointException) -> str:
    return "; ".join(f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values())


# -- out of each other's memory -------------------------------------------------------------------------------------


def test_a_node_that_holds_nothing_loads_what_only_anothers_memory_has(tmp_path: Path) -> None:
    with Hosts(2, tmp_path / "store", memory=MEMORY) as hosts:
        save(hosts[0], "run/step-1", 7, durable=False)
        assert load(hosts[1], "run/latest") == 7
        assert hosts[1].bytes_from()["store"] == 0
        assert NBYTES <= hosts[1].bytes_from()["peer"] <= 1.05 * NBYTES
        # What was fetched is kept.
        assert load(hosts[1], "run/step-1") == 7
        assert hosts[1].bytes_from()["peer"] <= 1.05 * NBYTES
        assert hosts[1].daemon.list()["run/step-1"]["state"] == "accepted"
        # The holder ends and comes back with what it held.
        save(hosts[0], "run/step-2", 8, durable=False)
        hosts[0].restart()
        assert load(hosts[1], "run/latest") == 8


def test_only_the_blocks_that_are_needed_are_moved(tmp_path: Path) -> None:
    with Hosts(2, tmp_path / "store", memory=MEMORY) as hosts:
        save(hosts[0], "run/step-1", 7, durable=False)
        found = {"r1": {"w": blank(joint.part(0, 1, NUMEL))["r1"]["w"]}}
        dcp.load(found, storage_reader=DaemonStorageReader("run/latest", address=hosts[1].address), no_dist=True)
        assert_equal(found["r1"]["w"], joint.part(7, 1, NUMEL)["r1"]["w"])
        assert hosts[1].bytes_from()["peer"] <= NBYTES / WORLD + 4 * 2**20


def test_what_is_durable_comes_from_anothers_memory_all_the_same(tmp_path: Path) -> None:
    with Hosts(2, tmp_path / "store", memory=MEMORY) as hosts:
        save(hosts[0], "run/step-1", 7)
        wait("run/step-1", address=hosts[0].address, timeout=60)
        assert load(hosts[1], "run/latest") == 7
        assert hosts[1].bytes_from()["store"] == 0
        assert hosts[1].bytes_from()["peer"] >= NBYTES


def test_what_a_holder_has_spoilt_is_read_from_the_store(tmp_path: Path) -> None:
    with Hosts(2, tmp_path / "store", memory=MEMORY) as hosts:
        save(hosts[0], "run/step-1", 7)
        wait("run/step-1", address=hosts[0].address, timeout=60)
        for shard in hosts[0].daemon.shm_dir.glob("*.sealed"):
            data = bytearray(shard.read_bytes())
            data[NUMEL] ^= 1
            shard.write_bytes(data)
        assert load(hosts[1], "run/latest") == 7
        assert hosts[1].bytes_from()["store"] > 0


def test_a_checkpoint_of_two_nodes_is_put_together_from_both(tmp_path: Path) -> None:
    with Hosts(3, tmp_path / "store", memory=MEMORY) as hosts:
        joint.save([hosts[0].address, hosts[1].address], "run/step-1", 7, NUMEL, durable=False)
        for host in hosts:
            assert load(host, "run/latest", world=2) == 7
        assert hosts[2].bytes_from()["peer"] >= 2 * NUMEL * 4
        for host in hosts[:2]:  # each has its own part
            assert NUMEL * 4 <= host.bytes_from()["peer"] <= 1.05 * NUMEL * 4
        assert sum(host.bytes_from()["store"] for host in hosts) == 0


def test_a_checkpoint_whose_part_is_gone_is_passed_over_and_says_what_is_missing(tmp_path: Path) -> None:
    with Hosts(3, tmp_path / "store", memory=MEMORY) as hosts:
        save(hosts[2], "run/step-1", 1, durable=False)
        joint.save([hosts[0].address, hosts[1].address], "run/step-2", 2, NUMEL, durable=False)
        node = hosts[1].status()["node"]
        hosts[1].lose()
        told = rf"run/step-1 is loaded as run/latest, .* run/step-2 was accepted later: .* rank 1 .* node {node} at"
        for fallback in (False, True):
            with pytest.warns(UserWarning, match=told):
                assert load(hosts[2], "run/latest", fallback=fallback) == 1
        with pytest.raises(CheckpointException) as failed:
            load(hosts[0], "run/step-2", world=2)
        assert re.search(rf"Unavailable: .*rank 1 .*node {node} at {hosts[1].peer}.*retry", causes(failed.value))
        for host in (hosts[0], hosts[2]):
            line = host.daemon.list()["run/step-2"]
            assert line["state"] == "accepted"
            assert "rank 1 " in line["reason"]
            assert node in line["reason"]
        # The node comes back with what it held.
        hosts[1].start()
        until("both parts are held again", lambda: "no memory" not in hosts[2].daemon.list()["run/step-2"].get("reason", ""))
        assert load(hosts[2], "run/latest", world=2) == 2


@pytest.mark.filterwarnings("ignore:ckptd. checkpoint:UserWarning")
def test_an_older_save_of_an_id_that_is_loaded_while_the_store_is_away_is_called_so(tmp_path: Path) -> None:
    store = Troubled(tmp_path)
    with store.hosts(2, memory=MEMORY) as hosts:
        store.works()
        save(hosts[0], "run/step-1", 1)
        wait("run/step-1", address=hosts[0].address, timeout=60)
        store.raises("EIO")
        joint.save([hosts[0].address, hosts[1].address], "run/step-1", 2, NUMEL, overwrite=True)
        hosts[1].kill()
        store.tell(list_raises="EIO", **{"raise": "EIO"})
        with pytest.warns(UserWarning, match="an older save of run/step-1 is loaded, .* was accepted later: .* rank 1 "):
            assert load(hosts[0], "run/step-1") == 1


def test_a_part_that_is_in_the_store_stands_in_for_a_node_that_is_gone(tmp_path: Path) -> None:
    """The other one cannot upload its own part, so nobody commits."""
    refuses, takes = tmp_path / "refuses", tmp_path / "takes"
    refuses.write_text('{"raise": "ENOSPC"}')
    takes.write_text("{}")
    hosts = Hosts(3, f"faulty://{tmp_path / 'store'}", memory=MEMORY, program=FAULTY, env={"FAULTY_CONTROL": str(takes)})
    hosts[0].daemon.env["FAULTY_CONTROL"] = str(refuses)
    with hosts:
        joint.save([hosts[0].address, hosts[1].address], "run/step-1", 7, NUMEL)
        until("a part is in the store", lambda: list((tmp_path / "store").rglob("*.part")))
        hosts[1].lose()
        for host in (hosts[0], hosts[2]):
            assert load(host, "run/latest", world=2) == 7
            assert host.bytes_from()["store"] > 0
        assert not list((tmp_path / "store").rglob(".metadata"))


# -- nodes that fail meanwhile --------------------------------------------------------------------------------------


def fails_soon(host: Host, holder: Host, then: Callable[[], object]) -> None:
    """A load in the middle of which the only holder fails: an error that names it, and no hanging."""
    with pytest.raises(CheckpointException) as failed:
        load_while(host, "run/latest", then)
    assert isinstance(next(iter(failed.value.failures.values()))[0], Unavailable)
    assert holder.peer in causes(failed.value)
    assert "load again" in causes(failed.value)


def test_a_holder_that_is_killed_in_the_middle_of_a_load_is_named(tmp_path: Path) -> None:
    with Hosts(2, tmp_path / "store", memory=MEMORY) as hosts:
        save(hosts[0], "run/step-1", 7, durable=False)
        fails_soon(hosts[1], hosts[0], hosts[0].kill)
        with pytest.raises(CheckpointException) as failed:
            load(hosts[1], "run/latest")
        assert re.search(rf"Unavailable: .*{hosts[0].peer}.*retry", causes(failed.value))  # by no means "no checkpoint"
        hosts[0].start()
        until("it is found again", lambda: "run/step-1" in hosts[1].daemon.list())
        assert load(hosts[1], "run/latest") == 7


@pytest.mark.slow
def test_a_holder_that_stalls_in_the_middle_of_a_load_is_named(tmp_path: Path) -> None:
    with Hosts(2, tmp_path / "store", memory=MEMORY) as hosts:
        save(hosts[0], "run/step-1", 7, durable=False)
        fails_soon(hosts[1], hosts[0], hosts[0].stop)
        hosts[0].cont()
        assert load(hosts[1], "run/latest") == 7


def test_what_has_become_durable_meanwhile_is_read_to_its_end_from_the_store(tmp_path: Path) -> None:
    control = tmp_path / "control"
    control.write_text('{"raise": "ENOSPC"}')
    store = f"faulty://{tmp_path / 'store'}"
    with Hosts(2, store, memory=MEMORY, program=FAULTY, env={"FAULTY_CONTROL": str(control)}) as hosts:
        save(hosts[0], "run/step-1", 7)

        def become_durable_and_die() -> None:
            control.write_text("{}")
            wait("run/step-1", address=hosts[0].address, timeout=60)
            hosts[0].kill()

        assert load_while(hosts[1], "run/latest", become_durable_and_die) == 7
        assert hosts[1].bytes_from()["peer"] >= NUMEL * 4
        assert hosts[1].bytes_from()["store"] > 0


@pytest.mark.parametrize("durable", [False, True])
def test_a_copy_takes_the_place_of_a_holder_that_fails(tmp_path: Path, durable: bool) -> None:
    """Of what is durable it is compared with the store's hashes, though nobody has made files out of the copy."""
    control = tmp_path / "control"
    control.write_text('{"raise": "ENOSPC"}')
    store = f"faulty://{tmp_path / 'store'}"
    with Hosts(3, store, memory="96MiB", replicas=1, program=FAULTY, env={"FAULTY_CONTROL": str(control)}) as hosts:
        joint.save([hosts[0].address, hosts[1].address], "run/step-1", 7, NUMEL)
        for host in hosts[:2]:
            host.daemon.until("run/step-1", "replicated")
        if durable:
            control.write_text("{}")
            hosts[2].daemon.until("run/step-1", "durable")
        hosts[0].lose(wipe=True)
        assert load(hosts[2], "run/latest", world=2) == 7
        assert hosts[2].bytes_from()["store"] == 0
        assert load(hosts[1], "run/latest", world=2) == 7
        assert hosts[1].bytes_from() == {"memory": hosts[1].bytes_from()["memory"], "peer": 0, "store": 0}


# -- each data file is read by one for all --------------------------------------------------------------------------


def stored(server: S3Server, prefix: str) -> int:
    return sum(nbytes for key, nbytes in server.keys(prefix).items() if key.endswith(".distcp"))


def only_in_the_store(store: str, *arguments: str) -> None:
    with Hosts(1, store, *arguments, memory=MEMORY, shared=False) as hosts:
        save(hosts[0], "run/step-1", 7)
        wait("run/step-1", address=hosts[0].address, timeout=60)


def test_each_byte_leaves_the_store_once_for_all_nodes(tmp_path: Path, s3_server: S3Server) -> None:
    store, arguments = s3_server.url("once-for-all"), [*s3_server.arguments, "--codec", "none"]
    only_in_the_store(store, *arguments)
    nbytes = stored(s3_server, "once-for-all")
    # They learn of each other by the load alone.
    with Hosts(3, store, *arguments, memory=MEMORY, shared=False, peers=False) as hosts:
        assert load_together(hosts, "run/latest") == [7, 7, 7]
        found = [host.bytes_from() for host in hosts]
        assert nbytes <= sum(one["store"] for one in found) <= 1.05 * nbytes
        for one in found:
            assert one["peer"] + one["store"] >= NBYTES


def test_what_is_larger_than_the_memory_of_each_node_streams_through_all_of_them(tmp_path: Path) -> None:
    with Hosts(1, tmp_path / "store", "--codec", "none") as hosts:
        joint.save([hosts[0].address] * 9, "run/step-1", 7, NUMEL)
        wait("run/step-1", address=hosts[0].address, timeout=60)
    with Hosts(3, tmp_path / "store", memory="32MiB") as hosts:
        assert load_together(hosts, "run/latest", world=9) == [7, 7, 7]
        assert sum(host.bytes_from()["peer"] for host in hosts) > 0


@pytest.mark.slow
def test_an_owner_that_stalls_is_done_without(tmp_path: Path) -> None:
    only_in_the_store(str(tmp_path / "store"))
    with Hosts(3, tmp_path / "store", memory=MEMORY) as hosts:
        hosts[2].stop()
        for host in hosts[:2]:
            assert load_as_if_with(host, [other.peer for other in hosts]) == 7
        hosts[2].cont()


def load_as_if_with(host: Host, addresses: list[str]) -> int:
    """A load by one rank that takes those at these addresses for its fellows."""
    reader = DaemonStorageReader("run/step-1", address=host.address)
    planner, into = DefaultLoadPlanner(), blank(joint.state(0, WORLD, NUMEL))
    planner.set_up_planner(into, reader.read_metadata(), is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    plan.storage_data = (*plan.storage_data[:2], tuple(addresses))
    reader.read_data(planner.finish_plan(plan), planner).wait()
    assert_equal(into, joint.state(into["r0"]["value"], WORLD, NUMEL))
    return int(into["r0"]["value"])


def test_damage_is_found_through_an_owner_and_named(tmp_path: Path) -> None:
    only_in_the_store(str(tmp_path / "store"), "--codec", "none")
    damaged = min((tmp_path / "store").rglob("*.distcp"))
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    with Hosts(3, tmp_path / "store", memory=MEMORY) as hosts:
        for outcome in load_together(hosts, "run/step-1"):
            assert re.search(rf"{damaged.name}: block \d of item \d .*is damaged", str(outcome))


# -- who knows of whom ----------------------------------------------------------------------------------------------


def test_ranks_that_found_different_checkpoints_find_the_same_when_they_look_again(tmp_path: Path) -> None:
    with Hosts(3, tmp_path / "store", memory=MEMORY, peers=False) as hosts:
        for number, host in enumerate(hosts):
            save(host, f"run/step-{number}", number, durable=False)
        with pytest.raises(WrongPhase, match="different checkpoints"):
            load_together(hosts, "run/latest")
        assert load_together(hosts, "run/latest") == [2, 2, 2]


def test_nodes_that_were_introduced_find_what_one_of_them_holds(tmp_path: Path) -> None:
    with Hosts(2, tmp_path / "store", memory=MEMORY, peers=False) as hosts:
        save(hosts[0], "run/step-1", 1, durable=False)
        with pytest.raises(NotFound):
            DaemonStorageReader("run/latest", address=hosts[1].address).read_metadata()
        introduce([host.peer for host in hosts], address=hosts[1].address)
        assert load(hosts[1], "run/latest") == 1
