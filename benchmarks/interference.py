"""How much what a save leaves for later slows training down, as ratios of step times within one run.

A small model is trained on the CPU, the worst case: its steps need the cores, the memory and
the interpreter that a save's background work needs, too. Steps are timed in turns: alone, while
the ckptd daemon flushes a checkpoint, and while stock `dcp.async_save` writes the same state.
The time of the save call itself is not part of it (stall.py measures that). Nothing passes or
fails here: figures of one machine say nothing about another's, ratios do.

    python benchmarks/interference.py [--gib 0.25] [--rounds 4] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from stall import daemon
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ckptd_client import DaemonStorageWriter, wait

if TYPE_CHECKING:
    from collections.abc import Callable

ALONE, CKPTD, ASYNC = "alone", "while ckptd flushes", "while dcp.async_save writes"


class Training:
    """A model whose step takes some milliseconds, and a state beside it that makes saves as large as they should be."""

    def __init__(self, nbytes: int) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(16)))
        # One parameter at a time: many short calls from Python, as a real training script makes them.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.batch = torch.randn(64, 256)
        self.state = {f"layer{number}": torch.randn(nbytes // 4 // 50) for number in range(50)}

    def step(self) -> float:
        """Seconds that one step took."""
        began = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        return time.perf_counter() - began

    def steps_until(self, ended: Callable[[], bool]) -> list[float]:
        """Seconds of each step until something else has ended."""
        found = []
        while not ended():
            found.append(self.step())
        return found


def beside_ckptd(training: Training, turn: int) -> list[float]:
    name = f"bench/step-{turn}"
    dcp_save(training.state, storage_writer=DaemonStorageWriter(name))
    waiting = threading.Thread(target=wait, args=(name,))
    waiting.start()
    return training.steps_until(lambda: not waiting.is_alive())


def beside_stock(training: Training, group: Any, directory: Path) -> list[float]:
    future: Any = dcp_async_save(training.state, storage_writer=FileSystemWriter(directory), process_group=group)
    found = training.steps_until(future.done)
    future.result()
    shutil.rmtree(directory)
    return found


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, list[float]]:
    """Seconds of each step, by what happened beside it."""
    dist.init_process_group("gloo", init_method=f"file://{scratch}/rendezvous", rank=0, world_size=1)
    group = dist.new_group(backend="gloo")
    training = Training(int(options.gib * 2**30))
    seconds: dict[str, list[float]] = {ALONE: [], CKPTD: [], ASYNC: []}
    for turn in range(options.rounds + 1):
        for tensor in training.state.values():
            tensor.mul_(0.999)
        until = time.monotonic() + options.alone
        steps = {
            ALONE: training.steps_until(lambda until=until: time.monotonic() > until),
            CKPTD: beside_ckptd(training, turn),
            ASYNC: beside_stock(training, group, scratch / "async"),
        }
        os.sync()
        if turn > 0:  # the first warms up
            for way, found in steps.items():
                seconds[way] += found
    dist.destroy_process_group()
    return seconds


def report(options: argparse.Namespace, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Prints the table; returns the same as a JSON document."""
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    ratios = {way: median / medians[ALONE] for way, median in medians.items()}
    table = Table("steps", "number", "median ms", "x alone", title=f"steps beside a save of {options.gib:g} GiB, {options.rounds} rounds")
    for way, times in seconds.items():
        table.add_row(way, str(len(times)), f"{1000 * medians[way]:.1f}", f"{ratios[way]:.2f}")
    Console().print(table)
    return {
        "gib": options.gib,
        "codec": options.codec,
        "cpus": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "steps": {way: len(times) for way, times in seconds.items()},
        "median_seconds": medians,
        "ratio_to_alone": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gib", type=float, default=0.25, help="of state (%(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="that count (%(default)s)")
    parser.add_argument("--alone", type=float, default=1.0, metavar="S", help="seconds of steps alone, per round (%(default)s)")
    parser.add_argument("--codec", default="zstd:1", help="of the daemon (%(default)s)")
    parser.add_argument("--memory", default="2GiB", help="of the daemon (%(default)s)")
    parser.add_argument("--shm", default="/dev/shm", help="a tmpfs (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ckptd-bench-") as directory:
        scratch = Path(directory)
        with daemon(options, scratch):
            seconds = measure(options, scratch)
        figures = report(options, seconds)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
