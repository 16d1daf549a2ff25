"""Verification over a real store: every damage is found and named, and nothing else is called damage."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptd import archive, blockcheck, codec
from ckptd.errors import Corrupt, NotFound, Unavailable
from ckptd.ledger import Ledger, newest_first
from ckptd.localstore import LocalStore
from ckptd.manifest import block_spans
from ckptd.model import CheckpointId, mint_attempt, mint_token
from ckptd.scan import Entry
from ckptd.store import Object, Source, Store
from ckptd.v1.manifest_pb2 import Form, Item, Manifest, Stored, StoredShard, Summary, Table
from ckptd.verify import Progress, is_whole, verify

BLOCK_NBYTES = 1024
#: Raw bytes of the items of each rank: several blocks, one, none, exactly one block's worth.
SIZES = ((5000, 100, 0), (BLOCK_NBYTES, 3000), ())
#: The trainer's part of a `.metadata`, as opcodes: the rooms under test know no torch.
PICKLE = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}X\x13\0\0\0state_dict_metadata}sb."


def stored_shard(rank: int, sizes: tuple[int, ...], used: codec.Codec, values: random.Random) -> tuple[StoredShard, bytes]:
    """A shard as the flusher stores it, and its file."""
    table = Table(forms=[Form(pkl=b"pkl", dtype="uint8", shape=[size], strides=[1]) for size in sizes])
    stored, file, at = [], b"", 0
    for number, size in enumerate(sizes):
        raw_at, end = archive.layout(at, 3, size)
        head, tail = archive.gaps(at, b"pkl", size)
        container = head + values.randbytes(size // 2) + bytes(size - size // 2) + tail
        table.items.append(Item(fqn=b"%d" % number, kind=Item.RAW, at=at, raw_at=raw_at, nbytes=size, form=number))
        placed = Stored(offset=len(file))
        for start, stop in block_spans(at, end, BLOCK_NBYTES):
            block = container[start:stop]
            encoded = bytes(used.encode(block))
            placed.lengths.append(len(encoded))
            placed.hashes += codec.block_hash(block)
            file += encoded
        stored.append(placed)
        at = end
    table.end = at
    name = f"__{rank}_{mint_token()}.distcp" if sizes else ""
    return StoredShard(rank=rank, file=name, nbytes=len(file), table=table, stored=stored), file


def save(store: Store, name: str, us: int, *, codec_name: str = "zstd:1", seed: int = 0) -> Entry:
    """Commits an attempt of three ranks, one of them empty."""
    id, used, values = CheckpointId.parse(name), codec.parse(codec_name), random.Random(seed)
    summary = Summary(id=name, attempt=mint_attempt(us, None), accepted_us=us, world_size=len(SIZES), codec=used.name)
    contents = Manifest(summary=summary, block_nbytes=BLOCK_NBYTES)
    for rank, sizes in enumerate(SIZES):
        shard, file = stored_shard(rank, sizes, used, values)
        contents.shards.append(shard)
        if shard.file:
            store.put(f"{name}/{shard.file}", lambda file=file: [file])
    Ledger(store).commit(id, contents, PICKLE)
    return Ledger(store).find(id)


@pytest.fixture
def root(shm_dir: Path) -> Path:
    return shm_dir / "store"


@pytest.fixture
def store(root: Path) -> LocalStore:
    store = LocalStore(root)
    store.probe()
    return store


def damage(store: Store, entry: Entry | None = None, name: str = "step-1") -> list[str]:
    """All damage that is found in the checkpoint as it is now."""
    ledger = Ledger(store)
    steps = list(verify(store, ledger, entry or ledger.find(CheckpointId.parse(name))))
    assert [step.ended for step in steps] == [False] * (len(steps) - 1) + [True]
    return [text for step in steps for text in step.damage]


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def data_files(root: Path, name: str = "step-1") -> list[Path]:
    return sorted((root / name).glob("*.distcp"))


# --- what is whole -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec_name", ["none", "zstd:1"])
def test_a_whole_checkpoint_is_read_to_its_last_byte(root: Path, store: LocalStore, codec_name: str) -> None:
    entry = save(store, "step-1", 1, codec_name=codec_name)
    ledger = Ledger(store)
    steps = list(verify(store, ledger, entry))
    total = sum(path.stat().st_size for path in (root / "step-1").rglob("*") if path.is_file())
    assert steps[-1] == Progress(entry.id, total, total, ended=True)
    assert [step.nbytes for step in steps] == sorted(step.nbytes for step in steps)
    assert all(step.damage == () and step.note == "" for step in steps)
    assert is_whole(store, ledger, entry) == ()


def test_a_copied_checkpoint_is_whole_under_its_new_name(root: Path, store: LocalStore) -> None:
    save(store, "step-1", 1)
    shutil.copytree(root / "step-1", root / "run" / "copy")
    assert damage(store, name="run/copy") == []


def test_what_lies_beside_a_checkpoint_is_none_of_its_damage(root: Path, store: LocalStore) -> None:
    save(store, "step-1", 1)
    save(store, "step-1", 2)  # leaves the superseded attempt's files
    (root / "step-1" / "notes.txt").write_text("a user's own")
    assert damage(store) == []


# --- flipped bits ------------------------------------------------------------------------------------------------


def boundaries(root: Path, contents: Manifest) -> dict[Path, set[int]]:
    """The bytes at which something begins or ends."""
    found: dict[Path, set[int]] = {}
    for shard in contents.shards:
        if shard.file:
            edges = [shard.nbytes]
            for placed in shard.stored:
                offset = placed.offset
                for length in placed.lengths:
                    edges += [offset, offset + 4, offset + length - 4]
                    offset += length
            found[root / shard.file] = {at for edge in edges for at in (edge - 1, edge) if 0 <= at < shard.nbytes}
    manifest = next((root / ".ckptd").glob("*.manifest"))
    nbytes, summary_end = manifest.stat().st_size, 12 + int.from_bytes(manifest.read_bytes()[8:12], "little")
    edges = [0, 7, 8, 11, 12, summary_end - 1, summary_end, summary_end + 7, summary_end + 8, nbytes - 17, nbytes - 16, nbytes - 1]
    found[manifest] = set(edges)
    metadata = root / ".metadata"
    nbytes = metadata.stat().st_size
    # The whole tail: every byte of it decides something.
    found[metadata] = {0, 1, contents.metadata_head - 1, contents.metadata_head, *range(nbytes - 110, nbytes)}
    return found


def is_found(root: Path, store: LocalStore, path: Path, at: int, bit: int) -> bool:
    """Whether the flip is found; then it is named, and the checkpoint has not moved in time. It is undone."""
    flip(path, at, bit)
    where = f"byte {at} of {path.name}, bit {bit}"
    texts = damage(store, name=root.name)
    key = str(path.relative_to(root.parent))
    named = [text for text in texts if key in text or (path.name == ".metadata" and ".manifest is missing" in text)]
    assert bool(named) == bool(texts), (where, texts)
    assert next(newest_first(Ledger(store).entries(""))).id.name == root.name, where
    flip(path, at, bit)
    return bool(named)


def missed(root: Path, store: LocalStore, path: Path, flips: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(at, bit) for at, bit in flips if not is_found(root, store, path, at, bit)]


@pytest.mark.parametrize("codec_name", ["none", "zstd:1"])
def test_a_flipped_bit_is_found_and_named(root: Path, store: LocalStore, codec_name: str) -> None:
    save(store, "step-0", 1)
    save(store, "step-1", 2, codec_name=codec_name)
    contents = Ledger(store).manifest(Ledger(store).find(CheckpointId.parse("step-1")))
    choice = random.Random(39)
    for path, edges in boundaries(root / "step-1", contents).items():
        nbytes = path.stat().st_size
        places = sorted(edges | {choice.randrange(nbytes) for _ in range(20)})
        assert missed(root / "step-1", store, path, [(at, choice.randrange(8)) for at in places]) == []
    assert damage(store) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("codec_name", ["none", "zstd:1"])
def test_any_flipped_bit_is_found(root: Path, store: LocalStore, codec_name: str) -> None:
    save(store, "step-0", 1)
    save(store, "step-1", 2, codec_name=codec_name)
    choice = random.Random(40)
    for path in sorted(path for path in (root / "step-1").rglob("*") if path.is_file()):
        bits = range(8) if path.name == ".metadata" else (choice.randrange(8),)
        nbytes = path.stat().st_size
        void = missed(root / "step-1", store, path, [(at, bit) for at in range(nbytes) for bit in bits])
        # zstd has a few bits that mean nothing: what they stand in still decodes to the bytes that were saved.
        assert len(void) <= (nbytes // 200 if codec_name != "none" and path.suffix == ".distcp" else 0), void


def test_a_block_is_named_with_its_item_and_its_place(root: Path, store: LocalStore) -> None:
    entry = save(store, "step-1", 1, codec_name="none")
    first = Ledger(store).manifest(entry).shards[0]
    flip(root / "step-1" / first.file, first.stored[1].offset)
    start = first.stored[1].offset
    place = f"block 0 of item 1 (bytes {start} to {start + first.stored[1].lengths[0]})"
    assert damage(store) == [f"step-1/{first.file}: {place} is damaged: its checksum does not match"]


def test_all_damage_is_told_and_the_first_is_enough_to_be_not_whole(root: Path, store: LocalStore) -> None:
    entry = save(store, "step-1", 1)
    first, second = data_files(root)
    flip(first, 10)
    flip(second, 10)
    flip(root / "step-1" / ".metadata", 5)
    texts = damage(store)
    assert [sum(path.name in text for text in texts) for path in (first, second, root / ".metadata")] == [1, 1, 1]
    ledger = Ledger(store)
    assert is_whole(store, ledger, ledger.find(entry.id)) == ("step-1/.metadata is damaged: it does not match the checkpoint's manifest",)


def test_damage_without_end_is_counted_and_not_listed(store: LocalStore) -> None:
    id, used = CheckpointId.parse("step-1"), codec.parse("none")
    shard, file = stored_shard(0, (1,) * 500, used, random.Random(1))
    summary = Summary(id="step-1", attempt=mint_attempt(1, None), world_size=1, codec="none")
    store.put(f"step-1/{shard.file}", lambda: [bytes(len(file))])
    Ledger(store).commit(id, Manifest(summary=summary, block_nbytes=BLOCK_NBYTES, shards=[shard]), PICKLE)
    texts = damage(store)
    assert len(texts) == 101
    assert texts[-1] == "step-1: 400 more places are damaged"


# --- files -------------------------------------------------------------------------------------------------------


def swap(first: Path, second: Path) -> None:
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)


FILE_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut by one": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes in the store"),
    "emptied": (lambda path: path.write_bytes(b""), "has 0 bytes in the store"),
    "missing": (lambda path: path.unlink(), "is missing from the store"),
    "one more byte": (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "bytes in the store"),
    "twice": (lambda path: path.write_bytes(2 * path.read_bytes()), "bytes in the store"),
    "swapped": (lambda path: swap(*data_files(path.parents[1])), "bytes in the store"),
}


@pytest.mark.parametrize("codec_name", ["none", "zstd:1"])
@pytest.mark.parametrize(("harm", "words"), FILE_DAMAGE.values(), ids=FILE_DAMAGE)
def test_a_data_file_that_is_not_as_long_as_it_was_is_named(
    root: Path, store: LocalStore, harm: Callable[[Path], object], words: str, codec_name: str
) -> None:
    entry = save(store, "step-1", 1, codec_name=codec_name)
    path = data_files(root)[0]
    harm(path)
    assert any(text.startswith(f"step-1/{path.name} ") and words in text for text in damage(store))
    contents = Ledger(store).manifest(entry)
    assert words in blockcheck.misplaced(entry.id, contents, blockcheck.sizes(store, entry.id))[0]


def test_the_first_block_that_is_cut_off_is_named(root: Path, store: LocalStore) -> None:
    entry = save(store, "step-1", 1, codec_name="none")
    first = Ledger(store).manifest(entry).shards[0]
    path = root / "step-1" / first.file
    path.write_bytes(path.read_bytes()[: 2 * BLOCK_NBYTES + 1])
    assert damage(store) == [
        f"step-1/{first.file} is damaged: it has {2 * BLOCK_NBYTES + 1} bytes in the store, {first.nbytes} were written",
        f"step-1/{first.file}: block 2 of item 0 (bytes {2 * BLOCK_NBYTES} to {3 * BLOCK_NBYTES}) and what follows is cut off",
    ]


def test_shards_of_one_size_that_were_swapped_are_found_by_their_blocks(store: LocalStore) -> None:
    id, used, values = CheckpointId.parse("step-1"), codec.parse("none"), random.Random(2)
    made = [stored_shard(rank, (2000,), used, values) for rank in range(2)]
    for number, (shard, _) in enumerate(made):
        store.put(f"step-1/{shard.file}", lambda file=made[1 - number][1]: [file])
    summary = Summary(id="step-1", attempt=mint_attempt(1, None), world_size=2, codec="none")
    Ledger(store).commit(id, Manifest(summary=summary, block_nbytes=BLOCK_NBYTES, shards=[shard for shard, _ in made]), PICKLE)
    texts = damage(store)
    assert all(any(shard.file in text and "block 0 of item 0" in text for text in texts) for shard, _ in made)


def test_an_older_attempts_file_under_the_new_name_is_found(root: Path, store: LocalStore) -> None:
    save(store, "step-1", 1, seed=1)
    old = data_files(root)
    save(store, "step-1", 2, seed=2)
    new = [path for path in data_files(root) if path not in old]
    for path in new:
        shutil.copy(next(was for was in old if was.name[:4] == path.name[:4]), path)
    texts = damage(store)
    assert all(any(path.name in text for text in texts) for path in new)


# --- manifest and .metadata --------------------------------------------------------------------------------------


def test_another_checkpoints_manifest_is_found(root: Path, store: LocalStore) -> None:
    save(store, "step-1", 1)
    save(store, "step-2", 2)
    (own,), (other,) = (list((root / name / ".ckptd").iterdir()) for name in ("step-1", "step-2"))
    shutil.copy(other, own)
    assert [own.name in text for text in damage(store)] == [True]


def test_a_manifest_of_the_same_attempt_that_metadata_does_not_name_is_found(root: Path, store: LocalStore) -> None:
    entry = save(store, "step-1", 1)
    (first,) = (root / "step-1" / ".ckptd").iterdir()
    contents = Ledger(store).manifest(entry)
    store.delete(["step-1/.metadata"])
    Ledger(store).commit(entry.id, contents, PICKLE)  # another try of the same commit
    (second,) = (path for path in (root / "step-1" / ".ckptd").iterdir() if path != first)
    assert damage(store) == []
    shutil.copy(first, second)
    assert damage(store) == ["step-1/.metadata is damaged: it does not match the checkpoint's manifest"]


def test_a_missing_manifest_is_found(root: Path, store: LocalStore) -> None:
    save(store, "step-1", 1)
    next((root / "step-1" / ".ckptd").iterdir()).unlink()
    assert [".manifest is missing, although .metadata names it" in text for text in damage(store)] == [True]


@pytest.mark.parametrize("keep", [0, 1, 50, -1], ids=["emptied", "one byte", "half", "all but one"])
def test_a_metadata_that_was_cut_is_found(root: Path, store: LocalStore, keep: int) -> None:
    save(store, "step-1", 1)
    path = root / "step-1" / ".metadata"
    path.write_bytes(path.read_bytes()[:keep])
    assert ["step-1/.metadata is damaged" in text for text in damage(store)] == [True]


def test_a_metadata_of_an_older_attempt_is_the_older_checkpoint(root: Path, store: LocalStore) -> None:
    """An older `.metadata` put back whole is no damage as such: what it names decides."""
    save(store, "step-1", 1)
    old = (root / "step-1" / ".metadata").read_bytes()
    first = data_files(root)
    save(store, "step-1", 2)
    (root / "step-1" / ".metadata").write_bytes(old)
    assert damage(store) == []
    first[0].unlink()
    assert [first[0].name in text for text in damage(store)] == [True]


def test_a_name_in_metadata_that_leads_nowhere_never_makes_a_checkpoint_older(root: Path, store: LocalStore) -> None:
    newest = save(store, "run/step-2", 0x7_0000)
    save(store, "run/step-1", 0x5_0000)
    path = root / "run" / "step-2" / ".metadata"
    assert newest.save_id is not None
    path.write_bytes(path.read_bytes().replace(newest.save_id.encode(), newest.save_id.replace("7", "3", 1).encode()))
    entry = Ledger(store).latest("run")
    assert (str(entry.id), entry.damaged, entry.save_id) == ("run/step-2", True, newest.save_id)
    assert damage(store, name="run/step-2") == ["run/step-2/.metadata is damaged: it does not match the checkpoint's manifest"]


def test_a_metadata_of_ours_that_names_no_manifest_any_more_is_not_taken_for_stocks(root: Path, store: LocalStore) -> None:
    save(store, "step-1", 1)
    path = root / "step-1" / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"save_id", b"rave_id"))
    assert Ledger(store).find(CheckpointId.parse("step-1")).damaged
    assert damage(store) == ["step-1/.metadata is damaged: it does not match the checkpoint's manifest"]


# --- what is no damage -------------------------------------------------------------------------------------------


class Seam:
    """A store that passes everything on; tests change what `get` does."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.gets: list[tuple[str, int, int | None]] = []
        self.before_get: Callable[[str], None] = lambda _: None
        self.after_get: Callable[[str, bytes], bytes] = lambda _, data: data

    @property
    def url(self) -> str:
        return self.store.url

    @property
    def conditional(self) -> bool:
        return self.store.conditional

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.gets.append((key, start, end))
        self.before_get(key)
        return self.after_get(key, self.store.get(key, start, end))

    def put(self, key: str, source: Source, *, nbytes_hint: int | None = None, replacing: str | None = None) -> int:
        return self.store.put(key, source, nbytes_hint=nbytes_hint, replacing=replacing)

    def list(self, prefix: str = "", *, temporary: bool = False) -> Iterator[Object]:
        return self.store.list(prefix, temporary=temporary)

    def children(self, directory: str = "") -> tuple[list[Object], list[str]]:
        return self.store.children(directory)

    def delete(self, keys: list[str]) -> None:
        self.store.delete(keys)

    def remove(self, key: str, version: str) -> None:
        self.store.remove(key, version)

    def abort_uploads(self, older_than_seconds: float) -> int:
        return self.store.abort_uploads(older_than_seconds)

    def probe(self) -> None:
        self.store.probe()


def test_a_checkpoint_deleted_meanwhile_is_told_in_a_note(root: Path, store: LocalStore) -> None:
    entry = save(store, "step-1", 1)
    seam = Seam(store)
    seam.before_get = lambda key: shutil.rmtree(root / "step-1", ignore_errors=True) if key.endswith(".distcp") else None
    steps = list(verify(seam, Ledger(seam), entry))
    assert (steps[-1].damage, steps[-1].note) == ((), "step-1 was deleted while it was verified")
    assert all(step.damage == () for step in steps)
    entry = save(store, "step-1", 2)
    with pytest.raises(NotFound, match="deleted"):
        is_whole(seam, Ledger(seam), entry)


def test_a_checkpoint_saved_again_meanwhile_is_told_in_a_note(store: LocalStore) -> None:
    entry = save(store, "step-1", 1)
    seam, once = Seam(store), threading.Lock()

    def replace(key: str) -> None:
        if key.endswith(".distcp") and once.acquire(blocking=False):
            save(store, "step-1", 2)
            store.delete([key])

    seam.before_get = replace
    steps = list(verify(seam, Ledger(seam), entry))
    assert (steps[-1].note, {step.damage for step in steps}) == ("step-1 was saved again while it was verified", {()})


def test_what_one_request_garbled_is_read_again(store: LocalStore) -> None:
    entry = save(store, "step-1", 1)
    seam, garbled = Seam(store), set[str]()

    def garble(key: str, data: bytes) -> bytes:
        if not key.endswith(".distcp") or key in garbled:
            return data
        garbled.add(key)
        return bytes(len(data))

    seam.after_get = garble
    assert damage(seam, entry) == []
    assert len(garbled) == 2


def test_a_store_that_goes_away_is_an_error_and_no_damage(store: LocalStore) -> None:
    entry = save(store, "step-1", 1)
    seam = Seam(store)

    def fail(key: str) -> None:
        if key.endswith(".distcp"):
            raise Unavailable("the store is away")

    seam.before_get = fail
    with pytest.raises(Unavailable):
        list(verify(seam, Ledger(seam), entry))
    with pytest.raises(Unavailable):
        is_whole(seam, Ledger(seam), entry)


# --- how it reads ------------------------------------------------------------------------------------------------


def large(store: Store, nbytes: int) -> Entry:
    """One item of zeros in blocks of 4 MiB, uncompressed."""
    block = 4 * 1024 * 1024
    raw_at, end = archive.layout(0, 3, nbytes)
    head, tail = archive.gaps(0, b"pkl", nbytes)
    container = head + bytes(nbytes) + tail
    form = Form(pkl=b"pkl", dtype="uint8", shape=[nbytes], strides=[1])
    table = Table(forms=[form], items=[Item(fqn=b"t", kind=Item.RAW, raw_at=raw_at, nbytes=nbytes)], end=end)
    placed = Stored()
    for start, stop in block_spans(0, end, block):
        placed.lengths.append(stop - start)
        placed.hashes += codec.block_hash(memoryview(container)[start:stop])
    shard = StoredShard(file=f"__0_{mint_token()}.distcp", nbytes=end, table=table, stored=[placed])
    store.put(f"step-1/{shard.file}", lambda: [container])
    summary = Summary(id="step-1", attempt=mint_attempt(1, None), world_size=1, codec="none")
    Ledger(store).commit(CheckpointId.parse("step-1"), Manifest(summary=summary, block_nbytes=block, shards=[shard]), PICKLE)
    return Ledger(store).find(CheckpointId.parse("step-1"))


def test_requests_are_bounded_and_a_closed_verification_stops_reading(store: LocalStore) -> None:
    entry = large(store, 160 * 1024 * 1024)
    seam = Seam(store)
    steps = verify(seam, Ledger(seam), entry)
    while next(steps).nbytes < 32 * 1024 * 1024:
        pass
    steps.close()
    read = [(end or 0) - start for key, start, end in seam.gets if key.endswith(".distcp")]
    assert max(read) <= 16 * 1024 * 1024
    assert sum(read) <= 112 * 1024 * 1024  # what was told, and what was ahead

    with pytest.raises(InterruptedError):
        is_whole(store, Ledger(store), entry, stop=lambda: True)


def test_bits_of_a_frames_header_that_zstd_ignores_are_damage_all_the_same() -> None:
    block = random.Random(4).randbytes(1024 * 1024)  # longer than level 1's window, so that the header has one
    frame = codec.Zstd(1).encode(block)
    assert codec.Zstd(1).decode(frame, len(block)) == block
    assert not frame[4] & 0x20
    for at, bit in ((4, 4), (5, 0), (5, 1), (5, 2)):
        flipped = bytearray(frame)
        flipped[at] ^= 1 << bit
        with pytest.raises(Corrupt):
            codec.Zstd(1).decode(flipped, len(block))
