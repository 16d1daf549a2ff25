"""Many hosts on one machine: each a real daemon with files and an address of its own, and what runs beside it.

    with Hosts(3, store, replicas=1) as hosts:
        hosts[0].address                     # what trainers of that host call: CKPTD_ADDRESS
        hosts[1].lose(wipe=True)             # the whole machine, at once and for good

Every host has an IP address of its own out of 127.0.0.0/8, so that to daemons another host is another
host. Whatever was started is gone at the end, and so are its files.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import random
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ckptd_worker.children import Child, descendants
from daemons import FAULTY, DaemonProcess

#: Below the range from which the kernel takes ports for whoever does not care.
_PORTS = range(20000, 30000)
#: So many times a port that somebody took at the last moment is chosen anew.
_TRIES = 5


@dataclass(frozen=True)
class Place:
    """Where a host is: its IP address, and the command that runs another one there, in its place."""

    ip: str
    launcher: tuple[str, ...] = ()


def loopback(count: int) -> list[Place]:
    """Places on this machine's loopback: one address each, in a block of 127.0.0.0/8 that no other test is likely to use."""
    block = f"127.{random.randint(1, 254)}.{random.randint(0, 254)}"
    return [Place(f"{block}.{number + 1}") for number in range(count)]


def free_port(ip: str = "127.0.0.1") -> int:
    """One that nobody listens at, nor takes by chance before somebody does."""
    while True:
        port = random.choice(_PORTS)
        if not is_taken(ip, port):
            return port


def is_taken(ip: str, port: int) -> bool:
    """Whether nobody can listen there."""
    try:
        with socket.create_server((ip, port)):
            return False
    except OSError:
        return True


class Host:
    """One daemon, and the processes that were started beside it. `Hosts` makes them."""

    def __init__(self, number: int, place: Place, daemon: DaemonProcess) -> None:
        self.number = number
        self.place = place
        self.daemon = daemon
        self.port = 0
        self.children: list[Child] = []
        self._arguments = list(daemon.arguments)

    @property
    def address(self) -> str:
        """What trainers and commands of this host call."""
        return self.daemon.address

    @property
    def peer(self) -> str:
        """HOST:PORT by which other hosts call its daemon."""
        return f"{self.place.ip}:{self.port}"

    @property
    def running(self) -> bool:
        """Whether its daemon was started and not killed."""
        return self.daemon.process is not None

    def listen_at(self, port: int, peers: Sequence[str]) -> None:
        """From its next start on the daemon has that port, and is told of those peers."""
        self.port = port
        told = [argument for peer in peers for argument in ("--peer", peer)]
        self.daemon.arguments = [*self._arguments, "--listen", self.peer, *told]

    def start(self) -> Self:
        """Starts the daemon and returns when it is ready."""
        self.daemon.start()
        return self

    def restart(self) -> Self:
        """SIGKILL, if it still runs; then a new daemon at the same addresses with what its shm-dir holds."""
        self.daemon.restart()
        return self

    def kill(self) -> None:
        """SIGKILL of the daemon alone."""
        self.daemon.kill()

    def lose(self, *, wipe: bool = False) -> None:
        """The daemon and all that runs beside it end at once, as when a machine fails; with `wipe`, for good."""
        agents = [child.process.pid for child in self.children if child.process.poll() is None]
        for pid in agents:
            os.kill(pid, signal.SIGSTOP)  # or they would start new ones meanwhile
        doomed = [*agents, *(pid for agent in agents for pid in descendants(agent))]
        for pid in [*([self.daemon.pid] if self.running else []), *doomed]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.daemon.kill()
        for child in self.children:
            child.process.wait()
        self.children = []
        if wipe:
            self.wipe()

    def stop(self) -> None:
        """SIGSTOP of the daemon: it answers nothing, and nobody is told."""
        os.kill(self.daemon.pid, signal.SIGSTOP)

    def cont(self) -> None:
        """SIGCONT: it goes on where it was."""
        os.kill(self.daemon.pid, signal.SIGCONT)

    def wipe(self) -> None:
        """Removes what its memory held; the daemon must not run. Started again, it is another node."""
        assert not self.running
        shutil.rmtree(self.daemon.shm_dir)

    def run(self, name: str, command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None) -> Child:
        """Starts a command on this host, which ends with it. It finds this host's daemon."""
        found = {**os.environ, "OMP_NUM_THREADS": "1", "CKPTD_ADDRESS": self.address, **(env or {})}
        child = Child(name, [*self.place.launcher, *command], log=log, env=found)
        self.children.append(child)
        return child

    def status(self) -> dict[str, Any]:
        """What ``ckptd status --json`` says."""
        done = self.daemon.cli("status", "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def bytes_from(self) -> dict[str, int]:
        """Bytes that its daemon gave to loads, by source: memory, peer, store."""
        found: dict[str, int] = self.status()["bytes_from"]
        return found

    def remove(self) -> None:
        """Ends all that runs here and removes the daemon's files."""
        self.lose()
        self.daemon.remove()


class Hosts(Sequence[Host]):
    """`count` hosts with one store. Use as a context manager.

    arguments: further ones of every daemon.
    replicas: ``--replicas``.
    peers: every daemon is told of all others; otherwise they learn of each other from saves and loads.
    shared: ``--shared-store``: the store is a directory that all of them see.
    running: so many are started at first; the others when `start` of one is called.
    places: where they are; default: addresses of this machine's loopback.
    The rest is `DaemonProcess`'s.
    """

    def __init__(
        self,
        count: int,
        store: str | Path,
        *arguments: str,
        memory: str = "256MiB",
        replicas: int = 0,
        peers: bool = True,
        shared: bool = True,
        running: int | None = None,
        places: Sequence[Place] | None = None,
        env: dict[str, str] | None = None,
        program: tuple[str, ...] = ("-m", "ckptd"),
    ) -> None:
        told = [*arguments, *(["--replicas", str(replicas)] if replicas else []), *(["--shared-store"] if shared else [])]
        self._peers = peers
        self._running = count if running is None else running
        self._on_loopback = places is None
        self._hosts = [
            Host(number, place, DaemonProcess(str(store), *told, memory=memory, env=env, program=program, launcher=place.launcher))
            for number, place in enumerate(places or loopback(count))
        ]
        assert len(self._hosts) == count

    def __getitem__(self, index: Any) -> Any:
        return self._hosts[index]

    def __len__(self) -> int:
        return len(self._hosts)

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def start(self) -> Self:
        """Starts the daemons that are to run at first, at the same time. Raises what keeps one from starting."""
        for attempt in range(_TRIES):
            self._choose_ports()
            starting = self._hosts[: self._running]
            with ThreadPoolExecutor(max(len(starting), 1)) as threads:
                began = [threads.submit(host.start) for host in starting]
            errors = [error for one in began if (error := one.exception()) is not None]
            if not errors:
                return self
            for host in starting:
                host.kill()
            if attempt + 1 == _TRIES or not any(self._is_taken(host) for host in starting):
                raise errors[0]
        raise AssertionError

    def _choose_ports(self) -> None:
        for host in self._hosts:
            host.port = free_port(host.place.ip) if self._on_loopback else random.choice(_PORTS)
        for host in self._hosts:
            host.listen_at(host.port, [other.peer for other in self._hosts if other is not host] if self._peers else [])

    def _is_taken(self, host: Host) -> bool:
        return self._on_loopback and is_taken(host.place.ip, host.port)  # elsewhere nobody else is

    def bytes_from(self) -> dict[str, int]:
        """Bytes given to loads by all daemons that run, by source."""
        found = [host.bytes_from() for host in self._hosts if host.running]
        return {source: sum(one[source] for one in found) for source in found[0]}

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.remove()
            raise

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()

    def remove(self) -> None:
        """Ends everything and removes all files."""
        with contextlib.ExitStack() as stack:
            for host in self._hosts:
                stack.callback(host.remove)


class Troubled:
    """A store that all hosts share, a directory at `path`: every write fails with EIO until it is told to do something else.

    What it is told holds for all hosts, or `on` one of them: each has a control file of its own.
    """

    def __init__(self, home: Path) -> None:
        self.path = home / "store"
        self._home = home
        self._told: dict[str, Any] = {"raise": "EIO"}
        self._controls: list[Path] = []

    def hosts(self, count: int, **options: Any) -> Hosts:
        """Hosts with this store; `options` are theirs."""
        hosts = Hosts(count, f"faulty://{self.path}", program=FAULTY, **options)
        self._controls = [self._home / f"control-{host.number}" for host in hosts]
        for host, control in zip(hosts, self._controls, strict=True):
            host.daemon.env["FAULTY_CONTROL"] = str(control)
        self.tell(**self._told)
        return hosts

    def tell(self, *, on: Host | None = None, **behaviour: Any) -> None:
        """From now on it does what faulty_daemon.py has words for."""
        if on is None:
            self._told = behaviour
        for control in self._controls if on is None else [self._controls[on.number]]:
            fresh = control.with_suffix(".new")
            fresh.write_text(json.dumps(behaviour))
            fresh.replace(control)  # at once: a file that is half there says nothing

    def raises(self, error: str, *, on: Host | None = None) -> None:
        """From now on every write fails with that errno."""
        self.tell(on=on, **{"raise": error})

    def has_held(self, key: str, *, on: Host) -> bool:
        """Whether the host's daemon had such an object ready (`*` stands for anything), and had to wait as `hold_after` says."""
        noted = Path(f"{self._controls[on.number]}.held")
        return noted.exists() and bool(fnmatch.filter(noted.read_text().splitlines(), f"{self.path / key}"))

    def works(self, *, on: Host | None = None) -> None:
        """From now on nothing is wrong with it."""
        self.tell(on=on)


def until(what: str, condition: Callable[[], Any], *, timeout: float = 60.0, every: float = 0.05, said: Callable[[], str] = str) -> Any:
    """Polls until `condition` gives something that is true, and returns that; `said` tells more if it takes too long."""
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"took more than {timeout:.0f} s until: {what}\n{said()}")
        time.sleep(every)
    return found
