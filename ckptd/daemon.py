"""The daemon: recovers, serves, drains.

Promises: one daemon per socket and per shm-dir; `ready ADDRESS STORE` is printed when calls are taken; SIGTERM and SIGINT
end it in order within the grace, and what is accepted and not durable stays in memory for the next start; a bug in a background
task ends it loudly, and that memory stays as well.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc

from ckptd import __version__, errors, tls
from ckptd.addresses import is_reachable, is_unix
from ckptd.channels import MESSAGE_NBYTES
from ckptd.config import Settings
from ckptd.lookup import behind
from ckptd.node import Node
from ckptd.peerservice import Introductions
from ckptd.rooms import put_together
from ckptd.statuses import ErrorInterceptor
from ckptd.stores import is_node_local, open_store
from ckptd.v1.daemon_pb2_grpc import add_DaemonServicer_to_server
from ckptd.v1.peer_pb2_grpc import add_PeerServicer_to_server

log = logging.getLogger(__name__)
#: How long the start waits for the store.
PROBE_SECONDS = 10.0
#: How long running calls may finish at the end.
STOP_SECONDS = 0.5
OPTIONS = (
    ("grpc.so_reuseport", 0),  # a second daemon on a port must fail, not share it
    ("grpc.max_send_message_length", MESSAGE_NBYTES),
    ("grpc.max_receive_message_length", MESSAGE_NBYTES),
)


def serve(settings: Settings) -> int:
    """Runs the daemon until a signal ends it; returns the exit status. Raises what keeps it from starting."""
    logging.basicConfig(
        stream=sys.stderr, level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True
    )
    locks = [claim_socket(address) for address in settings.listen if is_unix(address)]
    try:
        status = asyncio.run(run(settings))
    finally:
        for lock in locks:
            os.close(lock)
    if any(thread is not threading.main_thread() and not thread.daemon for thread in threading.enumerate()):
        # A put that hangs in the network must not outlive the grace; nothing it could still do would be seen.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(status)
    return status


async def run(settings: Settings) -> int:
    """The daemon inside its loop."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    credentials = tls.server_credentials(settings)
    store = open_store(settings.store, settings.store_options)
    rooms = put_together(settings, store)  # first: who is refused for the shm-dir or the memory has made no directory for a store
    await probe(loop, store.probe, ended)
    if settings.advertise and is_node_local(store.url) and not settings.shared_store:
        log.warning(
            "the store %s is a directory that other nodes may not see: saves of several nodes are refused; give an object store, or "
            "--shared-store if all nodes see that directory",
            store.url,
        )
    node = rooms.node
    node.recover()
    calls = ErrorInterceptor()
    server = grpc.aio.server(interceptors=(calls, Introductions(rooms.peers)), options=OPTIONS)
    add_DaemonServicer_to_server(rooms.service, server)
    add_PeerServicer_to_server(rooms.peer_service, server)
    for address in settings.listen:
        listen(server, address, credentials)
    await server.start()
    print("ready", settings.address, store.url, flush=True)
    log.info("ckptd %s, node %s, store %s, memory %d bytes in %s", __version__, node.name, store.url, node.arena.budget, settings.shm_dir)
    background = (
        asyncio.create_task(node.flush_forever(), name="flush"),
        asyncio.create_task(tick(node), name="tick"),
        asyncio.create_task(rooms.upkeep.forever(), name="upkeep"),
        asyncio.create_task(rooms.watch.forever(), name="watch"),
        asyncio.create_task(rooms.peers.look_up_forever(), name="peers"),
    )
    ending = asyncio.create_task(ended.wait(), name="signal")
    looking_up = asyncio.create_task(look_up(settings.advertise))
    try:
        await asyncio.wait((*background, ending), return_when=asyncio.FIRST_COMPLETED)
        for task in background:
            if task.done():  # a bug: end loudly; a new daemon takes the memory over
                log.critical("the daemon's %s task ended", task.get_name(), exc_info=task.exception())
                return 70
        log.info("shutting down, %.0f s of grace", settings.grace_seconds)
        await node.drain(settings.grace_seconds)
        return 0
    finally:
        for ended_task in (*background, ending, looking_up):
            ended_task.cancel()
        rooms.service.ending.set()
        node.wake()  # who waits for a change is told as well
        stopping = asyncio.create_task(server.stop(10 * STOP_SECONDS))
        await asyncio.wait((stopping,), timeout=STOP_SECONDS)
        calls.end()
        await stopping
        await rooms.peers.close()
        rooms.restore.close()
        node.close()
        for pool in rooms.pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for number in (signal.SIGTERM, signal.SIGINT):  # who is told once more, on the last steps, ends no differently
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)


async def probe(loop: asyncio.AbstractEventLoop, call: Callable[[], None], ended: asyncio.Event) -> None:
    """A store that can never work is an error now; one that is away for a while must not keep memory from being served."""
    pool = ThreadPoolExecutor(1, "probe")
    probing = asyncio.ensure_future(loop.run_in_executor(pool, call))
    ending = asyncio.create_task(ended.wait())
    await asyncio.wait((probing, ending), timeout=PROBE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    ending.cancel()
    pool.shutdown(wait=False)
    if not probing.done():
        probing.add_done_callback(lambda late: late.cancelled() or late.exception())
        log.warning("the store does not answer, checkpoints stay in memory until it does")
        return
    try:
        probing.result()
    except errors.Unavailable as exc:
        log.warning("the store cannot be reached now, checkpoints stay in memory until it can: %s", exc)


async def look_up(advertised: str) -> None:
    """Warns of a name for other nodes that leads nowhere; it may lead here later."""
    try:
        if advertised:
            await behind(advertised)
    except OSError as exc:
        log.warning(
            "--advertise %s leads nowhere now (%s), and other nodes will not reach this one by it: give a name or an address that "
            "leads to this node from every other one, or see to it that the name does",
            advertised,
            exc.strerror or exc,
        )


async def tick(node: Node) -> None:
    """Lets the node look at its clocks once a second."""
    while True:
        await asyncio.sleep(1.0)
        node.tick()


def claim_socket(address: str) -> int:
    """Makes the socket's directory and takes the lock beside it; gRPC itself would silently replace a live socket."""
    path = Path(address.removeprefix("unix:")).absolute()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.parent.stat().st_uid not in (os.geteuid(), 0):  # its owner could put a socket of his own there
            raise errors.InvalidRequest(f"cannot listen on {address}: {path.parent} belongs to another user; choose another --listen")
        lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise errors.InvalidRequest(f"cannot listen on {address}: {exc}; choose another --listen unix:PATH") from exc
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        os.close(lock)
        raise errors.InvalidRequest(f"another ckptd daemon listens on {address}: stop it, or choose another --listen") from exc
    if path.exists() and not path.is_socket():
        os.close(lock)
        raise errors.InvalidRequest(f"cannot listen on {address}: a file is there that is no socket; choose another --listen")
    with suppress(FileNotFoundError):  # of a daemon that was killed: we hold its lock
        path.unlink()
    return lock


def listen(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> None:
    """Takes an address, TCP with TLS if there are credentials, or raises InvalidRequest."""
    if credentials is None and is_reachable(address):
        log.warning(
            "--insecure: whoever reaches %s can read, replace and delete checkpoints; give --tls-cert, --tls-key and --tls-ca "
            "unless every machine on that network is trusted",
            address,
        )
    try:
        if credentials is None or is_unix(address):
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError:
        port = 0
    if port == 0:
        raise errors.InvalidRequest(f"cannot listen on {address}: it is in use, or no address of this machine; choose another --listen")
