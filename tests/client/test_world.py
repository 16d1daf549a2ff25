"""Many ranks, one daemon: any world and sharding into any other, and errors that reach every rank."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from client.pairs import Pair
from worlds import MEETING, meeting_place

PROGRAM = Path(__file__).with_name("world_program.py")


def run_world(pair: Pair, size: int, scenario: str, *, seconds: float) -> None:
    """Runs the program on `size` ranks; fails with what a failing rank said."""
    place = meeting_place()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), pair.saving.address, pair.other.address, str(pair.store), scenario],
            env={**pair.saving.env, "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(place.port)}
            | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **MEETING},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    outputs: list[str] = []
    deadline = time.monotonic() + seconds
    try:
        outputs.extend(rank.communicate(timeout=max(0.0, deadline - time.monotonic()))[0] for rank in ranks)
    except subprocess.TimeoutExpired:
        for rank in ranks:
            rank.kill()
        said = [rank.communicate()[0][-3000:] for rank in ranks]
        pytest.fail("a rank did not end:\n" + "\n---\n".join(said))
    finally:  # also when the test itself is ended: what it leaves behind would fail another one
        for rank in ranks:
            rank.kill()
            rank.communicate()
    ended_well = [rank.returncode == 0 and "done\n" in output for rank, output in zip(ranks, outputs, strict=True)]
    failed = {number: output[-6000:] for number, (output, well) in enumerate(zip(outputs, ended_well, strict=True)) if not well}
    # A rank that only lost its neighbour says nothing of interest.
    first = {number: output for number, output in failed.items() if "Connection closed by peer" not in output} or failed
    assert not failed, "\n---\n".join(f"rank {number}:\n{output}" for number, output in first.items())


@pytest.mark.timeout(300)
def test_c12_four_ranks_save_reshard_and_fail_together(pair: Pair) -> None:
    run_world(pair, 4, "all", seconds=240)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_c12_eight_ranks_save_and_reshard(pair: Pair) -> None:
    run_world(pair, 8, "eight", seconds=360)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_dcps_background_process_saves_through_the_writer(pair: Pair) -> None:
    run_world(pair, 2, "process", seconds=180)
