"""How the cost of a commit, the size of the metadata and the time of a resolve grow.

All nodes live in one process and on one loop: each is what a daemon consists of (`put_together`), with a shm-dir
of its own and a gRPC server on a loopback port, so every message between them is a real one. Three sweeps:
nodes (one rank each), ranks (of two nodes), and items (of one node and of two). The store is a directory on
tmpfs. One process pays for all nodes, so seconds of CPU say more than seconds: at n nodes one of them pays
about an n-th of what is common, and its own part. Nothing passes or fails here, and figures of one machine
say nothing about another's; how they grow does. docs/0006-scaling.md draws the conclusions.

    python benchmarks/scaling.py [--nodes 1,2,4,…] [--ranks 2,64,…] [--items 1000,10000,…] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import operator
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import torch
from crowd import CALLS, OWNER, Counted, as_large, nodes, pickle_of, sealed, sealed_pickle, stored, table_of, written
from rich.console import Console
from rich.table import Table as Shown

from ckptd import errors
from ckptd.ledger import Ledger
from ckptd.localstore import LocalStore
from ckptd.model import CheckpointId, manifest_key, metadata_key, mint_token
from ckptd.ring import View, judge
from ckptd.v1.daemon_pb2 import Checkpoint, CommitRequest
from ckptd.v1.daemon_pb2_grpc import DaemonStub
from ckptd.v1.manifest_pb2 import Receipt, Record, Table
from ckptd.v1.peer_pb2 import AdoptRequest, HoldingsRequest, PrepareReply, PrepareRequest, WatchReply, WatchRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine, Iterator, Sequence

    from ckptd.attempt import Attempt
    from ckptd.daemon import Rooms

#: What gRPC takes as one message.
MESSAGE_NBYTES = 4 * 2**20
DURABLE_SECONDS = 300.0
#: What a shard takes in memory at least.
ROUNDED_NBYTES = 2 * 2**20


@dataclass
class Figures:
    """Values of one row, by name: every round adds one to each."""

    found: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, name: str, value: float) -> None:
        self.found[name].append(value)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds `<name>_seconds` and `<name>_cpu_seconds`, the latter of all threads of this process."""
        began, cpu = time.perf_counter(), time.process_time()
        yield
        self.add(f"{name}_seconds", time.perf_counter() - began)
        self.add(f"{name}_cpu_seconds", time.process_time() - cpu)

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(values) for name, values in self.found.items()}


def messages(figures: Figures, request: CommitRequest, record: Record) -> None:
    """Bytes of the messages of one commit between the coordinator and one participant, as protobuf; without the pickle."""
    last = request.shards[-1].node
    prepare = PrepareRequest(
        id=request.id, shards=[one for one in request.shards if one.node == last], metadata=request.metadata, durable=True
    )
    reply = PrepareReply(newest=record.summary.attempt, store=record.store)
    figures.add("record_bytes", record.ByteSize())
    figures.add("receipt_bytes", sum(one.ByteSize() + 2 for one in record.shards) / len(record.shards))
    figures.add("commit_request_bytes", request.ByteSize())
    figures.add("wire_bytes_per_participant", prepare.ByteSize() + reply.ByteSize() + AdoptRequest(record=record).ByteSize())


async def asked(figures: Figures, name: str, call: Awaitable[Any], made: int) -> Any:
    """Times one question that leads to `made` calls of other nodes."""
    with figures.timed(name):
        found = await call
    figures.add(f"{name}_calls", made)
    return found


def watched(figures: Figures, all_nodes: Sequence[Rooms], attempt: str) -> None:
    """Bytes of one question of one node to another what has become of one attempt, and of the answer."""
    fate = all_nodes[-1].peer_service.commits.fate(attempt)
    figures.add("watch_bytes", WatchRequest(attempts=[attempt]).ByteSize() + WatchReply(fates=[fate]).ByteSize())


def told(figures: Figures, rooms: Rooms, checkpoint: CheckpointId, attempt: str) -> None:
    """Bytes that one node answers to a survey of the run, and to a look for one attempt."""
    answer = rooms.restore.whereabouts.answer
    figures.add("survey_bytes", sum(one.ByteSize() for one in answer(HoldingsRequest(run=checkpoint.run))))
    figures.add("look_bytes", sum(one.ByteSize() for one in answer(HoldingsRequest(id=str(checkpoint), attempt=attempt))))


# -- the sweeps ----------------------------------------------------------------------------------


async def pending(figures: Figures, all_nodes: Sequence[Rooms], checkpoint: CheckpointId, request: CommitRequest) -> Attempt:
    """Commits, and finds what was committed from the last node while it is in memory alone."""
    peers, reader = len(all_nodes) - 1, all_nodes[-1]
    cost: Attempt = await asked(figures, "commit", all_nodes[0].peer_service.commits.commit(request), 2 * peers)
    messages(figures, request, cost.record)
    line = await asked(figures, "resolve", reader.restore.resolve(checkpoint.run), peers)
    assert line.summary.attempt == cost.name, line
    source = await asked(figures, "open", reader.restore.open(checkpoint, cost.name), len(request.shards) + 1)
    source.close()
    whereabouts = reader.restore.whereabouts
    await asked(figures, "look", whereabouts.look(checkpoint, cost.name, again=True), peers)
    told(figures, reader, checkpoint, cost.name)
    watch = WatchRequest(attempts=[cost.name])
    await asked(figures, "watch", reader.peers.ask(reader.peers.known, "look", lambda stub: stub.Watch(watch)), peers)
    watched(figures, all_nodes, cost.name)
    return cost


async def become_durable(figures: Figures, all_nodes: Sequence[Rooms], attempt: str, store: Counted) -> None:
    """Lets the nodes do what they do in the background until all of them know that it is durable."""
    store.requests.clear()
    CALLS.taken.clear()
    with figures.timed("flush"):
        tasks = [asyncio.create_task(work) for rooms in all_nodes for work in (rooms.node.flush_forever(), rooms.watch.forever())]
        deadline = time.monotonic() + DURABLE_SECONDS
        while any(rooms.node.catalog.attempts[attempt].state != Checkpoint.DURABLE for rooms in all_nodes):
            if time.monotonic() > deadline:
                sys.exit(f"attempt {attempt} did not become durable in {DURABLE_SECONDS:.0f} s")
            await asyncio.sleep(0.005)
    with figures.timed("settle"):
        # What they still tell each other must not be taken for a cost of the next commit.
        while telling := [task for rooms in all_nodes for task in rooms.watch._telling]:  # noqa: SLF001 - nobody else has to know
            await asyncio.wait(telling)
    running = set(tasks)
    while running:  # Python 3.11's wait_for forgets a cancellation that comes together with what it waited for
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=0.1)
    for verb in ("put", "get", "list"):
        figures.add(f"flush_{verb}s", store.requests[verb])
    for name in ("Tell", "Watch"):
        figures.add(f"flush_{name.lower()}_calls", CALLS.taken[name])


async def sweep_nodes(count: int, rounds: int, root: Path) -> Figures:
    """One rank per node, two items each."""
    figures, store = Figures(), Counted(LocalStore(root))
    tables = [table_of(2 * rank, 2) for rank in range(count)]
    pickle = pickle_of(2 * count)
    async with nodes(count, store, 32 * 2**20) as all_nodes:
        # First all that happens before anything is flushed: flushes leave calls behind that one process works off slowly.
        for number in range(rounds + 1):
            now = Figures() if number == 0 else figures  # the first round makes connections
            checkpoint = CheckpointId.parse(f"nodes-{count}/step-{number}")
            await pending(now, all_nodes, checkpoint, await sealed(all_nodes, checkpoint, tables, pickle))
            for rooms in all_nodes:
                rooms.node.forget(checkpoint)
        for number in range(rounds):
            checkpoint = CheckpointId.parse(f"durable-{count}/step-{number}")
            request = await sealed(all_nodes, checkpoint, tables, pickle)
            attempt = await all_nodes[0].peer_service.commits.commit(request)
            await become_durable(figures, all_nodes, attempt.name, store)
            store.requests.clear()
            reader = all_nodes[-1].restore
            line = await asked(figures, "resolve_durable", reader.resolve(checkpoint.run), count - 1)
            assert line.state == Checkpoint.DURABLE, line
            figures.add("resolve_durable_requests", store.requests.total())
            for rooms in all_nodes:
                rooms.node.forget(checkpoint)
    return figures


async def sweep_ranks(count: int, rounds: int, root: Path) -> Figures:
    """Two nodes, empty shards: what a rank costs beside its items."""
    figures, store = Figures(), Counted(LocalStore(root))
    pickle = pickle_of(1)
    async with nodes(2, store, 128 * 2**20 + count * ROUNDED_NBYTES) as all_nodes:
        for number in range(rounds + 1):
            now = Figures() if number == 0 else figures
            checkpoint = CheckpointId.parse(f"ranks-{count}/step-{number}")
            request = await sealed(all_nodes, checkpoint, [Table()] * count, pickle)
            await pending(now, all_nodes, checkpoint, request)
            for rooms in all_nodes:
                rooms.node.forget(checkpoint)
    return figures


async def sweep_items(count: int, count_nodes: int, rounds: int, root: Path) -> Figures:
    """Items split over the nodes, one rank each; the data files are made up, sparse, because only what describes them is measured."""
    figures, store = Figures(), Counted(LocalStore(root))
    began = time.perf_counter()
    pickle = pickle_of(count)
    figures.add("pickle_made_seconds", time.perf_counter() - began)
    figures.add("pickle_bytes", len(pickle))
    each = count // count_nodes
    tables = [table_of(rank * each, each) for rank in range(count_nodes)]
    memory = 64 * 2**20 + 2 * (sum(table.end for table in tables) // count_nodes + 1000 * count)
    async with nodes(count_nodes + 1, store, memory) as (*all_nodes, stranger):
        for number in range(rounds):
            checkpoint = CheckpointId.parse(f"items-{count}-{count_nodes}-{number}/step-1")
            shards = []
            for rank, (rooms, table) in enumerate(zip(all_nodes, tables, strict=True)):
                encoded = table.SerializeToString()
                token = await written(rooms, checkpoint, rank, table, encoded)
                with figures.timed("seal"):
                    shards.append(await rooms.node.seal(OWNER, token, table.end, len(encoded)))
                figures.add("table_bytes", len(encoded))
            metadata = await sealed_pickle(all_nodes[0], checkpoint, pickle)
            request = CommitRequest(id=str(checkpoint), step=1, shards=shards, metadata=metadata, durable=True)
            attempt = await pending(figures, all_nodes, checkpoint, request)
            contents = stored(store, checkpoint, attempt.record, tables)
            ledger = Ledger(store)
            with figures.timed("ledger_commit"):
                await asyncio.to_thread(ledger.commit, checkpoint, contents, pickle)
            del contents
            entry = ledger.find(checkpoint)
            sizes = {one.key: one.nbytes for one in store.list(str(checkpoint))}
            figures.add("metadata_bytes", sizes[metadata_key(checkpoint)])
            figures.add("manifest_bytes", sizes[manifest_key(checkpoint, entry.save_id or "")])
            with figures.timed("summary"):
                ledger.summary(entry)
            line = await asked(figures, "resolve_durable", stranger.restore.resolve(checkpoint.run), 0)
            source = await asked(figures, "open_durable", stranger.restore.open(checkpoint, line.summary.attempt), 0)
            source.close()
            for rooms in (*all_nodes, stranger):
                rooms.node.forget(checkpoint)
            shutil.rmtree(root / checkpoint.run)
            gc.collect()
    return figures


def sweep_judge(count: int, rounds: int) -> Figures:
    """What one node makes of the others' answers, in every round of its watch; eight ranks per node. No node has to run for it."""
    figures, record, views = Figures(), Record(), {}
    for node in range(count):
        name, tokens = f"{node:016x}", [mint_token() for _ in range(8)]
        for at, token in enumerate(tokens):
            receipt = Receipt(node=name, address=f"node-{node:04}.cluster.example.com:7070", token=token, rank=8 * node + at)
            record.shards.append(as_large(receipt))
        views[name] = View(WatchReply.Fate(state=Checkpoint.ACCEPTED, held=tokens))
    record.metadata.CopyFrom(Receipt(node=f"{0:016x}", token=mint_token()))
    own = f"{count - 1:016x}"
    held = set(views.pop(own).held)
    for _ in range(rounds):
        with figures.timed("judge"):
            judge(record, own, held, views, None)
        with figures.timed("serialize"):
            figures.add("record_bytes", len(AdoptRequest(record=record).SerializeToString()))
    return figures


async def limits(root: Path) -> dict[str, Any]:
    """At how many ranks a commit no longer fits into one message of gRPC, and what is said then."""
    found: dict[str, Any] = {}
    store = LocalStore(root)
    async with nodes(2, store, 32 * 2**20) as (own, other):
        checkpoint = CheckpointId.parse("limits/step-1")
        request = await sealed([own, other], checkpoint, [table_of(0, 1), table_of(1, 1)], pickle_of(1))
        record = (await own.peer_service.commits.commit(request)).record
        record.summary.attempt = f"{int(record.summary.attempt[:16], 16) + 1:016x}{record.summary.attempt[16:]}"
        large = as_large(record.shards[0])
        large.address, large.rank = "node-0511.cluster.example.com:7070", 20_000
        each = large.ByteSize() + 2  # its field, and its length
        fits = (MESSAGE_NBYTES - 1000) // each
        found["receipt_bytes"], found["adopt_ranks"] = each, fits
        for name, ranks in (("within", fits), ("beyond", fits + 100)):
            record.ClearField("shards")
            record.shards.extend([large] * ranks)
            adopt = AdoptRequest(record=record)
            began = time.perf_counter()
            try:
                await own.peers.call(other.node.address, "adopt", operator.methodcaller("Adopt", adopt), patience_seconds=2.0)
            except errors.CkptdError as exc:
                found[f"adopt_{name}"] = f"{type(exc).__name__}: {str(exc)[:300]}"
            found[f"adopt_{name}_bytes"], found[f"adopt_{name}_seconds"] = adopt.ByteSize(), time.perf_counter() - began
        async with grpc.aio.insecure_channel(own.node.address) as channel:
            stub: Any = DaemonStub(channel)
            request.ClearField("shards")
            request.shards.extend([large] * (fits + 1000))
            try:
                await stub.Commit(request)
            except grpc.aio.AioRpcError as exc:
                found["commit_beyond"] = f"{exc.code().name}: {exc.details()}"
    return found


async def absent(root: Path) -> dict[str, Any]:
    """How long a resolve at one of four nodes takes while another is gone; each asked twice."""
    found: dict[str, Any] = {}
    store, servers = Counted(LocalStore(root)), list[grpc.aio.Server]()
    async with nodes(4, store, 32 * 2**20, servers) as all_nodes:
        reader, pickle = all_nodes[-1], pickle_of(8)
        tables = [table_of(2 * rank, 2) for rank in range(4)]
        for run in ("durable", "pending"):
            checkpoint = CheckpointId.parse(f"{run}/step-1")
            attempt = await all_nodes[0].peer_service.commits.commit(await sealed(all_nodes, checkpoint, tables, pickle))
            if run == "durable":
                await become_durable(Figures(), all_nodes, attempt.name, store)

        async def resolves(what: str) -> None:
            for run in ("durable", "pending"):
                for turn in ("first", "second"):
                    began = time.perf_counter()
                    try:
                        await reader.restore.resolve(run)
                        said = "found"
                    except errors.CkptdError as exc:
                        said = f"{type(exc).__name__}: {str(exc)[:200]}"
                    found[f"{what}, {run}, {turn}"] = [round(time.perf_counter() - began, 3), said]

        await resolves("all there")
        await servers[1].stop(0)
        await resolves("one gone")
    return found


# -- what comes out ------------------------------------------------------------------------------

NODE_COLUMNS = (
    "commit_seconds commit_cpu_seconds record_bytes wire_bytes_per_participant resolve_seconds resolve_cpu_seconds open_seconds "
    "look_seconds look_bytes watch_cpu_seconds watch_bytes flush_seconds flush_cpu_seconds "
    "settle_seconds settle_cpu_seconds flush_puts flush_gets flush_lists "
    "flush_tell_calls flush_watch_calls "
    "resolve_durable_seconds"
)
RANK_COLUMNS = (
    "commit_seconds commit_cpu_seconds record_bytes receipt_bytes resolve_seconds resolve_cpu_seconds open_seconds open_cpu_seconds "
    "look_seconds look_bytes watch_bytes"
)
ITEM_COLUMNS = (
    "seal_seconds seal_cpu_seconds commit_seconds resolve_seconds open_seconds open_cpu_seconds table_bytes pickle_bytes metadata_bytes "
    "manifest_bytes ledger_commit_seconds ledger_commit_cpu_seconds summary_seconds resolve_durable_seconds open_durable_seconds "
    "open_durable_cpu_seconds"
)


def show(title: str, rows: dict[str, dict[str, float]], columns: str) -> None:
    """One line per figure, one column per row: there are more figures than rows."""
    shown = Shown("", *rows, title=title)
    for name in columns.split():
        shown.add_row(name, *(figure(name, row.get(name)) for row in rows.values()))
    Console(width=160).print(shown)


def figure(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if name.endswith("seconds") else f"{value:,.0f}"


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=numbers, default=[1, 2, 4, 8, 16, 32, 64], help="numbers of nodes")
    parser.add_argument("--ranks", type=numbers, default=[2, 64, 512, 2048], help="numbers of ranks of two nodes")
    parser.add_argument("--items", type=numbers, default=[1000, 10_000, 100_000, 1_000_000], help="numbers of items")
    parser.add_argument("--rounds", type=int, default=5, help="that count (%(default)s)")
    parser.add_argument("--once-from", type=int, default=1_000_000, help="so many items are measured once (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    options = parser.parse_args()
    logging.basicConfig(level="ERROR")
    found: dict[str, Any] = {
        "cpus": len(os.sched_getaffinity(0)),
        "load": os.getloadavg(),
        "torch": torch.__version__,
        "rounds": options.rounds,
    }
    with tempfile.TemporaryDirectory(prefix="ckptd-test-", dir="/dev/shm") as directory:
        root = Path(directory)

        def swept(name: str, row: str, measured: Coroutine[Any, Any, Figures]) -> None:
            """Keeps what there is so far: the last rows take longest."""
            began = time.perf_counter()
            figures = asyncio.run(measured)
            gc.collect()
            found.setdefault(name, {})[row] = figures.medians()
            found.setdefault(f"{name}_all", {})[row] = figures.found
            print(f"{name}, {row}: measured in {time.perf_counter() - began:.0f} s", file=sys.stderr)
            if options.json is not None:
                options.json.write_text(json.dumps(found, indent=1) + "\n")

        for count in options.nodes:
            swept("nodes", f"n={count}", sweep_nodes(count, options.rounds, root))
        for count in options.ranks:
            swept("ranks", f"ranks={count}", sweep_ranks(count, options.rounds, root))
        for count in options.items:
            rounds = 1 if count >= options.once_from else options.rounds
            for count_nodes in (1, 2):
                swept("items", f"{count} n={count_nodes}", sweep_items(count, count_nodes, rounds, root))
        for count in (8, 64, 512):
            figures = sweep_judge(count, options.rounds)
            found.setdefault("judge", {})[f"n={count}"] = figures.medians()
        found["limits"] = asyncio.run(limits(root))
        found["absent"] = asyncio.run(absent(root))
    for name, columns in (
        ("nodes", NODE_COLUMNS),
        ("ranks", RANK_COLUMNS),
        ("items", ITEM_COLUMNS),
        ("judge", "judge_seconds judge_cpu_seconds serialize_seconds record_bytes"),
    ):
        show(name, found.get(name, {}), columns)
    Console().print_json(data={name: found[name] for name in ("limits", "absent")})
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
