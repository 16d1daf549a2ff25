"""What the demo is made of: children that are killed whole, and digests that see every difference."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch

from ckptd_worker.children import Child, Unexpected, descendants
from ckptd_worker.stock import digests

SLEEP = "import time; time.sleep(600)"
IN_A_SESSION_OF_ITS_OWN = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def python(script: str, log: Path) -> Child:
    return Child("script", [sys.executable, "-c", script], log=log, env=dict(os.environ))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_kill_reaches_descendants_in_sessions_of_their_own(tmp_path: Path) -> None:
    child = python(IN_A_SESSION_OF_ITS_OWN, tmp_path / "log")
    child.until("it has started another", lambda: len(child.lines()) == 1)
    grandchild = int(child.lines()[0])
    assert descendants(child.process.pid) == [grandchild]

    assert child.kill() == 2

    while alive(grandchild):  # killed, but perhaps not gone yet: the test's timeout is the limit
        time.sleep(0.01)
    assert child.kill() == 0


def test_waiting_for_a_child_that_ends_early_says_so(tmp_path: Path) -> None:
    child = python("raise SystemExit(7)", tmp_path / "log")

    with pytest.raises(Unexpected, match="script ended with exit status 7 before: it is ready"):
        child.until("it is ready", lambda: False)
    with pytest.raises(Unexpected, match="exit status 7"):
        child.finish()


def test_waiting_for_a_child_has_a_limit(tmp_path: Path) -> None:
    child = python(SLEEP, tmp_path / "log")
    try:
        with pytest.raises(Unexpected, match="took more than 0 s until: it is ready"):
            child.until("it is ready", lambda: False, timeout=0.1)
        with pytest.raises(Unexpected, match="not done"):
            child.finish(timeout=0.1)
    finally:
        child.kill()


def test_digests_differ_by_a_single_bit_a_dtype_a_shape_and_an_object() -> None:
    values = [
        torch.zeros(4),
        torch.tensor([0.0, 0.0, 0.0, -0.0]),
        torch.zeros(2, 2),
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(8, dtype=torch.bfloat16),
        4,
        "4",
        None,
    ]
    assert len({digests({"value": value})["value"] for value in values}) == len(values)
    assert digests({"value": torch.arange(6.0).view(2, 3).t()}) == digests({"value": torch.tensor([[0.0, 3], [1, 4], [2, 5]])})
    assert digests({"value": torch.tensor(1.0)}) == digests({"value": torch.ones(())})
    assert len(digests({"value": torch.empty(0, 3)})["value"]) == 64
