"""DCP's StorageWriter that hands a save to the daemon. It translates; it decides nothing.

One writer serves many saves, also overlapping ones on several threads: what belongs to
one save is kept per thread, on which DCP runs all of it. Nothing that must be fresh
goes into DCP's plans, because DCP caches them.

Promises: what is saved are the values at the time of the call; when ``finish`` returns
the checkpoint is accepted. It never uses collectives of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, cast

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckptd.errors import CkptdError, InvalidRequest, NotFound, StoreError, Unavailable, WrongPhase
from ckptd.model import check_tags
from ckptd.v1 import daemon_pb2, manifest_pb2
from ckptd_client import metadata as pickles
from ckptd_client.channel import Daemon, connect, unanswered, warn_once
from ckptd_client.names import checked_id, text_of
from ckptd_client.shard import write_metadata, write_shard
from ckptd_client.waiting import remember

if TYPE_CHECKING:
    import os

    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner


#: How long a save asks the store whether its id is durable; after that the commit finds out, in the background.
_CHECK_SECONDS: Final = 2.0


class _Save(threading.local):
    """What belongs to the save that runs on this thread."""

    def __init__(self, checkpoint_id: object = None) -> None:
        self.checkpoint_id = checkpoint_id
        self.rank = 0
        self.is_coordinator = True
        self.only_new = False


class DaemonStorageWriter(StorageWriter):
    """Saves through the ckptd daemon of this node; for ``dcp.save`` and ``dcp.async_save``.

    checkpoint_id: ``step-1200`` or ``run-a/step-1200``; DCP's own argument overrides it.
    address: ``unix:/path`` or ``HOST:PORT``; default ``CKPTD_ADDRESS``, then the node's own daemon.
    overwrite: False refuses, before any byte moves, an id that is already durable.
    durable: False keeps the checkpoint in memory only, until a newer one of the run is accepted.
    tags: small texts that ``ckptd show`` displays, 64 KiB together at most.

    Every error is one of ``ckptd.errors``, inside the CheckpointException that DCP raises on all ranks.
    """

    def __init__(
        self,
        checkpoint_id: str | os.PathLike[str] | None = None,
        *,
        address: str | None = None,
        overwrite: bool = False,
        durable: bool = True,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._tags = _checked_tags(tags)
        self._checkpoint_id = checkpoint_id
        self._address = address
        self._overwrite = overwrite
        self._durable = durable
        self._save = _Save(checkpoint_id)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_save": self._save.checkpoint_id}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._save = _Save(state["_save"])

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The id of this thread's save, as it was given."""
        return cast("str | os.PathLike[str]", self._save.checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is an id of a checkpoint that could be saved."""
        try:
            checked_id(checkpoint_id)
        except CkptdError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins on this thread. Never raises: DCP would leave the other ranks waiting."""
        if checkpoint_id is not None:
            self._save.checkpoint_id = checkpoint_id

    def storage_meta(self) -> StorageMeta | None:
        """What DCP hands to the planner and puts into the metadata it returns."""
        return StorageMeta(checkpoint_id=text_of(self._save.checkpoint_id))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001 - DCP's signature
        """Takes the rank; refuses ``use_collectives=False``."""
        if not kwargs.get("use_collectives", True):
            raise InvalidRequest(
                "ckptd binds the shards of all ranks into one checkpoint: call save without use_collectives=False, "
                "or let each rank save under an id of its own with a process_group of its own"
            )
        self._save.is_coordinator = is_coordinator
        self._save.rank = kwargs.get("rank") or 0

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Checks, on every rank and before any byte moves, the id and that the daemon answers."""
        checkpoint_id = checked_id(self._save.checkpoint_id)
        daemon = connect(self._address)
        warn_once(daemon.hello().warning)  # what went wrong in the background since the last save
        self._save.only_new = self._save.is_coordinator and not self._overwrite and not _is_new(daemon, checkpoint_id)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Refuses the save of one rank out of many that would look like the save of all."""
        if len(plans) == 1 and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and dist.get_rank() != 0:
            raise InvalidRequest(
                f"rank {dist.get_rank()} of {dist.get_world_size()} saves alone (no_dist=True, or a group of one): every such rank would "
                "make its own checkpoint of the same id. Pass process_group= to save together, save on rank 0 only, or run "
                "the rank in a world of its own"
            )
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's shard; the one result carries its receipt."""
        checkpoint_id = checked_id(self._save.checkpoint_id)
        daemon = connect(self._address)
        receipt = write_shard(daemon, checkpoint_id=checkpoint_id, rank=self._save.rank, plan=plan, planner=planner)
        remember(daemon.address, checkpoint_id, receipt)
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(MetadataIndex(""), receipt.raw_bytes, receipt.SerializeToString())])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Binds the shards of all ranks into the checkpoint; returns when it is accepted."""
        checkpoint_id = checked_id(self._save.checkpoint_id)
        daemon = connect(self._address)
        pickled = write_metadata(daemon, checkpoint_id=checkpoint_id, rank=self._save.rank, data=pickles.dump(metadata))
        request = daemon_pb2.CommitRequest(
            id=checkpoint_id,
            shards=[manifest_pb2.Receipt.FromString(result.storage_data) for of_rank in results for result in of_rank],
            metadata=pickled,
            tags=self._tags,
            durable=self._durable,
            only_new=self._save.only_new,
        )
        try:
            daemon.commit(request)
        except Unavailable as error:
            if not unanswered(error):
                raise
            raise Unavailable(
                f"outcome unknown: the daemon went away while it accepted {checkpoint_id!r}, which may yet appear; "
                f"`ckptd list` tells, saving again is safe ({error})"
            ) from error
        metadata.version = pickles.DCP_VERSION
        metadata.storage_meta = self.storage_meta()


def _checked_tags(tags: object) -> dict[str, str]:
    if tags is None:
        return {}
    if not isinstance(tags, Mapping) or not all(isinstance(text, str) for pair in tags.items() for text in pair):
        raise InvalidRequest(f"tags map str to str, which {tags!r} does not")
    if any(not text.isascii() and text != text.encode("utf-8", "replace").decode() for pair in tags.items() for text in pair):
        raise InvalidRequest(f"tags are Unicode text, and {tags!r} has a lone surrogate")
    check_tags(tags)
    return dict(tags)


def _is_new(daemon: Daemon, checkpoint_id: str) -> bool:
    """Raises WrongPhase if the id is durable already; False if that cannot be told: no save waits for the store."""
    try:
        found = daemon.resolve(daemon_pb2.ResolveRequest(id=checkpoint_id, saving=True), seconds=_CHECK_SECONDS)
    except NotFound:
        return True
    except (StoreError, Unavailable):
        return False
    if found.stock or found.state == daemon_pb2.Checkpoint.DURABLE:
        raise WrongPhase(
            f"checkpoint {checkpoint_id!r} is already durable: choose another id, or pass overwrite=True to replace it, "
            "or is another job saving to this run?"
        )
    return True
