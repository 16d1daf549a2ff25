"""Copies of other nodes' shards where memory is short."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemons import FAULTY
from hosts import Hosts, until
from joint import load, save

pytestmark = pytest.mark.filterwarnings("ignore:ckptd. :UserWarning")

ID = "run/step-1"


def test_a_copy_for_which_there_is_no_room_never_costs_a_shard_that_only_memory_has(tmp_path: Path) -> None:
    control = tmp_path / "control"
    control.write_text("{}")
    program = {"program": FAULTY, "env": {"FAULTY_CONTROL": str(control)}}
    with Hosts(2, f"faulty://{tmp_path / 'store'}", memory="30MiB", replicas=1, **program) as hosts:
        control.write_text('{"raise": "EACCES"}')
        save([host.address for host in hosts], ID, 1, 3_600_000)  # 15 MB on each: a second one does not fit
        for host in hosts:
            host.daemon.until(ID, "failed")
        tried = "no copy of the shard"
        until("copies have been tried", lambda: all(tried in host.daemon.log.read_text() for host in hosts))
        until("and again", lambda: all(host.daemon.log.read_text().count(tried) > 2 for host in hosts))
        assert [load(host.address, "run/latest", 2, 3_600_000) for host in hosts] == [1, 1]
