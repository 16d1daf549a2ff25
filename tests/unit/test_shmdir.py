"""The directory in shared memory: whose it is, and what lies in it that is not of ours."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.errors import InvalidRequest, Unavailable
from ckptd.pool import Pool
from ckptd.shmdir import ShmDirectory

ATTEMPT = "0006400000000000deadbeef"
LATER = "0006400000000001deadbeef"
TOKEN = "0123456789abcdef"


@pytest.fixture
def directory(shm_dir: Path) -> Iterator[ShmDirectory]:
    found = ShmDirectory(shm_dir)
    yield found
    found.close()


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """Root may read everything; what is unreadable can be tried only as somebody else."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


# --- whose directory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o1777, 0o770, 0o710, 0o701, 0o500])
def test_a_directory_that_is_open_to_others_is_refused_and_keeps_its_mode(shm_dir: Path, mode: int) -> None:
    shared = shm_dir / "shared"
    shared.mkdir()
    shared.chmod(mode)
    (shared / "theirs").write_text("x")
    with pytest.raises(InvalidRequest) as refused:
        ShmDirectory(shared)
    message = f"{shared} has mode {mode & 0o777:04o}, "
    assert str(refused.value).startswith(message)
    # What is everybody's has to stay so.
    advice = "give a directory in it" if mode & 0o1000 else "chmod 700 it if it is meant for ckptd"
    assert advice in str(refused.value)
    assert shared.stat().st_mode & 0o7777 == mode
    assert os.listdir(shared) == ["theirs"]


def test_a_closed_directory_with_files_of_others_is_used_and_they_stay(shm_dir: Path) -> None:
    (shm_dir / "theirs").write_text("x")
    ShmDirectory(shm_dir).close()
    assert sorted(os.listdir(shm_dir)) == ["lock", "theirs"]


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277])
def test_a_new_directory_is_the_daemons_alone_whatever_the_umask(shm_dir: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        ShmDirectory(shm_dir / "new").close()
    finally:
        os.umask(before)
    assert (shm_dir / "new").stat().st_mode & 0o777 == 0o700


def test_a_link_that_leads_nowhere_is_refused(shm_dir: Path) -> None:
    (shm_dir / "link").symlink_to(shm_dir / "nowhere")
    (shm_dir / "loop").symlink_to(shm_dir / "loop")
    for name in ("link", "loop"):
        with pytest.raises(InvalidRequest, match=name):
            ShmDirectory(shm_dir / name)


@pytest.mark.parametrize("kind", ["directory", "link", "dangling"])
def test_a_lock_that_is_no_file_is_refused_in_one_line(shm_dir: Path, kind: str) -> None:
    (shm_dir / "target").write_text("theirs")
    if kind == "directory":
        (shm_dir / "lock").mkdir()
    else:
        (shm_dir / "lock").symlink_to(shm_dir / ("target" if kind == "link" else "nowhere"))
    before = sorted(os.listdir(shm_dir))
    with pytest.raises(InvalidRequest, match=f"cannot lock {shm_dir}/lock") as refused:
        ShmDirectory(shm_dir)
    assert "\n" not in str(refused.value)
    assert sorted(os.listdir(shm_dir)) == before


# --- what is not of ours -----------------------------------------------------------------------------------------

GARBAGE = [f"{ATTEMPT}.accepted.record", f"{TOKEN}.sealed", f"{TOKEN}.open", f"{ATTEMPT}.durable.record.tmp"]


def start(directory: ShmDirectory) -> tuple[list[tuple[str, str, bytes]], set[str]]:
    """What a daemon does with it at its start: the records that it read, the segments that it took back."""
    pool = Pool(directory, lambda: None)
    records = directory.records()
    directory.remove_temporaries()
    adopted = pool.adopt({TOKEN: 1})
    pool.close()
    return records, adopted


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING and "tmpfs" not in record.getMessage()]


def make(path: Path, kind: str, target: Path) -> None:
    if kind == "directory":
        path.mkdir()
        (path / "inside").write_text("theirs")
    elif kind == "link":
        path.symlink_to(target)
    elif kind == "fifo":
        os.mkfifo(path)


@pytest.mark.parametrize("kind", ["directory", "link", "fifo"])
@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_named_like_ours_is_left_alone_with_one_warning(
    directory: ShmDirectory, tmp_path: Path, name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = tmp_path / "elsewhere"
    target.write_bytes(b"theirs")
    path = directory.path / name
    make(path, kind, target)
    directory.put_record(LATER, "accepted", b"ours")
    before = path.lstat()
    assert start(directory) == ([(LATER, "accepted", b"ours")], set())
    directory.drop_record(ATTEMPT)
    after = path.lstat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert target.read_bytes() == b"theirs"
    told = warnings_of(caplog)
    assert len(told) == 1
    assert str(path) in told[0]


@pytest.mark.parametrize("name", GARBAGE)
def test_a_file_that_may_not_be_read_is_left_alone_with_one_warning(shm_dir: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    if os.geteuid() == 0:
        os.chown(shm_dir, 65534, -1)
    with nobody():
        directory = ShmDirectory(shm_dir)
        path = shm_dir / name
        path.write_bytes(b"x" * 4096)
        path.chmod(0)
        directory.put_record(LATER, "accepted", b"ours")
        assert start(directory) == ([(LATER, "accepted", b"ours")], set())
        directory.drop_record(ATTEMPT)
        directory.close()
        assert path.stat().st_size == 4096
    told = warnings_of(caplog)
    assert len(told) == 1
    assert str(path) in told[0]


@pytest.mark.parametrize("kind", ["directory", "link"])
def test_a_record_is_never_written_through_what_lies_in_its_way(directory: ShmDirectory, tmp_path: Path, kind: str) -> None:
    target = tmp_path / "elsewhere"
    target.write_bytes(b"theirs")
    path = directory.path / f"{ATTEMPT}.accepted.record.tmp"
    make(path, kind, target)
    with pytest.raises(Unavailable, match=re.escape(f"{ATTEMPT}.accepted.record")):
        directory.put_record(ATTEMPT, "accepted", b"ours")
    assert target.read_bytes() == b"theirs"
    assert path.is_symlink() or path.is_dir()
    assert directory.records() == []


# --- a record that somebody has removed --------------------------------------------------------------------------


def test_a_record_that_has_gone_is_written_anew_where_it_was_to_be_moved(directory: ShmDirectory) -> None:
    directory.move_record(ATTEMPT, "accepted", "durable", b"data")
    assert directory.records() == [(ATTEMPT, "durable", b"data")]


def test_a_record_that_is_there_is_moved_and_not_written(directory: ShmDirectory) -> None:
    directory.put_record(ATTEMPT, "accepted", b"as it was")
    directory.move_record(ATTEMPT, "accepted", "durable", b"other")
    assert directory.records() == [(ATTEMPT, "durable", b"as it was")]


def test_without_data_a_missing_record_cannot_be_moved(directory: ShmDirectory) -> None:
    with pytest.raises(Unavailable):
        directory.move_record(ATTEMPT, "accepted", "durable")
