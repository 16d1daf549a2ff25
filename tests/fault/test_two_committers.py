"""Two daemons of one store, one of which is held up between its last look and its last put: what is newer stays.

Each daemon has a shm-dir of its own, and knows nothing of the other but what the store says.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptd.ledger import Ledger
from ckptd.model import CheckpointId
from ckptd.store import Store
from ckptd.stores import open_store
from ckptd.verify import is_whole
from ckptd_client import wait
from fault.promises import ID, close_client, load, save
from faulty_proxy import Fault, FaultyProxy, Headers
from forks import ForkedDaemon, ForkServer
from s3 import S3Server

pytestmark = pytest.mark.filterwarnings("ignore:ckptd. :UserWarning")


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    with ForkServer("s3fs", "ckptd.s3") as started:
        yield started


@contextmanager
def both(older: ForkedDaemon, newer: ForkedDaemon) -> Iterator[Future[None]]:
    """Both run, and a save of 1 with the older one, which may be stopped before it has answered, is under way."""
    with older, newer, ThreadPoolExecutor(1) as threads:
        try:
            yield threads.submit(save, older, ID, 1)
        finally:
            go_on(older)
            for daemon in (older, newer):
                close_client(daemon)


def until_stopped(daemon: ForkedDaemon) -> None:
    deadline = time.monotonic() + 60
    while Path(f"/proc/{daemon.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline, daemon.log.read_text()
        time.sleep(0.01)


def go_on(daemon: ForkedDaemon) -> None:
    os.kill(daemon.pid, signal.SIGCONT)


def assert_newer_stays(store: Store, older: ForkedDaemon) -> None:
    """In the store, whole, and for the daemon that held the other one in its memory, too."""
    ledger = Ledger(store)
    assert is_whole(store, ledger, ledger.find(CheckpointId.parse(ID))) == ()
    assert load(older, ID) == 2


def until_superseded(daemon: ForkedDaemon) -> None:
    """Whoever waits now may be told so, or that the id is durable: by its newer attempt. The log knows which came to what."""
    deadline = time.monotonic() + 60
    while not re.search(r"flush of run/step-7 ended: .* is superseded by attempt", daemon.log.read_text()):
        assert time.monotonic() < deadline, daemon.log.read_text()
        time.sleep(0.01)


@pytest.mark.parametrize(
    "moment", ["before create run/step-7/.ckptd-*.tmp #3", "before rename run/step-7/.metadata #1"], ids=["put", "lock"]
)
def test_a_daemon_that_is_stopped_before_its_last_put_into_a_directory_does_not_undo_a_newer_save(
    forks: ForkServer, tmp_path: Path, moment: str
) -> None:
    older = ForkedDaemon(forks, str(tmp_path / "store"), env={"STOP_AT": moment})
    newer = ForkedDaemon(forks, str(tmp_path / "store"))
    with both(older, newer) as saving:
        until_stopped(older)
        save(newer, ID, 2, overwrite=True)
        overtaken = "create" in moment
        if overtaken:
            wait(ID, address=newer.address, timeout=60)
        go_on(older)  # who was stopped with the lock comes first, and is replaced
        saving.result()
        if overtaken:
            until_superseded(older)
        wait(ID, address=newer.address, timeout=60)
        assert_newer_stays(open_store(str(tmp_path / "store")), older)


@pytest.mark.parametrize("held", ["the daemon", "the request"])
def test_a_daemon_or_a_request_that_is_held_up_before_its_last_put_into_s3_does_not_undo_a_newer_save(
    forks: ForkServer, s3_server: S3Server, held: str
) -> None:
    url = s3_server.url(f"two-{uuid.uuid4().hex[:8]}")
    released, reached = threading.Event(), threading.Event()
    with FaultyProxy(s3_server.endpoint) as proxy:
        older = ForkedDaemon(forks, url, *s3_server.arguments, "--store-option", f"endpoint_url={proxy.endpoint}")
        newer = ForkedDaemon(forks, url, *s3_server.arguments)

        def judge(line: str, _headers: Headers, _body: bytes) -> Fault | None:
            if held == "the request" and line.startswith("PUT") and "/.metadata" in line:
                reached.set()
                released.wait(100)
            elif held == "the daemon" and proxy.count("PUT .*manifest") and "list-type=2" in line and "__" in line and not reached.is_set():
                reached.set()  # the last look at the data files; its answer finds nobody
                os.kill(older.pid, signal.SIGSTOP)
            return None

        proxy.judge = judge
        with both(older, newer) as saving:
            try:
                assert reached.wait(60), older.log.read_text()
                save(newer, ID, 2, overwrite=True)
                wait(ID, address=newer.address, timeout=60)
            finally:
                released.set()
            assert not proxy.count("PUT .*/.metadata") or held == "the request"
            go_on(older)
            saving.result()
            until_superseded(older)
            assert proxy.count("PUT .*/.metadata") == 1
            assert_newer_stays(open_store(url, s3_server.options), older)
