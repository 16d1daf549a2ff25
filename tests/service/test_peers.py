"""The daemons of other nodes, as one daemon sees them: who never answers, who is itself, and connections that are replaced under a call."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

import joint
from ckptd import channels, peers
from ckptd.errors import InvalidRequest, Unavailable
from ckptd.peers import Peers
from ckptd.v1 import peer_pb2 as pb
from ckptd.v1.daemon_pb2 import CommitRequest, ResolveRequest
from ckptd.v1.manifest_pb2 import Receipt
from ckptd.v1.peer_pb2_grpc import PeerServicer, add_PeerServicer_to_server
from ckptd_client.channel import connect
from ckptd_client.meeting import introduce
from ckptd_client.stream import LoadStream
from daemons import DaemonProcess
from hosts import Hosts, free_port, until

# -- connections that are replaced ----------------------------------------------------------------------------------


class Silent(PeerServicer):
    """Takes questions and never answers; sends one piece of a shard, and no more."""

    def __init__(self) -> None:
        self.asked = asyncio.Semaphore(0)

    async def Watch(self, request: pb.WatchRequest, context: Any) -> pb.WatchReply:
        self.asked.release()
        await asyncio.Event().wait()
        raise AssertionError

    async def Pull(self, request: pb.PullRequest, context: Any) -> AsyncIterator[pb.Bytes]:
        yield pb.Bytes(data=b"a piece")
        self.asked.release()
        await asyncio.Event().wait()


def with_silent(then: Callable[[Peers, str, Silent], Awaitable[None]]) -> None:
    """Runs `then` with a peer that is silent, at an address."""

    async def run() -> None:
        server, silent, there = grpc.aio.server(), Silent(), Peers("")
        add_PeerServicer_to_server(silent, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            await then(there, address, silent)
        finally:
            await there.close()
            await server.stop(0)

    asyncio.run(run())


async def watch(there: Peers, address: str) -> None:
    await there.call(address, "say something", lambda stub: stub.Watch(pb.WatchRequest()), 60.0)


async def pull(there: Peers, address: str) -> None:
    async for piece in there.stream(address, "send something", lambda stub: stub.Pull(pb.PullRequest()), 60.0):
        assert piece.data == b"a piece"


def test_calls_over_a_connection_that_is_replaced_end_as_those_to_a_peer_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "_CLOSING_SECONDS", 0.1)

    async def run(there: Peers, address: str, silent: Silent) -> None:
        calls = [asyncio.create_task(watch(there, address)), asyncio.create_task(pull(there, address))]
        for _ in calls:
            await silent.asked.acquire()
        with pytest.raises(Unavailable):
            await there.call(address, "say something at once", lambda stub: stub.Watch(pb.WatchRequest()), 0.1)
        there.called(address)
        for call, doing in zip(calls, ("say something", "send something"), strict=True):
            with pytest.raises(Unavailable, match=f"the ckptd daemon at {address} does not answer: it was asked to {doing}"):
                await call
        # It has called: what became of the old connection says nothing of the new one.
        assert there.reachable() == [address]
        assert there.gone_seconds(address) == 0.0

    with_silent(run)


def test_a_call_of_a_task_that_is_cancelled_is_cancelled() -> None:
    async def run(there: Peers, address: str, silent: Silent) -> None:
        for call in (watch, pull):
            task = asyncio.create_task(call(there, address))
            await silent.asked.acquire()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    with_silent(run)


def test_a_cancellation_that_comes_with_the_answer_is_not_lost() -> None:
    async def run(there: Peers, address: str, _: Silent) -> None:
        replies: asyncio.Queue[asyncio.Future[pb.Bytes]] = asyncio.Queue()

        class Call:
            async def read(self) -> pb.Bytes:
                reply = asyncio.get_running_loop().create_future()
                await replies.put(reply)
                return await reply

            def cancel(self) -> None:
                pass

        async def once() -> None:
            await there.call(address, "say something", lambda _: Call().read(), 0.2)
            await asyncio.sleep(0)

        async def often() -> None:
            async for _ in there.stream(address, "send something", lambda _: Call(), 0.2):
                pass

        for call in (once, often):
            task = asyncio.create_task(call())
            reply = await replies.get()
            reply.set_result(pb.Bytes())
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    with_silent(run)


def test_after_the_end_nobody_is_called() -> None:
    async def run(there: Peers, address: str, _: Silent) -> None:
        await there.close()
        for call in (watch, pull):
            with pytest.raises(Unavailable, match="this ckptd daemon ends"):
                await call(there, address)

    with_silent(run)


# -- what is no address -----------------------------------------------------------------------------------------------

#: gRPC cannot write the first ones into a call's metadata.
NO_ADDRESSES = ["a\nb:1", "a\x01b:1", "\x7f:1", "b\u00fccher.example:7070", "x" * 300_000 + ":1", "a:1,b:1", "unix:/run/ckptd.sock", ""]


def test_what_is_no_address_is_not_learnt_and_nobody_is_called_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "LOOK_UP_SECONDS", 0.02)

    async def run() -> None:
        there, quiet, port = Peers("here:7070"), Quiet(), free_port()
        server, address = await started(quiet, port), f"127.0.0.1:{port}"
        there.learn([*NO_ADDRESSES, address])
        for one in NO_ADDRESSES:
            there.called(one)
        assert there.known == there.reachable() == [address]
        looking = asyncio.create_task(there.look_up_forever())
        await there.introduce([*NO_ADDRESSES, address])
        for one in NO_ADDRESSES:
            for call in (watch, pull):
                with pytest.raises(Unavailable, match=r"no ckptd daemon can be called at .*: it is no address"):
                    await call(there, one)
        assert await there.ask(NO_ADDRESSES, "say something", lambda stub: stub.Watch(pb.WatchRequest())) == {}
        asked = len(quiet.told)
        while len(quiet.told) < asked + 2 and not looking.done():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.02)
        assert not looking.done()
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await there.close()
        await server.stop(0)

    asyncio.run(run())


def test_a_client_that_brings_what_is_no_address_is_refused_where_it_matters_and_harms_nobody(tmp_path: Path) -> None:
    with Hosts(1, tmp_path / "store", memory="64MiB") as hosts:
        host = hosts[0]
        introduce(NO_ADDRESSES, address=host.address)
        joint.save(joint.addresses(hosts), "run/step-1", 1)
        written = joint.Save(joint.addresses(hosts), "run/step-2", 2)
        written.write()
        record = joint.record_of(written, host)
        daemon = connect(host.address)
        attempt = daemon.resolve(ResolveRequest(id="run/step-1")).summary.attempt
        with LoadStream(daemon, "run/step-1", attempt, NO_ADDRESSES) as stream:
            stream.open()
        for odd in [one for one in NO_ADDRESSES if one]:
            other = Receipt(node="f" * 16, token="e" * 16, rank=1, address=odd, nbytes=1)
            request = CommitRequest(id="run/step-2", shards=[*record.shards, other], metadata=record.metadata, durable=True)
            with pytest.raises(InvalidRequest, match="the receipt of rank 1 does not say where its daemon") as caught:
                daemon.commit(request)
            assert len(str(caught.value)) < 1000
        daemon.commit(CommitRequest(id="run/step-2", shards=record.shards, metadata=record.metadata, durable=True))
        assert joint.load(host.address, "run/step-2", 1) == 2
        assert host.status()["peers"] == []
        assert "Traceback" not in host.daemon.log.read_text()


# -- who has gone while nobody needed him ----------------------------------------------------------------------------


class Quiet(PeerServicer):
    """Answers, and keeps what callers told of themselves."""

    def __init__(self) -> None:
        self.told: list[str | bytes | None] = []

    async def Watch(self, request: pb.WatchRequest, context: Any) -> pb.WatchReply:
        self.told.append(dict(context.invocation_metadata()).get(channels.PEER_KEY))
        return pb.WatchReply()


async def started(servicer: PeerServicer, port: int) -> grpc.aio.Server:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    add_PeerServicer_to_server(servicer, server)
    assert server.add_insecure_port(f"127.0.0.1:{port}") == port
    await server.start()
    return server


def test_a_peer_that_nobody_needs_is_missed_since_it_was_heard_of_and_gone_only_since_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "LOOK_UP_SECONDS", 0.05)
    port = free_port()
    address = f"127.0.0.1:{port}"

    async def holds(condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.02)

    async def run() -> None:
        there, quiet = Peers("here:7070"), Quiet()
        server = await started(quiet, port)
        there.learn([address])
        await watch(there, address)
        heard = time.monotonic()
        assert quiet.told == ["here:7070"]
        assert there.missed_seconds(address) == 0.0
        await server.stop(0)
        await asyncio.sleep(0.3)
        await there.ask([address], "say that it is there", lambda stub: stub.Watch(pb.WatchRequest()), idle=True)
        assert there.missed_seconds(address) >= 0.3
        assert there.gone_seconds(address) == 0.0
        server = await started(quiet, port)
        quiet.told.clear()
        for _ in range(2):
            await there.ask([address], "say that it is there", lambda stub: stub.Watch(pb.WatchRequest()), idle=True)
        assert quiet.told == ["here:7070", None]  # it may have forgotten this one while it was missed; after that it learns nothing by it
        assert there.missed_seconds(address) == 0.0
        looking = asyncio.create_task(there.look_up_forever())
        await holds(lambda: len(quiet.told) > 5)
        assert set(quiet.told[3:]) == {None}
        await server.stop(0)
        await holds(lambda: there.missed_seconds(address) > 0.0)
        assert there.gone_seconds(address) == 0.0
        with pytest.raises(Unavailable):
            await watch(there, address)
        assert 0.0 < there.gone_seconds(address) < there.missed_seconds(address) < time.monotonic() - heard
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await there.close()

    asyncio.run(run())


def test_a_peer_that_stays_away_and_that_nobody_configured_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "LOOK_UP_SECONDS", 0.05)
    monkeypatch.setattr(peers, "FORGET_SECONDS", 0.2)
    learnt, configured = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"

    async def run() -> None:
        there = Peers("", configured=[configured])
        there.learn([learnt])
        looking = asyncio.create_task(there.look_up_forever())
        while learnt in there.known:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.02)
        assert there.known == [configured]
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await there.close()

    asyncio.run(run())


# -- who never answers ----------------------------------------------------------------------------------------------


def test_a_peer_that_never_answered_is_shown_as_such_and_one_that_did_as_gone(tmp_path: Path) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    with Hosts(2, tmp_path / "store", "--peer", nobody, memory="64MiB") as hosts:

        def shown() -> dict[str, Any]:
            return {one["address"]: one for one in hosts[0].status()["peers"]}

        until("the one is tried", lambda: shown()[nobody]["never_answered"])
        assert f"{nobody} (never answered)" in hosts[0].daemon.cli("status").stdout
        hosts[1].daemon.list()  # calls the first one, which may have tried it before it listened, and has heard of it by now
        assert not shown()[hosts[1].peer]["never_answered"]
        hosts[1].kill()

        time.sleep(1.0)

        def gone_seconds() -> float:
            hosts[0].daemon.list()  # asks them
            return float(shown()[hosts[1].peer]["gone_seconds"])

        assert until("the other is missed", gone_seconds) >= 1.0  # since it was heard of, not since it was called
        assert not shown()[hosts[1].peer]["never_answered"]
        assert f"{hosts[1].peer} (gone for " in hosts[0].daemon.cli("status").stdout


def test_a_peer_that_never_answers_is_warned_of_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(peers, "LOOK_UP_SECONDS", 0.05)
    monkeypatch.setattr(peers, "UNANSWERED_SECONDS", 0.2)
    address, strange = f"127.0.0.1:{free_port()}", "no..name:7070"

    async def run() -> list[str]:
        there = Peers("", configured=[address, strange])
        looking = asyncio.create_task(there.look_up_forever())
        rounds = 0
        while rounds < 5 or len(warnings()) < 2:
            await asyncio.sleep(0.1)
            rounds += 1
            assert not looking.done()
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await there.close()
        return warnings()

    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]

    said = asyncio.run(run())
    assert len(said) == 2
    (of_address,) = (one for one in said if one.startswith(f"--peer {address} has never answered: it cannot be reached ("))
    assert "check the address, that the daemon there has it among its --listen" in of_address
    assert any(f"--peer {strange} has never answered" in one for one in said)


@pytest.mark.parametrize("called", ["localhost", "127.0.0.1"])
def test_a_daemon_that_is_in_its_own_list_of_peers_is_no_peer(called: str, tmp_path: Path) -> None:
    port = free_port()
    advertised = "127.0.0.1" if called == "localhost" else "localhost"
    arguments = ["--listen", f"127.0.0.1:{port}", "--advertise", f"{advertised}:{port}", "--peer", f"{called}:{port}"]
    with DaemonProcess(str(tmp_path / "store"), *arguments, memory="64MiB") as daemon:

        def peers_shown() -> list[Any]:
            return list(json.loads(daemon.cli("status", "--json").stdout)["peers"])

        until("it has found itself", lambda: not peers_shown())


# -- copies ---------------------------------------------------------------------------------------------------------


def test_fewer_nodes_than_replicas_is_said_once_per_run(tmp_path: Path) -> None:
    with Hosts(2, tmp_path / "store", replicas=2, memory="64MiB") as hosts:
        for id in ("run/step-1", "run/step-2", "other/step-1"):
            joint.save(joint.addresses(hosts), id, 1)
        said = [
            line
            for line in hosts[0].daemon.log.read_text().splitlines()
            if "--replicas 2 is more than its saves have other nodes, 1:" in line
        ]
        assert [line.partition("run '")[2].partition("'")[0] for line in said] == ["run", "other"]
        assert " INFO " in said[0]
