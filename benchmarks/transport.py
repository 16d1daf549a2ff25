"""What moves a shard from one node's memory into another's, and what a second channel of our own would gain.

First the bytes alone: a sealed 256 MiB segment of a daemon in another process is pulled over loopback into a
segment here, through gRPC as daemons do it (`ckptd.pull`) with several sizes of piece and numbers of streams, and
over bare TCP sockets (sendfile into recv_into on the mapped segment; once as it is, once with a hash per piece as
`ckptd.pull` has it). Then what a user waits for: `dcp.load` of a 256 MiB checkpoint through a daemon that holds
nothing of it, with the daemon's own pull and with the bare sockets in its place; and through the daemon that holds
it, where nothing moves. All ways take turns, so that what the machine does meanwhile hits all alike. CPU seconds are
those of both ends. Nothing passes or fails here: figures of one machine say nothing about another's, ratios do.

    python benchmarks/transport.py [--mib 256] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import mmap
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import grpc
import torch
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ckptd import nearby, pull
from ckptd.cli.main import main as ckptd
from ckptd.codec import HASH_NBYTES, block_hash
from ckptd.peers import Peers
from ckptd.v1.daemon_pb2 import StatusRequest
from ckptd.v1.daemon_pb2_grpc import DaemonStub
from ckptd.v1.peer_pb2 import HoldingsRequest
from ckptd_client import DaemonStorageReader, DaemonStorageWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from concurrent.futures import Executor

    from ckptd.v1.manifest_pb2 import Receipt

MIB = 2**20
#: gRPC takes 4 MiB as one message, with what is around the bytes.
PIECES = {"0.25": MIB // 4, "1": MIB, "2": 2 * MIB, "4-": 4 * MIB - 4096}
STREAMS = (1, 2, 4)
#: Bytes per hash on the bare sockets, as `ckptd.pull` has them.
HASHED_NBYTES = pull.PIECE_NBYTES
ID = "transport/step-1"
TENSORS = 16
TICKS = os.sysconf("SC_CLK_TCK")
#: What a daemon does beside its own work: gives bytes over TCP, takes them so (with hashes), or nothing.
GIVES, TAKES, TAKES_HASHED, NOTHING = "gives", "takes", "takes-hashed", "nothing"


# -- the second channel: a thread beside the daemon that gives, and what takes the place of `pull` -----------------


def give(server: socket.socket, shm_dir: Path) -> None:
    """Serves segments by name to whoever connects; asks for no certificate."""
    while True:
        connection, _ = server.accept()
        threading.Thread(target=given, args=(connection, shm_dir), daemon=True).start()


def given(connection: socket.socket, shm_dir: Path) -> None:
    with connection, connection.makefile("r") as asked:
        wanted = json.loads(asked.readline())
        with (
            (shm_dir / f"{wanted['token']}.sealed").open("rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as whole,
            memoryview(whole) as view,
        ):
            for start, end in wanted["ranges"]:
                for first, stop in pieces(start, end, hashed=wanted["hashed"]):
                    if wanted["hashed"]:
                        with view[first:stop] as piece:
                            connection.sendall(block_hash(piece))
                    at = first
                    while at < stop:
                        at += os.sendfile(connection.fileno(), file.fileno(), at, stop - at)


def take(port: int, token: str, ranges: Sequence[pull.Range], path: Path, *, hashed: bool) -> int:
    with socket.create_connection(("127.0.0.1", port)) as connection, path.open("r+b") as file:
        connection.sendall(json.dumps({"token": token, "ranges": ranges, "hashed": hashed}).encode() + b"\n")
        with mmap.mmap(file.fileno(), 0) as whole, memoryview(whole) as view:
            for start, end in ranges:
                for at, stop in pieces(start, end, hashed=hashed):
                    with view[at:stop] as piece:
                        digest = received(connection, memoryview(bytearray(HASH_NBYTES))) if hashed else None
                        received(connection, piece)
                        if digest is not None and block_hash(piece) != bytes(digest):
                            raise ValueError("bytes changed on the way")
    return sum(end - start for start, end in ranges)


def received(connection: socket.socket, into: memoryview) -> memoryview:
    at = 0
    while at < len(into):
        nbytes = connection.recv_into(into[at:])
        if nbytes == 0:
            raise ConnectionError("it stopped in the middle")
        at += nbytes
    return into


def pieces(start: int, end: int, *, hashed: bool) -> Iterator[pull.Range]:
    step = HASHED_NBYTES if hashed else max(end - start, 1)
    for at in range(start, end, step):
        yield at, min(at + step, end)


async def taken(port: int, token: str, ranges: Sequence[pull.Range], path: Path, threads: Executor, *, hashed: bool) -> int:
    """What `pull` does, in as many streams, over bare sockets."""
    loop = asyncio.get_running_loop()

    def one(share: list[pull.Range]) -> int:
        return take(port, token, share, path, hashed=hashed)

    return sum(await asyncio.gather(*(loop.run_in_executor(threads, one, share) for share in pull.shared_out(ranges))))


def be_daemon(piece: int, port: int, role: str, shm_dir: Path, arguments: list[str]) -> None:
    """A daemon with another size of piece, and with a part in the second channel."""
    pull.PIECE_NBYTES = piece  # type: ignore[misc]
    if role == GIVES:
        threading.Thread(target=give, args=(socket.create_server(("127.0.0.1", port)), shm_dir), daemon=True).start()
    elif role != NOTHING:

        async def instead(_: Peers, _address: str, token: str, ranges: Sequence[pull.Range], path: Path, threads: Executor) -> int:
            return await taken(port, token, ranges, path, threads, hashed=role == TAKES_HASHED)

        nearby.pull = instead  # type: ignore[attr-defined, assignment]
    sys.exit(ckptd(["serve", "--shm-dir", str(shm_dir), *arguments]))


# -- daemons and what they hold --------------------------------------------------------------------


class Daemon:
    """A daemon process; a context manager."""

    def __init__(
        self, scratch: Path, name: str, *, piece: int = pull.PIECE_NBYTES, channel: str = NOTHING, giver: Daemon | None = None
    ) -> None:
        self.shm_dir = Path(tempfile.mkdtemp(prefix="ckptd-test-", dir="/dev/shm"))
        self.peer = f"127.0.0.1:{free_port()}"
        self.port: int = free_port() if giver is None else giver.port
        self.address = f"unix:{scratch}/{name}.sock"
        self.log = scratch / f"{name}.log"
        role = channel if giver is not None else GIVES
        wrapped = [sys.executable, __file__, "--daemon", str(piece), str(self.port), role, str(self.shm_dir)]
        command = [*wrapped, "--store", str(scratch / "store"), "--shared-store", "--memory", "640MiB"]
        command += ["--listen", self.address, "--listen", self.peer, *([] if giver is None else ["--peer", giver.peer])]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)

    def __enter__(self) -> Self:
        if self.process.stdout is None or not self.process.stdout.readline().startswith("ready "):
            self.__exit__()
            sys.exit(f"the daemon did not start:\n{self.log.read_text()}")
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        shutil.rmtree(self.shm_dir, ignore_errors=True)

    def cpu_seconds(self) -> float:
        """Of all its threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def bytes_from_peers(self) -> int:
        with grpc.insecure_channel(self.address) as channel:
            stub: Any = DaemonStub(channel)
            return int(stub.Status(StatusRequest()).bytes_from["peer"])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def state_of(nbytes: int) -> dict[str, torch.Tensor]:
    return {f"t{number}": torch.randint(-(2**31), 2**31 - 1, (nbytes // TENSORS // 4,), dtype=torch.int32) for number in range(TENSORS)}


def save(daemon: Daemon, state: dict[str, torch.Tensor]) -> None:
    """Held in that daemon's memory alone."""
    dcp_save(state, storage_writer=DaemonStorageWriter(ID, address=daemon.address, durable=False), no_dist=True)


async def shard_of(peers: Peers, daemon: Daemon) -> Receipt:
    """What the daemon says that it holds."""

    async def ask(request: HoldingsRequest) -> Any:
        async def all_of(call: Any) -> list[Any]:
            return [one async for one in call]

        return (await peers.call(daemon.peer, "tell", lambda stub: all_of(stub.Holdings(request))))[0]

    name = (await ask(HoldingsRequest(id=ID))).summary.attempt
    receipt: Receipt = (await ask(HoldingsRequest(id=ID, attempt=name))).record.shards[0]
    return receipt


# -- what is measured ------------------------------------------------------------------------------


class Seconds:
    """Of each way: seconds, and CPU seconds of the processes that took part."""

    def __init__(self) -> None:
        self.wall: dict[str, list[float]] = defaultdict(list)
        self.cpu: dict[str, list[float]] = defaultdict(list)

    @contextlib.contextmanager
    def timed(self, way: str, daemons: Collection[Daemon], *, counts: bool) -> Iterator[None]:
        cpu = -time.process_time() - sum(daemon.cpu_seconds() for daemon in daemons)
        began = time.perf_counter()
        yield
        wall = time.perf_counter() - began
        cpu += time.process_time() + sum(daemon.cpu_seconds() for daemon in daemons)
        if counts:
            self.wall[way].append(wall)
            self.cpu[way].append(cpu)


async def bytes_alone(seconds: Seconds, daemons: dict[str, Daemon], target: Path, rounds: int) -> None:
    """Pulls the segment in every way, in turn."""
    peers = Peers("")
    threads = ThreadPoolExecutor(16)
    shards = {label: await shard_of(peers, daemon) for label, daemon in daemons.items()}
    with target.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(shard.nbytes for shard in shards.values()))
    pull.STREAM_NBYTES = 1  # type: ignore[misc]
    for turn in range(rounds + 1):
        for streams in STREAMS:
            pull.STREAMS = streams  # type: ignore[misc]
            for label, daemon in daemons.items():
                pull.PIECE_NBYTES = PIECES[label]  # type: ignore[misc]
                shard = shards[label]
                with seconds.timed(f"gRPC, pieces of {label} MiB, {streams} streams", [daemon], counts=turn > 0):
                    await pull.pull(peers, daemon.peer, shard.token, [(0, shard.nbytes)], target, threads)
            daemon, shard = daemons["2"], shards["2"]
            for name, hashed in (("TCP, bare", False), ("TCP, with hashes", True)):
                with seconds.timed(f"{name}, {streams} streams", [daemon], counts=turn > 0):
                    await taken(daemon.port, shard.token, [(0, shard.nbytes)], target, threads, hashed=hashed)
            with (daemon.shm_dir / f"{shard.token}.sealed").open("rb") as sent, target.open("rb") as got:
                if sent.read(shard.nbytes) != got.read(shard.nbytes):
                    sys.exit("what arrived is not what was sent")
    await peers.close()
    threads.shutdown()


def end_to_end(seconds: Seconds, giver: Daemon, takers: dict[str, Daemon], state: dict[str, torch.Tensor], rounds: int) -> None:
    """Loads what only the giver's memory has, in every way, in turn; a new attempt each round, so that nothing is there yet."""
    into = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    nbytes = sum(tensor.nbytes for tensor in state.values())
    for turn in range(rounds + 1):
        save(giver, state)
        for way, daemon in {"out of the own node's memory": giver, **takers}.items():
            before = daemon.bytes_from_peers()
            with seconds.timed(f"dcp.load, {way}", {giver, daemon}, counts=turn > 0):
                dcp_load(into, storage_reader=DaemonStorageReader(ID, address=daemon.address), no_dist=True)
            if any(not torch.equal(into[name], state[name]) for name in state):
                sys.exit("what was loaded is not what was saved")
            if daemon is not giver and daemon.bytes_from_peers() - before < nbytes:
                sys.exit("not all of it came from the other node")
            for tensor in into.values():
                tensor.zero_()


def report(seconds: Seconds, nbytes: int) -> dict[str, Any]:
    table = Table("way", "median s", "least s", "most s", "GB/s", "CPU s per GiB", title=f"{nbytes // MIB} MiB")
    for way, walls in seconds.wall.items():
        wall, cpu = statistics.median(walls), statistics.median(seconds.cpu[way])
        figures = (wall, min(walls), max(walls), nbytes / wall / 1e9, cpu * 2**30 / nbytes)
        table.add_row(way, *(f"{figure:.3f}" for figure in figures))
    Console(width=120).print(table)
    return {
        "nbytes": nbytes,
        "cpus": len(os.sched_getaffinity(0)),
        "load": os.getloadavg(),
        "torch": torch.__version__,
        "seconds": seconds.wall,
        "cpu_seconds": seconds.cpu,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=int, default=256, help="of state (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="that count (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # one process is meant
    seconds, state = Seconds(), state_of(options.mib * MIB)
    with (
        tempfile.TemporaryDirectory(prefix="ckptd-test-") as directory,
        tempfile.TemporaryDirectory(prefix="ckptd-test-", dir="/dev/shm") as shm,
    ):
        scratch = Path(directory)
        with contextlib.ExitStack() as stack:
            started = {label: Daemon(scratch, f"giver-{label}", piece=piece) for label, piece in PIECES.items()}
            for daemon in started.values():
                save(stack.enter_context(daemon), state)
            asyncio.run(bytes_alone(seconds, started, Path(shm) / "target", options.rounds))
        with Daemon(scratch, "giver") as giver, contextlib.ExitStack() as stack:
            ways: dict[str, Callable[[], Daemon]] = {
                "from a peer, gRPC": lambda: Daemon(scratch, "grpc", giver=giver),
                "from a peer, bare TCP": lambda: Daemon(scratch, "tcp", channel=TAKES, giver=giver),
                "from a peer, TCP with hashes": lambda: Daemon(scratch, "hashed", channel=TAKES_HASHED, giver=giver),
            }
            takers = {way: stack.enter_context(make()) for way, make in ways.items()}
            end_to_end(seconds, giver, takers, state, options.rounds)
    figures = report(seconds, options.mib * MIB)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--daemon"]:
        be_daemon(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5]), sys.argv[6:])
    main()
