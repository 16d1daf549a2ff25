"""Addresses as people write them: ``unix:PATH`` and ``HOST:PORT``, and who can reach what listens there.

Promises: what is no address raises InvalidRequest that says what one looks like; what is one can
be called, and written into a call's metadata, whoever has given it. Nothing is looked up: a name
other than ``localhost`` counts as reachable from other machines, whatever it leads to.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from typing import Final

from ckptd.errors import InvalidRequest

#: A Unix socket's path has at most this many bytes (sun_path without its NUL).
SOCKET_PATH_NBYTES: Final = 107
#: A host's name has at most this many characters (RFC 1035, 3.1: 255 bytes on the wire, two more than in text).
HOST_LENGTH: Final = 253

#: Of names what hosts(5) allows, and ``_``, which resolvers take and people use; of IPv6 addresses the zone, too.
_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")
_IPV6: Final = re.compile(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9._~-]+)?")


def default_address() -> str:
    """Where a daemon of this user listens, and clients look, unless told otherwise."""
    return f"unix:/tmp/ckptd-{os.getuid()}/ckptd.sock"  # the daemon makes the directory, mode 0700


def parse_address(text: str) -> str:
    """Reads an address to call: ``unix:PATH`` or ``HOST:PORT``; returns it as gRPC takes it."""
    if text.startswith("unix:"):
        # gRPC knows unix:/path and unix:///path; one spelling is enough for messages and comparisons.
        path = "/" + text.removeprefix("unix:").lstrip("/")
        if not text.startswith("unix:/") or path == "/" or "\0" in path:
            raise InvalidRequest(f"{shown(text)} names no socket: give unix:/absolute/path")
        if len(os.fsencode(path)) > SOCKET_PATH_NBYTES:
            raise InvalidRequest(
                f"{shown(text)} is too long: a socket's path has at most {SOCKET_PATH_NBYTES} bytes; choose a shorter directory"
            )
        return f"unix:{path}"
    host, colon, port = text.rpartition(":")
    named = host.removeprefix("[").removesuffix("]") if host.startswith("[") and host.endswith("]") else host
    if not colon or not named or (":" in named and named == host) or re.search(r"[\s/\[\]]", named):
        raise InvalidRequest(f"{shown(text)} is no address: give unix:PATH or HOST:PORT")
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise InvalidRequest(f"{shown(text)} has no port between 1 and 65535")
    _check_host(text, named, numeric=named != host)
    return text


def parse_peer(text: str) -> str:
    """Reads an address that one node calls another by: ``HOST:PORT``. The name may lead to many addresses."""
    address = parse_address(text)
    if is_unix(address):
        raise InvalidRequest(f"{shown(text)} is of one machine only: other nodes are called by HOST:PORT")
    if is_wildcard(address):
        raise InvalidRequest(f"{shown(text)} can be listened on, not called: give the node's own name or address as HOST:PORT")
    return address


def is_peer(text: str) -> bool:
    """Whether `parse_peer` takes it: for hints, of which those that are no address are nothing."""
    try:
        parse_peer(text)
    except InvalidRequest:
        return False
    return True


def host_of(address: str) -> str:
    """The host of a TCP address, without brackets."""
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]")


def is_unix(address: str) -> bool:
    """Whether it is a socket of this machine's filesystem."""
    return address.startswith("unix:")


def is_wildcard(address: str) -> bool:
    """Whether a TCP address means all interfaces (``0.0.0.0``, ``[::]``), so that nobody can call it by that."""
    ip = _ip(address)
    return ip is not None and ip.is_unspecified


def is_reachable(address: str) -> bool:
    """Whether other machines may be able to reach what listens there: all TCP addresses but loopback ones."""
    if is_unix(address) or host_of(address).lower() == "localhost":
        return False
    ip = _ip(address)
    return ip is None or not ip.is_loopback


def advertised(listen: Sequence[str]) -> str:
    """What other nodes call a daemon that listens there, unless it is told: "" without TCP. Raises InvalidRequest for a wildcard."""
    tcp = [address for address in listen if not is_unix(address)]
    # Beside one that other machines can reach, a loopback address is for callers on this one.
    chosen = next(filter(is_reachable, tcp), tcp[0] if tcp else "")
    if chosen and is_wildcard(chosen):
        raise InvalidRequest(
            f"--listen {chosen} means every interface, and other nodes need an address to call: "
            "say with --advertise HOST:PORT what this node is called there"
        )
    return chosen


def shown(text: str) -> str:
    """What somebody wrote, as messages quote it: never long."""
    return repr(text) if len(text) <= 80 else repr(text[:77] + "...")


def _check_host(text: str, host: str, *, numeric: bool) -> None:
    """Raises InvalidRequest unless the address `text` has a host that can be looked up; `numeric`: it was in brackets."""
    if not host.isascii():
        raise InvalidRequest(f"{shown(text)} has letters that no host's name has: give an international name in its xn-- form")
    if len(host) > HOST_LENGTH:
        raise InvalidRequest(f"{shown(text)} is too long: a host's name has at most {HOST_LENGTH} characters")
    if numeric:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            numeric = False
        if not numeric or not _IPV6.fullmatch(host):
            raise InvalidRequest(f"{shown(text)} has no IPv6 address in its brackets: give [ADDRESS]:PORT, or NAME:PORT without them")
    elif not _NAME.fullmatch(host):
        raise InvalidRequest(f"{shown(text)} is no address: a host's name has letters, digits, '-', '.' and '_' only")


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        ip = ipaddress.ip_address(host_of(address))
    except ValueError:
        return None
    return (ip.ipv4_mapped or ip) if isinstance(ip, ipaddress.IPv6Address) else ip
