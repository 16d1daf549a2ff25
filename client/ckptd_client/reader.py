"""DCP's StorageReader that loads through the daemon. It translates; it decides nothing.

Every rank resolves the id; the attempt rides in DCP's plans, and a mixture is refused. With it
rides the address of each rank's daemon, so that all of them know who loads together.
What is read is addressed by (attempt, item, byte range), from memory or from the store,
wherever the daemon finds it. Of a checkpoint that stock DCP wrote items come whole, as
``torch.save`` wrote them, and the attempt is the state of its directory: DCP saves over the
files that are there, so at the end that state is looked at again.

Promises: nothing of a checkpoint but its plain objects is unpickled with more than
``weights_only`` (objects are DCP's planner's, which unpickles them in full); only what
the plan needs is asked for; a target is handed back to the planner only after the
daemon has confirmed that its bytes did not change under the copy.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import operator
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckptd.errors import CkptdError, Corrupt, InvalidRequest, WrongPhase
from ckptd.v1 import daemon_pb2, manifest_pb2
from ckptd_client import metadata as pickles
from ckptd_client import plans
from ckptd_client.channel import connect, warn_always
from ckptd_client.meeting import introduce_to
from ckptd_client.names import checked_target
from ckptd_client.stream import LoadStream
from ckptd_client.strictness import Keys
from ckptd_client.transfer import copy_bits, fqn_bytes, is_hollow, is_plain

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

    from ckptd_client.mapping import Mapping


class _Unread(Metadata):
    """Stands for metadata that could not be read: raises why, to whoever looks.

    DCP catches what ``read_metadata`` raises, logs it as a missing file and raises an
    AssertionError; this way every rank gets the error itself.
    """

    def __init__(self, error: CkptdError) -> None:
        self.error = error

    def _raise(self) -> NoReturn:
        raise self.error

    state_dict_metadata = planner_data = property(_raise)


class DaemonStorageReader(StorageReader):
    """Loads through the ckptd daemon of this node; for ``dcp.load``.

    checkpoint_id: an id, ``latest`` or ``<run>/latest``; DCP's own argument overrides it.
    address: ``unix:/path`` or ``HOST:PORT``; default ``CKPTD_ADDRESS``, then the node's own daemon.
    fallback: a damaged checkpoint is an error; True goes back to the newest good one of its run that was accepted
        before it, with a warning on every rank that names each checkpoint passed over, and why. To know it, the daemon
        reads the whole checkpoint back from the store before it is loaded (once per checkpoint, for all ranks; not if
        its memory holds it whole). A store that is away is an error all the same.

    Every error is one of ``ckptd.errors``, inside the CheckpointException that DCP raises on all ranks.
    """

    _tables: list[manifest_pb2.Table]

    def __init__(self, checkpoint_id: str | os.PathLike[str] | None = None, *, address: str | None = None, fallback: bool = False) -> None:
        super().__init__()
        self._checkpoint_id = checkpoint_id
        self._address = address
        self._fallback = fallback
        self._forget()

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The id to load, as it was given."""
        return cast("str | os.PathLike[str]", self._checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is an id, ``latest`` or ``<run>/latest``."""
        try:
            checked_target(checkpoint_id)
        except CkptdError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins. Never raises: DCP would leave the other ranks waiting."""
        if checkpoint_id is not None:
            self._checkpoint_id = checkpoint_id
        self._forget()

    def read_metadata(self) -> Metadata:  # with **kwargs DCP would try again and hide the first error
        """Finds the checkpoint and reads what it consists of; its ``storage_meta.checkpoint_id`` is the id that was found.

        Raises NotFound if there is none, Unavailable if it cannot be told.
        """
        try:
            return self._read_metadata()
        except CkptdError as error:
            frame = inspect.currentframe()
            caller = frame.f_back.f_globals.get("__name__", "") if frame and frame.f_back else ""
            if caller.startswith("torch.distributed.checkpoint."):
                return _Unread(error)
            raise

    def _read_metadata(self) -> Metadata:
        self._forget()
        target = checked_target(self._checkpoint_id)
        daemon = connect(self._address)
        hello = daemon.hello()
        self._limit = plans.batch_limit(hello.memory)
        self._daemon_address = hello.address
        found = daemon.resolve_whole(target) if self._fallback else daemon.resolve(daemon_pb2.ResolveRequest(id=target))
        checkpoint_id, attempt = found.summary.id, found.summary.attempt
        for skipped in found.skipped:
            warn_always(f"{checkpoint_id} is loaded instead of {target}, because a newer checkpoint is damaged: {skipped}")
        for why in found.not_reached:
            what = f"an older save of {target} is loaded" if checkpoint_id == target else f"{checkpoint_id} is loaded as {target}"
            warn_always(f"{what}, the newest that can be read: {why}")
        with LoadStream(daemon, checkpoint_id, attempt) as stream:
            pickled, tables = stream.index(stream.open())
        metadata = pickles.load(pickled, checkpoint_id)
        metadata.storage_data = None  # where stock stored what: the tables say it
        metadata.storage_meta = StorageMeta(checkpoint_id=checkpoint_id, load_id=attempt)
        self._keys = metadata.state_dict_metadata = Keys(metadata.state_dict_metadata, checkpoint_id)
        self._tables = tables
        for shard, table in enumerate(tables):
            for number, item in enumerate(table.items):
                self._places[item.fqn, tuple(item.offset) if item.has_offset else None] = plans.Place(shard, number, item)
        self._source = (checkpoint_id, attempt)
        self._stock = found.stock
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001 - DCP's signature
        """Raises what `read_metadata` could not."""
        if isinstance(metadata, _Unread):
            raise metadata.error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Says which attempt this rank has resolved, and how other nodes reach its daemon."""
        return dataclasses.replace(plan, storage_data=(*self._source, (self._daemon_address,)))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Refuses ranks that would read different checkpoints; tells all of the daemons that load together."""
        said = [plan.storage_data for plan in plans if plan.storage_data is not None]
        sources = {(checkpoint_id, attempt) for checkpoint_id, attempt, _ in said}
        addresses = tuple(sorted({address for *_, known in said for address in known if address}))
        if len(sources) > 1:
            with suppress(CkptdError):  # what one daemon alone knew of, others find when the load is tried again
                introduce_to(connect(self._address), addresses)
            named = ", ".join(f"{checkpoint_id} (attempt {attempt})" for checkpoint_id, attempt in sorted(sources))
            raise WrongPhase(f"the ranks resolved {self._checkpoint_id!r} to different checkpoints ({named}): retry the load")
        self._keys.log_left_out(plans)
        source = next(iter(sources), self._source)
        return [dataclasses.replace(plan, storage_data=(*source, addresses)) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copies everything of the plan into its targets."""
        reads = [read for request in plan.items for read in self._reads(request)]
        reads.sort(key=lambda read: (read.place.shard, read.place.item.at))
        targets: dict[int, torch.Tensor] = {}
        addresses = plan.storage_data[2] if plan.storage_data is not None else ()
        with LoadStream(connect(self._address), *self._source, addresses) as stream:
            stream.open()
            for batch in plans.batches((read for read in reads if read.ranges), self._limit):
                want = batch.want()
                mapping, nbytes = stream.fetch(want)
                opaque = _opaque(batch, mapping, dict(zip(want.items, nbytes, strict=False)))
                for read in batch.reads:
                    if read.box is not None:
                        self._copy(read, read.box, mapping, planner, targets)
                stream.copied()
                tensors: dict[int, torch.Tensor] = {}
                for read in batch.reads:
                    self._hand_over(read, opaque.get(read.place.number), tensors, planner, targets)
        for read in reads:
            if not read.ranges:
                self._hand_over(read, b"" if read.box is None else None, {}, planner, targets)
        if self._stock:
            with LoadStream(connect(self._address), *self._source) as stream:
                stream.open()  # raises LeaseLost if DCP has saved over what was read
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _forget(self) -> None:
        self._source = ("", "")
        self._daemon_address = ""
        self._stock = False
        self._tables = []
        self._keys = Keys({}, "")
        self._places: dict[tuple[bytes, tuple[int, ...] | None], plans.Place] = {}
        self._limit = plans.BATCH_NBYTES

    def _reads(self, request: ReadItem) -> Iterator[plans.Read]:
        index = request.storage_index
        place = self._places.get((fqn_bytes(index.fqn), tuple(index.offset) if index.offset is not None else None))
        if place is None:
            raise Corrupt(f"checkpoint {self._source[0]!r}: no shard holds {_named(index)}, which its metadata names")
        item = place.item
        if (request.type == LoadItemType.BYTE_IO) != (item.kind == manifest_pb2.Item.OPAQUE_OBJECT):
            raise Corrupt(f"checkpoint {self._source[0]!r}: {_named(index)} is not of the kind that its metadata says")
        if item.kind != manifest_pb2.Item.RAW:
            yield plans.Read(request, place, None, [(0, item.nbytes)] if item.nbytes else [], last=True)
            return
        strides = self._form(place).strides
        box = (tuple(request.storage_offsets), tuple(request.lengths))
        parts = list(plans.cut(item, box, strides, self._dtype(place).itemsize, self._limit))
        for number, (part, ranges) in enumerate(parts, start=1):
            yield plans.Read(request, place, part, ranges, last=number == len(parts))

    def _copy(self, read: plans.Read, box: plans.Box, mapping: Mapping, planner: LoadPlanner, targets: dict[int, torch.Tensor]) -> None:
        """Copies a raw part into its target."""
        item = read.place.item
        view = mapping.view(item.raw_at, item.nbytes)
        form = self._form(read.place)
        stored = torch.frombuffer(view, dtype=torch.uint8).view(self._dtype(read.place)).as_strided(tuple(form.shape), tuple(form.strides))
        offsets, lengths = box
        target = _target(read, planner, targets)
        inner = tuple(map(operator.sub, offsets, read.request.storage_offsets))
        _fill(narrow_tensor_by_index(target, inner, lengths), narrow_tensor_by_index(stored, offsets, lengths), read.request)

    def _hand_over(
        self,
        read: plans.Read,
        data: bytes | None,
        tensors: dict[int, torch.Tensor],
        planner: LoadPlanner,
        targets: dict[int, torch.Tensor],
    ) -> None:
        """Gives the planner what is now certain. `data`: of an opaque item; `tensors`: what has been made of those, by item."""
        request, number = read.request, read.place.number
        if request.type == LoadItemType.BYTE_IO:
            planner.load_bytes(request, io.BytesIO(data or b""))
            return
        if not read.last:
            return
        target = _target(read, planner, targets)
        if data is not None:
            if number not in tensors:
                tensors.clear()  # the reads of an item follow one another
                tensors[number] = self._unpacked(data, read)
            _fill(target, narrow_tensor_by_index(tensors[number], request.storage_offsets, request.lengths), request)
        planner.commit_tensor(request, target)
        del targets[id(request)]

    def _unpacked(self, data: bytes, read: plans.Read) -> torch.Tensor:
        tensor = _unpacked(data, read.request.storage_index)
        if self._stock and tensor.size() != torch.Size(self._form(read.place).shape):
            raise Corrupt(
                f"checkpoint {self._source[0]!r}: {_named(read.request.storage_index)} has shape {tuple(tensor.size())} in its data file, "
                f"{tuple(self._form(read.place).shape)} in .metadata: was it saved over by a save that did not end? load another checkpoint"
            )
        return tensor

    def _form(self, place: plans.Place) -> manifest_pb2.Form:
        return self._tables[place.shard].forms[place.item.form]

    def _dtype(self, place: plans.Place) -> torch.dtype:
        name = self._form(place).dtype
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            key = place.item.fqn.decode(errors="replace")
            raise InvalidRequest(f"{key!r} is of dtype {name!r}, which torch {torch.__version__} does not have")
        return dtype


def _named(index: MetadataIndex) -> str:
    return f"{index.fqn!r}" if index.offset is None else f"{index.fqn!r} at {tuple(index.offset)}"


def _opaque(batch: plans.Batch, mapping: Mapping, nbytes: dict[int, int]) -> dict[int, bytes]:
    """The bytes of a batch's opaque items, out of the segment, by item; `nbytes`: of those whose table says only the most."""
    found: dict[int, bytes] = {}
    for read in batch.reads:
        number, item = read.place.number, read.place.item
        if read.box is None and number not in found:
            found[number] = bytes(mapping.view(item.raw_at, nbytes.get(number, item.nbytes)))
    return found


def _target(read: plans.Read, planner: LoadPlanner, targets: dict[int, torch.Tensor]) -> torch.Tensor:
    """Where a request goes; asked for once, because a planner may make it up."""
    request = read.request
    target = targets.get(id(request))
    if target is None:
        target = planner.resolve_tensor(request)
        # A detached sparse or quantised tensor does not pass new indices or scales on: it would be filled in vain.
        target = targets[id(request)] = target.detach() if is_plain(target) else target
        if is_plain(target) and is_hollow(target):
            raise InvalidRequest(f"{_named(request.storage_index)}: the target's storage was freed or shortened: nothing to load into")
        if target.size() != torch.Size(request.lengths):
            raise InvalidRequest(
                f"{_named(request.storage_index)}: the target has shape {tuple(target.size())}, "
                f"what is loaded into it {tuple(request.lengths)}"
            )
    return target


@torch.no_grad()
def _fill(target: torch.Tensor, saved: torch.Tensor, request: ReadItem) -> None:
    try:
        copy_bits(target, saved)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        kinds = [f"{type(tensor).__qualname__} ({tensor.dtype}, {tensor.layout})" for tensor in (saved, target)]
        raise InvalidRequest(f"{_named(request.storage_index)}: a saved {kinds[0]} does not go into a {kinds[1]}: {error}") from error


def _unpacked(data: bytes, index: MetadataIndex) -> torch.Tensor:
    try:
        tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (EOFError, OSError, RuntimeError) as error:
        raise Corrupt(f"{_named(index)} is not what torch.save writes: {' '.join(str(error).split())}; load another checkpoint") from error
    except Exception as error:
        # torch's own text also advises to load without any check.
        refused = re.search(r"GLOBAL (\S+) (?:was not an allowed global|whose module)", str(error))
        reason = f"it contains {refused.group(1)}" if refused else " ".join(str(error).partition("WeightsUnpickler error:")[2].split())
        raise InvalidRequest(
            f"{_named(index)} was saved as torch.save wrote it, and is not loaded unless you allow its classes with "
            f"torch.serialization.add_safe_globals: {reason}"
        ) from error
    if not isinstance(tensor, torch.Tensor):
        raise Corrupt(f"{_named(index)} is a {type(tensor).__name__}, not a tensor")
    return tensor
