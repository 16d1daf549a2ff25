"""What a daemon consists of, put together; nothing runs yet. And what its status tells of all that.

Every thread of a daemon comes from the pools that are made here: what may wait for the store holds up nothing that memory alone can do.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from ckptd import __version__, tls
from ckptd.attempt import Attempt
from ckptd.codec import parse
from ckptd.commits import Commits
from ckptd.config import Settings
from ckptd.fallback import Fallback
from ckptd.fetcher import Fetcher
from ckptd.flusher import Flusher
from ckptd.ledger import Ledger
from ckptd.node import Node
from ckptd.peers import Peers
from ckptd.peerservice import PeerService
from ckptd.replicas import Replicas
from ckptd.restore import Restore
from ckptd.retention import Policy
from ckptd.service import Service
from ckptd.store import Store
from ckptd.stores import is_node_local
from ckptd.survey import KnownDamage
from ckptd.sweeper import Sweeper
from ckptd.upkeep import Upkeep
from ckptd.v1 import daemon_pb2 as pb
from ckptd.verifier import Verifier
from ckptd.watch import Watch
from ckptd.witness import Witness

#: Niceness of the threads that compress: training goes first.
FLUSH_NICENESS: Final = 10


@dataclass(frozen=True, slots=True)
class Rooms:
    """What a daemon consists of."""

    node: Node
    restore: Restore
    upkeep: Upkeep
    service: Service
    peers: Peers
    peer_service: PeerService
    watch: Watch
    pools: tuple[ThreadPoolExecutor, ...]


def put_together(settings: Settings, store: Store) -> Rooms:
    """Makes the rooms; nothing runs yet. Raises what is wrong with the shm-dir."""
    compute = ThreadPoolExecutor(os.cpu_count() or 1, "flush", initializer=be_nice)
    uploads = ThreadPoolExecutor(4, "upload", initializer=be_nice)
    threads = ThreadPoolExecutor(16, "store")
    memory_threads = ThreadPoolExecutor(16, "memory")
    flush_threads = ThreadPoolExecutor(1, "backlog")
    verify_threads = ThreadPoolExecutor(1, "verify", initializer=be_nice)
    fallback_threads = ThreadPoolExecutor(2, "fallback")
    ledger, known = Ledger(store), KnownDamage()
    peers = Peers(settings.advertise, configured=settings.peers, credentials=tls.channel_credentials(settings))
    node = Node(
        shm_dir=settings.shm_dir,
        memory=settings.memory,
        codec=parse(settings.codec).name,
        address=settings.advertise,
        open_timeout_seconds=settings.open_timeout_seconds,
        ledger=ledger,
        flusher=Flusher(store, ledger, compute, uploads),
        threads=threads,
        memory_threads=memory_threads,
        flush_threads=flush_threads,
    )
    restore = Restore(node, ledger, Fetcher(store, node.arena, threads), threads, known, peers=peers)
    upkeep = Upkeep(
        node,
        restore,
        ledger,
        Sweeper(store, ledger),
        threads,
        policy=Policy(settings.keep_last, settings.keep_every, settings.keep_within_seconds),
        delete_grace_seconds=settings.delete_grace_seconds,
        orphan_age_seconds=settings.orphan_age_seconds,
        known=known,
    )
    watch, replicas = Watch(node, peers), Replicas(node, peers)
    node_local = is_node_local(store.url)
    commits = Commits(
        node,
        peers,
        node_local=node_local and not settings.shared_store,
        replicas=settings.replicas,
        witness=Witness(store, threads) if node_local and settings.shared_store else None,
    )

    def accepted(attempt: Attempt) -> None:
        if attempt.confirmed:
            replicas.begin(attempt)
        watch.begin(attempt)

    commits.accepted = watch.taken_over = accepted
    replicas.arrived = watch.look_at
    watch.confirmed = node.backlog.proved = commits.confirm
    upkeep.deletion.abandon = commits.give_up
    service = Service(
        node,
        commits,
        restore,
        Fallback(node, restore, ledger, store, fallback_threads, known),
        Verifier(node, ledger, store, verify_threads, known),
        upkeep,
        store=store.url,
        status=functools.partial(describe, settings, node, restore, peers, store.url, time.monotonic()),
    )
    pools = (compute, uploads, threads, memory_threads, flush_threads, verify_threads, fallback_threads)
    return Rooms(node, restore, upkeep, service, peers, PeerService(commits, watch, restore), watch, pools)


def be_nice() -> None:
    """Lowers this thread's priority; Linux gives each thread its own."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), FLUSH_NICENESS)


def describe(settings: Settings, node: Node, restore: Restore, peers: Peers, store: str, started: float) -> pb.StatusReply:
    """What `ckptd status` shows."""
    attempts = node.catalog.attempts.values()
    served = dict(restore.bytes_from)
    served["store"] += restore.fetcher.bytes_from_store
    return pb.StatusReply(
        node=node.name,
        version=__version__,
        store=store,
        memory=node.arena.budget,
        used=node.arena.used,
        segments=len(node.arena),
        leases=len(+node.catalog.leases),
        open_shards=sum(shard.receipt is None for shard in node.catalog.shards.values()),
        waiting=node.arena.waiting,
        accepted=sum(attempt.pending for attempt in attempts),
        replicated=sum(attempt.state == pb.Checkpoint.REPLICATED for attempt in attempts),
        lost=sum(attempt.state == pb.Checkpoint.LOST for attempt in attempts),
        failed=sum(attempt.state == pb.Checkpoint.FAILED for attempt in attempts),
        bytes_from=served,
        uptime_seconds=time.monotonic() - started,
        warning=node.catalog.warning,
        pid=os.getpid(),
        shm_dir=str(settings.shm_dir),
        draining=node.drained or node.draining,
        address=node.address,
        peers=[
            pb.PeerStatus(address=address, gone_seconds=peers.missed_seconds(address), never_answered=peers.never_answered(address))
            for address in peers.known
        ],
    )
