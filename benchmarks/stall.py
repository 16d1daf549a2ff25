"""How long a save keeps training waiting, as ratios within one run.

Four ways to save the same state take turns, so that what the machine does meanwhile
hits all of them alike: the bare copy (numpy into touched shared memory), `dcp.save`
through ckptd, stock `dcp.save` to a local directory, stock `dcp.async_save` until it
returns. Values change before every save. What a save leaves for later (the flush, the
background write) is waited for outside of the timed region, so this is the steady
state of a job that saves less often than its store can take. Planning alone is timed,
too, because every `dcp.save` contains it. Nothing passes or fails here: figures of one
machine say nothing about another's, ratios do.

    python benchmarks/stall.py [--gib 1] [--tensors 200] [--world 1] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ckptd_client import DaemonStorageWriter, wait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COPY, CKPTD, STOCK, ASYNC, PLAN = "bare copy", "dcp.save, ckptd", "dcp.save, stock", "dcp.async_save, stock", "planning alone"


class Ways:
    """The ways to save one rank's state. Each returns what is to be done, untimed, afterwards."""

    def __init__(self, options: argparse.Namespace, scratch: Path, rank: int) -> None:
        self.scratch, self.rank, self.saves = scratch, rank, 0
        elements = int(options.gib * 2**30) // 4 // options.tensors // options.world
        torch.manual_seed(rank)
        self.state = {f"rank{rank}.layer{number}": torch.randn(elements) for number in range(options.tensors)}
        self.background = dist.new_group(backend="gloo")  # async_save on the default group would meet our own collectives
        nbytes = 4 * elements * options.tensors
        with tempfile.TemporaryFile(dir=options.shm) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            self.target = np.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=np.float32)
        self.target[:] = 0  # touches every page, through this mapping

    def change(self) -> None:
        """New values, as a training step would make them."""
        for tensor in self.state.values():
            tensor.mul_(0.999)

    def copy(self) -> Callable[[], object]:
        at = 0
        for tensor in self.state.values():
            np.copyto(self.target[at : at + tensor.numel()], tensor.numpy())
            at += tensor.numel()
        return lambda: None

    def ckptd(self) -> Callable[[], object]:
        self.saves += 1
        name = f"bench/step-{self.saves}"
        dcp_save(self.state, storage_writer=DaemonStorageWriter(name))
        return lambda: wait(name)

    def stock(self) -> Callable[[], object]:
        directory = self.scratch / "stock"
        dcp_save(self.state, storage_writer=FileSystemWriter(directory))
        return lambda: self.remove(directory)

    def in_background(self) -> Callable[[], object]:
        directory = self.scratch / "async"
        future: Any = dcp_async_save(self.state, storage_writer=FileSystemWriter(directory), process_group=self.background)

        def afterwards() -> None:
            future.result()
            self.remove(directory)

        return afterwards

    def plan(self) -> Callable[[], object]:
        """What DCP does before a single byte is written; of this rank's part only."""
        planner = DefaultSavePlanner()
        planner.set_up_planner(self.state, None, is_coordinator=True)
        plans, _ = planner.create_global_plan([planner.create_local_plan()])
        planner.finish_plan(plans[0])
        return lambda: None

    def remove(self, directory: Path) -> None:
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(directory)


def measure(rank: int, options: argparse.Namespace, scratch: Path) -> None:
    """One rank of the job. Rank 0 writes the seconds of every way, the slowest rank's, to a file."""
    dist.init_process_group("gloo", init_method=f"file://{scratch}/rendezvous", rank=rank, world_size=options.world)
    ways = Ways(options, scratch, rank)
    turns = {COPY: ways.copy, CKPTD: ways.ckptd, STOCK: ways.stock, ASYNC: ways.in_background, PLAN: ways.plan}
    seconds: dict[str, list[float]] = {way: [] for way in turns}
    for turn in range(options.warmup + options.rounds):
        for way, save in turns.items():
            ways.change()
            dist.barrier()
            began = time.perf_counter()
            afterwards = save()
            slowest = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
            afterwards()
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if turn >= options.warmup:
                seconds[way].append(slowest.item())
            if rank == 0:
                os.sync()
    if rank == 0:
        (scratch / "seconds.json").write_text(json.dumps(seconds))
    dist.destroy_process_group()


@contextlib.contextmanager
def daemon(options: argparse.Namespace, scratch: Path) -> Iterator[None]:
    """A daemon of this benchmark's own; sets CKPTD_ADDRESS."""
    shm_dir = tempfile.mkdtemp(prefix="ckptd-bench-", dir=options.shm)
    address = f"unix:{scratch}/ckptd.sock"
    command = [sys.executable, "-m", "ckptd", "serve", "--store", str(scratch / "store"), "--listen", address]
    command += ["--shm-dir", shm_dir, "--memory", options.memory, "--codec", options.codec]
    (scratch / "store").mkdir()
    with (scratch / "daemon.log").open("w") as log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
        try:
            if process.stdout is None or not process.stdout.readline().startswith("ready "):
                sys.exit(f"the daemon did not start:\n{(scratch / 'daemon.log').read_text()}")
            os.environ["CKPTD_ADDRESS"] = address
            yield
        finally:
            process.kill()
            shutil.rmtree(shm_dir, ignore_errors=True)


def report(options: argparse.Namespace, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Prints the table; returns the same as a JSON document."""
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    ratios = {way: median / medians[COPY] for way, median in medians.items()}
    title = f"{options.gib:g} GiB in {options.tensors} tensors, {options.world} rank(s), {options.rounds} rounds"
    table = Table("way", "median s", "least s", "most s", "x bare copy", title=title)
    for way, times in seconds.items():
        table.add_row(way, f"{medians[way]:.3f}", f"{min(times):.3f}", f"{max(times):.3f}", f"{ratios[way]:.2f}")
    Console().print(table)
    return {
        "gib": options.gib,
        "tensors": options.tensors,
        "world": options.world,
        "codec": options.codec,
        "cpus": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "seconds": seconds,
        "median_seconds": medians,
        "ratio_to_copy": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gib", type=float, default=1.0, help="of state, all ranks together (%(default)s)")
    parser.add_argument("--tensors", type=int, default=200, help="per rank (%(default)s)")
    parser.add_argument("--world", type=int, default=1, help="ranks (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="that count (%(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="rounds before (%(default)s)")
    parser.add_argument("--codec", default="zstd:1", help="of the daemon (%(default)s)")
    parser.add_argument("--memory", default="4GiB", help="of the daemon (%(default)s)")
    parser.add_argument("--shm", default="/dev/shm", help="a tmpfs (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ckptd-bench-") as directory:
        scratch = Path(directory)
        with daemon(options, scratch):
            torch.multiprocessing.spawn(measure, (options, scratch), nprocs=options.world)
        figures = report(options, json.loads((scratch / "seconds.json").read_text()))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
