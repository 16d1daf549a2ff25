"""Mappings against a real arena: the lock lives exactly as long as the mapping, whatever happens to the process."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
import threading
import time
import traceback
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ckptd.arena import Arena
from ckptd.errors import InvalidRequest, LeaseLost, Unavailable
from ckptd.v1.daemon_pb2 import Segment
from ckptd_client import mapping as room
from ckptd_client.mapping import Mappings, open_mapping

MiB = 1024 * 1024
NBYTES = 8 * MiB

HOLDER = """
import sys
from ckptd_client.mapping import open_mapping
mapping = open_mapping(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), writable=True)
mapping.view(0, 4)[:] = b"mine"
print("mapped", flush=True)
sys.stdin.read(1)
mapping.view(0, 4)[:] = b"late"
print("written", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def segment(shm_dir):
    path = shm_dir / "0123456789abcdef.open"
    path.write_bytes(bytes(range(256)) * (NBYTES // 256))
    return Segment(token="0123456789abcdef", path=str(path), inode=path.stat().st_ino, nbytes=NBYTES)


@contextmanager
def holder(path, inode, nbytes):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), str(inode), str(nbytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout.readline() == "mapped\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def opened(segment, *, writable=True):
    return open_mapping(segment.path, segment.inode, segment.nbytes, writable=writable)


def is_mapped(path):
    """Whether anybody holds the shared lock, as the daemon would ask."""
    fd = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)


def in_child(check):
    """Runs `check` in a forked child; what it returns there, as an exit status."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(int(check()))
        except BaseException:  # noqa: BLE001 - it must not go on as a second pytest; what it was has to be seen all the same
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(99)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def test_what_is_written_through_a_view_is_in_the_file(segment):
    mapping = opened(segment)
    view = mapping.view(64, 1024)
    target = torch.frombuffer(view, dtype=torch.float32)
    assert target.data_ptr() == mapping.address + 64
    target.copy_(torch.arange(256, dtype=torch.float32))
    written = Path(segment.path).read_bytes()
    assert written[64 : 64 + 1024] == torch.arange(256, dtype=torch.float32).numpy().tobytes()
    assert written[:64] == bytes(range(64))
    mapping.close()


def test_a_read_only_mapping_needs_no_pages_of_its_own_and_torch_takes_its_views_in_silence(shm_dir):
    path = shm_dir / "x.cache"
    path.touch()
    os.truncate(path, 64 * MiB)
    mapping = open_mapping(path, path.stat().st_ino, 64 * MiB, writable=False)
    assert path.stat().st_blocks == 0
    with path.open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), b"\x01" * 4096, 32 * MiB)
    assert torch.frombuffer(mapping.view(32 * MiB, 4096), dtype=torch.uint8).sum().item() == 4096
    assert path.stat().st_blocks * 512 == 4096
    mapping.close()


def test_views_are_checked_against_the_segments_bounds(segment):
    mapping = opened(segment)
    assert len(mapping.view(NBYTES, 0)) == 0
    for at, nbytes in ((-1, 2), (0, NBYTES + 1), (NBYTES, 1), (4, -1), (2**63, 2**63)):
        with pytest.raises(ValueError, match="are not in a segment"):
            mapping.view(at, nbytes)
    mapping.close()


def test_closing_waits_for_the_last_view_and_can_be_repeated(segment):
    mapping = opened(segment)
    tensor = torch.frombuffer(mapping.view(1024, 1024), dtype=torch.uint8)[256:]
    mapping.close()
    mapping.close()
    assert is_mapped(segment.path)
    assert tensor[3] == 3
    with pytest.raises(ValueError, match="closed"):
        mapping.view(0, 1)
    with pytest.raises(ValueError, match="closed"):
        mapping.address  # noqa: B018
    del tensor
    assert not is_mapped(segment.path)


def test_a_forgotten_mapping_is_unmapped(segment):
    mapping = opened(segment)
    assert is_mapped(segment.path)
    del mapping
    assert not is_mapped(segment.path)


def test_no_descriptor_stays_open(segment):
    mapping = opened(segment)
    assert segment.path not in [target_of(fd) for fd in other_descriptors()]  # others come and go: this process has threads
    mapping.close()


def test_a_forked_child_has_neither_the_pages_nor_the_lock_and_unmaps_nothing(segment):
    mappings = Mappings()
    mapping = mappings.obtain(segment)
    where = f"{mapping.address:x}-"
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        status = 99
        try:
            clean = where not in Path("/proc/self/maps").read_text(encoding="ascii") and len(mappings) == 0
            # Something else lives there now: closing the parent's mapping must not unmap it.
            libc = room._libc
            placed = libc.mmap(mapping.address, NBYTES, 3, 0x100022, -1, 0)
            mapping.close()
            mappings.keep_only([])
            del mapping
            status = 0 if clean and f"{placed:x}-" in Path("/proc/self/maps").read_text(encoding="ascii") else 1
            os.read(read_end, 1)  # until the parent has looked at the lock
        finally:
            os._exit(status)
    os.close(read_end)
    assert is_mapped(segment.path)
    mappings.keep_only([])
    mapping.close()
    del mapping
    assert not is_mapped(segment.path)
    os.close(write_end)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_fork_in_the_middle_of_mapping_inherits_nothing(segment):
    stop = threading.Event()

    def map_again_and_again():
        while not stop.is_set():
            opened(segment).close()

    thread = threading.Thread(target=map_again_and_again)
    thread.start()

    def inherited():
        paths = [target_of(fd) for fd in other_descriptors()]
        return segment.path in paths or segment.path in Path("/proc/self/maps").read_text(encoding="utf-8")

    try:
        for _ in range(20):
            assert in_child(inherited) == 0
    finally:
        stop.set()
        thread.join()


def test_a_killed_process_lets_go_at_once_and_its_segment_is_taken_over(shm_dir):
    async def run():
        victims, evicted = [], []
        arena = Arena(shm_dir, 20 * MiB, victims=lambda: victims, evicted=evicted.append)
        old = await arena.allocate(18 * MiB, "a")
        with holder(old.path, old.inode, old.nbytes) as process:
            arena.seal(old.token, old.nbytes)
            victims.append((old.token, False))
            process.kill()
            process.wait()
            assert not is_mapped(arena.get(old.token).path)
            new = await arena.allocate(18 * MiB, "b")
        assert new.inode == old.inode
        assert evicted == [old.token]
        arena.close()

    asyncio.run(run())


def test_a_zombie_writes_into_nothing_and_its_memory_is_free(shm_dir):
    async def run():
        victims, evicted = [], []
        arena = Arena(shm_dir, 20 * MiB, victims=lambda: victims, evicted=evicted.append)
        old = await arena.allocate(18 * MiB, "a")
        witness = os.open(old.path, os.O_RDONLY)
        with holder(old.path, old.inode, old.nbytes) as process:
            arena.seal(old.token, old.nbytes)
            victims.append((old.token, False))
            new = await arena.allocate(18 * MiB, "b")
            assert new.inode != old.inode
            assert os.fstat(witness).st_blocks == 0
            process.stdin.write("x")
            process.stdin.flush()
            assert process.stdout.readline() == "written\n"
            assert new.path.read_bytes()[:4] == bytes(4)
        os.close(witness)
        arena.close()

    asyncio.run(run())


def test_a_name_that_leads_elsewhere_is_a_lost_lease(segment):
    path = Path(segment.path)
    (path.parent / "lock").touch()
    other = path.with_name("0000000000000000.open")
    other.write_bytes(bytes(NBYTES))
    other.replace(path)
    with pytest.raises(LeaseLost, match="redo the whole save"):
        opened(segment)
    path.unlink()
    with pytest.raises(LeaseLost):
        opened(segment)


def test_a_segment_that_is_taken_over_between_open_and_lock_is_a_lost_lease(segment):
    path = Path(segment.path)
    daemon = os.open(path, os.O_RDWR)
    fcntl.flock(daemon, fcntl.LOCK_EX | fcntl.LOCK_NB)
    raised = []

    def client():
        try:
            opened(segment)
        except LeaseLost as error:
            raised.append(error)

    thread = threading.Thread(target=client)
    thread.start()
    while not any(target_of(fd) == segment.path for fd in other_descriptors(daemon)):
        time.sleep(0.001)
    path.rename(path.with_name("0000000000000000.open"))
    os.close(daemon)
    thread.join()
    assert len(raised) == 1


def target_of(fd):
    """What a descriptor leads to; "" if it has been closed, by another thread: gRPC clears up in a forked child on threads of its own."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


def other_descriptors(but=-1):
    return [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd != but and os.path.lexists(f"/proc/self/fd/{fd}")]


def test_a_lock_that_is_never_given_up_is_an_error(segment, monkeypatch):
    monkeypatch.setattr(room, "_LOCK_SECONDS", 0.01)
    daemon = os.open(segment.path, os.O_RDWR)
    fcntl.flock(daemon, fcntl.LOCK_EX)
    with pytest.raises(Unavailable, match="is the daemon stopped"):
        opened(segment)
    os.close(daemon)


def test_a_segment_that_is_too_short_is_a_lost_lease_not_a_signal(segment):
    os.truncate(segment.path, NBYTES - 1)
    with pytest.raises(LeaseLost):
        opened(segment)


def test_memory_that_is_not_visible_here_says_so(segment, shm_dir):
    elsewhere = shm_dir / "elsewhere" / "0123456789abcdef.open"
    with pytest.raises(InvalidRequest, match=f"the daemon's memory {elsewhere.parent} is not visible here .* mount the daemon's --shm-dir"):
        open_mapping(elsewhere, 1, NBYTES, writable=True)
    Path(segment.path).unlink()  # and no lock beside it: not the daemon's directory
    with pytest.raises(InvalidRequest, match="is not visible here"):
        opened(segment)
    with pytest.raises(InvalidRequest, match="0 bytes"):
        open_mapping(segment.path, 1, 0, writable=True)


def test_without_address_space_the_error_says_where_to_look(shm_dir):
    path = shm_dir / "x.cache"
    path.touch()
    os.truncate(path, 2**62)
    with pytest.raises(Unavailable, match=r"vm\.max_map_count"):
        open_mapping(path, path.stat().st_ino, 2**62, writable=False)


def test_a_pool_keeps_a_mapping_by_inode_whatever_its_name(segment):
    mappings = Mappings()
    first = mappings.obtain(segment)
    renamed = Path(segment.path).rename(Path(segment.path).with_name("ffffffffffffffff.open"))
    again = mappings.obtain(Segment(token="f" * 16, path=str(renamed), inode=segment.inode, nbytes=NBYTES))
    assert again is first
    mappings.keep_only([segment.inode, 1])
    assert len(mappings) == 1
    mappings.keep_only([])
    assert len(mappings) == 0
    del first, again
    assert not is_mapped(renamed)


def test_a_pool_maps_again_what_it_had_for_reading_only(segment):
    mappings = Mappings()
    reading = mappings.obtain(segment, writable=False)
    writing = mappings.obtain(segment)
    assert writing is not reading
    assert mappings.obtain(segment, writable=False) is writing
    writing.view(0, 1)[:] = b"x"
    mappings.keep_only([])
