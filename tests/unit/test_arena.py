"""Segments under a budget: real files on tmpfs, real processes that map them, real kills."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd import segment as files
from ckptd.arena import Arena
from ckptd.errors import ArenaFull, InvalidRequest, LeaseLost, Unavailable

MiB = 1024 * 1024
ATTEMPT = "0006400000000000deadbeef"

#: Maps a file as the client does, without the client: says its inode, then waits to be ended.
HOLDER = """
import ctypes, fcntl, os, sys
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
fd = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(fd, fcntl.LOCK_SH)
n = os.fstat(fd).st_size
address = libc.mmap(None, ctypes.c_size_t(n), 3, 1, fd, ctypes.c_long(0))
os.close(fd)
print("mapped", flush=True)
sys.stdin.read(1)
ctypes.memset(address, 7, n)
print("written", flush=True)
sys.stdin.read()
"""


class Bench:
    """An arena with a catalogue that is a list."""

    def __init__(self, directory: Path, budget: int | None = 64 * MiB):
        self.victims: list[tuple[str, bool]] = []
        self.evicted: list[str] = []
        self.directory = directory
        self.arena = Arena(directory, budget, victims=lambda: list(self.victims), evicted=self._evicted)

    def _evicted(self, token):
        self.evicted.append(token)
        self.victims = [victim for victim in self.victims if victim[0] != token]

    async def sealed(self, nbytes, owner, *, victim=False, precious=False, metadata=False):
        segment = await self.arena.allocate(nbytes, owner, metadata=metadata)
        self.arena.seal(segment.token, nbytes)
        if victim:
            self.victims.append((segment.token, precious))
        return self.arena.get(segment.token)

    def on_tmpfs(self):
        total = 0
        for path in self.directory.iterdir():
            with contextlib.suppress(FileNotFoundError):  # a thread unlinks just now
                total += path.stat().st_blocks * 512 if files.parse_name(path.name) else 0
        return total

    def names(self):
        return sorted(path.name for path in self.directory.iterdir() if files.parse_name(path.name))

    async def settled(self):
        """Until no thread makes or frees pages and nothing is about to be done."""
        pool = self.arena._pool
        await asyncio.sleep(0)
        pieces = pool._pages._pieces
        while self.arena._poked or pool._growing or pool._leaving or not all(piece.done() for piece in pieces.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def balanced(self):
        await self.settled()
        assert self.arena.used == self.on_tmpfs() <= self.arena.budget


@contextlib.asynccontextmanager
async def bench(directory, budget=64 * MiB, *, spares=False):
    made = Bench(directory, budget)
    if not spares:
        made.arena.prepare = lambda *_: None
    try:
        yield made
        await made.balanced()
    finally:
        made.arena.close()


@contextlib.contextmanager
def holder(path):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "mapped\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def small_tmpfs(shm_dir):
    """A tmpfs of 32 MiB of its own."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m,mode=700", "none", str(shm_dir)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"may not mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield shm_dir
    subprocess.run(["umount", "-l", str(shm_dir)], check=True)


def soon():
    return asyncio.get_running_loop().time() + 0.05


# -- one segment ---------------------------------------------------------------------------------


def test_a_segment_has_all_its_pages_before_anybody_gets_it(shm_dir):
    async def run():
        async with bench(shm_dir) as b:
            segment = await b.arena.allocate(3 * MiB, "a")
            found = segment.path.stat()
            assert (found.st_size, found.st_blocks * 512, found.st_ino) == (4 * MiB, 4 * MiB, segment.inode)
            assert (segment.nbytes, segment.state, segment.owner, found.st_mode & 0o777) == (4 * MiB, "open", "a", 0o600)
            assert b.arena.used == 4 * MiB
            assert b.arena.owned("a") == [segment.inode]
            assert b.arena.owned("") == []

    asyncio.run(run())


def test_sealing_is_a_rename_and_can_be_repeated(shm_dir):
    async def run():
        async with bench(shm_dir) as b:
            segment = await b.arena.allocate(1, "a")
            with pytest.raises(InvalidRequest, match="more than segment"):
                b.arena.seal(segment.token, 3 * MiB)
            b.arena.seal(segment.token, 1)
            b.arena.seal(segment.token, 1)
            assert b.names() == [f"{segment.token}.sealed"]
            b.arena.release(segment.token, reusable=True)  # too late: it is sealed
            assert b.arena.get(segment.token).path.exists()
            with pytest.raises(LeaseLost):
                b.arena.seal("0" * 16, 1)

    asyncio.run(run())


def test_the_owner_gets_its_released_segment_back_with_the_same_inode(shm_dir):
    async def run():
        async with bench(shm_dir) as b:
            first = await b.arena.allocate(4 * MiB, "a")
            b.arena.release(first.token, reusable=True)
            with pytest.raises(KeyError):
                b.arena.get(first.token)
            other = await b.arena.allocate(4 * MiB, "b")
            again = await b.arena.allocate(3 * MiB, "a")
            assert other.inode != first.inode == again.inode
            assert again.token != first.token
            assert again.path.stat().st_ino == first.inode

    asyncio.run(run())


def test_a_segment_whose_copy_may_go_on_is_not_reused(shm_dir):
    async def run():
        async with bench(shm_dir) as b:
            first = await b.arena.allocate(4 * MiB, "a")
            second = await b.arena.allocate(4 * MiB, "a")
            b.arena.release(first.token, reusable=False)
            b.arena.drop(second.token)
            await b.balanced()
            assert b.names() == []
            assert b.arena.used == 0

    asyncio.run(run())


def test_a_dropped_sealed_segment_serves_its_owner_again_and_a_wasteful_one_does_not(shm_dir):
    async def run():
        async with bench(shm_dir, 512 * MiB) as b:
            small = await b.sealed(4 * MiB, "a")
            huge = await b.sealed(80 * MiB, "a")
            b.arena.drop(small.token)
            b.arena.drop(huge.token)
            b.arena.drop(huge.token)  # fine
            assert (await b.arena.allocate(2 * MiB, "a")).inode == small.inode
            assert (await b.arena.allocate(2 * MiB, "a")).inode != huge.inode
            assert (await b.arena.allocate(16 * MiB, "a")).inode == huge.inode

    asyncio.run(run())


def test_a_file_removed_by_somebody_else_is_a_clear_error_or_nothing_at_all(shm_dir):
    async def run():
        async with bench(shm_dir) as b:
            segment = await b.arena.allocate(1, "a")
            segment.path.unlink()
            with pytest.raises(LeaseLost, match="has been removed"):
                b.arena.seal(segment.token, 1)
            sealed = await b.sealed(1, "a", victim=True)
            sealed.path.unlink()
            assert (await b.arena.allocate(1, "a")).inode != sealed.inode
            assert b.evicted == [sealed.token]
            gone = await b.sealed(1, "a")
            gone.path.unlink()
            b.arena.drop(gone.token)

    asyncio.run(run())


# -- reuse and eviction --------------------------------------------------------------------------


def test_the_owners_own_victim_is_reused_before_fresh_pages_but_a_precious_one_is_not(shm_dir):
    async def run():
        async with bench(shm_dir) as b:
            newest = await b.sealed(4 * MiB, "a", victim=True, precious=True)
            older = await b.sealed(4 * MiB, "a", victim=True)
            segment = await b.arena.allocate(4 * MiB, "a")
            assert segment.inode == older.inode
            assert b.evicted == [older.token]
            assert (await b.arena.allocate(4 * MiB, "a")).inode != newest.inode
            assert b.arena.get(newest.token).path.exists()

    asyncio.run(run())


def test_victims_go_in_order_and_only_as_many_as_needed(shm_dir):
    async def run():
        async with bench(shm_dir, 20 * MiB) as b:
            assert b.arena.budget - b.arena._budget.kept_back == 18 * MiB
            first, second, third = [await b.sealed(6 * MiB, owner, victim=True) for owner in "abc"]
            b.victims.reverse()
            await b.arena.allocate(8 * MiB, "z")
            assert b.evicted == [third.token, second.token]
            assert b.arena.get(first.token).path.exists()

    asyncio.run(run())


def test_nothing_is_evicted_for_a_request_that_would_not_fit_anyway(shm_dir):
    async def run():
        async with bench(shm_dir, 20 * MiB) as b:
            await b.sealed(6 * MiB, "a")
            kept = await b.sealed(6 * MiB, "a", victim=True)
            with pytest.raises(ArenaFull):
                await b.arena.allocate(14 * MiB, "z", deadline=soon())
            assert b.arena.get(kept.token).path.exists()
            assert b.evicted == []

    asyncio.run(run())


def test_what_a_request_spares_is_not_evicted_for_it_also_if_that_is_known_only_later(shm_dir):
    async def run():
        async with bench(shm_dir, 20 * MiB) as b:
            kept = await b.sealed(12 * MiB, "a")
            spared = []
            waits = asyncio.create_task(b.arena.allocate(12 * MiB, "", deadline=soon(), sparing=lambda: spared))
            await asyncio.sleep(0)
            spared.append(kept.token)
            b.victims.append((kept.token, True))
            b.arena.poke()
            with pytest.raises(ArenaFull):
                await waits
            assert b.evicted == []
            await b.arena.allocate(12 * MiB, "z")
            assert b.evicted == [kept.token]

    asyncio.run(run())


def test_what_a_victim_lets_go_counts_as_used_until_it_is_free(shm_dir):
    async def run():
        async with bench(shm_dir, 90 * MiB) as b:
            old = await b.sealed(80 * MiB, "a", victim=True, precious=True)
            request = asyncio.create_task(b.arena.allocate(4 * MiB, "b"))
            await asyncio.sleep(0)
            assert b.evicted == [old.token]
            assert b.arena.used == 80 * MiB
            assert b.arena.waiting == 1
            await request
            assert b.arena.used == 4 * MiB

    asyncio.run(run())


def test_another_owners_victim_is_taken_over_if_nobody_maps_it(shm_dir):
    async def run():
        async with bench(shm_dir, 20 * MiB) as b:
            old = await b.sealed(18 * MiB, "a", victim=True)
            with holder(old.path) as process:
                process.kill()
                process.wait()  # the lock dies with the process
                new = await b.arena.allocate(18 * MiB, "b")
            assert new.inode == old.inode
            assert new.owner == "b"
            assert b.evicted == [old.token]

    asyncio.run(run())


def test_while_another_process_maps_a_victim_the_memory_is_freed_and_the_inode_is_not_used_again(shm_dir):
    async def run():
        async with bench(shm_dir, 20 * MiB) as b:
            old = await b.sealed(18 * MiB, "a", victim=True)
            witness = os.open(old.path, os.O_RDONLY)
            try:
                with holder(old.path) as process:
                    new = await b.arena.allocate(18 * MiB, "b")
                    assert new.inode != old.inode
                    assert os.fstat(witness).st_blocks == 0
                    assert os.fstat(witness).st_size == 18 * MiB  # so that the other process gets no SIGBUS
                    before = new.path.read_bytes()
                    process.stdin.write("w")
                    process.stdin.flush()
                    assert process.stdout.readline() == "written\n"
                    assert new.path.read_bytes() == before
            finally:
                os.close(witness)

    asyncio.run(run())


def test_memory_of_a_mapped_victim_really_comes_back(small_tmpfs):
    async def run():
        async with bench(small_tmpfs, 32 * MiB) as b:
            old = await b.sealed(28 * MiB, "a", victim=True)
            with holder(old.path):
                # Would not fit into the tmpfs beside the old one.
                await b.arena.allocate(28 * MiB, "b")
            assert os.statvfs(small_tmpfs).f_bfree * os.statvfs(small_tmpfs).f_frsize >= 2 * MiB

    asyncio.run(run())


# -- the line ------------------------------------------------------------------------------------


def test_a_later_small_request_never_overtakes_an_earlier_big_one(shm_dir):
    async def run():
        async with bench(shm_dir, 32 * MiB) as b:
            order = []

            async def ask(name, nbytes):
                segment = await b.arena.allocate(nbytes, name)
                order.append(name)
                return segment

            held = await b.sealed(16 * MiB, "z")
            big = asyncio.create_task(ask("big", 24 * MiB))
            await asyncio.sleep(0)
            small = asyncio.create_task(ask("small", 2 * MiB))
            cache = b.arena.create_cache(4 * MiB)
            more = asyncio.create_task(b.arena.reserve(cache.token, 4096))
            await asyncio.sleep(0.02)
            assert b.arena.waiting == 3
            assert order == []
            assert not more.done()
            b.victims.append((held.token, False))
            b.arena.poke()
            await big
            await small
            await more
            assert sorted(order) == ["big", "small"]
            b.arena.charge(cache.token, 0, settled=cache.reserved)

    asyncio.run(run())


def test_metadata_does_not_wait_behind_shards(shm_dir):
    async def run():
        async with bench(shm_dir, 32 * MiB) as b:
            await b.sealed(28 * MiB, "a")
            shard = asyncio.create_task(b.arena.allocate(2 * MiB, "a"))
            await asyncio.sleep(0)
            assert b.arena.waiting == 1
            first = await b.sealed(100, "a", metadata=True)
            await b.sealed(100, "a", metadata=True)
            third = asyncio.create_task(b.arena.allocate(100, "a", metadata=True))
            await asyncio.sleep(0.01)
            assert not third.done()
            b.victims.append((first.token, True))
            b.arena.poke()
            assert (await third).metadata
            assert not shard.done()
            shard.cancel()

    asyncio.run(run())


def test_what_can_never_fit_is_refused_at_once_with_the_numbers(shm_dir):
    async def run():
        async with bench(shm_dir, 32 * MiB) as b:
            with pytest.raises(ArenaFull, match=r"30\.0 MiB can never fit into 32\.0 MiB of memory, 4\.0 MiB of it kept back.* --memory"):
                await b.arena.allocate(29 * MiB, "a")
            with pytest.raises(ArenaFull, match="can never fit"):
                await b.arena.allocate(2**62, "a", metadata=True)
            with pytest.raises(InvalidRequest):
                await b.arena.allocate(-1, "a")

    asyncio.run(run())


def test_at_the_deadline_the_error_says_who_holds_the_memory(shm_dir):
    async def run():
        async with bench(shm_dir, 32 * MiB) as b:
            await b.sealed(16 * MiB, "a")
            await b.arena.allocate(4 * MiB, "b")
            big = asyncio.create_task(b.arena.allocate(20 * MiB, "a"))
            await asyncio.sleep(0)
            with pytest.raises(
                ArenaFull,
                match=r"^no room for 10\.0 MiB: 32\.0 MiB budget, 16\.0 MiB held by checkpoints that are not durable yet, 4\.0 MiB being "
                r"written, 1 earlier requests waiting \(waited [\d.]+ s\); raise --memory, save less often, or wait$",
            ):
                await b.arena.allocate(10 * MiB, "a", deadline=soon())
            assert b.arena.waiting == 1
            big.cancel()
            await asyncio.sleep(0)
            assert b.arena.waiting == 0

    asyncio.run(run())


def test_shards_of_one_save_that_can_never_fit_together_are_told_so(shm_dir):
    async def run():
        async with bench(shm_dir, 32 * MiB) as b:
            other = await b.sealed(20 * MiB, "a")
            with pytest.raises(
                ArenaFull,
                match=r"^no room for 10\.0 MiB: the shards of this save on this node need 30\.0 MiB or more together, which can never fit "
                r"into 32\.0 MiB of memory, 4\.0 MiB of it kept back for metadata \(waited .* s\); raise --memory, or spread the state ",
            ):
                await b.arena.allocate(10 * MiB, "b", deadline=soon(), beside=lambda: {other.token})
            await b.sealed(4 * MiB, "c")
            with pytest.raises(ArenaFull, match=r"20\.0 MiB held by other shards of this save, 4\.0 MiB held by checkpoints that are not "):
                await b.arena.allocate(8 * MiB, "b", deadline=soon(), beside=lambda: {other.token})

    asyncio.run(run())


def test_who_waits_long_is_in_the_log_once(shm_dir, monkeypatch, caplog):
    monkeypatch.setattr("ckptd.line.PATIENCE_SECONDS", 0.01)

    async def run():
        async with bench(shm_dir, 32 * MiB) as b:
            await b.sealed(16 * MiB, "a")
            with caplog.at_level(logging.WARNING):
                waits = asyncio.create_task(b.arena.allocate(20 * MiB, "a"))
                while not caplog.records:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                await asyncio.sleep(0.05)
            waits.cancel()
            await asyncio.gather(waits, return_exceptions=True)

    asyncio.run(run())
    assert [record.message for record in caplog.records] == [
        "no room for 20.0 MiB: 32.0 MiB budget, 16.0 MiB held by checkpoints that are not durable yet; waiting"
    ]


def test_the_request_behind_one_that_gave_up_is_served(shm_dir):
    async def run():
        async with bench(shm_dir, 32 * MiB) as b:
            await b.sealed(16 * MiB, "a")
            big = asyncio.create_task(b.arena.allocate(20 * MiB, "a", deadline=soon()))
            await asyncio.sleep(0)
            small = asyncio.create_task(b.arena.allocate(2 * MiB, "a"))
            with pytest.raises(ArenaFull):
                await big
            await small

    asyncio.run(run())


# -- nothing is left behind ----------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(6))
def test_a_cancelled_request_leaves_the_accounts_balanced(shm_dir, steps):
    async def run():
        async with bench(shm_dir, 256 * MiB) as b:
            request = asyncio.create_task(b.arena.allocate(140 * MiB, "a"))
            for _ in range(steps):
                await asyncio.sleep(0)
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
            await b.balanced()
            assert (b.arena.used, b.names(), b.arena.waiting) == (0, [], 0)

    asyncio.run(run())


def test_a_request_cancelled_in_the_line_or_just_after_its_grant_leaves_the_accounts_balanced(shm_dir):
    async def run():
        async with bench(shm_dir, 32 * MiB) as b:
            held = await b.arena.allocate(24 * MiB, "a")
            waiting = asyncio.create_task(b.arena.allocate(20 * MiB, "b"))
            reused = asyncio.create_task(b.arena.allocate(22 * MiB, "a"))
            cache = b.arena.create_cache(MiB)
            reserving = asyncio.create_task(b.arena.reserve(cache.token, MiB))
            await asyncio.sleep(0.01)
            assert b.arena.waiting == 3
            waiting.cancel()
            await asyncio.sleep(0)
            b.arena.release(held.token, reusable=True)
            b.arena._serve()
            assert b.arena.waiting == 0
            assert not reused.done()
            reused.cancel()
            reserving.cancel()
            await asyncio.gather(waiting, reused, reserving, return_exceptions=True)
            await b.balanced()
            assert (b.arena.used, b.arena.waiting) == (0, 0)
            b.arena.drop(cache.token)

    asyncio.run(run())


def test_a_full_file_system_is_an_error_and_leaves_no_file(small_tmpfs):
    async def run():
        async with bench(small_tmpfs, 32 * MiB) as b:
            (small_tmpfs / "somebody-elses").write_bytes(bytes(24 * MiB))
            with pytest.raises(ArenaFull, match=r"no room for 16\.0 MiB: .* is full \(No space left on device; .* lower --memory"):
                await b.arena.allocate(16 * MiB, "a")
            await b.balanced()
            assert b.names() == []
            await b.arena.allocate(4 * MiB, "a")
            with pytest.raises(ArenaFull, match="no room for a commit record"):
                b.arena.put_record(ATTEMPT, "accepted", bytes(8 * MiB))
            assert b.arena.records() == []
            assert not list(small_tmpfs.glob("*.tmp"))

    asyncio.run(run())


def test_pages_that_do_not_exist_are_an_error_not_a_signal(small_tmpfs):
    path = small_tmpfs / "x"
    files.create(path)
    with pytest.raises(OSError, match="No space left") as caught:
        files.populate(path, 0, 40 * MiB)
    assert caught.value.errno == errno.ENOSPC


def test_when_the_lease_ends_spares_go_requests_fail_and_sealed_segments_stay(shm_dir):
    async def run():
        async with bench(shm_dir, 32 * MiB) as b:
            sealed = await b.sealed(8 * MiB, "a")
            opened = await b.arena.allocate(2 * MiB, "a")
            spare = await b.arena.allocate(4 * MiB, "a")
            b.arena.release(spare.token, reusable=True)
            await b.arena.allocate(12 * MiB, "b")
            waiting = asyncio.create_task(b.arena.allocate(10 * MiB, "a"))
            await asyncio.sleep(0)
            b.arena.disown("a")
            with pytest.raises(LeaseLost):
                await waiting
            assert b.arena.owned("a") == []
            assert b.arena.get(sealed.token).owner == ""
            b.arena.drop(opened.token)
            b.arena.drop(sealed.token)
            await b.balanced()
            assert b.arena.used == 12 * MiB

    asyncio.run(run())


# -- spares --------------------------------------------------------------------------------------


def test_after_a_seal_a_spare_of_the_same_size_is_ready_for_the_owner(shm_dir):
    async def run():
        async with bench(shm_dir, 64 * MiB, spares=True) as b:
            first = await b.sealed(16 * MiB, "a")
            await b.balanced()
            assert b.arena.used == 32 * MiB
            made = set(b.arena.owned("a")) - {first.inode}
            second = await b.sealed(16 * MiB, "a")
            assert {second.inode} == made
            b.victims.append((first.token, False))
            third = await b.sealed(16 * MiB, "a")
            assert third.inode == first.inode
            await b.balanced()
            assert b.arena.used == 48 * MiB

    asyncio.run(run())


def test_no_spare_is_made_without_need_or_without_room(shm_dir):
    async def run():
        async with bench(shm_dir, 32 * MiB, spares=True) as b:
            await b.sealed(16 * MiB, "a")
            await b.sealed(100, "b", metadata=True)
            await b.balanced()
            assert len(b.arena) == 2
            await b.sealed(4 * MiB, "c", victim=True)
            await b.balanced()
            assert len(b.arena) == 3  # what is evictable by then serves as well
            b.arena.prepare("c", 10 * MiB)
            b.arena.prepare("", 2 * MiB)
            await b.balanced()
            assert len(b.arena) == 3

    asyncio.run(run())


def test_a_spare_never_keeps_a_request_waiting_even_while_it_is_being_made(shm_dir):
    async def run():
        async with bench(shm_dir, 512 * MiB, spares=True) as b:
            sealed = await b.sealed(200 * MiB, "a")
            await asyncio.sleep(0)
            while not b.arena._pool._growing:  # noqa: ASYNC110
                await asyncio.sleep(0)
            kept = await b.arena.allocate(300 * MiB, "b")
            await b.balanced()
            assert sorted(b.names()) == sorted([sealed.path.name, kept.path.name])

    asyncio.run(run())


def test_spares_of_anybody_go_before_any_checkpoint(shm_dir):
    async def run():
        async with bench(shm_dir, 32 * MiB) as b:
            victim = await b.sealed(8 * MiB, "a", victim=True)
            spare = await b.arena.allocate(16 * MiB, "b")
            b.arena.release(spare.token, reusable=True)
            await b.arena.allocate(18 * MiB, "c")
            assert b.evicted == []
            assert b.arena.get(victim.token).path.exists()

    asyncio.run(run())


# -- caches --------------------------------------------------------------------------------------


def test_a_cache_is_charged_what_is_reserved_and_then_what_it_holds(shm_dir):
    async def run():
        async with bench(shm_dir, 32 * MiB) as b:
            cache = b.arena.create_cache(100 * MiB + 1)
            assert cache.path.stat().st_size == 100 * MiB + 4096
            assert b.arena.used == 0
            await b.arena.reserve(cache.token, 8 * MiB + 1)
            assert b.arena.used == 8 * MiB + 4096
            with cache.path.open("r+b", buffering=0) as file:
                file.seek(64 * MiB)
                file.write(bytes(8 * MiB))
            b.arena.charge(cache.token, cache.path.stat().st_blocks * 512)
            assert b.arena.used == 8 * MiB + 4096, "what is reserved stays charged until it is settled"
            b.arena.charge(cache.token, cache.path.stat().st_blocks * 512, settled=8 * MiB + 4096)
            await b.balanced()
            b.arena.charge(cache.token, 9 * MiB)
            assert b.arena.used == 8 * MiB, "only a reservation raises what is charged"
            b.victims.append((cache.token, False))
            await b.arena.allocate(28 * MiB, "a")
            assert b.evicted == [cache.token]
            b.arena.charge(cache.token, 0)  # fine
            with pytest.raises(LeaseLost):
                await b.arena.reserve(cache.token, 1)

    asyncio.run(run())


def test_a_cache_is_not_evicted_to_make_room_for_itself(shm_dir):
    async def run():
        async with bench(shm_dir, 32 * MiB) as b:
            cache = b.arena.create_cache(100 * MiB)
            b.victims.append((cache.token, False))
            await b.arena.reserve(cache.token, 20 * MiB)
            with pytest.raises(ArenaFull):
                await b.arena.reserve(cache.token, 20 * MiB, soon())
            waiting = asyncio.create_task(b.arena.reserve(cache.token, 20 * MiB))
            await asyncio.sleep(0)
            b.arena.drop(cache.token)
            with pytest.raises(LeaseLost):
                await waiting

    asyncio.run(run())


# -- what outlives the daemon --------------------------------------------------------------------


def test_a_new_arena_takes_back_what_it_is_told_to_and_unlinks_only_what_is_ours(shm_dir):
    async def run():
        async with bench(shm_dir) as b:
            keep = await b.sealed(4 * MiB, "a")
            forgotten = await b.sealed(4 * MiB, "a")
            damaged = await b.sealed(4 * MiB, "a")
            b.arena.put_record(ATTEMPT, "accepted", b"record")
        # What a SIGKILL leaves besides.
        os.truncate(damaged.path, 0)
        os.truncate(damaged.path, 4 * MiB)
        for name in ("0123456789abcdef.open", "0123456789abcdee.spare", "0123456789abcded.cache", f"{ATTEMPT}.durable.record.tmp"):
            (shm_dir / name).write_bytes(b"half")
        foreign = ["notes.txt", "0123456789abcdef.sealed.bak", "short.open", "x.record", "y.tmp"]
        for name in foreign:
            (shm_dir / name).write_bytes(b"foreign")
        async with bench(shm_dir) as b:
            missing = "f" * 16
            assert b.arena.records() == [(ATTEMPT, "accepted", b"record")]
            assert b.arena.adopt({keep.token: 3 * MiB, damaged.token: 1, missing: 1}) == {keep.token}
            assert b.arena.used == 4 * MiB
            assert b.arena.get(keep.token).inode == keep.inode
            left = {path.name for path in shm_dir.iterdir()}
            assert left == {*foreign, keep.path.name, "lock", f"{ATTEMPT}.accepted.record"}
            assert not forgotten.path.exists()

    asyncio.run(run())


def test_a_segment_smaller_than_its_record_says_is_not_adopted(shm_dir):
    async def run():
        async with bench(shm_dir) as b:
            sealed = await b.sealed(4 * MiB, "a")
        async with bench(shm_dir) as b:
            assert b.arena.adopt({sealed.token: 4 * MiB + 1}) == set()
            assert b.names() == []

    asyncio.run(run())


def test_records_change_state_by_rename_and_go_whatever_their_state(shm_dir):
    b = Bench(shm_dir)
    later = "0006400000000001deadbeef"
    b.arena.put_record(later, "accepted", b"2")
    b.arena.put_record(ATTEMPT, "accepted", b"1")
    b.arena.move_record(ATTEMPT, "accepted", "durable")
    assert b.arena.records() == [(ATTEMPT, "durable", b"1"), (later, "accepted", b"2")]
    b.arena.drop_record(ATTEMPT)
    b.arena.drop_record(ATTEMPT)
    assert b.arena.records() == [(later, "accepted", b"2")]
    with pytest.raises(Unavailable):
        b.arena.move_record(ATTEMPT, "accepted", "durable")
    with pytest.raises(ValueError, match="would not be found again"):
        b.arena.put_record("../x", "accepted", b"")
    b.arena.close()


def test_an_orderly_end_leaves_sealed_segments_and_records_only(shm_dir):
    async def run():
        b = Bench(shm_dir, 512 * MiB)
        sealed = await b.sealed(4 * MiB, "a")
        await b.arena.allocate(2 * MiB, "a")
        spare = await b.arena.allocate(2 * MiB, "a")
        b.arena.release(spare.token, reusable=True)
        b.arena.create_cache(MiB)
        b.arena.prepare("a", 100 * MiB)
        await asyncio.sleep(0.01)
        held = await b.arena.allocate(260 * MiB, "a")
        making = asyncio.create_task(b.arena.allocate(130 * MiB, "b"))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(b.arena.allocate(400 * MiB, "a"))
        await asyncio.sleep(0.01)
        b.arena.close()
        b.arena.close()
        outcomes = await asyncio.gather(making, waiting, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Unavailable, Unavailable]
        with pytest.raises(Unavailable):
            await b.arena.allocate(1, "a")
        assert b.names() == [sealed.path.name]
        assert not held.path.exists()

    asyncio.run(run())


# -- whose directory -----------------------------------------------------------------------------


def test_a_second_daemon_is_refused_until_the_first_ends_even_by_sigkill(shm_dir):
    script = (
        "import pathlib, sys, time; from ckptd.arena import Arena; "
        "a = Arena(pathlib.Path(sys.argv[1]), 16 << 20, victims=list, evicted=print); print('up', flush=True); time.sleep(60)"
    )
    repository = str(Path(files.__file__).parent.parent)
    first = subprocess.Popen(
        [sys.executable, "-c", script, str(shm_dir)], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": repository}
    )
    try:
        assert first.stdout.readline() == "up\n"
        with pytest.raises(InvalidRequest, match=f"another ckptd daemon uses {shm_dir}: stop it or give --shm-dir"):
            Bench(shm_dir)
    finally:
        first.kill()
        first.communicate()
    Bench(shm_dir).arena.close()


def test_programs_that_the_daemon_starts_do_not_keep_the_lock(shm_dir):
    b = Bench(shm_dir)
    child = subprocess.Popen(["sleep", "60"], close_fds=False)
    b.arena.close()
    Bench(shm_dir).arena.close()
    child.kill()
    child.wait()


def test_the_directory_is_made_and_closed_to_others(shm_dir):
    directory = shm_dir / "deep" / "er"
    Bench(directory).arena.close()
    assert directory.stat().st_mode & 0o777 == 0o700
    Bench(directory).arena.close()


def test_a_directory_that_cannot_be_ours_is_refused(shm_dir):
    (shm_dir / "file").write_text("")
    with pytest.raises(InvalidRequest, match="cannot make the shared-memory directory"):
        Bench(shm_dir / "file" / "below")
    with pytest.raises(InvalidRequest, match="--shm-dir"):
        Bench(shm_dir / "file")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_somebody_elses_directory_is_refused(shm_dir):
    directory = shm_dir / "theirs"
    directory.mkdir()
    os.chown(directory, 12345, -1)
    with pytest.raises(InvalidRequest, match="belongs to uid 12345"):
        Bench(directory)


def test_a_directory_on_a_disk_works_with_a_warning(tmp_path, caplog):
    if tmp_path.stat().st_dev == Path("/dev/shm").stat().st_dev:
        pytest.skip("the temporary directory is a tmpfs")
    with caplog.at_level(logging.WARNING):
        Bench(tmp_path).arena.close()
    if subprocess.run(["stat", "-f", "-c", "%T", str(tmp_path)], capture_output=True, text=True, check=True).stdout.strip() != "tmpfs":
        assert "is not on a tmpfs" in caplog.text


def test_the_budget_must_make_sense_there(small_tmpfs):
    with pytest.raises(InvalidRequest, match=r"--memory 33\.0 MiB is more than the 32\.0 MiB that .* can hold: give less"):
        Bench(small_tmpfs, 33 * MiB)
    with pytest.raises(InvalidRequest, match=r"8\.0 MiB in .* is too little memory: --memory must be at least 16\.0 MiB"):
        Bench(small_tmpfs, 8 * MiB)
    for nbytes, said in ((512, "512 bytes"), (512 * 1024, r"512\.0 KiB")):
        with pytest.raises(InvalidRequest, match=f"^{said} in .* is too little memory"):
            Bench(small_tmpfs, nbytes)
    b = Bench(small_tmpfs, None)
    assert b.arena.budget == 16 * MiB
    b.arena.close()


# -- whatever happens ----------------------------------------------------------------------------

NAMES = "allocate metadata seal drop release offer cancel disown cache reserve charge pause"
OPERATIONS = st.lists(st.tuples(st.sampled_from(NAMES.split()), st.integers(0, 2**16)), max_size=30)


@settings(max_examples=40)
@given(OPERATIONS)
def test_accounts_balance_whatever_happens(operations):
    async def run(directory):
        async with bench(directory, 32 * MiB, spares=True) as b:
            tasks, tokens = [], []

            async def ask(nbytes, owner, metadata):
                tokens.append((await b.arena.allocate(nbytes, owner, metadata=metadata)).token)

            for operation, number in operations:
                pick = random.Random(number)
                owner = pick.choice("ab")
                token = pick.choice(tokens) if tokens else "0" * 16
                segment = b.arena._pool.get(token)
                match operation:
                    case "allocate" | "metadata":
                        nbytes = pick.choice([1, 3, 6, 12, 24]) * MiB if operation == "allocate" else 100
                        tasks.append(asyncio.create_task(ask(nbytes, owner, operation == "metadata")))
                    case "seal" if segment is not None and segment.state == "open":
                        b.arena.seal(token, 1)
                    case "drop":
                        b.arena.drop(token)
                    case "release":
                        b.arena.release(token, reusable=pick.random() < 0.7)
                    case "offer" if (token, False) not in b.victims:
                        b.victims.append((token, False))
                        b.arena.poke()
                    case "cancel" if tasks:
                        pick.choice(tasks).cancel()
                    case "disown":
                        b.arena.disown(owner)
                    case "cache":
                        tokens.append(b.arena.create_cache(20 * MiB).token)
                    case "reserve" if segment is not None and segment.state == "cache":
                        tasks.append(asyncio.create_task(b.arena.reserve(token, pick.choice([1, 5]) * MiB)))
                    case "charge" if segment is not None and segment.state == "cache":
                        b.arena.charge(token, 0, settled=segment.reserved)
                    case "pause":
                        await b.settled()
                await asyncio.sleep(0)
                assert b.on_tmpfs() <= b.arena.used <= b.arena.budget
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert b.arena.waiting == 0
            for token in tokens:
                segment = b.arena._pool.get(token)
                if segment is not None and segment.state == "cache":
                    b.arena.charge(token, 0, settled=segment.reserved)  # nothing was written into it

    with tempfile.TemporaryDirectory(prefix="ckptd-test-", dir="/dev/shm") as directory:
        asyncio.run(run(Path(directory)))
