"""What can go wrong, grouped by what the caller should do about it.

Every error that crosses a room's edge is one of these. A foreign exception is
translated once, where it enters, with ``raise … from exc``; a message says what
happened, to what, and what to do. `TABLE` is the whole contract between a
daemon's error, the gRPC status that carries it and the CLI's exit status; gRPC
codes stand here by name so that this room needs no gRPC.
"""

from __future__ import annotations

from typing import Any, Final


class CkptdError(Exception):
    """Base of all errors of this project."""

    #: gRPC status name that carries the error.
    status = "UNKNOWN"
    #: CLI exit status.
    exit_status = 1


class InvalidRequest(CkptdError):
    """The call cannot work as it is: fix it."""

    status = "INVALID_ARGUMENT"
    exit_status = 2


class NotFound(CkptdError):
    """No such checkpoint or object: try another one."""

    status = "NOT_FOUND"
    exit_status = 1


class WrongPhase(CkptdError):
    """What is asked for is no longer, or never will be, possible: do not retry as is."""

    status = "FAILED_PRECONDITION"
    exit_status = 1


class StoreError(CkptdError):
    """The store refuses for good (denied, missing bucket, misconfigured): an operator must act."""

    status = "FAILED_PRECONDITION"
    exit_status = 3


class LeaseLost(CkptdError):
    """The daemon no longer holds what this process wrote or reads: redo the whole save or load."""

    status = "ABORTED"
    exit_status = 1


class ArenaFull(CkptdError):
    """No memory for a segment: skip this save, or wait."""

    status = "RESOURCE_EXHAUSTED"
    exit_status = 1


class Unavailable(CkptdError):
    """Daemon or store is not there at the moment: retry with backoff."""

    status = "UNAVAILABLE"
    exit_status = 3


class Corrupt(CkptdError):
    """Bytes are not what was written: choose another checkpoint."""

    status = "DATA_LOSS"
    exit_status = 1


#: Kind (the name sent in trailing metadata) to class.
TABLE: dict[str, type[CkptdError]] = {
    kind.__name__: kind for kind in (InvalidRequest, NotFound, WrongPhase, StoreError, LeaseLost, ArenaFull, Unavailable, Corrupt)
}
#: Trailing metadata key that carries the kind.
KIND_KEY: Final = "ckptd-kind"


def kind_of(failed: Any) -> type[CkptdError] | None:
    """The class that a daemon raised, from the gRPC error that its call ended with; None if no daemon of ours answered."""
    for key, value in failed.trailing_metadata() or ():
        if key == KIND_KEY:
            return TABLE.get(value.decode() if isinstance(value, bytes) else value, CkptdError)  # another version may know more kinds
    return None
