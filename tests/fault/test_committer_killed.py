"""Two nodes save one checkpoint over a durable one, and the committer's daemon is SIGKILLed at each of its effects.

It comes back with its memory, or it never comes back and the other node is all there is. What was accepted becomes durable
in the first case; in both the checkpoint is old, or new, or (if it was never told to be accepted) whatever it was before,
whole and the same for everybody.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from ckptd.errors import CkptdError
from ckptd_client import wait
from client.states import assert_equal
from fault.promises import close_client, until
from forks import ForkedDaemon, ForkServer
from hosts import loopback
from invariants import assert_accounts_balance, assert_whole_or_absent
from joint import load, save, state

pytestmark = pytest.mark.filterwarnings("ignore:ckptd. :UserWarning")

ID = "run/step-7"
OLD, NEW, NEXT = 1, 2, 3


class Pair:
    """Two daemons with one store, the first of which may kill itself."""

    def __init__(self, server: ForkServer, *arguments: str) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="ckptd-test-", dir="/dev/shm"))
        self.store = self.home / "store"
        self.daemons = []
        for place in loopback(2):
            listen = f"{place.ip}:{random.randrange(20000, 30000)}"
            self.daemons.append(
                ForkedDaemon(server, str(self.store), "--listen", listen, "--shared-store", "--grace", "1s", *arguments, memory="64MiB")
            )
        self.committer, self.other = self.daemons

    @property
    def addresses(self) -> list[str]:
        return [daemon.address for daemon in self.daemons]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in self.daemons:
            close_client(daemon)
            daemon.remove()
        shutil.rmtree(self.home, ignore_errors=True)

    def begin(self, **environment: str) -> None:
        """Both run, and OLD is durable; from here on the committer counts."""
        for daemon in self.daemons:
            daemon.start()
        save(self.addresses, ID, OLD)
        for daemon in self.daemons:
            wait(ID, address=daemon.address, timeout=30)
        close_client(self.committer)
        self.committer.kill()
        self.committer.environment = environment
        self.committer.start()

    def save_new(self) -> bool:
        """Whether the save of NEW was told to be accepted; then it becomes durable, unless the committer is dead by then."""
        try:
            save(self.addresses, ID, NEW, overwrite=True)
        except (CkptdError, CheckpointException):
            assert self.committer.dead(5.0)
            return False
        until(self.committer, lambda: self.durable(NEW))
        return True

    def durable(self, value: int) -> bool:
        return bool(self.stored()[ID]["r0"]["value"] == value)

    def stored(self) -> dict[str, dict[str, Any]]:
        """What is in the store, verified, at a moment in which it is not being replaced."""
        for tries_left in reversed(range(20)):
            try:
                return assert_whole_or_absent(self.store)
            except (FileNotFoundError, CkptdError, CheckpointException):
                if not tries_left:
                    raise
                time.sleep(0.1)
        raise AssertionError


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as started:
        yield started


def effects(server: ForkServer) -> list[str]:
    """What the committer does in a save that nothing interrupts."""
    with Pair(server) as pair:
        log = pair.home / "effects"
        log.touch()
        pair.begin(CRASH_LOG=str(log))
        first = len(log.read_text().splitlines())
        assert pair.save_new()
        time.sleep(0.3)
        # Memory for the next save is made in the background: how far that gets is chance.
        return [name for name in log.read_text().splitlines()[first:] if ".spare" not in name and ".open" not in name]


def check(pair: Pair, accepted: bool, left: list[Any], values: set[int]) -> None:
    """What holds on the nodes that are left."""
    deadline = time.monotonic() + 40
    while True:  # a save whose outcome is not known may yet appear
        found = {load(daemon.address, ID, 2) for daemon in left}
        assert found <= values, found
        if not accepted or pair.durable(NEW):
            break
        assert time.monotonic() < deadline, pair.other.log.read_text()
        time.sleep(0.2)
    if accepted:
        assert {load(daemon.address, ID, 2) for daemon in left} == {NEW}
    stored = pair.stored()
    assert_equal(stored[ID], state(stored[ID]["r0"]["value"], 2))
    assert stored[ID]["r0"]["value"] in values
    save([daemon.address for daemon in left], ID, NEXT, overwrite=True)
    for daemon in left:
        wait(ID, address=daemon.address, timeout=40)
        assert load(daemon.address, ID, len(left)) == NEXT
    for daemon in left:
        close_client(daemon)
        assert_accounts_balance(daemon)
        assert "Traceback" not in daemon.log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_committer_that_comes_back_keeps_every_promise(server: ForkServer) -> None:
    moments = effects(server)
    assert any("write" in moment and "distcp" not in moment for moment in moments), moments
    for moment in moments:
        with Pair(server) as pair:
            try:
                pair.begin(CRASH_AT=f"before {moment}")
                accepted = pair.save_new()
                close_client(pair.committer)
                pair.committer.kill()
                pair.committer.environment = {}
                pair.committer.start()
                check(pair, accepted, pair.daemons, {NEW} if accepted else {OLD, NEW})
            except BaseException as exc:
                exc.add_note(f"killed before {moment}")
                raise


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["record.tmp", "distcp", "part", "manifest", "metadata", "durable"])
def test_a_committer_that_is_gone_for_good_leaves_old_or_new(server: ForkServer, kind: str) -> None:
    moments = [moment for moment in effects(server) if kind in moment] or effects(server)[-1:]
    with Pair(server, "--replicas", "1") as pair:
        pair.begin(CRASH_AT=f"before {moments[-1]}")
        pair.save_new()
        close_client(pair.committer)
        pair.committer.kill()
        shutil.rmtree(pair.committer.shm_dir)
        check(pair, False, [pair.other], {OLD, NEW})
