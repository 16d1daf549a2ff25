"""SIGKILL of the daemon before and after every request that changes something in S3.

As `test_crash_matrix`, but what kills is a proxy before the S3: it sees the daemon's requests as the service would, counts
them by what they do to which kind of object, and kills the daemon instead of passing one on, or passes it on from the dead.
"""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
import pytest

from ckptd.ledger import Ledger
from ckptd.stores import open_store
from ckptd.v1.daemon_pb2 import DeleteRequest, PruneRequest
from ckptd.v1.daemon_pb2_grpc import DaemonStub
from ckptd.verify import is_whole
from ckptd_client import wait, waiting
from fault.promises import ID, Told, close_client, load, until
from faulty_proxy import Fault, FaultyProxy, Headers
from forks import ForkedDaemon, ForkServer
from invariants import assert_accounts_balance
from s3 import S3Server

#: With it a shard is uploaded in two parts.
LARGE = 5_000_000
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:ckptd. :UserWarning")]
#: After these somebody is answered, or something has become true; after any other it is as before the next.
_ANSWERED = re.compile(r"POST|DELETE|PUT .*\.metadata")
_CHANGES = re.compile(r"(PUT|POST|DELETE) /[^?]*")
_RANDOM = re.compile(r"[0-9a-f]{24}-[0-9a-f]{16}|[0-9a-f]{16}-[0-9a-f]{16}|[0-9a-f]{16,24}|uploadId=[^&]+")


@dataclass
class Killer:
    """Counts requests that change something; kills at the one that `moment` names."""

    prefix: str
    moment: str = ""
    pid: int = 0

    def __post_init__(self) -> None:
        self.seen: list[str] = []
        self._counts: Counter[str] = Counter()

    def judge(self, line: str, headers: Headers, body: bytes) -> Fault | None:
        if not _CHANGES.match(line) or not self.pid:
            return None
        what = _RANDOM.sub("*", line.replace(f"{self.prefix}/", ""))
        self._counts[what] += 1
        name = f"{what} #{self._counts[what]}"
        self.seen.append(name)
        if self.moment in (f"before {name}", f"after {name}"):
            os.kill(self.pid, signal.SIGKILL)
            if self.moment.startswith("before"):
                return Fault(status=503)
        return None


def save_one(value: int, numel: int = 10_000) -> Callable[[ForkedDaemon, Told, S3Server], None]:
    def act(daemon: ForkedDaemon, told: Told, server: S3Server) -> None:
        told.saves(daemon, ID, value, numel)
        until(
            daemon, lambda: len(list(daemon.shm_dir.glob("*.durable.record"))) == 1 and not list(daemon.shm_dir.glob("*.accepted.record"))
        )

    return act


def leave_two(daemon: ForkedDaemon, told: Told, server: S3Server) -> None:
    for id, value in (("run/step-1", 1), ("run/step-2", 2)):
        told.saves(daemon, id, value)
        wait(id, address=daemon.address, timeout=60)


def prune(daemon: ForkedDaemon, told: Told, server: S3Server) -> None:
    request = PruneRequest(run="run", keep_last=1, delete_grace_seconds=0.0, orphan_age_seconds=3600.0)
    told.deletes(daemon, ["run/step-1"], lambda stub: list(stub.Prune(request, timeout=60)))


def delete(daemon: ForkedDaemon, told: Told, server: S3Server) -> None:
    told.deletes(daemon, ["run/step-1"], lambda stub: stub.Delete(DeleteRequest(id="run/step-1"), timeout=60))


Act = Callable[[ForkedDaemon, Told, S3Server], None]
SCENARIOS: dict[str, tuple[Act | None, Act, int]] = {
    "a save in parts": (None, save_one(1, LARGE), LARGE),
    "a save over a durable one": (save_one(1), save_one(2), 10_000),
    "a prune": (leave_two, prune, 10_000),
    "a delete": (leave_two, delete, 10_000),
}


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    with ForkServer("s3fs", "ckptd.s3") as started:
        yield started


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_kill_at_any_request_that_changes_something(forks: ForkServer, s3_server: S3Server, name: str) -> None:
    prepare, act, numel = SCENARIOS[name]
    kills = 0
    unreached = []
    with FaultyProxy(s3_server.endpoint) as proxy:

        def case(moment: str) -> Killer:
            nonlocal kills
            prefix = f"crash-{name.replace(' ', '-')}-{kills}"
            killer = Killer(prefix, moment)
            proxy.judge = killer.judge
            daemon = started(forks, s3_server, proxy, prefix)
            try:
                told = Told()
                if prepare is not None:
                    prepare(daemon, told, s3_server)
                before = dict(told.accepted)
                killer.pid = daemon.pid
                act(daemon, told, s3_server)
                if moment and not daemon.dead(1.0):
                    unreached.append(moment)
                killer.pid = 0
                check(daemon, told, before, s3_server, prefix, numel)
            finally:
                close_client(daemon)
                daemon.remove()
            kills += 1
            return killer

        effects = case("").seen
        for moment in [f"before {effect}" for effect in effects] + [f"after {effect}" for effect in effects if _ANSWERED.match(effect)]:
            try:
                case(moment)
            except BaseException as exc:
                exc.add_note(f"{name}: killed {moment}")
                raise
    print(f"S3, {name}: {len(effects)} effects, {kills - 1} kills, {len(unreached)} not reached")
    assert len(unreached) * 10 <= kills, unreached


def started(forks: ForkServer, server: S3Server, proxy: FaultyProxy, prefix: str) -> ForkedDaemon:
    through = {**server.options, "endpoint_url": proxy.endpoint}
    options = [part for option, value in through.items() for part in ("--store-option", f"{option}={value}")]
    daemon = ForkedDaemon(forks, server.url(prefix), "--codec", "none", *options)
    try:
        daemon.start()
    except BaseException:
        daemon.remove()
        raise
    return daemon


def check(daemon: ForkedDaemon, told: Told, before: dict[str, int], server: S3Server, prefix: str, numel: int) -> None:
    """What holds after a kill: in S3 alone, then through another daemon."""
    close_client(daemon)
    daemon.kill()
    store = open_store(server.url(prefix), server.options)
    ledger = Ledger(store)
    entries = {str(entry.id): entry for entry in ledger.entries()}
    assert all(is_whole(store, ledger, entry) == () for entry in entries.values())
    assert before.keys() - told.leaving.keys() - told.deleted <= entries.keys()
    daemon.start()
    for id, value in (told.unsure | told.leaving).items():
        found = load(daemon, id, numel)
        assert found in {before.get(id), value, None}, (id, found, told)
        if found is not None:
            told.accepted[id] = found
        if found != value:
            waiting._receipts.pop((daemon.address, id), None)
    for id, value in told.accepted.items():
        assert load(daemon, id, numel) == value, (id, told)
        wait(id, address=daemon.address, timeout=60)
    assert [id for id in told.deleted if load(daemon, id, numel) is not None] == []
    told.saves(daemon, "run/step-9", 9, numel)
    wait("run/step-9", address=daemon.address, timeout=60)
    assert load(daemon, "run/latest", numel) == 9
    with grpc.insecure_channel(daemon.address) as connection:
        # What was cut off goes when it is old: here at once, but for what may still belong to somebody else.
        list(DaemonStub(connection).Prune(PruneRequest(delete_grace_seconds=0.0, orphan_age_seconds=0.0), timeout=60))  # type: ignore[no-untyped-call]
    assert [key for key in server.unfinished_uploads() if key.startswith(prefix)] == []
    close_client(daemon)
    assert_accounts_balance(daemon)
    entries = {str(entry.id): entry for entry in ledger.entries()}
    assert entries.keys() == told.accepted.keys()
    assert all(is_whole(store, ledger, entry) == () for entry in entries.values())
