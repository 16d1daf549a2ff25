"""Real ranks of one job on several nodes: resharded loads from memory and what they move, and the cases of one node on several."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemons import FAULTY
from hosts import Hosts
from worlds import World

pytestmark = pytest.mark.filterwarnings("ignore:ckptd. :UserWarning")

BLOCK = 4 * 2**20
ROWS, ROW_NBYTES = 1536, 4 * 8192


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(Path(__file__).with_name("nodes_program.py"), 4) as ranks:
        yield ranks


def addresses(hosts: Hosts) -> list[str]:
    return [host.address for host in hosts]


def needed_from_others(rank: int, saved: int, loaded: int) -> int:
    """Bytes of whole blocks that a rank's rows take of other ranks' shards."""
    first, last = rank * ROWS // loaded, (rank + 1) * ROWS // loaded
    total = 0
    for source in range(saved):
        begin, end = source * ROWS // saved, (source + 1) * ROWS // saved
        start, stop = max(first, begin), min(last, end)
        if source == rank or start >= stop:
            continue
        # What comes before an item's raw bytes in its container moves all of them by less than a block's part.
        head = 1
        at, until = head + (start - begin) * ROW_NBYTES, head + (stop - begin) * ROW_NBYTES
        total += ((until - 1) // BLOCK - at // BLOCK + 1) * BLOCK
    return total


@pytest.mark.slow
def test_four_nodes_become_three_and_each_gets_little_more_than_it_needs(world: World, tmp_path: Path) -> None:
    with Hosts(4, tmp_path / "store") as hosts:
        world.call("save", addresses=addresses(hosts), id="run/step-1", value=1)
        before = [host.bytes_from() for host in hosts]
        assert world.call("load", addresses=addresses(hosts)[:3], id="run/latest") == [1, 1, 1, -1]
        for rank in range(3):
            moved = sum(hosts[rank].bytes_from()[source] - before[rank][source] for source in ("peer", "store"))
            assert moved <= 1.15 * needed_from_others(rank, 4, 3), rank
            assert moved > 0
        # And into other slices, which lie across all shards.
        assert world.call("load", addresses=addresses(hosts)[:3], id="run/latest", dim=1) == [1, 1, 1, -1]
        assert hosts.bytes_from()["store"] == sum(one["store"] for one in before) == 0


@pytest.mark.slow
def test_c05_ranks_on_two_nodes_do_not_wait_for_a_slow_store(world: World, tmp_path: Path) -> None:
    control = tmp_path / "control"
    control.write_text('{"delay_seconds": 6}')
    with Hosts(2, f"faulty://{tmp_path / 'store'}", program=FAULTY, env={"FAULTY_CONTROL": str(control)}, memory="512MiB") as hosts:
        pair = addresses(hosts)
        took = world.call("save_beside_collectives", addresses=pair, id="run/step-1", value=1)
        assert {host.daemon.list()["run/step-1"]["state"] for host in hosts} == {"accepted"}
        assert max(took) < 18  # a data file, a part, the manifest and `.metadata` take longer
        world.call("until_durable", addresses=pair, id="run/step-1")
        assert world.call("load", addresses=pair, id="run/step-1")[:2] == [1, 1]


@pytest.mark.parametrize("how", [pytest.param("kill", marks=pytest.mark.slow), "stop"])
def test_c21_all_ranks_fail_in_time_when_one_of_their_daemons_does_and_the_next_save_works(how: str, world: World, tmp_path: Path) -> None:
    with Hosts(3, tmp_path / "store", memory="512MiB") as hosts:
        world.call("save", addresses=addresses(hosts), id="run/step-1", value=1)
        world.call("until_durable", addresses=addresses(hosts), id="run/step-1")
        getattr(hosts[1], how)()
        said = [(seconds, why) for seconds, why in world.call("fails", addresses=addresses(hosts), id="run/step-2", value=2)[:3]]
        assert all(seconds < 30 for seconds, _ in said), said
        if how == "stop":
            hosts[1].cont()
        else:
            hosts[1].start()
        assert world.call("load", addresses=addresses(hosts), id="run/latest")[:3] == [1, 1, 1]
        world.call("save", addresses=addresses(hosts), id="run/step-2", value=3)
        assert world.call("load", addresses=addresses(hosts), id="run/latest")[:3] == [3, 3, 3]


def save_until_killed(world: World, pair: list[str]) -> None:
    for step in range(2, 50):
        world.call("save", addresses=pair, id=f"run/step-{step}", value=step)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_c28_new_workers_on_other_nodes_load_and_save_while_the_old_saves_are_on_their_way(tmp_path: Path) -> None:
    control = tmp_path / "control"
    control.write_text('{"raise": "EIO"}')
    program = Path(__file__).with_name("nodes_program.py")
    with Hosts(3, f"faulty://{tmp_path / 'store'}", program=FAULTY, env={"FAULTY_CONTROL": str(control)}, memory="512MiB") as hosts:
        with World(program, 2) as old:
            old.call("save", addresses=addresses(hosts)[:2], id="run/step-1", value=1)
            killing = threading.Timer(0.3, old.stop)
            killing.start()
            with pytest.raises((AssertionError, OSError, ValueError)):  # SIGKILLed somewhere in it, or before
                save_until_killed(old, addresses(hosts)[:2])
            killing.join()
        with World(program, 3) as new:
            (found, *others) = new.call("load", addresses=addresses(hosts), id="run/latest", seconds=60)
            assert found >= 1
            assert others == [found, found]
            new.call("save", addresses=addresses(hosts), id="run/step-100", value=100, seconds=60)
            control.write_text("{}")
            for id in ("run/step-1", "run/step-100"):
                new.call("until_durable", addresses=addresses(hosts), id=id)
            assert new.call("load", addresses=addresses(hosts), id="run/latest") == [100, 100, 100]
            assert new.call("load", addresses=addresses(hosts), id="run/step-1") == [1, 1, 1]
