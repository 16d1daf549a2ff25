"""A trainer that saves and loads: ``saving_trainer.py ADDRESS FIRST COUNT TENSORS``; a line of JSON on what it holds after each step."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait

NUMEL = 1 << 20


def held() -> dict[str, int]:
    """What this process holds: resident bytes, descriptors, mappings of segments, threads."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "rss": int(status["VmRSS"].split()[0]) * 1024,
        "threads": int(status["Threads"]),
        "fds": len(os.listdir("/proc/self/fd")),
        "mappings": sum("/dev/shm/" in line for line in Path("/proc/self/maps").read_text().splitlines()),
    }


def main() -> None:
    address, first, count, tensors = sys.argv[1], *map(int, sys.argv[2:5])
    state = {f"t{number}": torch.zeros(NUMEL // tensors) for number in range(tensors)}
    for step in range(first, first + count):
        for number, tensor in enumerate(state.values()):
            tensor.fill_(step + number)
        dcp.save(state, checkpoint_id=f"run/step-{step}", storage_writer=DaemonStorageWriter(address=address))
        if step % 5 == 0:
            wait(f"run/step-{step}", address=address, timeout=60)
            dcp.load(state, checkpoint_id="run/latest", storage_reader=DaemonStorageReader(address=address))
            assert all((tensor == step + number).all() for number, tensor in enumerate(state.values()))
        print(json.dumps(held()), flush=True)


if __name__ == "__main__":
    main()
