"""What a client was told before its daemon died, and what its checkpoints may hold therefore."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import grpc
from torch.distributed.checkpoint.api import CheckpointException

import joint
from ckptd.errors import CkptdError, NotFound
from ckptd.v1.daemon_pb2_grpc import DaemonStub
from ckptd_client import channel
from forks import ForkedDaemon

WORLD = 2
ID = "run/step-7"


def state(value: int, numel: int = 10_000) -> dict[str, Any]:
    """What all ranks together save."""
    return joint.state(value, WORLD, numel)


def save(daemon: ForkedDaemon, id: str, value: int, numel: int = 10_000, **options: Any) -> None:
    """A save of two ranks in one process."""
    joint.save([daemon.address] * WORLD, id, value, numel, **options)


def load(daemon: ForkedDaemon, id: str, numel: int = 10_000) -> int | None:
    """The value that the checkpoint holds, after comparing all of it; None if there is no such checkpoint."""
    try:
        return joint.load(daemon.address, id, WORLD, numel)
    except CheckpointException as failed:
        if all(isinstance(why[0], NotFound) for why in failed.failures.values()):
            return None
        raise


@dataclass
class Told:
    """What the client knows when the daemon dies."""

    accepted: dict[str, int] = field(default_factory=dict)
    #: Of a save that had not returned.
    unsure: dict[str, int] = field(default_factory=dict)
    #: Of a deletion that had not returned, and of one that had.
    leaving: dict[str, int] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)

    def possible(self, id: str) -> set[int | None]:
        """The values that the id may have now."""
        before = self.accepted.get(id)
        return {before, self.unsure[id]} if id in self.unsure else {before}

    def saves(self, daemon: ForkedDaemon, id: str, value: int, numel: int = 10_000) -> None:
        """Saves unless the daemon is dead; notes what came of it."""
        if daemon.dead():  # perhaps in the middle of an earlier save, of which nobody is sure either
            return
        self.unsure[id] = value
        if survives(daemon, lambda: save(daemon, id, value, numel, overwrite=True)):
            self.accepted[id] = self.unsure.pop(id)

    def deletes(self, daemon: ForkedDaemon, ids: Collection[str], call: Callable[[DaemonStub], object]) -> None:
        """Deletes unless the daemon is dead; notes what came of it."""
        self.leaving = {id: self.accepted.pop(id) for id in ids if id in self.accepted}
        with grpc.insecure_channel(daemon.address) as connection:
            if survives(daemon, lambda: call(DaemonStub(connection))):  # type: ignore[no-untyped-call]
                self.deleted, self.leaving = set(ids), {}

    def finds(self, daemon: ForkedDaemon, id: str, numel: int = 10_000) -> None:
        assert load(daemon, id, numel) in self.possible(id)


def survives(daemon: ForkedDaemon, call: Callable[[], object]) -> bool:
    """Whether the call succeeds. It fails only with a daemon that is dead."""
    if daemon.dead():
        return False
    try:
        call()
    except (CkptdError, CheckpointException, grpc.RpcError):
        if not daemon.dead(5.0):
            raise
        return False
    return True


def until(daemon: ForkedDaemon, true: Callable[[], bool], timeout: float = 30.0) -> None:
    """Returns when the condition holds or the daemon is dead."""
    deadline = time.monotonic() + timeout
    while not true() and not daemon.dead():
        assert time.monotonic() < deadline, daemon.log.read_text()
        time.sleep(0.002)


def close_client(daemon: ForkedDaemon) -> None:
    """Ends this process's lease and channel, as its exit would."""
    connection = channel._daemons.pop(daemon.address, None)
    if connection is not None:
        connection.close()
