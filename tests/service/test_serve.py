"""Starting and ending a daemon: what it refuses in one line, and how it ends."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemons import DaemonProcess


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ckptd", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory whose name is short enough for a socket."""
    path = Path(tempfile.mkdtemp(prefix="ckptd-test-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ckptd-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def refused(done: subprocess.CompletedProcess[str], status: int, *words: str) -> None:
    assert done.returncode == status, done.stderr
    last = done.stderr.strip().splitlines()
    assert len([line for line in last if line.startswith("ckptd: ")]) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in last[-1], done.stderr


def test_an_unknown_scheme_is_refused(home: Path, shm_dir: Path) -> None:
    done = serve("--store", "nosuch://x/y", "--listen", f"unix:{home}/s", "--shm-dir", str(shm_dir))
    refused(done, 2, "nosuch")


def test_a_root_that_is_a_file_is_refused(home: Path, shm_dir: Path) -> None:
    (home / "file").write_text("x")
    done = serve("--store", str(home / "file" / "store"), "--listen", f"unix:{home}/s", "--shm-dir", str(shm_dir))
    refused(done, 3, str(home / "file"))


def test_a_root_that_cannot_be_written_is_refused(home: Path, shm_dir: Path) -> None:
    done = serve("--store", "/proc/ckptd", "--listen", f"unix:{home}/s", "--shm-dir", str(shm_dir))
    refused(done, 3, "/proc/ckptd")


def test_more_memory_than_the_tmpfs_holds_is_refused(home: Path, shm_dir: Path) -> None:
    done = serve("--store", str(home / "store"), "--listen", f"unix:{home}/s", "--shm-dir", str(shm_dir), "--memory", "900TiB")
    refused(done, 2, "--memory", "can hold")


def test_a_busy_socket_is_refused_and_its_daemon_goes_on(home: Path, shm_dir: Path) -> None:
    with DaemonProcess(str(home / "store")) as daemon:
        done = serve("--store", str(home / "other"), "--listen", daemon.address, "--shm-dir", str(shm_dir))
        refused(done, 2, daemon.address, "--listen")
        assert daemon.cli("status").returncode == 0


def test_a_busy_shm_dir_is_refused(home: Path) -> None:
    with DaemonProcess(str(home / "store")) as daemon:
        done = serve("--store", str(home / "other"), "--listen", f"unix:{home}/s", "--shm-dir", str(daemon.shm_dir))
        refused(done, 2, str(daemon.shm_dir), "--shm-dir")
        assert daemon.cli("status").returncode == 0


def test_a_busy_port_is_refused(home: Path, shm_dir: Path) -> None:
    with DaemonProcess(str(home / "store")) as daemon:
        daemon.terminate()
        import socket

        with socket.socket() as busy:
            busy.bind(("127.0.0.1", 0))
            busy.listen()
            address = f"127.0.0.1:{busy.getsockname()[1]}"
            done = serve("--store", str(home / "store"), "--listen", address, "--shm-dir", str(shm_dir))
    refused(done, 2, address)


def test_a_file_in_the_place_of_the_socket_is_kept(home: Path, shm_dir: Path) -> None:
    (home / "s").write_text("precious")
    done = serve("--store", str(home / "store"), "--listen", f"unix:{home}/s", "--shm-dir", str(shm_dir))
    refused(done, 2, f"{home}/s")
    assert (home / "s").read_text() == "precious"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_ends_it_with_status_0_and_leaves_no_memory(home: Path, name: str) -> None:
    import signal

    with DaemonProcess(str(home / "store")) as daemon:
        assert daemon.process is not None
        daemon.process.send_signal(getattr(signal, name))
        assert daemon.process.wait(30) == 0
        left = [path.name for path in daemon.shm_dir.iterdir() if path.suffix in (".open", ".sealed", ".cache", ".spare", ".record")]
        assert left == []


def test_a_killed_daemon_is_replaced_on_the_same_socket(home: Path) -> None:
    with DaemonProcess(str(home / "store")) as daemon:
        daemon.restart()
        assert daemon.cli("status").returncode == 0


def test_a_store_that_had_to_be_made_is_told_once(home: Path) -> None:
    """It may be the directory under a disk that is not mounted."""
    with DaemonProcess(str(home / "disk" / "store")) as daemon:
        told = f"{home}/disk/store did not exist and was made"
        assert daemon.log.read_text().count(told) == 1
        daemon.restart()
        assert daemon.log.read_text().count(told) == 1


def test_the_socket_directory_is_private(home: Path) -> None:
    address = f"unix:{home}/private/s"
    with DaemonProcess(str(home / "store")) as daemon:
        daemon.terminate()
        daemon.address = address
        daemon.start()
        assert (home / "private").stat().st_mode & 0o777 == 0o700
