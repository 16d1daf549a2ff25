"""A node that is cut off from the others, and runs: each call ends in time, and says who did not answer.

The daemons are in network namespaces; ranks and readers reach each through its Unix socket, as those of its host would.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from torch.distributed.checkpoint import CheckpointException

import joint
from ckptd.errors import CkptdError
from ckptd_client import wait
from hosts import Host, Hosts, until
from netns import Network

# What a cut-off node is missed for is said again by the next save.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:ckptd. :UserWarning")]

#: In which a save or a load has to fail or to find another way.
LIMIT_SECONDS = 30.0
#: Elements of 4 and 2 bytes that each of three ranks saves: more than one block.
NUMEL = 1_500_000
NBYTES = 4 * NUMEL


@dataclass
class Site:
    """Three hosts in a network of their own."""

    network: Network
    hosts: Hosts

    def save(self, id: str, value: int, *, durable: bool = True) -> None:
        """A save of one rank on each host; raises what the commit raises."""
        joint.save([host.address for host in self.hosts], id, value, NUMEL, durable=durable)

    def durable(self, id: str) -> None:
        for host in self.hosts:
            wait(id, address=host.address, timeout=60)


def load(host: Host, id: str) -> int:
    """A load of everything by a reader on that host; the value that was saved, after comparing every bit."""
    return joint.load(host.address, id, 3, NUMEL)


def failure(call: Callable[[], object]) -> str:
    """What goes wrong; that it takes no longer than it may."""
    began = time.monotonic()
    try:
        call()
    except CheckpointException as error:
        said = "; ".join(f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values())
    except CkptdError as error:
        said = f"{type(error).__name__}: {error}"
    else:
        pytest.fail("it went well, which it cannot")
    assert time.monotonic() - began < LIMIT_SECONDS, said
    return said


def succeeds(call: Callable[[], object]) -> bool:
    try:
        call()
    except (CkptdError, CheckpointException):
        return False
    return True


@pytest.fixture(scope="module")
def wired(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    store: Path = tmp_path_factory.mktemp("store")
    with Network(3) as network, Hosts(3, store, "--insecure", places=network.places) as hosts:
        yield Site(network, hosts)


@pytest.fixture
def site(wired: Site) -> Iterator[Site]:
    yield wired
    for number in range(3):
        wired.network.plug(number)
        wired.network.mend(number)
        wired.network.fast(number)
    # A connection that was cut may fail one more call: each daemon calls each other one until that is over.
    for first in range(3):
        addresses = [wired.hosts[(first + number) % 3].address for number in range(3)]
        connect = partial(joint.save, addresses, "again/step-1", first, durable=False)
        until("the nodes hear each other again", partial(succeeds, connect), timeout=LIMIT_SECONDS)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("cut", [2, 0])
def test_a_save_fails_while_a_participant_is_cut_off_and_names_it(site: Site, cut: int) -> None:
    run = f"save-{cut}"
    others = [host for host in site.hosts if host.number != cut]
    site.save(f"{run}/step-1", 1)
    site.durable(f"{run}/step-1")

    site.network.cut(cut)
    said = failure(lambda: site.save(f"{run}/step-2", 2))
    # Rank 0's daemon is the one that calls: if that is cut off, it misses the others.
    assert any(host.peer in said for host in ([site.hosts[cut]] if cut else others)), said
    # Those who still hear each other go on from what there is.
    assert load(others[0], f"{run}/latest") == 1

    site.network.mend(cut)
    # A daemon that has just failed to connect tries again within seconds, not at once.
    until("the nodes hear each other again", lambda: succeeds(lambda: site.save(f"{run}/step-3", 3)), timeout=LIMIT_SECONDS)
    for host in site.hosts:
        assert load(host, f"{run}/latest") == 3
    site.durable(f"{run}/step-3")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ["cut", "unplug"])
def test_a_load_whose_holder_is_cut_off_takes_its_part_out_of_the_store(site: Site, how: str) -> None:
    id = f"stored-{how}/step-1"
    site.save(id, 5)
    site.durable(id)
    reader, away, _ = site.hosts
    before = reader.bytes_from()

    getattr(site.network, how)(away.number)
    began = time.monotonic()
    assert load(reader, id) == 5

    assert time.monotonic() - began < LIMIT_SECONDS
    assert reader.bytes_from()["store"] > before["store"]


@pytest.mark.timeout(240)
def test_a_load_fails_while_the_only_holder_is_cut_off_and_names_it_and_works_when_it_is_back(site: Site) -> None:
    site.save("held/step-1", 7, durable=False)
    reader, away, _ = site.hosts
    before = reader.bytes_from()

    site.network.cut(away.number)
    said = failure(lambda: load(reader, "held/step-1"))
    assert away.peer in said

    site.network.mend(away.number)
    until("the reader's daemon hears the other again", lambda: succeeds(lambda: load(reader, "held/step-1")), timeout=LIMIT_SECONDS)
    assert load(reader, "held/step-1") == 7
    after = reader.bytes_from()
    assert after["peer"] - before["peer"] >= 2 * NBYTES
    assert after["store"] == before["store"]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("durable", [True, False])
def test_a_load_whose_holder_is_cut_off_in_the_middle_goes_on_with_the_store_or_names_it(site: Site, durable: bool) -> None:
    id = f"midway-{durable}/step-1"
    site.save(id, 9, durable=durable)
    if durable:
        site.durable(id)
    reader, away, _ = site.hosts

    site.network.slow(away.number, "8mbit")
    before = site.network.sent(away.number)
    with ThreadPoolExecutor(1) as threads:
        loading = threads.submit(load, reader, id)
        until("a part of the shard is there", lambda: site.network.sent(away.number) > before + NBYTES // 4)
        site.network.cut(away.number)
        if durable:
            assert loading.result(LIMIT_SECONDS) == 9
        else:
            assert away.peer in failure(loading.result)
