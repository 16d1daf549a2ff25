"""C36: what a save leaves for later costs the trainer nothing: the daemon does it, at low priority, and noise grows by no more than 1 %."""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptd_client import DaemonStorageWriter, wait
from daemons import DaemonProcess

MIB = 1024 * 1024
#: From the cheapest to the smallest.
CODECS = ["none", "zstd:1", "zstd:19"]


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, DaemonProcess]]:
    """One for each codec."""
    made = {codec: DaemonProcess(str(tmp_path_factory.mktemp("store")), "--codec", codec) for codec in CODECS}
    try:
        for daemon in made.values():
            daemon.start()
        yield made
    finally:
        for daemon in made.values():
            daemon.remove()


def stored(daemon: DaemonProcess, id: str, state: dict[str, torch.Tensor]) -> int:
    """Saves; bytes of everything that the checkpoint is in the store."""
    dcp.save(state, storage_writer=DaemonStorageWriter(id, address=daemon.address))
    wait(id, address=daemon.address, timeout=60)
    line = daemon.list()[id]
    assert line["raw_bytes"] == sum(tensor.nbytes for tensor in state.values())
    files = [path for path in (Path(daemon.store) / id).rglob("*") if path.is_file()]
    assert line["stored_bytes"] == sum(path.stat().st_size for path in files if path.suffix == ".distcp")
    return sum(path.stat().st_size for path in files)


@pytest.mark.parametrize("codec", CODECS[:2])
@pytest.mark.parametrize("tensors", [1, 16])
def test_noise_that_cannot_be_compressed_takes_at_most_one_percent_more_than_it_is(
    daemons: dict[str, DaemonProcess], codec: str, tensors: int
) -> None:
    bits = torch.randint(-(2**15), 2**15, (tensors, 8 * MIB // tensors), dtype=torch.int16, generator=torch.Generator().manual_seed(7))
    noise = {f"t{number}": row for number, row in enumerate(bits.view(torch.bfloat16))}
    assert 16 * MIB < stored(daemons[codec], f"noise/step-{tensors}", noise) <= 1.01 * 16 * MIB


def test_the_level_of_compression_is_chosen_by_who_runs_the_daemon(daemons: dict[str, DaemonProcess]) -> None:
    words = [f"{random.Random(seed).getrandbits(40):x}" for seed in range(3000)]
    text = " ".join(random.Random(7).choices(words, k=200_000)).encode()[: 2 * MIB]
    state = {"text": torch.frombuffer(bytearray(text), dtype=torch.uint8)}
    none, fast, small = (stored(daemons[codec], "text/step-1", state) for codec in CODECS)
    assert small < 0.95 * fast < 0.5 * none
    assert none <= 1.01 * len(text)


def test_a_flush_is_the_work_of_niced_threads_of_the_daemon_and_not_of_the_trainer(daemons: dict[str, DaemonProcess]) -> None:
    daemon = daemons["zstd:1"]
    command = [sys.executable, __file__, str(daemon.pid)]
    done = subprocess.run(
        command, env={**daemon.env, "CKPTD_ADDRESS": daemon.address}, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    cost = json.loads(done.stdout)
    flush = sum(cost["daemon"].values())
    assert flush > 0.1, "too little to compare with"
    # In CPU seconds, of which a busy machine makes no more. A copy takes a tenth of what compression does.
    assert cost["hand over"] < 0.5 * flush, cost
    assert cost["train on"] < 0.1 * flush, cost
    assert sum(seconds for nice, seconds in cost["daemon"].items() if int(nice) >= 10) > 0.8 * flush, cost


# --- the trainer ---------------------------------------------------------------------------------------------------


def cpu_seconds() -> float:
    """Of this process, all its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def cpu_seconds_by_niceness(pid: int) -> dict[int, float]:
    """Of another process."""
    found: dict[int, float] = defaultdict(float)
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            found[int(fields[16])] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def main(daemon_pid: int) -> None:
    """Saves twice, because the first maps memory for all; tells what the second cost whom."""
    state = {f"t{number}": torch.randn(4 * MIB, generator=torch.Generator().manual_seed(number)) for number in range(8)}
    dcp.save(state, storage_writer=DaemonStorageWriter("cost/step-1"))
    wait("cost/step-1", timeout=60)
    for tensor in state.values():
        tensor.mul_(0.999)
    began = cpu_seconds()
    dcp.save(state, storage_writer=DaemonStorageWriter("cost/step-2"))
    handed_over, before = cpu_seconds(), cpu_seconds_by_niceness(daemon_pid)
    wait("cost/step-2", timeout=60)
    ended, after = cpu_seconds(), cpu_seconds_by_niceness(daemon_pid)
    spent = {nice: after[nice] - before[nice] for nice in after}
    print(json.dumps({"hand over": handed_over - began, "train on": ended - handed_over, "daemon": spent}))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    main(int(sys.argv[1]))
