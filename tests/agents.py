"""One elastic job on many hosts: a real torchrun agent on each, with the c10d rendezvous.

    with Hosts(4, store) as hosts, Agents(hosts, [str(PROGRAM)], home=tmp_path) as agents:
        agents.start(hosts[0])
        agents.start(hosts[1])
        hosts[0].lose()          # agent, workers and daemon at once
        agents.finish()

The rendezvous' store is in the test's own process: no agent that is killed takes it along. A
launch costs many seconds of CPU, most of it for importing torch: keep worlds small.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch.distributed import TCPStore

from ckptd_worker.children import Child
from hosts import Host, Hosts, until

#: An agent that was not heard of for KEEP_ALIVE_SECONDS x KEEP_ALIVE_ATTEMPTS is not waited for any longer.
KEEP_ALIVE_SECONDS = 1
KEEP_ALIVE_ATTEMPTS = 5
#: How long the others wait for more agents before they go on without.
LAST_CALL_SECONDS = 2
JOIN_SECONDS = 100


class Agents:
    """The agents of one job whose workers run ``python COMMAND…``. Use as a context manager, inside that of its hosts.

    home: where the logs go.
    nodes: at least and at most so many agents make a world; default: from one to all hosts.
    workers: of each agent.
    env: further variables of agents and workers.
    """

    def __init__(
        self,
        hosts: Hosts,
        command: Sequence[str],
        *,
        home: Path,
        nodes: tuple[int, int] | None = None,
        workers: int = 1,
        env: dict[str, str] | None = None,
    ) -> None:
        self.hosts = hosts
        self.command = command
        self.home = home
        self.nodes = nodes or (1, len(hosts))
        self.workers = workers
        self.env = env or {}
        self.started: list[tuple[Host, Child]] = []
        self._store: TCPStore | None = None

    def start(self, host: Host) -> Child:
        """An agent on this host joins the job."""
        assert self._store is not None
        settings = {
            "is_host": "false",
            "join_timeout": JOIN_SECONDS,
            "last_call_timeout": LAST_CALL_SECONDS,
            "keep_alive_interval": KEEP_ALIVE_SECONDS,
            "keep_alive_max_attempt": KEEP_ALIVE_ATTEMPTS,
        }
        launch = [
            *(sys.executable, "-m", "torch.distributed.run"),
            f"--nnodes={self.nodes[0]}:{self.nodes[1]}",
            f"--nproc-per-node={self.workers}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self._store.port}",
            "--rdzv-id=job",
            "--rdzv-conf=" + ",".join(f"{key}={value}" for key, value in settings.items()),
            "--local-addr=127.0.0.1",
            "--max-restarts=100",
        ]
        env = {
            "GLOO_SOCKET_IFNAME": "lo",
            "TMPDIR": str(self.home),
            # Otherwise an agent goes on calling the store of the first round's rank 0 after that one's host is gone.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        number = len(self.started)
        log = self.home / f"agent{number}-host{host.number}.log"
        child = host.run(f"the agent on host {host.number}", [*launch, *self.command], log=log, env={**env, **self.env})
        self.started.append((host, child))
        return child

    def until(self, what: str, condition: Callable[[], Any], *, timeout: float = 150.0) -> Any:
        """Polls until `condition` gives something that is true, and returns that; raises at once if an agent ends that was not killed."""

        def alive_and() -> Any:
            ended = [child.name for host, child in self.started if child in host.children and child.process.poll() is not None]
            found = condition()
            assert found or not ended, f"{' and '.join(ended)} ended before: {what}\n{self.said()}"
            return found

        return until(what, alive_and, timeout=timeout, said=self.said)

    def finish(self, *, timeout: float = 120.0) -> None:
        """Waits until every agent that is left has ended well."""
        left = [child for host, child in self.started if child in host.children]
        try:
            until("all agents have ended", lambda: all(child.process.poll() is not None for child in left), timeout=timeout)
        finally:
            ended = {child.name: child.process.poll() for child in left}
            assert set(ended.values()) <= {0}, f"{ended}\n{self.said()}"

    def said(self) -> str:
        """The ends of all logs, the daemons' too."""
        logs = [child.log for _, child in self.started] + [host.daemon.log for host in self.hosts]
        return "\n".join(f"--- {log}\n{log.read_text(errors='replace')[-2500:]}" for log in logs if log.exists())

    def __enter__(self) -> Self:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for _, child in self.started:
            child.kill()
        self._store = None
