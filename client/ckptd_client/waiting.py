"""Waits until a checkpoint is durable; a daemon that is restarted meanwhile does not matter.

Remembers, per daemon and id, the receipt of this process's last save, so that `wait`
means that save and no older one of the same id.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Final

from ckptd.errors import CkptdError, InvalidRequest, Unavailable
from ckptd.model import LONGEST_SECONDS
from ckptd.v1 import daemon_pb2, manifest_pb2
from ckptd_client.channel import connect, unanswered
from ckptd_client.names import checked_id

if TYPE_CHECKING:
    import os

    from ckptd_client.channel import Daemon

_FIRST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 2.0
#: Any timeout is at least so long: a call takes its time.
_LEAST_SECONDS: Final = 0.2
#: How long may take what the daemon says to who has waited in vain, and has waited so long himself.
_REASON_SECONDS: Final = 5.0

_receipts: dict[tuple[str, str], manifest_pb2.Receipt] = {}


def remember(address: str, checkpoint_id: str, receipt: manifest_pb2.Receipt) -> None:
    """Notes the shard that this process saved last under an id."""
    _receipts[address, checkpoint_id] = receipt


def wait(checkpoint_id: str | os.PathLike[str], *, address: str | None = None, timeout: float | None = None) -> None:
    """Returns once a checkpoint is durable, that is, complete in the store.

    Means the attempt that holds this process's last receipt for the id, else the newest
    that the daemon knows, else what the store has. `timeout` is in seconds, at least 0.2; None waits
    as long as it takes, through restarts of the daemon, but not longer than
    ``CKPTD_CONNECT_TIMEOUT`` for one that does not answer at all.

    Raises what made the checkpoint fail (StoreError, WrongPhase, …), NotFound if there is
    none, TimeoutError after `timeout`, also if no daemon answered until then; without one, Unavailable.
    To say why may take as long again, 5 s at most.
    """
    text = checked_id(checkpoint_id)
    timeout = _checked_timeout(timeout)
    daemon = connect(address)
    until = None if timeout is None else time.monotonic() + timeout
    pause = _FIRST_PAUSE_SECONDS
    receipt = _receipts.get((daemon.address, text), manifest_pb2.Receipt())
    while True:
        reached = False
        try:
            daemon.hello(seconds=_left(until))
            reached = True
            daemon.wait(daemon_pb2.WaitRequest(id=text, token=receipt.token, sealed_us=receipt.sealed_us), _left(until))
        except Unavailable as error:
            if until is None and not reached:
                raise
            if timeout is not None and until is not None and time.monotonic() + pause >= until:
                patience = min(timeout, _REASON_SECONDS)
                why = _reason(daemon, text, receipt.sealed_us, patience) if reached and unanswered(error) else str(error)
                if why is None:
                    return
                raise TimeoutError(f"checkpoint {text!r} is not durable after {timeout:g} s ({why})") from error
        else:
            return
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _reason(daemon: Daemon, checkpoint_id: str, sealed_us: int, seconds: float) -> str | None:
    """Why a checkpoint is not durable, as far as the daemon knows and soon says; None if by now it is."""
    try:
        found = daemon.resolve(daemon_pb2.ResolveRequest(id=checkpoint_id), seconds=seconds)
    except CkptdError as error:
        return f"the daemon at {daemon.address} does not say why" if unanswered(error) else str(error)
    if found.state != daemon_pb2.Checkpoint.DURABLE:
        return found.reason or f"it is {daemon_pb2.Checkpoint.State.Name(found.state).lower()}"
    return "only an older save of it is" if found.summary.accepted_us < sealed_us else None


def _checked_timeout(timeout: object) -> float | None:
    if timeout is None or timeout == math.inf:
        return None
    if not isinstance(timeout, int | float) or not timeout >= 0:
        raise InvalidRequest(f"timeout={timeout!r} is not a number of seconds, nor None for no limit")
    return float(min(max(timeout, _LEAST_SECONDS), LONGEST_SECONDS))


def _left(until: float | None) -> float | None:
    """Seconds left, never none at all: a call without time fails before it is sent."""
    return None if until is None else max(until - time.monotonic(), 0.001)
