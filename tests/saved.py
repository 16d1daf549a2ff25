"""Checkpoints as saves leave them in a store, without a daemon and without torch; and a store that can be told to fail."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from ckptd import codec, metadata
from ckptd.ledger import Ledger
from ckptd.metadata import Placed
from ckptd.model import CheckpointId, data_key, metadata_key, mint_attempt, mint_token
from ckptd.store import Children, Object, Source, Store, is_temporary
from ckptd.v1.manifest_pb2 import Item, Manifest, Stored, StoredShard, Summary, Table

_STOCK_CLASS = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81"
#: What a trainer pickles before a save: Metadata without storage data.
PICKLE = _STOCK_CLASS + b"}(X\x13\0\0\0state_dict_metadata}ub."


def contents(name: str, attempt: str, ranks: int = 1, payload: bytes = b"data") -> Manifest:
    """An attempt of some ranks, each with one object; the last rank of several has none. Its files have fresh names."""
    shards = []
    for rank in range(ranks):
        if rank and rank == ranks - 1:
            shards.append(StoredShard(rank=rank, table=Table()))
            continue
        item = Item(fqn=b"t%d" % rank, kind=Item.OPAQUE_OBJECT, nbytes=len(payload))
        stored = Stored(lengths=[len(payload)], hashes=codec.block_hash(payload))
        table = Table(items=[item], end=len(payload))
        shards.append(StoredShard(rank=rank, file=f"__{rank}_{mint_token()}.distcp", nbytes=len(payload), table=table, stored=[stored]))
    summary = Summary(id=name, attempt=attempt, accepted_us=int(attempt[:16], 16), world_size=ranks, codec="none")
    return Manifest(summary=summary, shards=shards, block_nbytes=4096)


def upload(store: Store, found: Manifest, payload: bytes = b"data") -> None:
    """Puts its data files."""
    for shard in found.shards:
        if shard.file:
            store.put(data_key(CheckpointId.parse(found.summary.id), shard.file), lambda: [payload])


def save(store: Store, name: str, us: int, ranks: int = 1, payload: bytes = b"data") -> Manifest:
    """Commits an attempt accepted at `us` microseconds."""
    found = contents(name, mint_attempt(us, None), ranks, payload)
    upload(store, found, payload)
    Ledger(store).commit(CheckpointId.parse(name), found, PICKLE)
    return found


def stock_metadata(files: Mapping[str, int]) -> bytes:
    """A `.metadata` as stock DCP writes it: one object in each file. No two are the same, as each save of stock has an id."""
    placed = [Placed(f"object-{number}".encode(), None, None, file, 0, nbytes) for number, (file, nbytes) in enumerate(files.items())]
    save_id = secrets.token_hex(16).encode()
    head = b"}(X\x13\0\0\0state_dict_metadata}X\x07\0\0\0save_idX\x20\0\0\0" + save_id + b"ub"
    storage = b"".join(metadata._storage_data(placed, ()))
    return _STOCK_CLASS + head + storage + b"."


def save_stock(store: Store, name: str, files: Mapping[str, bytes]) -> None:
    """What a save of stock DCP leaves: files of names that are used again, then `.metadata`."""
    for file, data in files.items():
        store.put(f"{name}/{file}", lambda data=data: [data])
    found = stock_metadata({file: len(data) for file, data in files.items()})
    store.put(metadata_key(CheckpointId.parse(name)), lambda: [found])


class DictStore:
    """Objects in memory, with times by a clock that the test sets; None: it tells no times."""

    url = "dict"
    conditional = False

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.clock = clock

    def put(self, key: str, source: Source, *, nbytes_hint: int | None = None, replacing: str | None = None) -> int:
        data = b"".join(bytes(piece) for piece in source())
        self.objects[key] = (data, self.clock() if self.clock else 0.0)
        return len(data)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        from ckptd.errors import NotFound

        if key not in self.objects:
            raise NotFound(key)
        return self.objects[key][0][start:end]

    def list(self, prefix: str = "", *, temporary: bool = False) -> Iterator[Object]:
        for key, (data, modified) in sorted(self.objects.items()):
            if key.startswith(prefix) and (temporary or not is_temporary(key)):
                yield Object(key, len(data), modified)

    def children(self, directory: str = "") -> Children:
        lead = f"{directory}/" if directory else ""
        found = [one for one in self.list(lead) if "/" not in one.key.removeprefix(lead)]
        return found, sorted(
            {one.key.removeprefix(lead).split("/")[0] for one in self.list(lead)} - {one.key.removeprefix(lead) for one in found}
        )

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)

    def remove(self, key: str, version: str) -> None:
        raise AssertionError("it tells no versions")

    def abort_uploads(self, older_than_seconds: float) -> int:
        return 0

    def probe(self) -> None:
        pass


class Stop(BaseException):
    """The process ends here."""


class Watched:
    """Another store, every call of which is seen: `before` and `after` are told what is called and with which keys.

    Deletions come one by one, as a process may die between two. What `before` or `after` raises comes out.
    """

    def __init__(
        self,
        store: Store,
        before: Callable[[str, str], None] = lambda _call, _key: None,
        after: Callable[[str, str], None] = lambda _call, _key: None,
    ) -> None:
        self.store = store
        self.before = before
        self.after = after

    @property
    def url(self) -> str:
        return self.store.url

    @property
    def conditional(self) -> bool:
        return self.store.conditional

    def put(self, key: str, source: Source, *, nbytes_hint: int | None = None, replacing: str | None = None) -> int:
        self.before("put", key)
        nbytes = self.store.put(key, source, nbytes_hint=nbytes_hint, replacing=replacing)
        self.after("put", key)
        return nbytes

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.before("get", key)
        data = self.store.get(key, start, end)
        self.after("get", key)
        return data

    def list(self, prefix: str = "", *, temporary: bool = False) -> Iterator[Object]:
        self.before("list", prefix)
        found = [*self.store.list(prefix, temporary=temporary)]
        self.after("list", prefix)
        return iter(found)

    def children(self, directory: str = "") -> Children:
        self.before("children", directory)
        found = self.store.children(directory)
        self.after("children", directory)
        return found

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.before("delete", key)
            self.store.delete([key])
            self.after("delete", key)

    def remove(self, key: str, version: str) -> None:
        self.before("delete", key)
        self.store.remove(key, version)
        self.after("delete", key)

    def abort_uploads(self, older_than_seconds: float) -> int:
        self.before("abort_uploads", "")
        return self.store.abort_uploads(older_than_seconds)

    def probe(self) -> None:
        self.store.probe()


EFFECTS: Collection[str] = ("put", "delete")


def stopping(store: Store, number: int, *, after: bool) -> Watched:
    """A store whose process ends before or after its n-th put or deletion, counted from 0."""
    left = [number]

    def moment(call: str, _key: str) -> None:
        if call in EFFECTS:
            left[0] -= 1
            if left[0] < 0:
                raise Stop

    return Watched(store, after=moment) if after else Watched(store, before=moment)
