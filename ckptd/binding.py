"""What a commit checks, and the record it makes of the receipts that it was given.

Pure: reads the catalogue, changes nothing. A receipt of this node counts only if the shard
behind it is held, sealed, and bound by nobody; those of other nodes are checked there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ckptd import errors
from ckptd.catalog import Catalog
from ckptd.model import CheckpointId, check_tags, mint_attempt
from ckptd.v1.daemon_pb2 import CommitRequest
from ckptd.v1.manifest_pb2 import Receipt, Record, Summary


def check(catalog: Catalog, request: CommitRequest) -> CheckpointId:
    """Raises InvalidRequest, LeaseLost or WrongPhase unless this node can take part in it."""
    checkpoint = CheckpointId.parse(request.id)
    receipts = [*request.shards, request.metadata]
    check_tags(request.tags)
    if not request.shards:
        raise errors.InvalidRequest(f"{checkpoint}: a checkpoint has at least one shard")
    ranks = Counter(receipt.rank for receipt in request.shards)
    if twice := [rank for rank, times in ranks.items() if times > 1]:
        raise errors.InvalidRequest(f"{checkpoint}: rank {twice[0]} brought more than one shard")
    if len({receipt.token for receipt in receipts}) < len(receipts):
        raise errors.InvalidRequest(f"{checkpoint}: a shard was brought twice")
    check_held(catalog, checkpoint, (receipt for receipt in request.shards if is_own(catalog, receipt)))
    if is_own(catalog, request.metadata):
        check_held(catalog, checkpoint, [request.metadata], metadata=True)
    check_stops_nothing(catalog, checkpoint, durable=request.durable)
    return checkpoint


def check_stops_nothing(catalog: Catalog, checkpoint: CheckpointId, *, durable: bool) -> None:
    """Raises WrongPhase if a save that stays in memory would supersede one that is on its way to the store."""
    if not durable and any(a.pending and a.record.durable and a.id == checkpoint for a in catalog.attempts.values()):
        raise errors.WrongPhase(
            f"{checkpoint}: an earlier save of this id is on its way to the store, and one with durable=False would stop it: "
            "wait for it, or choose another id"
        )


def check_held(catalog: Catalog, checkpoint: CheckpointId, receipts: Iterable[Receipt], *, metadata: bool = False) -> None:
    """Raises LeaseLost unless this node holds, sealed and unbound, what its receipts say."""
    for receipt in receipts:
        shard = catalog.shards.get(receipt.token)
        what = "the metadata" if metadata else f"the shard of rank {receipt.rank}"
        if shard is None or shard.receipt != receipt or catalog.holder(receipt.token):
            raise errors.LeaseLost(
                f"{checkpoint}: the daemon no longer holds {what}: it was restarted, another process saved the same id at the same "
                f"time, or the last rank sealed more than {catalog.open_timeout_seconds:g} s after the first (--open-timeout): save again"
            )
        if shard.metadata != metadata:
            raise errors.InvalidRequest(f"{checkpoint}: the metadata pickle and the shards are not told apart")
        if shard.id != checkpoint:
            raise errors.InvalidRequest(f"{what} was saved as {shard.id}, the save is of {checkpoint}: give all ranks the same id")


def is_own(catalog: Catalog, receipt: Receipt) -> bool:
    """Whether this node gave the receipt."""
    return receipt.node in (catalog.node, "")


def others(catalog: Catalog, request: CommitRequest, own: str) -> dict[str, str]:
    """The participants beside this node (at address `own`): address by node. Raises InvalidRequest if one cannot be reached."""
    found: dict[str, str] = {}
    receipts: list[Receipt] = [*request.shards, request.metadata]
    for receipt in receipts:
        if is_own(catalog, receipt):
            continue
        if not receipt.address:
            raise errors.InvalidRequest(
                f"{request.id}: rank {receipt.rank} saved to another daemon ({receipt.node}) that other nodes cannot reach, or to this one "
                "before its memory was lost: save again; where each node has a daemon, start them with --listen HOST:PORT, too, "
                "and on one node give all ranks the same CKPTD_ADDRESS"
            )
        if receipt.address == own:
            raise errors.LeaseLost(
                f"{request.id}: rank {receipt.rank} saved to this daemon before its memory was lost: save again (or another daemon has "
                f"the same --advertise {own}: give each its own)"
            )
        found[receipt.node] = receipt.address
    if found and not own:
        raise errors.InvalidRequest(
            f"{request.id}: ranks saved to {len(found) + 1} daemons, and the others cannot reach this one (node {catalog.node}): "
            "start it with --listen HOST:PORT, too"
        )
    return found


def record_of(catalog: Catalog, request: CommitRequest, now_us: int, *, newest: str = "", replicas: int = 0) -> Record:
    """The record that makes these receipts an attempt, newer than all that this node, or `newest`, knows of the run."""
    checkpoint = CheckpointId.parse(request.id)
    known = max(newest, catalog.newest.get(checkpoint.run, ""))
    summary = Summary(
        id=str(checkpoint),
        # Later than its shards, whatever the clock does: `wait` compares the two.
        attempt=mint_attempt(max(now_us, *(receipt.sealed_us + 1 for receipt in [*request.shards, request.metadata])), known or None),
        accepted_us=now_us,
        world_size=len(request.shards),
        raw_bytes=sum(receipt.raw_bytes for receipt in request.shards),
        codec=catalog.codec,
        tags=request.tags,
    )
    if request.HasField("step"):
        summary.step = request.step
    ordered: list[Receipt] = list(request.shards)
    ordered.sort(key=lambda receipt: receipt.rank)
    return Record(
        summary=summary,
        shards=ordered,
        metadata=request.metadata,
        durable=request.durable,
        only_new=request.only_new,
        replicas=replicas,
    )
