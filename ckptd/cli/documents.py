"""What the CLI knows of a checkpoint, as one JSON document for programs.

The fields are a contract (DESIGN, "Public surface"). Times are RFC 3339 in UTC,
sizes are bytes, what is not known is null. Never decides anything: the daemon or
the store has said it all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from ckptd.errors import InvalidRequest
from ckptd.model import CheckpointId
from ckptd.v1 import daemon_pb2

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: Longer lists are not indented: Python does that one letter at a time.
_MANY = 1000
#: Sources of bytes that a status always names.
_SOURCES = ("memory", "peer", "store")


@dataclass(frozen=True, slots=True)
class Shown:
    """One checkpoint with what is in it."""

    checkpoint: daemon_pb2.Checkpoint
    #: One per name, in the order of names; an empty dtype stands for an object that is no tensor.
    tensors: Sequence[daemon_pb2.ShowReply.Tensor]
    #: Names beside ``.metadata``.
    files: Sequence[str]


@dataclass(slots=True)
class Verified:
    """What is known of one checkpoint that is or was read back."""

    id: str
    nbytes: int = 0
    total_nbytes: int = 0
    damage: list[str] = field(default_factory=list)
    #: What could not be verified, or why there was nothing to read.
    note: str = ""
    #: ``incomplete``, or ``unstored`` (so far in a daemon's memory alone), if there was nothing to read.
    absent: str = ""

    @property
    def verdict(self) -> str:
        """In a word."""
        return self.absent or ("damaged" if self.damage else "ok")


def text(document: Any) -> str:
    """One document as JSON, indented; of a long list in it, each element takes one line."""
    if not isinstance(document, dict) or all(not isinstance(value, list) or len(value) <= _MANY for value in document.values()):
        return json.dumps(document, indent=2)
    line = json.JSONEncoder().encode
    fields = []
    for key, value in document.items():
        if isinstance(value, list) and len(value) > _MANY:
            shown = "[\n    " + ",\n    ".join([line(element) for element in value]) + "\n  ]"
        else:
            shown = json.dumps(value, indent=2).replace("\n", "\n  ")
        fields.append(f"  {line(key)}: {shown}")
    return "{\n" + ",\n".join(fields) + "\n}"


def state(checkpoint: daemon_pb2.Checkpoint) -> str:
    """The state's public name."""
    return daemon_pb2.Checkpoint.State.Name(checkpoint.state).lower()


def step(checkpoint: daemon_pb2.Checkpoint) -> int | None:
    """The step as it was given, else the id's trailing integer, else None."""
    if checkpoint.summary.HasField("step"):
        return checkpoint.summary.step
    return _id(checkpoint).step


def order(checkpoint: daemon_pb2.Checkpoint) -> tuple[str, int, str]:
    """Sorts by run, then step (those without one first), then name."""
    number = step(checkpoint)
    return (_id(checkpoint).run, -1 if number is None else number, checkpoint.summary.id)


def checkpoint(listed: daemon_pb2.Checkpoint) -> dict[str, Any]:
    """One checkpoint as ``list --json`` shows it."""
    summary = listed.summary
    document: dict[str, Any] = {
        "id": summary.id,
        "run": _id(listed).run,
        "step": step(listed),
        "state": state(listed),
        "created": created(listed),
        "raw_bytes": summary.raw_bytes,
        "stored_bytes": summary.stored_bytes,
        "world_size": summary.world_size,
        "pinned": listed.pinned,
        "tags": dict(sorted(summary.tags.items())),
    }
    if listed.reason:
        document["reason"] = listed.reason
    return document


def created(listed: daemon_pb2.Checkpoint) -> str | None:
    """When the checkpoint was accepted, RFC 3339 in UTC; None if nobody knows."""
    if not listed.summary.accepted_us:
        return None
    return (_EPOCH + timedelta(microseconds=listed.summary.accepted_us)).isoformat().replace("+00:00", "Z")


def shown(whole: Shown) -> dict[str, Any]:
    """One checkpoint as ``show --json`` shows it: the fields of ``list``, and what is in it."""
    return checkpoint(whole.checkpoint) | {
        "tensors": [
            {
                "name": name(tensor.fqn),
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "raw_bytes": tensor.raw_bytes,
                "chunks": tensor.chunks,
                "shards": tensor.shards,
            }
            for tensor in whole.tensors
            if tensor.dtype
        ],
        "objects": [{"name": name(tensor.fqn), "raw_bytes": tensor.raw_bytes} for tensor in whole.tensors if not tensor.dtype],
        "files": list(whole.files),
    }


def status(reply: daemon_pb2.StatusReply) -> dict[str, Any]:
    """What a daemon says of itself."""
    served: Mapping[str, int] = reply.bytes_from
    return {
        "node": reply.node,
        "version": reply.version,
        "pid": reply.pid,
        "uptime_seconds": reply.uptime_seconds,
        "store": reply.store,
        "shm_dir": reply.shm_dir,
        "memory": reply.memory,
        "used": reply.used,
        "segments": reply.segments,
        "leases": reply.leases,
        "open_shards": reply.open_shards,
        "waiting": reply.waiting,
        "accepted": reply.accepted,
        "replicated": reply.replicated,
        "lost": reply.lost,
        "failed": reply.failed,
        "draining": reply.draining,
        "bytes_from": dict.fromkeys(_SOURCES, 0) | dict(served),
        "address": reply.address,
        "peers": [
            {"address": peer.address, "gone_seconds": peer.gone_seconds, "never_answered": peer.never_answered} for peer in reply.peers
        ],
        "warning": reply.warning,
    }


def waited(id: str, *, durable: bool, reason: str) -> dict[str, Any]:
    """What was waited for; `reason`: why it is not durable yet, if that is known."""
    document: dict[str, Any] = {"id": id, "durable": durable}
    if reason:
        document["reason"] = reason
    return document


def pruned(reply: daemon_pb2.PruneReply, *, dry_run: bool) -> dict[str, Any]:
    """What was deleted and what was kept, why, and what was swept (with `dry_run`: would be)."""
    return {
        "dry_run": dry_run,
        "verdicts": [
            {"id": verdict.id, "kept": verdict.kept, "reason": verdict.reason, "stored_bytes": verdict.stored_bytes}
            for verdict in reply.verdicts
        ],
        "swept": {
            "files": reply.swept.files,
            "bytes": reply.swept.nbytes,
            "later_files": reply.swept.later_files,
            "later_bytes": reply.swept.later_nbytes,
        },
    }


def deleted(reply: daemon_pb2.Deleted) -> dict[str, Any]:
    """A checkpoint that is gone, and its files, which go after the grace."""
    return {"id": reply.id, "files": reply.files, "bytes": reply.nbytes, "grace_seconds": reply.grace_seconds}


def verified(found: Sequence[Verified]) -> dict[str, Any]:
    """What was read back."""
    return {
        "damaged": sum(bool(one.damage) for one in found),
        "checkpoints": [
            {
                "id": one.id,
                "verdict": one.verdict,
                "read_bytes": one.nbytes,
                "damage": one.damage,
                "note": one.note,
            }
            for one in found
        ],
    }


def drained(reply: daemon_pb2.DrainReply, *, draining: bool) -> dict[str, Any]:
    """What is not durable yet, what cannot be, and what was never to be."""
    return {
        "draining": draining,
        "accepted": reply.accepted,
        "raw_bytes": reply.nbytes,
        "failed": list(reply.failed),
        "memory_only": list(reply.memory_only),
        "begun": list(reply.begun),
    }


def name(fqn: bytes) -> str:
    """A key of the state dict; it need not be valid Unicode."""
    return fqn.decode("utf-8", "surrogatepass")


def _id(listed: daemon_pb2.Checkpoint) -> CheckpointId:
    try:
        return CheckpointId.parse(listed.summary.id)
    except InvalidRequest:
        # Said by a daemon of another version, whose rules may be wider: shown as it is.
        return CheckpointId(run="", name=listed.summary.id)
