"""What a store in a directory promises beyond every store: durability, tidiness, the operating system's errors."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.errors import InvalidRequest, NotFound, StoreError, Unavailable
from ckptd.filelock import LOCK_NAME
from ckptd.localstore import LocalStore
from ckptd.store import ABSENT, Changed, Store, is_temporary
from ckptd.stores import open_store
from mounts import small_tmpfs


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def test_a_writer_that_is_killed_leaves_nothing_that_is_listed(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import sys, time
        from ckptd.stores import open_store
        def source():
            yield b"x" * 100_000
            print("halfway", flush=True)
            time.sleep(600)
        open_store(sys.argv[1]).put("step-1/.metadata", source)
    """)
    with subprocess.Popen([sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "halfway\n"
        writer.send_signal(signal.SIGKILL)
    assert "step-1/.metadata" not in files(tmp_path)
    store = open_store(str(tmp_path))
    assert list(store.list()) == []
    with pytest.raises(NotFound):
        store.get("step-1/.metadata")
    store.put("step-1/.metadata", lambda: [b"whole"])
    assert (tmp_path / "step-1" / ".metadata").read_bytes() == b"whole"


def test_a_full_disk_may_pass_and_leaves_nothing(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import os, subprocess, sys
        from ckptd import errors
        from ckptd.stores import open_store
        root = sys.argv[1]
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "full", root], check=True)
        store = open_store(root)
        store.put("a", lambda: [b"1"])
        try:
            store.put("b", lambda: [b"x" * 300_000] * 10, nbytes_hint=3 << 20)
        except errors.Unavailable as exc:
            print(exc)
        print(os.listdir(root))
        store.put("c", lambda: [b"x" * 500_000])
        print(sorted(found.key for found in store.list()))
    """)
    command = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", script, str(tmp_path)]
    if subprocess.run([*command[:4], "mount", "-t", "tmpfs", "x", tmp_path], check=False, capture_output=True).returncode != 0:
        pytest.skip("no file system can be mounted here")
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines[1:] == ["['a']", "['a', 'c']"], done.stderr
    assert "No space left on device" in lines[0]
    assert "free some space" in lines[0]
    # One page of the mebibyte is taken by "a"; what "b" had taken is free again.
    assert "No space left on device for a file of up to 3.0 MiB (1020.0 KiB are free)" in lines[0]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE])
@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_what_the_disk_refuses_may_pass_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    store = open_store(str(tmp_path))
    store.put("step-1/.metadata", lambda: [b"old"])
    original = getattr(os, call)
    calls = []

    def refusing(*arguments: Any) -> Any:
        calls.append(arguments)
        if call == "write" and len(calls) == 1:  # the first part fits
            return original(*arguments)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refusing)
    with pytest.raises(Unavailable, match=os.strerror(number)) as caught:
        store.put("step-1/.metadata", lambda: [b"new", b"er"])
    monkeypatch.undo()
    assert calls
    assert ("free some space" in str(caught.value)) == (number in (errno.ENOSPC, errno.EDQUOT))
    assert files(tmp_path) == {"step-1", "step-1/.metadata"}
    assert store.get("step-1/.metadata") == b"old"
    store.put("step-1/.metadata", lambda: [b"new", b"er"])
    assert store.get("step-1/.metadata") == b"newer"


def test_a_directory_that_is_not_on_disk_is_told_although_the_object_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(tmp_path))

    def refusing(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", refusing)
    with pytest.raises(Unavailable, match="Input/output error"):
        store.put("step-1/.metadata", lambda: [b"new"])
    with pytest.raises(Unavailable, match="Input/output error"):
        open_store(str(tmp_path), retries=0).delete(["step-1/.metadata"])


def test_what_the_disk_cannot_read_may_pass_and_is_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(tmp_path), retries=0)
    store.put("step-1/.metadata", lambda: [b"old"])

    def refusing(*_arguments: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    for name, use in (
        ("pread", lambda: store.get("step-1/.metadata")),
        ("scandir", lambda: [*store.list()]),
        ("scandir", lambda: store.children("step-1")),
        ("unlink", lambda: store.delete(["step-1/.metadata"])),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, refusing)
            with pytest.raises(Unavailable, match="Input/output error"):
                use()
    assert store.get("step-1/.metadata") == b"old"


def test_a_size_limit_is_the_operators_and_leaves_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(StoreError, match="ulimit"):
            LocalStore(tmp_path).put("run/step-1/file", lambda: [b"x" * 50_000] * 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files(tmp_path) <= {"run", "run/step-1"}


def test_a_file_in_the_way_is_the_operators(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    root = LocalStore(tmp_path / "file")
    below = LocalStore(tmp_path / "file" / "store")
    for store in (root, below):
        for call in (store.probe, lambda store=store: [*store.list()], lambda store=store: store.put("a", lambda: [b"1"])):
            with pytest.raises(StoreError):
                call()
    with pytest.raises(StoreError, match="file"):
        LocalStore(tmp_path).put("file/a", lambda: [b"1"])
    (tmp_path / "directory").mkdir()
    with pytest.raises(StoreError):
        LocalStore(tmp_path).put("directory", lambda: [b"1"])
    assert files(tmp_path) == {"file", "directory"}


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs a sysfs")
def test_a_root_that_cannot_be_written_is_the_operators() -> None:
    with pytest.raises(StoreError, match="/sys/ckptd"):
        open_store("/sys/ckptd").probe()


@contextlib.contextmanager
def unreadable(directory: Path) -> Iterator[None]:
    """Inside it the directory cannot be read, not even by root, who is somebody else for as long."""
    directory.chmod(0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        directory.chmod(0o700)


@pytest.fixture
def open_root() -> Iterator[Path]:
    """A directory that others may read, on a way that others may go."""
    directory = Path(tempfile.mkdtemp(prefix="ckptd-test-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.mark.parametrize("where", ["run-a", "run-a/step-1", "run-a/lost+found"])
def test_a_directory_that_cannot_be_read_is_an_error_that_names_it_and_not_empty(open_root: Path, where: str) -> None:
    (open_root / where).mkdir(parents=True)
    with unreadable(open_root / where):
        store = open_store(str(open_root))
        with pytest.raises(
            StoreError, match=re.escape(f"cannot list {open_root / where}: Permission denied; give the daemon's user access")
        ):
            list(store.list())


def test_an_unreadable_lost_and_found_in_the_root_holds_no_checkpoint(open_root: Path) -> None:
    store = LocalStore(open_root)
    store.put("step-1/.metadata", lambda: [b"1"])
    store.put("lost+found/step-2/.metadata", lambda: [b"1"])
    with unreadable(open_root / "lost+found"):
        assert [found.key for found in store.list()] == ["step-1/.metadata"]
        assert store.children() == ([], ["step-1"])
        with pytest.raises(StoreError, match=r"lost\+found"):
            store.children("lost+found")
        with pytest.raises(StoreError, match=r"lost\+found"):
            list(store.list("lost+found/"))
    assert [found.key for found in store.list()] == ["lost+found/step-2/.metadata", "step-1/.metadata"]


def test_links_that_lead_back_to_themselves_are_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("run/step-1/.metadata", lambda: [b"1"])
    for at in (tmp_path, tmp_path / "run", tmp_path / "run" / "step-1"):
        (at / "self").symlink_to("self")
        (at / "ping").symlink_to("pong")
        (at / "pong").symlink_to("ping")
    for prefix in ("", "run/", "run/step-1/"):
        assert [found.key for found in store.list(prefix)] == ["run/step-1/.metadata"]
    assert list(store.list("self/")) == []
    assert store.children() == ([], ["run"])
    assert store.children("run") == ([], ["step-1"])
    assert store.children("self") == ([], [])


def test_a_listing_looks_only_into_what_begins_as_it_was_asked(open_root: Path) -> None:
    store = LocalStore(open_root)
    store.put("run/step-1/.metadata", lambda: [b"1"])
    store.put("run/step-2/.metadata", lambda: [b"1"])
    with unreadable(open_root / "run" / "step-2"):  # whoever looks into it, fails
        assert [found.key for found in store.list("run/step-1")] == ["run/step-1/.metadata"]
        assert store.children("run") == ([], ["step-1", "step-2"])
        with pytest.raises(StoreError, match="step-2"):
            store.children("run/step-2")


def every_call(store: Store) -> list[Callable[[], object]]:
    reads = [lambda: list(store.list()), store.children, lambda: store.children("a"), lambda: store.get("a")]
    return [*reads, lambda: store.put("a", lambda: [b"1"]), lambda: store.delete(["a"])]


def test_a_root_that_does_not_exist_is_an_error_and_made_when_it_is_probed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "not" / "there")
    for call in every_call(store):
        with pytest.raises(StoreError, match="does not exist"):
            call()
    assert files(tmp_path) == set()
    store.probe()
    assert list(store.list()) == []


def test_a_root_that_goes_away_is_waited_for_and_nothing_is_made_in_its_place(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    store.probe()
    store.put("a", lambda: [b"1"])
    (tmp_path / "store").rename(tmp_path / "away")
    for call in every_call(store):
        with pytest.raises(Unavailable, match="has been there and is not any more"):
            call()
    assert files(tmp_path) == {"away", "away/a"}
    (tmp_path / "away").rename(tmp_path / "store")
    assert store.get("a") == b"1"


def test_the_empty_directory_under_a_disk_that_was_unmounted_is_not_the_store() -> None:
    with small_tmpfs("4m") as disk:
        below = disk / "run"
        below.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "ckptd-test", str(below)], check=True)
        store = LocalStore(below / "store")
        store.probe()
        store.put("a", lambda: [b"1"])
        elsewhere = LocalStore(disk / "other")
        elsewhere.probe()
        subprocess.run(["umount", str(below)], check=True)
        (below / "store").mkdir()
        for call in every_call(store):
            with pytest.raises(Unavailable, match="mount it again"):
                call()
        assert files(below / "store") == set()
        assert list(elsewhere.list()) == []


def test_delete_removes_the_directories_it_empties_and_no_others(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    store.probe()
    for key in ("run/step-1/.metadata", "run/step-1/.ckptd/x", "run/step-2/.metadata"):
        store.put(key, lambda: [b"1"])
    (tmp_path / "store" / "mine").mkdir()
    store.delete(["run/step-1/.metadata"])
    assert "run/step-1/.ckptd/x" in files(tmp_path / "store")
    store.delete(["run/step-1/.ckptd/x"])
    assert files(tmp_path / "store") == {"run", "run/step-2", "run/step-2/.metadata", "mine"}
    store.delete(["run/step-2/.metadata", "mine/nothing"])
    assert files(tmp_path / "store") == set()


def test_puts_and_deletes_in_one_directory_do_not_disturb_each_other(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)

    def source() -> Iterator[bytes]:
        store.delete(["run/step-1/other"])
        yield b"1"

    for _ in range(3):
        store.put("run/step-1/other", lambda: [b"0"])
        store.put("run/step-1/file", source)
    assert files(tmp_path) == {"run", "run/step-1", "run/step-1/file"}


def test_links_to_directories_are_followed_and_loops_end(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    (disk / "step-1").mkdir(parents=True)
    (disk / "step-1" / ".metadata").write_bytes(b"1")
    root = tmp_path / "root"
    root.mkdir()
    (root / "run").symlink_to(disk)
    (disk / "again").symlink_to(root)
    (disk / "broken").symlink_to(tmp_path / "nowhere")
    store = LocalStore(root)
    assert [found.key for found in store.list()] == ["run/step-1/.metadata"]
    assert store.children() == ([], ["run"])
    assert store.children("run") == ([], ["step-1"])


@pytest.mark.parametrize(
    "make", [str, lambda path: f"file://{path}", lambda path: f"{path}/", lambda path: f"FILE://{path}/./", lambda path: f"local://{path}"]
)
def test_a_directory_may_be_written_as_a_path_or_a_file_url(tmp_path: Path, make) -> None:
    store = open_store(make(tmp_path))
    store.put("a", lambda: [b"1"])
    assert (tmp_path / "a").read_bytes() == b"1"
    assert store.url == str(tmp_path)


def test_a_relative_path_is_fixed_when_the_store_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("some/store")
    monkeypatch.chdir("/")
    store.probe()
    store.put("a", lambda: [b"1"])
    assert (tmp_path / "some" / "store" / "a").read_bytes() == b"1"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_store("~/store").url == str(tmp_path / "store")


def test_a_local_directory_takes_no_options(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="endpoint_url"):
        open_store(str(tmp_path), {"endpoint_url": "http://127.0.0.1:1"})


def test_a_directory_that_loses_its_disk_may_come_back() -> None:
    # /proc/<pid>/… of a process that has ended answers ESRCH: no errno that an operator could act on.
    with subprocess.Popen(["sleep", "60"]) as child:
        fd = os.open(f"/proc/{child.pid}/fd", os.O_RDONLY | os.O_DIRECTORY)
        child.kill()
    try:
        with pytest.raises((Unavailable, StoreError)):
            LocalStore(f"/proc/self/fd/{fd}").put("a", lambda: [b"1"])
    finally:
        os.close(fd)


# --- conditional puts ----------------------------------------------------------------------------------------------


def test_of_writers_that_meet_one_sees_the_other(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import os, sys, time
        from ckptd.store import Changed
        from ckptd.stores import open_store
        rename = os.rename
        os.rename = lambda *names: (time.sleep(0.02), rename(*names))  # others have time to look, and to come first
        store = open_store(sys.argv[1])
        done = 0
        while done < 10:
            (there,) = store.list("step-1/.metadata")
            more = b"%d" % (int(store.get("step-1/.metadata")) + 1)
            try:
                store.put("step-1/.metadata", lambda: [more], replacing=there.version)
            except Changed:
                continue
            done += 1
    """)
    LocalStore(tmp_path).put("step-1/.metadata", lambda: [b"0"])
    writers = [subprocess.Popen([sys.executable, "-c", script, tmp_path]) for _ in range(3)]
    assert [writer.wait(100) for writer in writers] == [0, 0, 0]
    assert (tmp_path / "step-1" / ".metadata").read_bytes() == b"30"
    assert files(tmp_path) == {"step-1", "step-1/.metadata"}


def test_a_writer_that_is_stopped_with_the_lock_holds_conditional_puts_up_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptd.filelock.WAIT_SECONDS", 0.05)
    store = LocalStore(tmp_path)
    store.put("step-1/.metadata", lambda: [b"old"])
    (there,) = store.list()
    lock = os.open(tmp_path / "step-1" / LOCK_NAME, os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(Unavailable, match="is one stopped"):
        store.put("step-1/.metadata", lambda: [b"new"], replacing=there.version)
    assert files(tmp_path) == {"step-1", "step-1/.metadata", f"step-1/{LOCK_NAME}"}
    assert [*store.list()] == [there]
    store.put("step-1/other", lambda: [b"1"])
    os.close(lock)  # what the kernel does with a holder that is killed
    store.put("step-1/.metadata", lambda: [b"new"], replacing=there.version)
    assert files(tmp_path) == {"step-1", "step-1/.metadata", "step-1/other"}


def test_a_lock_that_was_removed_by_its_holder_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    lock = tmp_path / "step-1" / LOCK_NAME
    real = fcntl.flock
    waited = []

    def flock(fd: int, operation: int) -> None:
        if not waited:  # who had the lock has gone with it, and another has come
            waited.append(fd)
            lock.unlink()
            os.close(os.open(lock, os.O_RDWR | os.O_CREAT))
        real(fd, operation)
        if os.fstat(fd).st_nlink:
            waited.append(fd)

    monkeypatch.setattr("ckptd.filelock.fcntl.flock", flock)
    store.put("step-1/.metadata", lambda: [b"1"], replacing=ABSENT)
    assert len(waited) == 2
    assert files(tmp_path) == {"step-1", "step-1/.metadata"}


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_where_a_file_system_has_no_locks_it_is_looked_at_and_the_store_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(_fd: int, _operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("ckptd.filelock.fcntl.flock", flock)
    store = LocalStore(tmp_path)
    assert store.conditional
    store.put("step-1/.metadata", lambda: [b"1"], replacing=ABSENT)
    assert not store.conditional
    with pytest.raises(Changed):
        store.put("step-1/.metadata", lambda: [b"2"], replacing=ABSENT)
    assert (tmp_path / "step-1" / ".metadata").read_bytes() == b"1"
    assert files(tmp_path) == {"step-1", "step-1/.metadata"}


def test_the_lock_has_a_name_that_is_swept_and_not_listed(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).touch()
    assert is_temporary(LOCK_NAME)
    assert [*LocalStore(tmp_path).list()] == []


def test_a_link_that_leads_nowhere_is_replaced_and_a_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("nothing")
    (tmp_path / "b").symlink_to("b")
    (tmp_path / "c").mkdir()
    store = LocalStore(tmp_path)
    for key in ("a", "b"):
        store.put(key, lambda: [b"1"], replacing=ABSENT)
        assert (tmp_path / key).read_bytes() == b"1"
    with pytest.raises(StoreError, match="a directory has the name"):
        store.put("c", lambda: [b"1"], replacing=ABSENT)


# -- what is neither a file nor a directory -----------------------------------------------------------------------------


def fifo(path: Path) -> None:
    os.mkfifo(path)


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(path.parent):  # the whole path may be too long
        server.bind(path.name)


def link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def link_to_a_fifo(path: Path) -> None:
    os.mkfifo(path.parent.parent / "elsewhere")
    path.symlink_to("../elsewhere")


ODD = pytest.mark.parametrize("make", [fifo, bound_socket, link_to_a_device, link_to_a_fifo])


@ODD
def test_what_is_no_file_is_not_read_and_nobody_waits_for_it(tmp_path: Path, make: Callable[[Path], None]) -> None:
    store = LocalStore(tmp_path)
    store.put("step-1/file", lambda: [b"1"])
    (tmp_path / "step-1" / ".ckptd").mkdir()
    make(tmp_path / "step-1" / ".metadata")
    assert [found.key for found in store.list()] == ["step-1/file"]
    assert [found.key for found in store.list("step-1/.")] == []
    assert [found.key for found in store.children("step-1")[0]] == ["step-1/file"]
    for start, end in ((0, None), (0, 4), (3, None)):
        with pytest.raises(NotFound, match=re.escape(f"{tmp_path}/step-1/.metadata is no file: move the FIFO, socket or device away")):
            store.get("step-1/.metadata", start, end)


@ODD
def test_what_is_no_file_is_not_replaced_by_who_has_looked_at_something_else(tmp_path: Path, make: Callable[[Path], None]) -> None:
    store = LocalStore(tmp_path)
    store.put("step-1/file", lambda: [b"1"])
    path = tmp_path / "step-1" / ".metadata"
    make(path)
    for version in (ABSENT, "1-2-3"):
        with pytest.raises(StoreError, match=re.escape(f"{path} is no file: move the FIFO, socket or device away")):
            store.put("step-1/.metadata", lambda: [b"new"], replacing=version)
    with pytest.raises(StoreError, match=re.escape(f"{path} is no file: move the FIFO, socket or device away")):
        store.remove("step-1/.metadata", "1-2-3")
    assert not path.is_file()
    assert set(os.listdir(path.parent)) == {"file", ".metadata"}
    store.delete(["step-1/.metadata"])
    assert os.listdir(path.parent) == ["file"]
