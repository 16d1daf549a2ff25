"""Which addresses lie behind the name of a host.

Promises: asks the machine's resolver and nobody else, keeps nothing, and never blocks the loop.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket

from ckptd.addresses import host_of


async def behind(address: str) -> list[str]:
    """The numeric addresses behind a HOST:PORT. Raises OSError."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host_of(address), address.rpartition(":")[2], type=socket.SOCK_STREAM)
    except UnicodeError as exc:  # it can be no host's name
        raise OSError(str(exc)) from exc
    port = address.rpartition(":")[2]
    hosts = dict.fromkeys(str(one[4][0]) for one in found)
    return [f"[{one}]:{port}" if ":" in one else f"{one}:{port}" for one in hosts]


def is_numeric(address: str) -> bool:
    """Whether the host of a HOST:PORT is an address already."""
    try:
        ipaddress.ip_address(host_of(address))
    except ValueError:
        return False
    return True
