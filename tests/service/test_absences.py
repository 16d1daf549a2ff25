"""What becomes of attempts while nodes are away: others step in after ten seconds, and what only they held is lost after a minute.

Every scenario has hosts and a store of its own. All wait at the same time.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

import saved
from ckptd.ledger import Ledger
from ckptd.localstore import LocalStore
from ckptd.model import CheckpointId
from ckptd.v1.peer_pb2 import AdoptRequest, TellRequest
from ckptd_client import wait
from hosts import Troubled, until
from joint import addresses, adopted, assert_stock_reads, listed, load, peer, save, save_replicated

# What the store's troubles make the daemons say to the next save.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:ckptd. :UserWarning")]

ID = "run/step-1"


def goes_on_when_back(home: Path, *, away: int, moved: bool = False) -> None:
    """A node is gone until what it holds a part of is lost; then it is back, `moved` to another port."""
    store = Troubled(home)
    with store.hosts(2) as hosts:
        save(addresses(hosts), ID, 1)
        hosts[away].kill()
        store.works()  # the other uploads its shard, and waits
        there = hosts[1 - away]
        until("who waits is told for whom", lambda: f"rank {away} " in there.daemon.cli("wait", ID, "--timeout", "1s").stderr)
        reasons = set()

        def is_lost() -> bool:
            line = there.daemon.list()[ID]
            reasons.add(line.get("reason", ""))
            return line["state"] == "lost"

        until("it is lost", is_lost, timeout=90, every=0.5)
        assert not [reason for reason in reasons if "the same on all nodes" in reason]  # it is not the store that is wrong
        with pytest.raises(CheckpointException, match=rf"{hosts[away].peer}, which may hold one, has not answered for \d+ s"):
            load(there.address, "another/latest", 1)
        drained = there.daemon.cli("drain")
        assert drained.returncode == 1, drained.stdout
        assert ID in drained.stdout
        if moved:  # nobody finds it there; what it puts into the store they see
            hosts[away].listen_at(hosts[away].port + 10_000, [there.peer])
        hosts[away].start()
        for host in hosts:
            host.daemon.until(ID, "durable", timeout=60)
        assert_stock_reads(store.path, ID, 1, 2)


def is_copied_again_when_back(home: Path) -> None:
    """The same, of what had no copy when its node went: once that is back, and there is room, it gets one."""
    numel = 3_600_000  # 15 MB on each
    store = Troubled(home)
    with store.hosts(2, replicas=1, memory="40MiB") as hosts:
        there, away = hosts
        save([there.address], "other/step-1", 1, numel)
        save(addresses(hosts), ID, 1, numel)
        until("a copy has found no room", lambda: "no copy of the shard" in there.daemon.log.read_text())
        away.kill()
        there.daemon.until(ID, "lost", timeout=90)
        assert there.daemon.cli("delete", "other/step-1").returncode == 0
        away.start()
        for host in hosts:
            host.daemon.until(ID, "replicated", timeout=60)
        away.lose(wipe=True)
        assert load(there.address, ID, 2, numel) == 1


def becomes_durable_from_copies(home: Path, *, lost: int) -> None:
    """A node is lost for good when the others have copies of all that it held: they put it into the store."""
    store = Troubled(home)
    with store.hosts(3, replicas=1) as hosts:
        save_replicated(hosts, ID, 1)
        hosts[lost].lose(wipe=True)
        store.works()
        for host in hosts:
            if host.running:
                host.daemon.until(ID, "durable", timeout=60)
        assert_stock_reads(store.path, ID, 1, 3)
        hosts[lost].start()  # another node, with nothing
        assert load(hosts[lost].address, "run/latest", 3) == 1


def takes_no_memory(home: Path) -> None:
    """A node is lost for good before its shard is anywhere else: what is left of the attempt makes room."""
    store = Troubled(home)
    with store.hosts(2, memory="32MiB") as hosts:
        save(addresses(hosts), ID, 1, 4_000_000)  # 16 MB on each
        hosts[1].lose(wipe=True)
        store.works()
        for step in (2, 3, 4):
            save([hosts[0].address], f"run/step-{step}", step, 4_000_000)
            wait(f"run/step-{step}", address=hosts[0].address, timeout=60)
        assert load(hosts[0].address, "run/latest", 1, 4_000_000) == 4


def does_not_come_back(home: Path) -> None:
    """A node that holds a copy stands still while the checkpoint is saved again, and deleted."""
    store = Troubled(home)
    with store.hosts(2, replicas=1) as hosts:
        save_replicated(hosts, ID, 1)
        hosts[1].stop()
        store.works()
        save([hosts[0].address], ID, 2, overwrite=True)
        wait(ID, address=hosts[0].address, timeout=60)
        done = hosts[0].daemon.cli("delete", ID)
        assert done.returncode == 0, done.stderr
        hosts[1].cont()
        until("both know", lambda: [listed(host, ID) for host in hosts] == ["", ""], timeout=30)
        time.sleep(12)  # longer than it takes to step in for a node that is gone
        assert not (store.path / ID / ".metadata").exists()


def is_uploaded_twice(home: Path) -> None:
    """A node stands still until others step in for it; then it goes on with what they have done."""
    store = Troubled(home)
    with store.hosts(3, replicas=1) as hosts:
        save_replicated(hosts, ID, 1)
        hosts[1].stop()
        store.works()
        for host in (hosts[0], hosts[2]):
            host.daemon.until(ID, "durable", timeout=60)
        hosts[1].cont()
        hosts[1].daemon.until(ID, "durable", timeout=60)
        assert_stock_reads(store.path, ID, 1, 3)
        assert [load(host.address, ID, 3) for host in hosts] == [1, 1, 1]


def counts_once_the_store_shows_it(home: Path) -> None:
    """A participant is away when all have adopted, and the coordinator is lost before it can tell it."""
    abandoned, uploaded, committed = ids = ["run/step-1", "run/step-2", "run/step-3"]
    store = Troubled(home)
    store.works()
    with store.hosts(2) as hosts:
        coordinator, participant = hosts
        save([participant.address], abandoned, 1, durable=False)
        records = {id: adopted(hosts, id, 2) for id in ids}
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


def is_back_while_the_store_hangs(home: Path) -> None:
    """What was lost is accepted again when its node is back, whatever the store of the other one does meanwhile."""
    store = Troubled(home)
    with store.hosts(2) as hosts:
        there, away = hosts
        save(addresses(hosts), ID, 1)
        away.kill()
        until("it is lost", lambda: there.status()["lost"] == 1, timeout=100, every=2.0)
        store.tell(on=there, list_hangs=True, **{"raise": "EIO"})
        away.start()
        until("it is accepted again", lambda: there.status()["accepted"] == 1, timeout=30, every=1.0)
        store.works()
        for host in hosts:
            host.daemon.until(ID, "durable", timeout=60)


def stood_still_together(home: Path) -> None:
    """A minute and more passes while both nodes are stopped; one goes on a moment before the other."""
    store = Troubled(home)
    with store.hosts(2) as hosts:
        save(addresses(hosts), ID, 1)
        first, second = hosts
        second.stop()
        time.sleep(1.0)
        first.stop()
        time.sleep(64.0)
        first.cont()
        time.sleep(0.5)
        second.cont()
        store.works()
        for host in hosts:
            host.daemon.until(ID, "durable", timeout=60)
            assert "is lost" not in host.daemon.log.read_text()


def is_removed_by_hand(home: Path) -> None:
    """Who commits says that it is durable, and nothing of it is in the store when the other can look there again."""
    store = Troubled(home)
    with store.hosts(2) as hosts:
        committer, other = hosts
        store.works(on=other)
        store.tell(on=committer, hold_after=2)  # its shard and its part
        save(addresses(hosts), ID, 1)
        until("both shards are there", lambda: list((store.path / ID / ".ckptd").glob("*-1-*.part")))
        store.tell(on=other, list_raises="EIO")
        store.works(on=committer)
        wait(ID, address=committer.address, timeout=60)
        shutil.rmtree(store.path / ID)
        store.works(on=other)
        until("it has failed", lambda: other.status()["failed"] == 1, timeout=100, every=2.0)
        drained = other.daemon.cli("drain", "--timeout", "20s")
        assert drained.returncode == 1
        assert "was it removed there?" in drained.stdout + drained.stderr
        assert not (store.path / ID / ".metadata").exists()


SCENARIOS: dict[str, Callable[[Path], None]] = {
    "what was lost goes on when its coordinator is back": partial(goes_on_when_back, away=0),
    "what was lost goes on when its participant is back": partial(goes_on_when_back, away=1),
    "what was lost goes on when its participant is back elsewhere": partial(goes_on_when_back, away=1, moved=True),
    "what was lost before it was copied gets its copies when its node is back": is_copied_again_when_back,
    "what was replicated becomes durable without its coordinator": partial(becomes_durable_from_copies, lost=0),
    "what was replicated becomes durable without its participant": partial(becomes_durable_from_copies, lost=1),
    "what a lost node had a part of does not keep memory from later saves": takes_no_memory,
    "what was superseded and deleted on one node does not come back from a copy": does_not_come_back,
    "what was lost is back although the store hangs": is_back_while_the_store_hangs,
    "what nodes held that stood still together is not lost": stood_still_together,
    "what another node calls durable and somebody has removed by hand fails": is_removed_by_hand,
    "two nodes that upload one shard do no harm": is_uploaded_twice,
    "what a node adopted counts once the store shows that all have accepted it": counts_once_the_store_shows_it,
}


@pytest.fixture(scope="module")
def begun(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[None]]]:
    """All scenarios that are asked for."""
    asked: list[Any] = [item for item in request.session.items if item.parent is request.node]
    names = [item.callspec.params["name"] for item in asked]
    with ThreadPoolExecutor(len(names)) as threads:
        yield {name: threads.submit(SCENARIOS[name], tmp_path_factory.mktemp("scenario")) for name in names}


@pytest.mark.parametrize("name", SCENARIOS)
def test_while_nodes_are_away(begun: dict[str, Future[None]], name: str) -> None:
    begun[name].result()
