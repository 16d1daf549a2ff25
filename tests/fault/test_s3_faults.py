"""A daemon on an S3 that fails: what was accepted becomes durable, bit by bit, and what cannot be listed is never empty."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from ckptd.errors import Unavailable
from ckptd.stores import open_store
from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from daemons import DaemonProcess
from faulty_proxy import Fault, FaultyProxy, Headers, refuse
from joint import at_the_same_moment
from s3 import S3Server

MIB = 1024 * 1024
LIST = "GET .*list-type=2"
#: One try of botocore's per try of ours, and none waits long: outages of a test are short.
HASTY = '{"retries": {"max_attempts": 0}, "connect_timeout": 2, "read_timeout": 2}'


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3_server.endpoint) as made:
        yield made


@pytest.fixture
def prefix() -> str:
    return f"daemon-{uuid.uuid4().hex[:8]}"


def arguments(server: S3Server, proxy: FaultyProxy, **more: str) -> list[str]:
    options = {**server.options, "endpoint_url": proxy.endpoint, **more}
    return ["--codec", "none", *(part for name, value in options.items() for part in ("--store-option", f"{name}={value}"))]


@pytest.fixture
def daemon(s3_server: S3Server, proxy: FaultyProxy, prefix: str) -> Iterator[DaemonProcess]:
    with DaemonProcess(s3_server.url(prefix), *arguments(s3_server, proxy, config_kwargs=HASTY)) as made:
        yield made


@pytest.fixture
def patient(s3_server: S3Server, proxy: FaultyProxy, prefix: str) -> Iterator[DaemonProcess]:
    """Sends no request a second time because this machine is slow."""
    with DaemonProcess(s3_server.url(prefix), *arguments(s3_server, proxy)) as made:
        yield made


def state(step: int) -> dict[str, torch.Tensor]:
    """18 MiB: a part, and a bit."""
    return {"t": torch.randn(18 * MIB // 4, generator=torch.Generator().manual_seed(step))}


def save(daemon: DaemonProcess, step: int) -> None:
    dcp.save(state(step), checkpoint_id=f"step-{step}", storage_writer=DaemonStorageWriter(address=daemon.address))


def load(daemon: DaemonProcess, checkpoint: str) -> torch.Tensor:
    found = {"t": torch.zeros_like(state(0)["t"])}
    dcp.load(found, checkpoint_id=checkpoint, storage_reader=DaemonStorageReader(address=daemon.address))
    return found["t"]


#: What S3 does to the requests of a save, and then to those of a load: fewer, since who waits for a load is told in the end.
OUTAGES: dict[str, Callable[[int], list[Fault]]] = {
    "busy": lambda n: [refuse(503, "SlowDown", times=2 * n), refuse(429, "TooManyRequests", times=n)],
    "resets": lambda n: [
        Fault(on="PUT", reset_request_after=MIB, times=n),
        Fault(on="POST", reset_answer_after=0, times=n),
        Fault(on="GET", reset_answer_after=200, times=n),
    ],
    "short bodies": lambda n: [Fault(on="GET", close_answer_after=150, times=n), Fault(on="PUT", reset_request_after=100, times=n)],
    "lies": lambda n: [refuse(500, "InternalError", on="PUT|POST", forwarded=True, times=2 * n)],
    "expired": lambda n: [refuse(400, "ExpiredToken", times=n), refuse(403, "RequestTimeTooSkewed", times=1)],
    "slow": lambda n: [Fault(delay_seconds=0.2, times=5 * n), Fault(delay_seconds=3.0, times=1)],
}


#: Of a kind with others, or long.
SLOW = ("short bodies", "slow")


@pytest.mark.parametrize("outage", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in OUTAGES])
def test_what_is_saved_while_s3_fails_becomes_durable_and_loads_bit_by_bit(
    daemon: DaemonProcess, s3_server: S3Server, proxy: FaultyProxy, prefix: str, outage: str
) -> None:
    save(daemon, 1)
    wait("step-1", address=daemon.address, timeout=60)
    proxy.tell(*OUTAGES[outage](2))
    save(daemon, 2)
    assert torch.equal(load(daemon, "step-2"), state(2)["t"])
    wait("step-2", address=daemon.address, timeout=100)
    daemon.kill()
    for path in daemon.shm_dir.iterdir():  # what is loaded now comes from the store
        path.unlink()
    proxy.tell()
    daemon.start()
    proxy.tell(*OUTAGES[outage](1))
    assert torch.equal(load(daemon, "latest"), state(2)["t"])
    proxy.tell(*OUTAGES[outage](1))
    assert torch.equal(load(daemon, "step-1"), state(1)["t"])
    proxy.tell()
    assert {line["state"] for line in daemon.list().values()} == {"durable"}
    # Of an upload whose beginning was not answered nobody knows: a sweep ends it when it is old.
    open_store(s3_server.url(prefix), s3_server.options).abort_uploads(0)
    assert [key for key in s3_server.unfinished_uploads() if key.startswith(prefix)] == []


def test_s3_that_cannot_be_listed_is_an_error_and_never_an_empty_one(
    daemon: DaemonProcess, s3_server: S3Server, proxy: FaultyProxy, prefix: str
) -> None:
    save(daemon, 1)
    wait("step-1", address=daemon.address, timeout=60)
    proxy.tell(refuse(503, "SlowDown", on=LIST))
    with pytest.raises(CheckpointException) as caught:
        load(daemon, "latest")
    assert {type(why[0]) for why in caught.value.failures.values()} == {Unavailable}
    done = daemon.cli("list", "--json")
    assert done.returncode == 3
    assert [line["id"] for line in json.loads(done.stdout)] == ["step-1"], "what memory holds is listed, and that it is not all"
    assert "503" in done.stderr or "told by a test" in done.stderr
    options = arguments(s3_server, proxy, config_kwargs=HASTY)[2:]
    command = [sys.executable, "-m", "ckptd", "list", "--json", "--store", s3_server.url(prefix), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (3, "")
    proxy.tell(refuse(503, "SlowDown", on=LIST, times=3))
    asked = proxy.count(LIST)
    assert daemon.list()["step-1"]["state"] == "durable"
    assert torch.equal(load(daemon, "latest"), state(1)["t"])
    assert proxy.count(LIST) - asked < 20


def test_ranks_that_start_together_ask_s3_once_and_not_each(patient: DaemonProcess, proxy: FaultyProxy) -> None:
    save(patient, 1)
    wait("step-1", address=patient.address, timeout=60)

    def held_until(asked: threading.Event) -> Callable[[str, Headers, bytes], Fault | None]:
        def judge(line: str, _headers: Headers, _body: bytes) -> Fault | None:
            if re.match(LIST, line):  # no answer comes before all have asked
                asked.wait(60)
            return None

        return judge

    def listings(ranks: int) -> int:
        before = proxy.count(LIST)
        with at_the_same_moment(ranks) as asked, ThreadPoolExecutor(ranks) as threads:
            proxy.judge = held_until(asked)
            for found in threads.map(lambda _: load(patient, "latest"), range(ranks)):
                assert torch.equal(found, state(1)["t"])
        return proxy.count(LIST) - before

    alone = min(listings(1) for _ in range(3))  # what is looked after when a checkpoint has become durable lists as well
    assert listings(8) <= 4 * alone


def test_a_store_that_takes_one_write_a_second_of_a_name_holds_up_no_save(patient: DaemonProcess, proxy: FaultyProxy) -> None:
    written: dict[str, float] = {}

    def one_a_second(line: str, _headers: Headers, _body: bytes) -> Fault | None:
        if not line.startswith("PUT "):
            return None
        now = time.monotonic()
        if now - written.get(line, -1.0) < 1.0:
            return refuse(429, "SlowDown")
        written[line] = now
        return None

    proxy.judge = one_a_second
    proxy.lines.clear()
    for step in (1, 2, 3):
        save(patient, step)
    for step in (1, 2, 3):
        wait(f"step-{step}", address=patient.address, timeout=60)
    assert {line["state"] for line in patient.list().values()} == {"durable"}
    # No name is written by every save: none was refused.
    assert len([line for line in proxy.lines if line.startswith("PUT ")]) == len(written)
