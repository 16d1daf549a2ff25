"""What holds at any moment, whatever was killed: four invariants, as functions that every suite shares.

*Whole or absent*: what has a `.metadata` can be read to its last byte. *Promises kept*: what was accepted is
given back bit by bit and becomes durable. *Accounts balance*: the bytes that a daemon counts are those on its tmpfs, within
the budget, and nothing is open once no lease is left. *Prune is humble*: it takes neither the newest of a run, nor what
somebody keeps, nor anything that a checkpoint which stays refers to, nor what is not ours.

The witnesses are stock PyTorch, the file system, and the daemon's own `status`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from ckptd import contents, metadata, verify
from ckptd.ledger import Entry, Ledger
from ckptd.localstore import LocalStore
from ckptd.model import OWN_DIRECTORY
from ckptd.v1.daemon_pb2 import StatusReply, StatusRequest
from ckptd.v1.daemon_pb2_grpc import DaemonStub
from daemons import DaemonProcess

T = TypeVar("T")
#: Name of a file in the shm-dir that counts.
SEGMENT = re.compile(r"[0-9a-f]{16}\.(open|sealed|spare|cache)")


def stock_state(checkpoint: Path) -> dict[str, Any]:
    """Everything in a checkpoint's directory, as stock DCP reads it."""
    state: dict[str, Any] = {}
    _load_state_dict(state, storage_reader=dcp.FileSystemReader(checkpoint), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


def assert_whole_or_absent(store: Path) -> dict[str, dict[str, Any]]:
    """Every checkpoint of a local store is verified whole, and read whole by stock DCP. Returns what that read, by id."""
    found = {}
    opened = LocalStore(store)
    ledger = Ledger(opened)
    for entry in ledger.entries():
        assert not entry.damaged, entry
        assert verify.is_whole(opened, ledger, entry) == ()
        found[str(entry.id)] = stock_state(store / str(entry.id))
    # A `.metadata` that the ledger does not list would be a checkpoint for others all the same.
    there = {str(path.parent.relative_to(store)) for path in store.rglob(".metadata")}
    assert there == found.keys()
    return found


def assert_promises_kept(accepted: Mapping[str, T], load: Callable[[str], T], wait: Callable[[str], object]) -> None:
    """What was accepted is given back at once, becomes durable, and is still the same. `load` compares every bit."""
    for id, value in accepted.items():
        assert load(id) == value, id
    for id in accepted:
        wait(id)
    for id, value in accepted.items():
        assert load(id) == value, id


def appeared(directory: Path) -> list[Path]:
    """All files there that have the names by which they are read, while others write and delete."""
    found = (Path(where, name) for where, _, names in os.walk(directory) for name in names)  # what goes meanwhile is left out
    return [path for path in found if ".ckptd-" not in str(path)]


def segments(shm_dir: Path) -> dict[int, int]:
    """Bytes that each segment of a daemon holds, by inode."""
    held = {}
    for path in shm_dir.iterdir():
        if SEGMENT.fullmatch(path.name):
            try:
                found = path.stat()
            except FileNotFoundError:  # renamed, or given up, meanwhile
                continue
            held[found.st_ino] = found.st_blocks * 512
    return held


def on_tmpfs(shm_dir: Path) -> int:
    """Bytes that the segments of a daemon hold, each inode once."""
    return sum(segments(shm_dir).values())


def on_tmpfs_at_once(shm_dir: Path) -> int:
    """The same while segments come and go, and no more than there was at a moment: what two looks, one after the other, both saw."""
    before = segments(shm_dir)
    return sum(min(nbytes, before.get(inode, 0)) for inode, nbytes in segments(shm_dir).items())


def status(daemon: DaemonProcess) -> StatusReply:
    """What the daemon counts."""
    with grpc.insecure_channel(daemon.address) as channel:
        reply: StatusReply = DaemonStub(channel).Status(StatusRequest(), timeout=60, wait_for_ready=True)  # type: ignore[no-untyped-call]
        return reply


def assert_accounts_balance(daemon: DaemonProcess, *, leases: int = 0, timeout: float = 60.0) -> StatusReply:
    """Once `leases` processes are left and the threads have done what they were at: used is what is on tmpfs, within the budget.

    Without leases nothing is open, and nobody waits.
    """
    deadline = time.monotonic() + timeout
    while True:
        found = status(daemon)
        assert found.used <= found.memory
        on_disk = on_tmpfs(daemon.shm_dir)
        balanced = found.used == on_disk and found.leases == leases
        if leases == 0:
            balanced = balanced and not (found.open_shards or found.waiting or list(daemon.shm_dir.glob("*.open")))
        if balanced:
            return found
        names = sorted(path.name for path in daemon.shm_dir.iterdir())
        assert time.monotonic() < deadline, f"{on_disk} bytes on tmpfs in {names}, and the daemon says: {found}"
        time.sleep(0.01)


@dataclass(frozen=True)
class Picture:
    """A local store at one moment."""

    files: dict[str, tuple[int, bytes]]
    entries: dict[str, Entry]
    refers: dict[str, set[str]]
    """By id: every key that its `.metadata` leads to."""

    @classmethod
    def of(cls, root: Path) -> Picture:
        store = LocalStore(root)
        ledger = Ledger(store)
        entries = {str(entry.id): entry for entry in ledger.entries()}
        refers = {}
        for id, entry in entries.items():
            if entry.save_id is None:
                names = contents.files(metadata.read(store.get(f"{id}/.metadata")))
            else:
                names = [shard.file for shard in ledger.manifest(entry).shards if shard.file] + [f"{OWN_DIRECTORY}/{entry.save_id}"]
            refers[id] = {f"{id}/{name}" for name in [*names, ".metadata"]}
        files = {str(path.relative_to(root)): (path.stat().st_size, path.read_bytes()) for path in root.rglob("*") if path.is_file()}
        return cls(files, entries, refers)

    def newest(self) -> set[str]:
        """Of each run, the one that was accepted last."""
        latest: dict[str, Entry] = {}
        for entry in self.entries.values():
            if entry.id.run not in latest or entry.accepted_us > latest[entry.id.run].accepted_us:
                latest[entry.id.run] = entry
        return {str(entry.id) for entry in latest.values()}


def assert_prune_was_humble(before: Picture, after: Picture, *, keeping: Collection[str] = (), foreign: Collection[str] = ()) -> None:
    """The newest of each run and the ids in `keeping` are as they were, and so is each key in `foreign`.

    What else is still there has every file that it refers to; the rest is gone, not half gone.
    """
    for id in {*before.newest(), *keeping}:
        assert id in after.entries, f"{id} was deleted"
        assert {key: after.files.get(key) for key in before.refers[id]} == {key: before.files[key] for key in before.refers[id]}, id
    for id, keys in after.refers.items():
        assert keys <= after.files.keys(), f"{id} lacks {keys - after.files.keys()}"
    assert {key: after.files.get(key) for key in foreign} == {key: before.files[key] for key in foreign}
