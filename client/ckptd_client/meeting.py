"""Daemons of different nodes that are to know of each other before anything is loaded.

A load tells them by itself, once its ranks have found a checkpoint; what only one node's memory has,
the others find if they were introduced before. Promises: nothing is read, nothing is changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd_client.channel import connect
from ckptd_client.stream import LoadStream

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptd_client.channel import Daemon


def daemon_address(*, address: str | None = None) -> str:
    """How other nodes reach the daemon of this one, as HOST:PORT; "" if they cannot.

    address: ``unix:/path`` or ``HOST:PORT``; default ``CKPTD_ADDRESS``, then the node's own daemon.
    Raises Unavailable if no daemon answers.
    """
    return connect(address).hello().address


def introduce(addresses: Iterable[str], *, address: str | None = None) -> None:
    """Makes the daemons at these addresses, and that of this node, known to each other: from now on they ask what the others hold.

    addresses: what `daemon_address` gave on all ranks; "" and the own one are fine. Raises Unavailable.
    """
    introduce_to(connect(address), addresses)


def introduce_to(daemon: Daemon, addresses: Iterable[str]) -> None:
    """The same, for a daemon that is connected already."""
    if peers := sorted({one for one in addresses if one}):
        with LoadStream(daemon, "", "", peers) as stream:
            stream.open()
