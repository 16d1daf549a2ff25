"""A trainer that is killed by a test: ``python crashing_trainer.py ADDRESS WHEN``.

WHEN is `copying` (saves one after another until it is killed), `forked` (the same, with a child
that keeps all descriptors open and outlives it by minutes) or `saved` (says so and waits to be
killed after `dcp.save` has returned).
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed.checkpoint as dcp

from ckptd_client import DaemonStorageWriter


def main() -> None:
    address, when = sys.argv[1:]
    state = {f"t{number}": torch.full((1024, 1024), float(number)) for number in range(64)}
    if when in ("copying", "forked"):
        writer = DaemonStorageWriter(address=address, durable=False)
        dcp.save(state, checkpoint_id="copy/step-0", storage_writer=writer)
        if when == "forked" and (child := os.fork()) == 0:
            time.sleep(600)
            os._exit(0)
        print(when if when == "copying" else f"forked {child}", flush=True)
        for step in range(1, 10_000):
            dcp.save(state, checkpoint_id=f"copy/step-{step}", storage_writer=writer)
    writer = DaemonStorageWriter(address=address)
    dcp.save(state, checkpoint_id="saved/step-1", storage_writer=writer)
    print("saved", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
