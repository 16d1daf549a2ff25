"""C27: nodes whose memories hold different steps: all ranks go on from the newest of which every part is there, never from a mixture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import joint
from ckptd_client import CkptdError
from daemons import FAULTY
from hosts import Host, Hosts, until

# Saves hear that the last one is not durable yet.
pytestmark = pytest.mark.filterwarnings("ignore:ckptd:UserWarning")
NUMEL = 1_000_000


def save(hosts: Hosts, step: int) -> None:
    """By a rank on each of the first two."""
    joint.save([hosts[0].address, hosts[1].address], f"run/step-{step}", step, NUMEL)


def agreed(addresses: list[str]) -> list[int | CkptdError]:
    """What each loads as the latest of two ranks."""
    try:
        return joint.load_together(addresses, "run/latest", 2, NUMEL)
    except CkptdError as error:  # nothing is returned while a daemon comes back
        return [error]


def sealed(host: Host) -> set[Path]:
    return set(host.daemon.shm_dir.glob("*.sealed"))


def loses_it_while_it_runs(host: Host, shard: Path) -> None:
    shard.unlink()


def loses_it_with_its_daemon(host: Host, shard: Path) -> None:
    host.kill()
    shard.unlink()
    host.start()


@pytest.mark.parametrize("loses", [loses_it_while_it_runs, loses_it_with_its_daemon])
@pytest.mark.parametrize("loser", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_the_newest_step_that_all_hold_is_loaded_by_all(tmp_path: Path, loses: Callable[[Host, Path], None], loser: int) -> None:
    control = tmp_path / "control"
    control.write_text('{"raise": "ENOSPC"}')  # memory is all there is
    with Hosts(3, f"faulty://{tmp_path / 'store'}", program=FAULTY, env={"FAULTY_CONTROL": str(control)}) as hosts:
        addresses = [host.address for host in hosts]
        save(hosts, 110)
        before = sealed(hosts[loser])
        save(hosts, 120)
        assert joint.load_together(addresses, "run/latest", 2, NUMEL) == [120, 120, 120]
        loses(hosts[loser], max(sealed(hosts[loser]) - before, key=lambda path: path.stat().st_size))
        until("all load the same", lambda: agreed(addresses) == [110, 110, 110])
        for host in hosts:
            line = host.daemon.list()["run/step-120"]
            assert line["state"] in ("accepted", "lost", "aborted"), line
            assert host.daemon.list()["run/step-110"]["state"] == "accepted"
        # It stays so when the store works again, and a later save is the newest.
        control.write_text("{}")
        hosts[1 - loser].daemon.until("run/step-110", "durable")
        assert agreed(addresses) == [110, 110, 110]
        save(hosts, 115)
        assert agreed(addresses) == [115, 115, 115]


def test_a_node_that_lost_all_of_it_takes_nothing_newer_with_it(tmp_path: Path) -> None:
    """Step 110 is durable; of step 120 one node's part is gone for good."""
    control = tmp_path / "control"
    control.write_text("{}")
    with Hosts(2, f"faulty://{tmp_path / 'store'}", program=FAULTY, env={"FAULTY_CONTROL": str(control)}) as hosts:
        addresses = [host.address for host in hosts]
        save(hosts, 110)
        for host in hosts:
            host.daemon.until("run/step-110", "durable")
        control.write_text('{"raise": "ENOSPC"}')
        save(hosts, 120)
        hosts[1].lose(wipe=True)
        hosts[1].start()
        until("both load what is durable", lambda: agreed(addresses) == [110, 110])
