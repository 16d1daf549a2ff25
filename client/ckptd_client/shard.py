"""One segment's way from Allocate to Seal: what a shard and a metadata pickle have in common.

Promises: either a receipt, or an error and the segment given back. Retries nothing:
whether a save is tried again is for the caller to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptd.errors import LeaseLost, Unavailable
from ckptd.v1 import daemon_pb2, manifest_pb2
from ckptd_client import transfer
from ckptd_client.channel import Daemon, unanswered, warn_once

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

    from ckptd_client.mapping import Mapping

#: A daemon's death ends a call and the lease, in any order: this long the second may take.
_GRACE_SECONDS = 1.0


def write_shard(daemon: Daemon, *, checkpoint_id: str, rank: int, plan: SavePlan, planner: SavePlanner) -> manifest_pb2.Receipt:
    """Writes all items of `plan` as this rank's shard; an empty plan makes an empty shard."""
    layout = transfer.lay_out(plan.items, planner)
    table = layout.table.SerializeToString()
    return _write(
        daemon,
        daemon_pb2.AllocateRequest(id=checkpoint_id, rank=rank, nbytes=layout.table.end + len(table)),
        daemon_pb2.SealRequest(nbytes=layout.table.end, table_nbytes=len(table)),
        lambda mapping: transfer.copy_in(layout, table, mapping, planner),
    )


def write_metadata(daemon: Daemon, *, checkpoint_id: str, rank: int, data: bytes) -> manifest_pb2.Receipt:
    """Writes the metadata pickle into a segment of its own."""
    request = daemon_pb2.AllocateRequest(id=checkpoint_id, rank=rank, nbytes=len(data), kind=daemon_pb2.AllocateRequest.METADATA)
    return _write(
        daemon, request, daemon_pb2.SealRequest(nbytes=len(data)), lambda mapping: transfer.move([(mapping.address, data, len(data))])
    )


def _write(
    daemon: Daemon, allocate: daemon_pb2.AllocateRequest, seal: daemon_pb2.SealRequest, fill: Callable[[Mapping], None]
) -> manifest_pb2.Receipt:
    lease = daemon.lease()
    allocate.owner = seal.owner = lease.owner
    try:
        segment = daemon.allocate(allocate)
        seal.token = segment.token
        try:
            warn_once(segment.warning)
            with lease.mapped(segment) as mapping:
                fill(mapping)
            lease.check()
            return daemon.seal(seal)
        except BaseException:
            if not daemon.release(daemon_pb2.ReleaseRequest(owner=lease.owner, token=segment.token)):
                lease.close()
            raise
    except (Unavailable, LeaseLost) as error:
        if isinstance(error, LeaseLost) or unanswered(error):
            try:
                lease.check(grace_seconds=_GRACE_SECONDS)
            finally:
                # Whatever the daemon may have given without our knowing ends with the lease.
                lease.close()
        raise
