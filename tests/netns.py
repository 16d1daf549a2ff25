"""A network of a test's own: hosts in network namespaces, whose links can be cut.

    with Network(3) as network, Hosts(3, store, "--insecure", places=network.places) as hosts:
        network.cut(2)       # the host runs, and nobody hears of it
        network.mend(2)

All hosts hang on one bridge, which is in a namespace as well: this machine's own network is never
touched. Programs outside reach a daemon through its Unix socket, cut off or not, as trainers of
its host would. All of it is gone at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
from types import TracebackType
from typing import Self

import pytest

from hosts import Place


class Network:
    """`count` places, at 192.0.2.1 and following (addresses for documentation, which lead nowhere else). Use as a context manager.

    Skips the test, with the reason, where namespaces cannot be made.
    """

    def __init__(self, count: int) -> None:
        name = f"ckptd-test-{secrets.token_hex(4)}"
        self._switch = f"{name}-switch"
        self._names = [f"{name}-{number}" for number in range(count)]
        self._made: list[str] = []
        self.places = [Place(f"192.0.2.{number + 1}", ("ip", "netns", "exec", each)) for number, each in enumerate(self._names)]

    def cut(self, number: int) -> None:
        """Nothing that this host sends arrives, and nothing reaches it; nobody is told."""
        _ip("-netns", self._switch, "link", "set", f"port{number}", "nomaster")

    def mend(self, number: int) -> None:
        """The link is as it was."""
        _ip("-netns", self._switch, "link", "set", f"port{number}", "master", "bridge")

    def unplug(self, number: int) -> None:
        """The link goes down: the host itself sees that it has none. `plug` brings it back."""
        _ip("-netns", self._switch, "link", "set", f"port{number}", "down")

    def plug(self, number: int) -> None:
        """The link is up again."""
        _ip("-netns", self._switch, "link", "set", f"port{number}", "up")

    def slow(self, number: int, rate: str) -> None:
        """What this host sends goes at that rate, as tc writes it ("20mbit"), until `fast`."""
        _run(
            "ip",
            "netns",
            "exec",
            self._names[number],
            "tc",
            "qdisc",
            "replace",
            "dev",
            "eth0",
            "root",
            *f"tbf rate {rate} burst 64kb latency 400ms".split(),
        )

    def fast(self, number: int) -> None:
        """As fast as this machine."""
        _run("ip", "netns", "exec", self._names[number], "tc", "qdisc", "replace", "dev", "eth0", "root", "pfifo")

    def sent(self, number: int) -> int:
        """Bytes that this host has sent so far."""
        found = json.loads(_ip("-netns", self._names[number], "-json", "-stats", "link", "show", "dev", "eth0"))
        return int(found[0]["stats64"]["tx"]["bytes"])

    def __enter__(self) -> Self:
        if shutil.which("ip") is None:
            pytest.skip("there is no ip command (iproute2) to make network namespaces with")
        try:
            self._make()
        except subprocess.CalledProcessError as exc:
            self._remove()
            pytest.skip(f"network namespaces cannot be made here: {' '.join(exc.cmd)}: {exc.stderr.strip()}")
        except BaseException:
            self._remove()
            raise
        return self

    def _make(self) -> None:
        for name in (self._switch, *self._names):
            self._made.append(name)
            _ip("netns", "add", name)
            _ip("-netns", name, "link", "set", "lo", "up")
        _ip("-netns", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-netns", self._switch, "link", "set", "bridge", "up")
        for number, (name, place) in enumerate(zip(self._names, self.places, strict=True)):
            port = f"port{number}"
            _ip("-netns", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-netns", self._switch, "link", "set", port, "master", "bridge", "up")
            _ip("-netns", name, "address", "add", f"{place.ip}/24", "dev", "eth0")
            _ip("-netns", name, "link", "set", "eth0", "up")

    def _remove(self) -> None:
        """Links and addresses go with the namespaces that they are in."""
        with contextlib.ExitStack() as stack:
            for name in self._made:
                if os.path.exists(f"/run/netns/{name}"):
                    stack.callback(_ip, "netns", "delete", name)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    """Raises CalledProcessError, whose `stderr` says why."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
