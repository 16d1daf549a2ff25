"""Where the daemon is and how long to wait for it: the environment's part of the client.

Reads ``CKPTD_ADDRESS``, ``CKPTD_CONNECT_TIMEOUT`` and ``CKPTD_SAVE_TIMEOUT`` when asked,
never at import, so that a bad value is an error of the call that needs it and reaches
every rank through DCP. Connects to nothing.
"""

from __future__ import annotations

import math
import os
import re
from typing import Final

from ckptd.errors import InvalidRequest

#: More than this no clock of gRPC holds.
_LONGEST_SECONDS: Final = 1e7
_ALLOWED: Final = "an address is unix:/absolute/path or HOST:PORT"
_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
#: The longest path that fits into Linux' sockaddr_un with its final zero (unix(7)).
_MAX_PATH_NBYTES: Final = 107


def default_address() -> str:
    """The address that both `ckptd serve` and the client use if nothing else is said."""
    return f"unix:/tmp/ckptd-{os.getuid()}/ckptd.sock"


def resolve_address(given: str | None) -> str:
    """The address to use: `given`, else ``CKPTD_ADDRESS``, else the default; raises InvalidRequest if it is none."""
    if given is not None:
        text, origin = given, "address"
    elif "CKPTD_ADDRESS" in os.environ:
        text, origin = os.environ["CKPTD_ADDRESS"], "CKPTD_ADDRESS"
    else:
        return default_address()
    if not isinstance(text, str):
        raise InvalidRequest(f"{origin} is of type {type(text).__name__}: {_ALLOWED}")
    return _checked(text, origin)


def _checked(text: str, origin: str) -> str:
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path.startswith("/") or "\0" in path:
            raise InvalidRequest(f"{origin}={text!r} has no absolute path: {_ALLOWED}")
        path = "/" + path.lstrip("/")
        if len(os.fsencode(path)) > _MAX_PATH_NBYTES:
            raise InvalidRequest(f"{origin}={text!r}: a socket's path has at most {_MAX_PATH_NBYTES} bytes")
        return f"unix:{path}"
    found = _HOST_PORT.fullmatch(text)
    if not found or not 0 < int(found.group(2)) < 65536:
        raise InvalidRequest(f"{origin}={text!r} is no address: {_ALLOWED}")
    return text


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise InvalidRequest(f"{name}={text!r} is not a number of seconds greater than 0")
    return min(value, _LONGEST_SECONDS)


def connect_seconds() -> float:
    """How long to wait for a daemon to answer at all (``CKPTD_CONNECT_TIMEOUT``, 10 s)."""
    return _seconds("CKPTD_CONNECT_TIMEOUT", 10.0)


def save_seconds() -> float:
    """How long a save waits for memory (``CKPTD_SAVE_TIMEOUT``, 30 s)."""
    return _seconds("CKPTD_SAVE_TIMEOUT", 30.0)
