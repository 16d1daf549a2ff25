"""The fetcher: which blocks lie under a range, which pages under blocks, and whole items, each read once for all."""

from __future__ import annotations

import asyncio
import io
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd import errors
from ckptd.arena import Arena
from ckptd.blocks import PAGE, REQUEST_NBYTES, BlockShard, StoredBlock, pages_nbytes, runs
from ckptd.codec import Raw
from ckptd.fetcher import Fetcher
from ckptd.localstore import LocalStore
from ckptd.metadata import Contents, StoredAt
from ckptd.model import CheckpointId
from ckptd.stock import Seen, Stock, describe, parse
from ckptd.v1.manifest_pb2 import Item, Stored, StoredShard, Table

BLOCK = 1000


def shard() -> BlockShard:
    """Two items: raw bytes 100 to 2600 of a container of 2700 bytes in three blocks, then an opaque one of 500 bytes."""
    table = Table(
        items=[
            Item(fqn=b"a", kind=Item.RAW, at=0, raw_at=100, nbytes=2500),
            Item(fqn=b"b", kind=Item.OPAQUE_OBJECT, at=2700, raw_at=2700, nbytes=500),
        ],
        end=3200,
    )
    stored = [Stored(offset=0, lengths=[10, 20, 30], hashes=bytes(48)), Stored(offset=60, lengths=[40], hashes=bytes(16))]
    return BlockShard(StoredShard(file="__0_x.distcp", nbytes=100, table=table, stored=stored), "key", Raw(), BLOCK)


def where(blocks: list[StoredBlock]) -> list[tuple[tuple[int, int], int, int, int, int]]:
    return [(block.key, block.at, block.nbytes, block.offset, block.length) for block in blocks]


def test_a_range_leads_to_the_blocks_that_hold_it() -> None:
    found = shard().find([0, 1], [899, 0], [901, 500])
    assert where(found) == [((0, 0), 0, 1000, 0, 10), ((0, 1), 1000, 1000, 10, 20), ((1, 0), 2700, 500, 60, 40)]
    assert where(shard().find([0], [2499], [2500])) == [((0, 2), 2000, 700, 30, 30)]
    assert shard().find([0], [5], [5]) == []


@pytest.mark.parametrize(("item", "start", "end"), [(2, 0, 1), (0, 0, 2501), (0, 3, 2), (1, 500, 501)])
def test_a_range_outside_of_the_item_is_refused(item: int, start: int, end: int) -> None:
    with pytest.raises(errors.InvalidRequest):
        shard().find([item], [start], [end])


def test_neighbours_are_read_in_one_request_and_distant_blocks_are_not() -> None:
    def block(offset: int, length: int) -> StoredBlock:
        return StoredBlock((0, offset), 0, 1, offset, length, b"")

    near, next_to, far = block(0, 10), block(10, 10), block(10_000_000, 10)
    assert runs([near, next_to, far]) == [[near, next_to], [far]]


@given(st.lists(st.tuples(st.integers(0, 50_000), st.integers(1, 20_000)), max_size=20))
def test_pages_are_counted_once(pieces: list[tuple[int, int]]) -> None:
    spans = [(start, start + nbytes) for start, nbytes in pieces]
    touched = {page for start, end in spans for page in range(start // PAGE, (end - 1) // PAGE + 1)}
    assert pages_nbytes(spans) == len(touched) * PAGE


# -- whole items -----------------------------------------------------------------------------------------------

MIB = 1024 * 1024
NBYTES = 2 * REQUEST_NBYTES + 12_345


class Counting(LocalStore):
    """A store of which a test sees and spoils what is read."""

    spoil: Callable[[int, bytes], bytes] = staticmethod(lambda _number, data: data)

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.gets: list[tuple[int, int | None]] = []

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.gets.append((start, end))
        return self.spoil(len(self.gets), super().get(key, start, end))


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ckptd-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def store(tmp_path: Path) -> Counting:
    return Counting(tmp_path)


def container(nbytes: int) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data/0", (b"0123456789abcdef" * (nbytes // 16 + 1))[:nbytes])
    return made.getvalue()


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def stock(tmp_path: Path, *items: bytes) -> Stock:
    """A checkpoint of these objects, o0, o1 and so on, in one file."""
    id, names, storage, at = CheckpointId.parse("step-1"), [], {}, 0
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "f").write_bytes(b"".join(items))
    for number, item in enumerate(items):
        names.append(f"o{number}".encode())
        storage[names[-1], None] = StoredAt("f", at, len(item), ())
        at += len(item)
    seen = Seen("stock-1", b"", parse(Contents([], names, storage, None)), {"f": at})
    return describe(LocalStore(tmp_path), id, seen, 1 << 30)[0]


def run(shm_dir: Path, store: LocalStore, scenario: Callable[[Fetcher], object], memory: int = 64 * MIB) -> None:
    async def inside() -> None:
        def victims() -> list[tuple[str, bool]]:
            return [(token, False) for token in fetcher.victims()]

        def evicted(token: str) -> None:
            fetcher.evicted(token)

        arena = Arena(shm_dir, memory, victims=victims, evicted=evicted)
        with ThreadPoolExecutor(4) as threads:
            fetcher = Fetcher(store, arena, threads)
            await scenario(fetcher)  # type: ignore[misc]
        arena.close()

    asyncio.run(inside())


async def fetched(fetcher: Fetcher, found: Stock, *numbers: int) -> list[bytes]:
    wanted = fetcher.find(found, 0, numbers, [0] * len(numbers), [found.shards[0].table.items[number].nbytes for number in numbers])
    blocks = await fetcher.present(found, 0, wanted.blocks, None)
    data = blocks.cached.segment.path.read_bytes()
    try:
        return [data[found.shards[0].table.items[number].at :][: blocks.cached.lengths[number]] for number in numbers]
    finally:
        fetcher.release(blocks)


def test_a_large_item_is_read_in_parts_and_small_neighbours_in_one_request(tmp_path: Path, shm_dir: Path, store: Counting) -> None:
    whole = [container(NBYTES), container(1000), container(2000), b"no container"]
    found = stock(tmp_path, *whole)

    async def scenario(fetcher: Fetcher) -> None:
        assert await fetched(fetcher, found, 3, 0, 2, 1) == [whole[number] for number in (3, 0, 2, 1)]
        assert len(store.gets) == 4
        assert fetcher.bytes_from_store == sum(map(len, whole))

    run(shm_dir, store, scenario)


def test_readers_of_an_item_share_one_read(tmp_path: Path, shm_dir: Path, store: Counting) -> None:
    found = stock(tmp_path, container(NBYTES), container(1000))

    async def scenario(fetcher: Fetcher) -> None:
        several = await asyncio.gather(*(fetched(fetcher, found, 0, 1) for _ in range(5)))
        assert all(one == several[0] for one in several)
        assert len(store.gets) == 4

    run(shm_dir, store, scenario)


@pytest.mark.parametrize("number", [0, 1])
def test_an_item_that_comes_garbled_is_read_again_and_one_that_stays_so_is_never_present(
    tmp_path: Path, shm_dir: Path, store: Counting, number: int
) -> None:
    whole = [container(NBYTES), container(1000)]
    found = stock(tmp_path, *whole)

    async def scenario(fetcher: Fetcher) -> None:
        store.spoil = lambda count, data: flipped(data) if count == 1 else data
        assert await fetched(fetcher, found, number) == [whole[number]]

        for token in fetcher.victims():
            fetcher.arena.drop(token)
            fetcher.evicted(token)
        store.spoil = lambda _count, data: flipped(data)
        with pytest.raises(errors.Corrupt, match=f"step-1/f: 'o{number}' .* is damaged"):
            await fetched(fetcher, found, number)
        assert not any(cached.blocks or cached.pins for cached in fetcher.cached.values())

        store.spoil = lambda _count, data: data
        assert await fetched(fetcher, found, number) == [whole[number]]

    run(shm_dir, store, scenario)


def test_items_that_are_not_read_any_more_make_room_for_the_next(tmp_path: Path, shm_dir: Path, store: Counting) -> None:
    whole = [container(9 * MIB + number) for number in range(6)]
    found = stock(tmp_path, *whole)

    async def scenario(fetcher: Fetcher) -> None:
        for number in range(6):
            assert await fetched(fetcher, found, number) == [whole[number]]
            assert fetcher.arena.used <= 24 * MIB

    run(shm_dir, store, scenario, memory=24 * MIB)
