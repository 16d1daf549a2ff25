"""Damage of every kind, in a store that a daemon reads: a load refuses and names the object, `verify` finds it, nothing is ever data."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from ckptd.errors import Corrupt, WrongPhase
from ckptd.ledger import Ledger
from ckptd.localstore import LocalStore
from ckptd.model import CheckpointId, mint_attempt
from ckptd.v1.daemon_pb2 import VerifyRequest
from ckptd.v1.daemon_pb2_grpc import DaemonStub
from ckptd.v1.manifest_pb2 import Manifest, StoredShard
from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from daemons import DaemonProcess

MIB = 1024 * 1024
STEPS = itertools.count(1)
State = dict[str, Any]


def states(seed: int, *, numel: int = 20_000) -> tuple[State, State]:
    """What two ranks save: shards of one size, some of it compressible, and bytes that no other seed has."""

    def one(rank: str) -> State:
        generator = torch.Generator().manual_seed(2 * seed + (rank == "b"))
        noise = torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=generator)
        return {f"{rank}.noise": noise, f"{rank}.flat": torch.arange(500.0), f"{rank}.empty": torch.zeros(0)}

    return one("a"), one("b")


def blank(state: State) -> State:
    """Targets whose every byte differs from what is saved of `flat`, and for `noise` nearly every one."""
    return {key: torch.full_like(tensor, 77) for key, tensor in state.items()}


def save(address: str, id: str, ranks: tuple[State, ...]) -> None:
    """As `dcp.save` on as many ranks: its calls, one rank after another."""
    writers = [DaemonStorageWriter(id, address=address, overwrite=True) for _ in ranks]
    planners = [DefaultSavePlanner() for _ in ranks]
    local = []
    for rank, (writer, planner, state) in enumerate(zip(writers, planners, ranks, strict=True)):
        writer.reset(id)
        planner.set_up_planner(state, writer.storage_meta(), rank == 0)
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        local.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(local)
    plans = writers[0].prepare_global_plan(plans)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).wait() for writer, planner, plan in zip(writers, planners, plans, strict=True)
    ]
    writers[0].finish(metadata, results)
    wait(id, address=address, timeout=60)


@dataclass
class Checkpoint:
    """A durable one that no reader has seen yet, and what it holds."""

    root: Path
    id: str
    state: State

    @functools.cached_property
    def contents(self) -> Manifest:
        ledger = Ledger(LocalStore(self.root))
        return ledger.manifest(ledger.find(CheckpointId.parse(self.id)))

    @property
    def directory(self) -> Path:
        return self.root / self.id

    @property
    def shards(self) -> list[StoredShard]:
        return list(self.contents.shards)

    def data(self, rank: int = 0) -> Path:
        return self.directory / self.shards[rank].file

    @functools.cached_property
    def manifest(self) -> Path:
        (found,) = (self.directory / ".ckptd").glob("*.manifest")
        return found

    @property
    def metadata(self) -> Path:
        return self.directory / ".metadata"

    def flip(self, path: Path, at: int) -> str:
        """One bit of one byte; returns the file's name, which has to be named."""
        data = bytearray(path.read_bytes())
        data[at] ^= 1 << random.Random(at).randrange(8)
        path.write_bytes(data)
        return path.name


@dataclass
class Bench:
    """A daemon that saves, and one that can have what it loads only from the store."""

    root: Path
    saving: DaemonProcess
    reading: DaemonProcess
    stub: DaemonStub

    def saved(self, *, numel: int = 20_000) -> Checkpoint:
        step = next(STEPS)
        ranks = states(step, numel=numel)
        save(self.saving.address, f"run/step-{step}", ranks)
        return Checkpoint(self.root, f"run/step-{step}", ranks[0] | ranks[1])

    def load(self, checkpoint: Checkpoint, into: State) -> None:
        dcp.load(into, checkpoint_id=checkpoint.id, storage_reader=DaemonStorageReader(address=self.reading.address))

    def verified(self, checkpoint: Checkpoint) -> list[str]:
        """What the daemon finds damaged."""
        replies = list(self.stub.Verify(VerifyRequest(id=checkpoint.id), timeout=60))
        assert [reply.ended for reply in replies] == [False] * (len(replies) - 1) + [True]
        return [text for reply in replies for text in reply.damage]


@pytest.fixture(scope="module", params=["none", "zstd:1"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    root = tmp_path_factory.mktemp("store")
    with (
        DaemonProcess(str(root), "--codec", request.param) as saving,
        DaemonProcess(str(root), memory="64MiB") as reading,
        grpc.insecure_channel(reading.address) as channel,
    ):
        yield Bench(root, saving, reading, DaemonStub(channel))


def assert_nothing_else_is_data(found: State, before: State, saved: State) -> None:
    """Every element of every target is what it was, or what was saved."""
    for key, tensor in found.items():
        assert bool(((tensor == before[key]) | (tensor == saved[key])).all()), key


def assert_refused(bench: Bench, checkpoint: Checkpoint, *words: str) -> None:
    """The load raises Corrupt with all the words in it (patterns), nothing wrong is in the targets, `verify` says the same."""
    targets = blank(checkpoint.state)
    with pytest.raises(CheckpointException) as caught:
        bench.load(checkpoint, targets)
    assert_nothing_else_is_data(targets, blank(checkpoint.state), checkpoint.state)
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, Corrupt), error
    found = bench.verified(checkpoint)
    for word in words:
        assert re.search(word, str(error)), (word, str(error))
        assert any(re.search(word, text) for text in found), (word, found)


# --- data files --------------------------------------------------------------------------------------------------


def test_what_is_whole_is_loaded_and_verified(bench: Bench) -> None:
    checkpoint = bench.saved()
    targets = blank(checkpoint.state)
    bench.load(checkpoint, targets)
    assert all(torch.equal(targets[key], tensor) for key, tensor in checkpoint.state.items())
    assert bench.verified(checkpoint) == []


@pytest.mark.parametrize("block", [0, 1, 2], ids=["first", "middle", "last"])
def test_a_flipped_bit_in_a_block_of_a_large_item(bench: Bench, block: int) -> None:
    checkpoint = bench.saved(numel=9 * MIB)
    number, stored = max(enumerate(checkpoint.shards[0].stored), key=lambda placed: len(placed[1].lengths))
    start = stored.offset + sum(stored.lengths[:block])
    name = checkpoint.flip(checkpoint.data(), start + random.Random(block).randrange(1000, stored.lengths[block] - 100))
    end = start + stored.lengths[block]
    assert_refused(bench, checkpoint, rf"{checkpoint.id}/{name}: block {block} of item {number} \(bytes {start} to {end}\) is damaged")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("place", ["first byte", "header", "middle", "last byte"])
def test_a_flipped_bit_anywhere_in_an_item(bench: Bench, rank: int, number: int, place: str) -> None:
    """A container's own header and directory, before and behind the tensor's bytes, count as well."""
    checkpoint = bench.saved()
    stored = checkpoint.shards[rank].stored[number]
    length = sum(stored.lengths)
    at = {"first byte": 0, "header": 40, "middle": length // 2, "last byte": length - 1}[place]
    name = checkpoint.flip(checkpoint.data(rank), stored.offset + at)
    item = checkpoint.shards[rank].table.items[number]
    if not item.nbytes:  # an empty tensor has no byte to be loaded: its container is not read
        assert any(name in text for text in bench.verified(checkpoint))
        return
    assert_refused(bench, checkpoint, rf"{name}: block 0 of item {number} ")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "harm",
    [lambda data: data[:-1], lambda data: data[: len(data) // 2], lambda _: b"", lambda data: data + b"\0", lambda data: b"\0" + data],
    ids=["cut by one", "cut in half", "emptied", "one byte behind", "one byte before"],
)
def test_a_data_file_of_another_length(bench: Bench, harm: Callable[[bytes], bytes], rank: int) -> None:
    checkpoint = bench.saved()
    path = checkpoint.data(rank)
    path.write_bytes(harm(path.read_bytes()))
    assert_refused(bench, checkpoint, f"{path.name} is damaged: it has {path.stat().st_size} bytes in the store")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_data_file(bench: Bench, rank: int) -> None:
    checkpoint = bench.saved()
    checkpoint.data(rank).unlink()
    assert_refused(bench, checkpoint, f"{checkpoint.data(rank).name} is missing from the store")


def swap(first: Path, second: Path) -> None:
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)


def test_two_shards_of_one_size_swapped(bench: Bench) -> None:
    checkpoint = bench.saved()
    paths = [checkpoint.data(rank) for rank in range(2)]
    assert paths[0].stat().st_size == paths[1].stat().st_size
    swap(*paths)
    assert_refused(bench, checkpoint, "block 0 of item")
    assert all(any(path.name in text for text in bench.verified(checkpoint)) for path in paths)


def test_two_shards_of_different_size_swapped(bench: Bench) -> None:
    step = next(STEPS)
    ranks = states(step)
    ranks[1]["b.more"] = torch.ones(10)
    save(bench.saving.address, f"run/step-{step}", ranks)
    checkpoint = Checkpoint(bench.root, f"run/step-{step}", ranks[0] | ranks[1])
    paths = [checkpoint.data(rank) for rank in range(2)]
    swap(*paths)
    assert_refused(bench, checkpoint, paths[0].name, paths[1].name)


def test_two_blocks_of_one_size_swapped(bench: Bench) -> None:
    checkpoint = bench.saved(numel=9 * MIB)
    number, stored = max(enumerate(checkpoint.shards[0].stored), key=lambda placed: len(placed[1].lengths))
    first, second = stored.lengths[:2]
    assert first == second
    path, at = checkpoint.data(), stored.offset
    data = path.read_bytes()
    path.write_bytes(data[:at] + data[at + first : at + 2 * first] + data[at : at + first] + data[at + 2 * first :])
    assert_refused(bench, checkpoint, rf"{path.name}: block 0 of item {number} ")


def test_an_older_attempts_file_under_the_new_name(bench: Bench) -> None:
    """Saved twice under one id: the values of before must not come back."""
    old = bench.saved()
    kept = old.data().read_bytes()
    ranks = states(next(STEPS))
    save(bench.saving.address, old.id, ranks)
    checkpoint = Checkpoint(bench.root, old.id, ranks[0] | ranks[1])
    assert len(kept) == checkpoint.data().stat().st_size
    checkpoint.data().write_bytes(kept)
    assert_refused(bench, checkpoint, rf"{checkpoint.data().name}: block 0 of item")


# --- the manifest ------------------------------------------------------------------------------------------------


def summary_end(path: Path) -> int:
    return 12 + int.from_bytes(path.read_bytes()[8:12], "little")


@pytest.mark.parametrize("place", ["magic", "length", "summary", "summary's hash", "body", "hash", "last byte"])
def test_a_flipped_bit_in_the_manifest(bench: Bench, place: str) -> None:
    checkpoint = bench.saved()
    path = checkpoint.manifest
    end, nbytes = summary_end(path), path.stat().st_size
    places = {"magic": 3, "length": 8, "summary": 20, "summary's hash": end + 3, "body": (end + nbytes) // 2, "hash": nbytes - 9}
    checkpoint.flip(path, places.get(place, nbytes - 1))
    assert_refused(bench, checkpoint, path.name)


@pytest.mark.parametrize(
    "harm",
    [lambda data: data[:-1], lambda data: data[:100], lambda _: b"", lambda data: data + b"\0"],
    ids=["cut by one", "cut short", "emptied", "one byte behind"],
)
def test_a_manifest_of_another_length(bench: Bench, harm: Callable[[bytes], bytes]) -> None:
    checkpoint = bench.saved()
    checkpoint.manifest.write_bytes(harm(checkpoint.manifest.read_bytes()))
    assert_refused(bench, checkpoint, checkpoint.manifest.name)


def test_a_missing_manifest(bench: Bench) -> None:
    checkpoint = bench.saved()
    checkpoint.manifest.unlink()
    assert_refused(bench, checkpoint, f"{checkpoint.manifest.name} is missing")


def test_the_manifest_of_another_checkpoint(bench: Bench) -> None:
    checkpoint = bench.saved()
    shutil.copy(bench.saved().manifest, checkpoint.manifest)
    assert_refused(bench, checkpoint, checkpoint.manifest.name)


def test_the_manifest_of_an_older_attempt_of_the_same_id(bench: Bench) -> None:
    old = bench.saved()
    kept = old.manifest
    ranks = states(next(STEPS))
    save(bench.saving.address, old.id, ranks)
    (new,) = (path for path in (old.directory / ".ckptd").glob("*.manifest") if path != kept)
    shutil.copy(kept, new)
    assert_refused(bench, Checkpoint(bench.root, old.id, ranks[0] | ranks[1]), new.name)


# --- .metadata ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["first byte", "the trainer's part", "the storage part", "the tail", "the manifest's name", "last byte"])
def test_a_flipped_bit_in_metadata(bench: Bench, place: str) -> None:
    checkpoint = bench.saved()
    path, head, nbytes = checkpoint.metadata, checkpoint.contents.metadata_head, checkpoint.metadata.stat().st_size
    named_at = path.read_bytes().index(checkpoint.manifest.name.encode())
    places = {
        "first byte": 0,
        "the trainer's part": head // 2,
        "the storage part": (head + nbytes) // 2,
        "the tail": nbytes - 90,
        "the manifest's name": named_at + 20,
    }
    name = checkpoint.flip(path, places.get(place, nbytes - 1))
    assert_refused(bench, checkpoint, name if place != "the manifest's name" else rf"{name} is damaged|\.manifest is missing")


@pytest.mark.parametrize(
    "harm",
    [lambda data: data[:-1], lambda data: data[: len(data) // 2], lambda _: b"", lambda data: data + b"."],
    ids=["cut by one", "cut in half", "emptied", "one byte behind"],
)
def test_a_metadata_of_another_length(bench: Bench, harm: Callable[[bytes], bytes]) -> None:
    checkpoint = bench.saved()
    checkpoint.metadata.write_bytes(harm(checkpoint.metadata.read_bytes()))
    assert_refused(bench, checkpoint, rf"{checkpoint.id}/\.metadata is damaged")


def test_the_metadata_of_another_checkpoint(bench: Bench) -> None:
    checkpoint = bench.saved()
    shutil.copy(bench.saved().metadata, checkpoint.metadata)
    assert_refused(bench, checkpoint, r"\.manifest is missing, although \.metadata names it|\.metadata is damaged")


# --- parts of a state, and what was verified before --------------------------------------------------------------


def test_a_load_of_another_part_gives_what_was_saved(bench: Bench) -> None:
    checkpoint = bench.saved()
    checkpoint.flip(checkpoint.data(1), checkpoint.shards[1].stored[1].offset + 90)
    targets = {"a.noise": torch.zeros_like(checkpoint.state["a.noise"])}
    bench.load(checkpoint, targets)
    assert torch.equal(targets["a.noise"], checkpoint.state["a.noise"])


def test_a_file_that_a_part_does_not_need_still_has_to_be_there(bench: Bench) -> None:
    checkpoint = bench.saved()
    checkpoint.data(1).unlink()
    with pytest.raises(CheckpointException, match=checkpoint.data(1).name):
        bench.load(checkpoint, {"a.noise": torch.zeros_like(checkpoint.state["a.noise"])})


def test_what_memory_holds_needs_nothing_of_the_store(bench: Bench) -> None:
    checkpoint = bench.saved()
    for rank in range(2):
        checkpoint.data(rank).write_bytes(b"")
    targets = blank(checkpoint.state)
    dcp.load(targets, checkpoint_id=checkpoint.id, storage_reader=DaemonStorageReader(address=bench.saving.address))
    assert all(torch.equal(targets[key], tensor) for key, tensor in checkpoint.state.items())


# --- a sweep -----------------------------------------------------------------------------------------------------


def copied(template: Checkpoint, step: int) -> Checkpoint:
    """The same bytes under an id and an attempt of their own, so that no reader has seen them."""
    store = LocalStore(template.root)
    ledger = Ledger(store)
    entry = ledger.find(CheckpointId.parse(template.id))
    contents = ledger.manifest(entry)
    pickle = ledger.metadata_pickle(entry, contents)
    copy = Checkpoint(template.root, f"sweep/step-{step}", template.state)
    contents.summary.id, contents.summary.attempt = copy.id, mint_attempt(step, None)
    copy.directory.mkdir(parents=True)
    for rank in range(2):
        shutil.copy(template.data(rank), copy.directory)
    ledger.commit(CheckpointId.parse(copy.id), contents, pickle)
    return copy


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_any_bit_of_any_file(bench: Bench) -> None:
    template = bench.saved()
    choice = random.Random(39)
    unseen = 0
    for step in range(1, 401):
        checkpoint = copied(template, step)
        path = choice.choice([checkpoint.data(0), checkpoint.data(1), checkpoint.manifest, checkpoint.metadata])
        # Half of them where things are decided, at the ends of a file.
        nbytes = path.stat().st_size
        at = choice.randrange(nbytes) if choice.random() < 0.5 else choice.choice([choice.randrange(200), -1 - choice.randrange(200)])
        checkpoint.flip(path, at % nbytes)
        found = bench.verified(checkpoint)
        targets = blank(checkpoint.state)
        refused = contextlib.suppress(CheckpointException)
        with refused if found else contextlib.nullcontext():
            bench.load(checkpoint, targets)
        assert_nothing_else_is_data(targets, blank(checkpoint.state), checkpoint.state)
        unseen += not found
        shutil.rmtree(checkpoint.directory)
    assert unseen <= 2  # the few bits of a zstd frame that mean nothing


def test_a_time_that_no_clock_tells_stops_no_save_but_that_of_its_own_id_which_says_how_to_go_on(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with DaemonProcess(str(store), "--delete-grace", "0s", memory="64MiB") as daemon:
        save(daemon.address, "run/step-1", states(1))
        bad = Checkpoint(store, "run/step-1", {})
        name = "f" * 16 + bad.manifest.name[16:]
        bad.metadata.write_bytes(bad.metadata.read_bytes().replace(bad.manifest.name.encode(), name.encode()))
        bad.manifest.rename(bad.manifest.with_name(name))
        daemon.terminate()
        daemon.start()  # what it knows of the run now, it knows from the store
        for step in (2, 3):
            save(daemon.address, f"run/step-{step}", states(step))
        with pytest.raises(WrongPhase, match="of a time that no clock tells: delete it, or save under another id"):
            save(daemon.address, "run/step-1", states(4))
        ledger = Ledger(LocalStore(store))
        assert ledger.find(CheckpointId.parse("run/step-3")).order > ledger.find(CheckpointId.parse("run/step-2")).order
        wait("run/step-3", address=daemon.address, timeout=60)
        assert ledger.latest("run").id == CheckpointId.parse("run/step-3")
        deleted = daemon.cli("delete", "run/step-1")
        assert deleted.returncode == 0, deleted.stderr
        save(daemon.address, "run/step-1", states(5))
        assert ledger.latest("run").id == CheckpointId.parse("run/step-1")
