"""Waits until a checkpoint is durable, for whoever asked, and raises what makes that impossible; tells a save what there is of its id.

This node's memory answers as long as it knows of the save that is meant, then the store, then what other nodes hold.
Lives on the loop.
"""

from __future__ import annotations

import asyncio

from ckptd import errors
from ckptd.attempt import PENDING, Attempt, checkpoint_of, refuse_older
from ckptd.model import CheckpointId
from ckptd.restore import Restore
from ckptd.v1.daemon_pb2 import Checkpoint
from ckptd.v1.manifest_pb2 import Summary

#: How often is looked for what only other nodes can make durable.
LOOK_SECONDS = 1.0


async def until_durable(restore: Restore, checkpoint: CheckpointId, token: str, sealed_us: int) -> Checkpoint:
    """Returns when the attempt that holds the shard (else the newest of the id) is durable.

    With a token that nobody holds any more, an attempt from before `sealed_us` is not what was meant.
    Raises WrongPhase if it never will be durable, NotFound if there is none.
    """
    node, name = restore.node, ""
    catalog = node.catalog
    while True:
        attempt = catalog.attempts.get(name) or catalog.holder(token)
        if attempt is None and token not in catalog.shards:
            newest = catalog.newest_of(checkpoint, restorable=False)
            if newest is not None and not (newest.ended and not newest.held):
                refuse_older(checkpoint, int(newest.name[:16], 16), sealed_us)
                attempt = newest
            else:  # only the store can tell: what memory remembers of the id is over
                elsewhere = await _is_elsewhere(restore, checkpoint, sealed_us)  # first: it may become durable meanwhile
                try:
                    return await _in_store(restore, checkpoint, sealed_us, newest)
                except errors.NotFound:
                    if not elsewhere:
                        raise
                await asyncio.sleep(LOOK_SECONDS)
                continue
        if attempt is not None:
            name = attempt.name
            if attempt.state == Checkpoint.DURABLE or attempt.was_durable:
                return checkpoint_of(attempt)
            if attempt.state == Checkpoint.FAILED:
                raise errors.WrongPhase(f"checkpoint {checkpoint} could not be made durable: {attempt.reason}")
            if attempt.ended:
                raise errors.WrongPhase(f"checkpoint {checkpoint} will not become durable: {attempt.reason}")
            if not attempt.record.durable:
                raise errors.WrongPhase(f"checkpoint {checkpoint} was saved with durable=False: it stays in memory")
        await node.changed()


async def before_save(restore: Restore, checkpoint: CheckpointId) -> Checkpoint:
    """The durable checkpoint of an id that is to be saved; NotFound if there is none.

    While the store is away nobody waits for it: Unavailable, unless memory holds a save of the id before which that was looked at.
    """
    node = restore.node
    try:
        entry = await node.learning.ask(checkpoint.run, lambda: restore.questions.ask("find", checkpoint, node.ledger.find))
    except errors.Unavailable:
        here = node.catalog.newest_of(checkpoint)
        if here is None or here.record.only_new:
            raise
        return checkpoint_of(here)
    summary = Summary(id=str(checkpoint), attempt=entry.attempt or "")
    return Checkpoint(summary=summary, state=Checkpoint.DURABLE, stock=entry.attempt is None)


async def _is_elsewhere(restore: Restore, checkpoint: CheckpointId, sealed_us: int) -> bool:
    """Whether other nodes hold an attempt of that id, no older than the save that is meant, which is on its way to the store."""
    seen = await restore.whereabouts.survey(checkpoint)
    return any(one.state in PENDING and int(name[:16], 16) >= sealed_us for name, one in seen.items())


async def _in_store(restore: Restore, checkpoint: CheckpointId, sealed_us: int, ended: Attempt | None) -> Checkpoint:
    """The durable checkpoint of that id, if it is no older than the save that is meant."""
    try:
        entry = await restore.questions.ask("find", checkpoint, restore.ledger.find)
    except errors.NotFound:
        if ended is None:
            raise errors.NotFound(f"no checkpoint {checkpoint} in the store or in memory; `ckptd list` shows what is there") from None
        raise errors.WrongPhase(f"checkpoint {checkpoint} will not become durable: {ended.reason}") from None
    refuse_older(checkpoint, entry.accepted_us, sealed_us)
    return await restore.summaries.line(entry)
