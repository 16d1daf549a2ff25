"""The hosts that other tests rely on: what is lost is lost whole, what was started is gone at the end."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hosts import Hosts, until
from netns import Network

#: Starts a child in a session of its own, as an agent does with its workers, and tells its pid.
PARENT = "import subprocess, time; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True); time.sleep(600)"


def is_alive(pid: int) -> bool:
    """Whether it runs: one that has ended may be left as a zombie where nobody waits for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_lost_host_takes_along_all_that_runs_on_it_and_comes_back_as_another_node(tmp_path: Path) -> None:
    with Hosts(2, tmp_path / "store") as hosts:
        stays, goes = hosts
        node = goes.status()["node"]
        assert goes.status()["peers"][0]["address"] == stays.peer
        child = goes.run("a parent", [sys.executable, "-c", PARENT], log=tmp_path / "log")
        child.until("it has a child", child.lines)
        daemon, grandchild = goes.daemon.pid, int(child.lines()[0])
        assert is_alive(daemon)
        assert is_alive(grandchild)

        goes.lose(wipe=True)
        until("all have ended", lambda: not any(is_alive(pid) for pid in (daemon, child.process.pid, grandchild)))
        assert not goes.daemon.shm_dir.exists()
        assert stays.status()["node"]

        assert goes.start().status()["node"] != node
        shm_dirs = [host.daemon.shm_dir for host in hosts]
    assert not any(directory.exists() for directory in shm_dirs)


def test_a_port_that_somebody_takes_at_the_last_moment_is_chosen_anew(tmp_path: Path) -> None:
    taken: list[socket.socket] = []

    class Hasty(Hosts):
        def _choose_ports(self) -> None:
            super()._choose_ports()
            if not taken:
                taken.append(socket.create_server((self[1].place.ip, self[1].port)))

    try:
        with Hasty(2, tmp_path / "store") as hosts:
            assert hosts[1].port != taken[0].getsockname()[1]
            assert hosts[0].status()["peers"][0]["address"] == hosts[1].peer
    finally:
        for server in taken:
            server.close()


def test_a_network_is_gone_after_a_failure() -> None:
    network = Network(2)
    reason = RuntimeError("told by a test")

    def fail() -> None:
        with network:
            assert len(namespaces(network)) == 2
            raise reason

    def namespaces(network: Network) -> list[str]:
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        return [place.launcher[-1] for place in network.places if place.launcher[-1] in listed]

    with pytest.raises(RuntimeError, match="told by a test"):
        fail()
    assert namespaces(network) == []
