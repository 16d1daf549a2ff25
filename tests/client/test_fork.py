"""C18: a forked child neither hangs nor harms the connection of its parent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from daemons import DaemonProcess

SCRIPT = """
import os, sys, traceback, warnings
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import DataLoader, Dataset
from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait

warnings.filterwarnings("ignore", message="torch.distributed is disabled")
warnings.filterwarnings("ignore", message="This process .* is multi-threaded")


class Numbers(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return index


def save(step):
    dcp.save({"w": torch.full((1000,), float(step)), "step": step}, checkpoint_id=f"fork/step-{step}", storage_writer=DaemonStorageWriter())


def load(step):
    state = {"w": torch.zeros(1000), "step": 0}
    dcp.load(state, storage_reader=DaemonStorageReader(f"fork/step-{step}"))
    assert state["step"] == step and bool((state["w"] == step).all()), state


def in_a_child(work):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert status == 0, status


def child_work(step):
    load(step - 1)
    save(step)
    load(step)
    wait(f"fork/step-{step}", timeout=30)


save(0)  # the channel and the lease are open from here on
seen = 0
for number, batch in enumerate(DataLoader(Numbers(), batch_size=50, num_workers=2, multiprocessing_context="fork")):
    seen += len(batch)
    if number in (3, 10):
        save(number)
        load(number)
assert seen == 1000
save(20)
in_a_child(lambda: child_work(21))
save(22)
load(22)
load(21)
in_a_child(lambda: in_a_child(lambda: child_work(23)))
pid = os.fork()
if pid == 0:
    sys.exit(0)  # a child that ends in the ordinary way runs the parent's atexit functions
os.waitpid(pid, 0)
save(24)
load(24)
wait("fork/step-24", timeout=30)
print("done")
"""


def test_c18_dataloader_workers_and_calls_from_forked_children(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with DaemonProcess(str(tmp_path / "store")) as daemon:
        done = subprocess.run(
            [sys.executable, str(script)],
            env={**daemon.env, "CKPTD_ADDRESS": daemon.address},
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


FORKS = """
import os, sys
from ckptd_client.channel import connect

daemon = connect(None)
daemon.hello()
lease = daemon.lease()
for _ in range(200):
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
assert not lease.lost
daemon.hello()
sys.stdout.write("done")
"""


def test_an_open_lease_does_not_make_every_fork_wait_for_grpcs_poll(tmp_path: Path) -> None:
    with DaemonProcess(str(tmp_path / "store")) as daemon:
        done = subprocess.run(
            [sys.executable, "-c", FORKS],
            env={**daemon.env, "CKPTD_ADDRESS": daemon.address},
            capture_output=True,
            text=True,
            timeout=90,  # the poll comes back once a second
            check=False,
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done", "")
