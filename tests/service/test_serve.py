"""Starting and ending a daemon: what it refuses in one line, and how it ends."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

import joint
from ckptd.v1 import daemon_pb2 as pb
from ckptd.v1 import daemon_pb2_grpc
from daemons import DaemonProcess
from hosts import free_port, until


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


def test_a_signal_ends_calls_that_still_run_with_an_error_and_leaves_no_traceback(home: Path) -> None:
    with DaemonProcess(str(home / "store")) as daemon, grpc.insecure_channel(daemon.address) as channel:
        joint.save([daemon.address], "run/step-1", 1)
        stub = daemon_pb2_grpc.DaemonStub(channel)
        attempt = stub.Resolve(pb.ResolveRequest(id="run/step-1")).summary.attempt
        asked, hung_up = threading.Event(), threading.Event()

        def requests() -> Iterator[pb.LoadRequest]:
            yield pb.LoadRequest(open=pb.LoadRequest.Open(id="run/step-1", attempt=attempt))
            asked.set()
            hung_up.wait()

        load = stub.Load(requests())
        assert next(load).HasField("opened")
        assert asked.wait(30)
        try:
            assert daemon.terminate() == 0
            with pytest.raises(grpc.RpcError) as caught:
                next(load)
        finally:
            hung_up.set()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        # Not an answer of the daemon's: of a commit that is cut off nobody knows what has come of it.
        assert "ckptd-kind" not in dict(caught.value.trailing_metadata() or ())
        log = daemon.log.read_text()
        assert "shutting down" in log
        assert "Traceback" not in log
        assert " ERROR " not in log


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


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_listening_beyond_this_machine_without_tls_is_refused_and_nothing_listens(home: Path, shm_dir: Path, host: str) -> None:
    import socket

    port = free_port()
    done = serve("--store", str(home / "store"), "--listen", f"unix:{home}/s", "--listen", f"{host}:{port}", "--shm-dir", str(shm_dir))
    refused(done, 2, f"--listen: '{host}:{port}'", "needs TLS", "--tls-cert", "--insecure")
    assert done.stdout == ""
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_wildcard_without_the_address_for_others_is_refused(home: Path, shm_dir: Path) -> None:
    where = ["--listen", f"unix:{home}/s", "--listen", f"0.0.0.0:{free_port()}", "--insecure"]
    done = serve("--store", str(home / "store"), *where, "--shm-dir", str(shm_dir))
    refused(done, 2, "--advertise HOST:PORT")


def test_other_nodes_without_an_address_for_them_are_refused(home: Path, shm_dir: Path) -> None:
    done = serve("--store", str(home / "store"), "--listen", f"unix:{home}/s", "--shm-dir", str(shm_dir), "--replicas", "1")
    refused(done, 2, "--replicas", f"--listen unix:{home}/s --listen HOST:PORT")


def test_loopback_needs_no_word_of_the_operator_and_no_warning(home: Path) -> None:
    with DaemonProcess(str(home / "store"), "--listen", f"127.0.0.1:{free_port()}", "--insecure") as daemon:
        assert "--insecure" not in daemon.log.read_text()


def test_other_machines_without_tls_are_worth_a_warning(home: Path, shm_dir: Path) -> None:
    # An address that is not this machine's, so that nothing listens beyond it: the warning comes first.
    address = f"192.0.2.1:{free_port()}"
    where = ["--listen", f"unix:{home}/s", "--listen", address, "--insecure"]
    done = serve("--store", str(home / "store"), *where, "--shm-dir", str(shm_dir), "--shared-store")
    refused(done, 2, f"cannot listen on {address}")
    warnings = [line for line in done.stderr.splitlines() if " WARNING ckptd.daemon " in line]
    assert len(warnings) == 1
    assert f"--insecure: whoever reaches {address} can read, replace and delete checkpoints" in warnings[0]


def test_the_ready_line_names_what_trainers_call(home: Path) -> None:
    with DaemonProcess(str(home / "store"), env={"CKPTD_SHARED_STORE": "yes"}) as daemon:
        daemon.terminate()
        listen = ["--listen", f"127.0.0.1:{free_port()}", "--listen", daemon.address]
        daemon.process = daemon.launch(["serve", "--store", daemon.store, *listen, "--shm-dir", str(daemon.shm_dir), "--memory", "64MiB"])
        assert daemon.process.stdout is not None
        assert daemon.process.stdout.readline() == f"ready {daemon.address} {home / 'store'}\n"
        assert daemon.cli("status").returncode == 0


def test_a_directory_that_others_may_not_see_is_worth_a_warning_where_others_can_call(home: Path) -> None:
    with DaemonProcess(str(home / "store"), "--listen", f"127.0.0.1:{free_port()}") as daemon:
        assert daemon.log.read_text().count("saves of several nodes are refused") == 1
        daemon.arguments.append("--shared-store")
        daemon.restart()
        assert daemon.log.read_text().count("saves of several nodes are refused") == 1


@pytest.mark.parametrize("name", ["no-such-host.invalid", "no..host"])
def test_a_name_for_others_that_leads_nowhere_is_worth_a_warning_and_not_refused(name: str, home: Path) -> None:
    port = free_port()
    where = ["--listen", f"127.0.0.1:{port}", "--shared-store"]
    with DaemonProcess(str(home / "store"), *where, "--advertise", f"{name}:{port}") as daemon:

        def warnings() -> list[str]:
            return [line for line in daemon.log.read_text().splitlines() if " WARNING ckptd.daemon " in line]

        until("it is warned of", warnings)
        assert len(warnings()) == 1
        assert f"--advertise {name}:{port} leads nowhere now (" in warnings()[0]
        assert "other nodes will not reach this one" in warnings()[0]


def test_a_name_for_others_that_leads_here_is_not_worth_a_warning(home: Path) -> None:
    port = free_port()
    with DaemonProcess(
        str(home / "store"), "--listen", f"127.0.0.1:{port}", "--shared-store", "--advertise", f"localhost:{port}"
    ) as daemon:
        assert daemon.cli("status").returncode == 0
        assert "leads nowhere" not in daemon.log.read_text()
