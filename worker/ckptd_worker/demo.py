"""What ``make demo`` runs: a training job that is killed twice, and loses nothing.

A daemon on a temporary local directory; the trainer at 2 workers, SIGKILLed mid-run;
resumed at 3 workers, then at 1; the daemon SIGKILLed in the middle of a flush, and
restarted; at the end stock PyTorch reads the last checkpoint. Whatever does not go as
it must ends the demo with one line that says so, the tails of the logs and exit status
1. Leaves no process, no shared memory and (without ``--keep``) no file behind.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ckptd_client import DaemonStorageReader
from ckptd_worker.children import Child, Unexpected
from ckptd_worker.stock import digests, load_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RUN = "demo"
SAVE_EVERY = 5
#: Free bytes that the demo needs in /dev/shm: a few checkpoints of 40 MB.
MEMORY_NBYTES = 384 * 1024 * 1024
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - inside it, a directory of our own
#: Stored bytes, out of some 36 MB, after which a flush counts as being in the middle.
PART_NBYTES = 4 * 1024 * 1024
#: Tries at hitting that middle: a flush lasts some tenths of a second.
TRIES = 5


class Demo:
    """Where everything of one demo lies, what it has started, and what happened so far."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.began = time.monotonic()
        self.rows: list[tuple[str, str, float]] = []
        self.children: list[Child] = []
        if shutil.disk_usage(SHARED_MEMORY).free < MEMORY_NBYTES:
            raise Unexpected(f"{SHARED_MEMORY} has less than {MEMORY_NBYTES >> 20} MiB free; for a container: docker run --shm-size=1g")
        self.home = Path(tempfile.mkdtemp(prefix="ckptd-demo-"))
        self.shm_dir = Path(tempfile.mkdtemp(prefix="ckptd-demo-", dir=SHARED_MEMORY))
        self.store = self.home / "store"
        self.store.mkdir()
        self.address = f"unix:{self.home}/ckptd.sock"
        self.env = {
            **os.environ,
            "CKPTD_ADDRESS": self.address,
            "COLUMNS": str(console.width),
            "GLOO_SOCKET_IFNAME": "lo",  # one machine, whatever its name resolves to
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.home),  # where torchrun leaves files when it is killed
        }

    def start(self, name: str, *command: str) -> Child:
        """Starts a Python module; its log is named after `name`."""
        log = self.home / f"{len(self.children):02d}-{name.replace(' ', '-')}.log"
        child = Child(name, [sys.executable, *command], log=log, env=self.env)
        self.children.append(child)
        return child

    def daemon(self) -> Child:
        """Starts the daemon; returns when it has printed that it is ready."""
        command = ["-m", "ckptd", "serve", "--store", str(self.store), "--listen", self.address]
        child = self.start("daemon", *command, "--shm-dir", str(self.shm_dir), "--memory", str(MEMORY_NBYTES))
        child.until("it is ready", lambda: any(line.startswith("ready ") for line in child.lines()))
        return child

    def trainer(self, workers: int, steps: int) -> Child:
        """Starts the trainer: under torchrun, or for one worker alone."""
        launch = [] if workers == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
        module = ["-m", "ckptd_worker.train", "--run-name", RUN, "--steps", str(steps), "--save-every", str(SAVE_EVERY)]
        return self.start(f"trainer at {workers} workers" if workers > 1 else "trainer alone", *launch, *module)

    def ckptd(self, *arguments: str) -> str:
        """Runs the CLI to its end; returns what it printed."""
        command = [sys.executable, "-m", "ckptd", *arguments]
        done = subprocess.run(command, env=self.env, stdout=subprocess.PIPE, text=True, timeout=60, check=False)  # noqa: S603
        if done.returncode != 0:
            raise Unexpected(f"ckptd {' '.join(arguments)} ended with exit status {done.returncode}")
        return done.stdout

    def listed(self, name: str) -> dict[str, Any]:
        """What ``ckptd list --json`` says of one checkpoint; {} if it is not listed."""
        listed: list[dict[str, Any]] = json.loads(self.ckptd("list", "--json"))
        return next((checkpoint for checkpoint in listed if checkpoint["id"] == name), {})

    @contextmanager
    def step(self, what: str) -> Iterator[list[str]]:
        """Times one line of the final table; the caller appends what happened to the list."""
        self.console.print(f"[dim]{time.monotonic() - self.began:6.1f} s[/]  {what} …")
        began = time.monotonic()
        happened: list[str] = []
        yield happened
        self.rows.append((what, "; ".join(happened), time.monotonic() - began))

    def table(self) -> Table:
        """What happened, and how long it took."""
        table = Table(title="ckptd demo")
        table.add_column("step")
        table.add_column("what happened")
        table.add_column("seconds", justify="right")
        for what, happened, seconds in self.rows:
            table.add_row(what, happened, f"{seconds:.1f}")
        table.add_section()
        table.add_row("all", "", f"{time.monotonic() - self.began:.1f}")
        return table

    def tails(self, count: int = 20) -> None:
        """Prints the last lines of every log."""
        for child in self.children:
            self.console.print(f"--- {child.name}: last lines of its log", style="dim")
            self.console.print("\n".join(line[:200] for line in child.lines()[-count:]), markup=False)

    def close(self, *, keep: bool) -> None:
        """Kills what still runs and removes what was made."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for child in reversed(self.children):
            child.kill()
        shutil.rmtree(self.shm_dir, ignore_errors=True)
        if not keep:
            shutil.rmtree(self.home, ignore_errors=True)


def said(child: Child, start: str) -> list[str]:
    """What follows `start` in each line of the trainer that begins with it, as far as printed by now."""
    start = f"[train] {start}"
    return [line.removeprefix(start) for line in child.lines() if line.startswith(start)]


def last_step(child: Child, word: str) -> tuple[int, str]:
    """Step of the checkpoint that the trainer last "saved" or "resumed", and how long that took. Raises Unexpected."""
    found = said(child, f"{word} {RUN}/step-")
    if not found:
        raise Unexpected(f"{child.name} never {word} anything")
    return int(found[-1].split()[0]), found[-1].rpartition(" in ")[2]


def nbytes_in(checkpoint: Path) -> int:
    """Bytes that a checkpoint has in the store so far, under whatever names."""
    total = 0
    for file in checkpoint.rglob("*"):
        with suppress(FileNotFoundError):  # it has got its final name meanwhile
            total += file.stat().st_size if file.is_file() else 0
    return total


def is_durable(checkpoint: Path) -> bool:
    """Whether the file is there that makes a directory of the store a checkpoint."""
    return (checkpoint / ".metadata").exists()


def under_way(checkpoint: Path) -> bool:
    """Whether a good part of a checkpoint is in the store, or all of it."""
    return nbytes_in(checkpoint) >= PART_NBYTES or is_durable(checkpoint)


def kill_in_flush(demo: Demo, daemon: Child, first: int) -> tuple[Child, str]:
    """Trains alone up to step `first` or a little further; SIGKILLs the daemon in the middle of the last flush.

    Returns the restarted daemon and the id of the checkpoint that was being flushed.
    """
    for steps in range(first, first + TRIES * SAVE_EVERY, SAVE_EVERY):
        name = f"{RUN}/step-{steps}"
        checkpoint = demo.store / name
        with demo.step(f"resume alone, up to step {steps}") as happened:
            trainer = demo.trainer(1, steps)
            trainer.until(f"{name} is accepted", partial(said, trainer, f"saved {name} "), every=0.002)
            trainer.until("its flush is under way", partial(under_way, checkpoint), every=0.001)
            if not is_durable(checkpoint):
                daemon.kill()
            resumed, seconds = last_step(trainer, "resumed")
            happened.append(f"resumed at step {resumed} in {seconds}; {name} is accepted")
        if daemon.process.poll() is None:
            trainer.finish()  # the flush was faster than we: once more
            continue
        hit = not is_durable(checkpoint)
        with demo.step("SIGKILL the daemon in the middle of that flush, restart it") as happened:
            happened.append(
                f"{nbytes_in(checkpoint) / 1e6:.1f} MB were in the store, and no .metadata" if hit else "too late: it was durable"
            )
            daemon = demo.daemon()
        with demo.step("what was accepted becomes durable") as happened:
            trainer.finish()
            if not is_durable(checkpoint) or demo.listed(name).get("state") != "durable":
                raise Unexpected(f"{name} is not durable, though the trainer was told so")
            happened.append(f"{name} is durable, the trainer exits 0")
        if hit:
            return daemon, name
    raise Unexpected(f"no flush could be hit in {TRIES} tries")


def play(demo: Demo) -> None:
    """All of the demo, step by step. Raises Unexpected."""
    with demo.step("start the daemon") as happened:
        daemon = demo.daemon()
        happened.append("ready")

    with demo.step("train at 2 workers, SIGKILL all of them mid-run") as happened:
        trainer = demo.trainer(2, steps=1000)
        trainer.until("two checkpoints and two steps", partial(said, trainer, f"step {2 * SAVE_EVERY + 2} "))
        count = trainer.kill()
        last, seconds = last_step(trainer, "saved")
        happened.append(f"{count} processes killed after step {said(trainer, 'step ')[-1].split()[0]}; saved step {last} in {seconds}")

    steps = last + SAVE_EVERY
    with demo.step(f"resume at 3 workers, up to step {steps}") as happened:
        trainer = demo.trainer(3, steps)
        trainer.finish()
        resumed, seconds = last_step(trainer, "resumed")
        if resumed < last:
            raise Unexpected(f"resumed at step {resumed}, though step {last} was accepted")
        happened.append(f"resumed at step {resumed} in {seconds}")

    daemon, name = kill_in_flush(demo, daemon, steps + SAVE_EVERY)

    with demo.step("ckptd list") as happened:
        demo.console.print(demo.ckptd("list"), markup=False, soft_wrap=True)
        happened.append(f"{name}: {demo.listed(name)['raw_bytes'] / 1e6:.0f} MB of state")

    with demo.step("stock dcp.load of that checkpoint against ckptd's own") as happened:
        stock = demo.start("stock", "-m", "ckptd_worker.stock", str(demo.store / name))
        ours = digests(load_all(DaemonStorageReader(name, address=demo.address)))
        stock.finish()
        theirs = json.loads(stock.lines()[-1])
        if ours != theirs:
            different = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
            raise Unexpected(f"stock and ckptd differ in {len(different)} of {len(ours)} entries: {', '.join(different[:5])}")
        whole = hashlib.sha256(json.dumps(ours, sort_keys=True).encode()).hexdigest()
        happened.append(f"{len(ours)} entries, all equal, SHA-256 {whole[:16]}")

    with demo.step("SIGTERM the daemon") as happened:
        daemon.process.send_signal(signal.SIGTERM)
        daemon.finish(timeout=30)
        happened.append("exits 0")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo; returns the exit status."""
    parser = argparse.ArgumentParser(prog="ckptd_worker.demo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keep", action="store_true", help="keep the store and the logs")
    options = parser.parse_args(argv)
    console = Console(highlight=False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        demo = Demo(console)
    except Unexpected as error:
        console.print(f"demo failed: {error}", style="red", markup=False)
        return 1
    try:
        play(demo)
        console.print(demo.table())
        return 0
    except Unexpected as error:
        demo.tails()
        console.print(f"demo failed: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        demo.close(keep=options.keep)
        if options.keep:
            console.print(f"store and logs are kept in {demo.home}")


if __name__ == "__main__":
    sys.exit(main())
