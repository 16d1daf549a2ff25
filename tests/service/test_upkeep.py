"""What a daemon deletes by itself and on request; what it never deletes; and how it is drained."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from ckptd.errors import Unavailable
from ckptd.v1 import daemon_pb2
from ckptd.v1.daemon_pb2_grpc import DaemonStub
from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from ckptd_client.channel import connect
from ckptd_client.stream import LoadStream
from daemons import FAULTY, DaemonProcess

#: `program` of a daemon whose deletions have no patience with the store.
HASTY = (
    "-c",
    "import runpy, sys, ckptd.deletion as d; d.LOOK_SECONDS = 0.5; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')",
    *FAULTY,
)


def save(daemon: DaemonProcess, name: str, value: float = 1.0, *, durable: bool = True, nbytes: int = 4000, **options: Any) -> None:
    writer = DaemonStorageWriter(address=daemon.address, **options)
    dcp.save({"t": torch.full((nbytes // 4,), value)}, checkpoint_id=name, storage_writer=writer)
    if durable:
        wait(name, address=daemon.address, timeout=60)


def load(daemon: DaemonProcess, name: str, **options: Any) -> float:
    found = {"t": torch.zeros(1000)}
    dcp.load(found, checkpoint_id=name, storage_reader=DaemonStorageReader(address=daemon.address, **options))
    return float(found["t"].sum()) / 1000


def until(condition: Callable[[], bool], daemon: DaemonProcess) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, daemon.log.read_text()[-3000:]
        time.sleep(0.05)


@contextmanager
def hanging(tmp_path: Path, program: tuple[str, ...] = FAULTY) -> Iterator[tuple[DaemonProcess, Path, Path]]:
    """A daemon that has made step-1 durable and has nothing to do, `control` and `listed`: who lists now waits until control says {},
    and is noted in `listed`.
    """
    control, listed = tmp_path / "control", tmp_path / "listed"
    control.write_text("{}")
    with DaemonProcess(f"faulty://{tmp_path}/store", program=program, env={"FAULTY_CONTROL": str(control)}) as daemon:
        save(daemon, "step-1")
        assert daemon.cli("prune", "--keep-last", "5").returncode == 0  # what follows a save by itself is over by then
        control.write_text(json.dumps({"list_hangs": True, "list_log": str(listed)}))
        yield daemon, control, listed


def data_files(store: Path, name: str) -> list[str]:
    return sorted(path.name for path in (store / name).glob("*.distcp"))


def status(daemon: DaemonProcess) -> dict[str, Any]:
    return dict(json.loads(daemon.cli("status", "--json").stdout))


def test_a_policy_keeps_the_last_of_the_run_and_leaves_other_runs_alone(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with DaemonProcess(str(store), "--keep-last", "2", "--keep-every", "10", "--delete-grace", "0s") as daemon:
        save(daemon, "other/step-1")
        assert daemon.cli("pin", "other/step-1").returncode == 0
        for step in (1, 10, 11, 12, 13):
            save(daemon, f"run/step-{step}", float(step))
        until(lambda: sorted(daemon.list()) == ["other/step-1", "run/step-10", "run/step-12", "run/step-13"], daemon)
        until(lambda: not (store / "run/step-1").exists() and not (store / "run/step-11").exists(), daemon)
        assert [load(daemon, f"run/step-{step}") for step in (10, 12, 13)] == [10, 12, 13]
        assert "it was deleted" not in status(daemon)["warning"]


def test_files_of_a_deleted_checkpoint_stay_for_the_grace(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with DaemonProcess(str(store), "--keep-last", "1") as daemon:
        save(daemon, "step-1")
        files = data_files(store, "step-1")
        save(daemon, "step-2")
        until(lambda: sorted(daemon.list()) == ["step-2"], daemon)
        assert data_files(store, "step-1") == files
        assert not (store / "step-1" / ".metadata").exists()
        done = daemon.cli("prune", "--delete-grace", "0s")
        assert done.returncode == 0, done.stderr
        assert not (store / "step-1").exists()
        assert load(daemon, "latest") == 1.0


def test_a_checkpoint_that_a_load_reads_is_deleted_by_nobody(tmp_path: Path) -> None:
    with DaemonProcess(str(tmp_path / "store"), "--delete-grace", "0s") as daemon:
        for step in (1, 2, 3):
            save(daemon, f"step-{step}")
        read = connect(daemon.address)
        attempt = read.resolve(daemon_pb2.ResolveRequest(id="step-1")).summary.attempt
        with LoadStream(read, "step-1", attempt) as stream:
            stream.open()
            refused = daemon.cli("delete", "step-1")
            assert (refused.returncode, "a load reads it" in refused.stderr) == (1, True), refused
            pruned = json.loads(daemon.cli("prune", "--keep-last", "1", "--json").stdout)
            assert {one["id"]: one["kept"] for one in pruned["verdicts"]} == {"step-1": True, "step-2": False, "step-3": True}
        assert sorted(daemon.list()) == ["step-1", "step-3"]
        until(lambda: daemon.cli("delete", "step-1").returncode == 0, daemon)
        assert sorted(daemon.list()) == ["step-3"]


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[DaemonProcess, Path]]:
    """A daemon whose store takes nothing as long as the file says so."""
    control = tmp_path / "control"
    control.write_text('{"hold_after": 0}')
    with DaemonProcess(f"faulty://{tmp_path}/store", program=FAULTY, env={"FAULTY_CONTROL": str(control)}) as daemon:
        yield daemon, control


def test_what_is_deleted_on_its_way_to_the_store_never_arrives(held: tuple[DaemonProcess, Path]) -> None:
    daemon, control = held
    save(daemon, "step-1", durable=False)
    assert daemon.list()["step-1"]["state"] == "accepted"
    control.write_text("{}")
    done = daemon.cli("delete", "step-1")
    assert done.returncode == 0, done.stderr
    assert daemon.list() == {}
    save(daemon, "step-2", 2.0)
    assert sorted(daemon.list()) == ["step-2"]
    daemon.restart()
    assert sorted(daemon.list()) == ["step-2"]


def test_a_deleted_id_can_be_saved_again_at_once(tmp_path: Path) -> None:
    with DaemonProcess(str(tmp_path / "store")) as daemon:
        for value in (1.0, 2.0, 3.0):
            save(daemon, "step-1", value)
            assert load(daemon, "step-1") == value
            if value < 3:
                assert daemon.cli("delete", "step-1").returncode == 0
                assert daemon.cli("show", "step-1").returncode == 1
        daemon.cli("prune", "--delete-grace", "0s", "--orphan-age", "0s")
        daemon.restart()
        assert load(daemon, "step-1") == 3.0
        assert len(data_files(tmp_path / "store", "step-1")) == 1


@pytest.mark.slow
def test_a_save_beside_a_deletion_by_another_process_becomes_durable(tmp_path: Path) -> None:
    with DaemonProcess(str(tmp_path / "store")) as daemon:
        save(daemon, "step-1", 1.0)
        deleted = subprocess.run([sys.executable, "-m", "ckptd", "delete", "step-1", "--store", daemon.store], check=False)
        assert deleted.returncode == 0
        save(daemon, "step-1", 2.0)  # waits until the deletion cannot undo it any more
        daemon.restart()
        assert load(daemon, "step-1") == 2.0


def test_what_an_overwrite_left_goes_and_the_new_one_stays(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with DaemonProcess(str(store)) as daemon:
        save(daemon, "step-1", 1.0)
        old = data_files(store, "step-1")
        save(daemon, "step-1", 2.0, overwrite=True)
        assert set(old) < set(data_files(store, "step-1"))
        assert daemon.cli("prune").returncode == 0
        assert set(old) < set(data_files(store, "step-1"))  # a load may have begun before
        assert daemon.cli("prune", "--delete-grace", "0s").returncode == 0
        assert not set(old) & set(data_files(store, "step-1"))
        daemon.restart()
        assert load(daemon, "step-1") == 2.0
        assert daemon.cli("verify", "step-1").returncode == 0


def test_a_pinned_checkpoint_is_deleted_by_nobody_until_it_is_unpinned(tmp_path: Path) -> None:
    with DaemonProcess(str(tmp_path / "store")) as daemon:
        save(daemon, "step-1")
        save(daemon, "step-2")
        assert daemon.cli("pin", "step-1").returncode == 0
        assert daemon.list()["step-1"]["pinned"]
        assert daemon.cli("prune", "--keep-last", "1").returncode == 0
        refused = daemon.cli("delete", "step-1")
        assert (refused.returncode, "unpin" in refused.stderr) == (1, True)
        assert sorted(daemon.list()) == ["step-1", "step-2"]
        assert daemon.cli("unpin", "step-1").returncode == 0
        assert daemon.cli("prune", "--keep-last", "1").returncode == 0
        assert sorted(daemon.list()) == ["step-2"]


def test_a_drain_takes_no_new_saves_and_ends_when_all_is_durable(held: tuple[DaemonProcess, Path]) -> None:
    daemon, control = held
    save(daemon, "step-1", durable=False)
    with subprocess.Popen([sys.executable, "-m", "ckptd", "drain", "--address", daemon.address]) as begun:
        until(lambda: status(daemon)["draining"], daemon)  # the second below may be over before the daemon hears
        begun.terminate()
    waited = daemon.cli("drain", "--timeout", "1s")
    assert waited.returncode == 1, waited
    with pytest.raises(CheckpointException, match="drained") as refused:
        save(daemon, "step-2")
    assert isinstance(next(iter(refused.value.failures.values()))[0], Unavailable)
    assert status(daemon)["draining"]
    control.write_text("{}")
    done = daemon.cli("drain", "--timeout", "30s")
    assert done.returncode == 0, done.stderr
    assert daemon.list()["step-1"]["state"] == "durable"
    assert load(daemon, "step-1") == 1.0
    assert daemon.cli("drain", "--cancel").returncode == 0
    save(daemon, "step-2", 2.0)


def test_a_checkpoint_that_stays_in_memory_only_says_so_and_no_drain_calls_it_durable(tmp_path: Path) -> None:
    with DaemonProcess(str(tmp_path / "store")) as daemon:
        save(daemon, "step-1")
        writer = DaemonStorageWriter(address=daemon.address, durable=False)
        dcp.save({"t": torch.ones(1000)}, checkpoint_id="step-2", storage_writer=writer)
        for looked in (daemon.list(), daemon.restart().list()):
            assert (looked["step-2"]["state"], looked["step-2"]["reason"]) == (
                "accepted",
                "saved with durable=False: it stays in memory only",
            )
            assert "reason" not in looked["step-1"]
        assert "stays in memory only" in daemon.cli("show", "step-2").stdout
        done = daemon.cli("drain", "--json")
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert (document["accepted"], document["failed"], document["memory_only"]) == (0, [], ["step-2"])


def test_trouble_with_old_checkpoints_is_told_and_passes(tmp_path: Path) -> None:
    control = tmp_path / "control"
    control.write_text("{}")
    environment = {"FAULTY_CONTROL": str(control)}
    with DaemonProcess(f"faulty://{tmp_path}/store", "--keep-last", "1", program=FAULTY, env=environment) as daemon:
        save(daemon, "step-1")
        control.write_text('{"raise": "EIO", "only": "step-1/"}')
        save(daemon, "step-2")
        until(lambda: "could not be deleted" in status(daemon)["warning"], daemon)
        assert sorted(daemon.list()) == ["step-1", "step-2"]
        control.write_text("{}")
        with pytest.warns(UserWarning, match="could not be deleted"):
            save(daemon, "step-3")
        until(lambda: sorted(daemon.list()) == ["step-3"], daemon)
        until(lambda: not status(daemon)["warning"], daemon)


def test_who_waits_for_what_a_policy_has_deleted_since_has_waited_long_enough(tmp_path: Path) -> None:
    with DaemonProcess(str(tmp_path / "store"), "--keep-last", "1", "--delete-grace", "0s") as daemon:
        for step in (1, 2, 3):
            save(daemon, f"step-{step}")
        until(lambda: sorted(daemon.list()) == ["step-3"], daemon)
        wait("step-1", address=daemon.address, timeout=10)


def test_a_deletion_that_fails_keeps_the_newer_save_that_is_on_its_way(held: tuple[DaemonProcess, Path]) -> None:
    daemon, control = held
    control.write_text("{}")
    save(daemon, "run/step-1", 1.0)
    control.write_text('{"hold_after": 0}')
    save(daemon, "run/step-1", 2.0, durable=False, overwrite=True)
    control.write_text('{"raise": "EACCES", "only": "run/step-1/.ckptd"}')
    refused = daemon.cli("delete", "run/step-1")
    assert refused.returncode == 3, refused
    assert load(daemon, "run/step-1") == 2.0
    control.write_text("{}")
    daemon.restart()
    wait("run/step-1", address=daemon.address, timeout=60)
    assert load(daemon, "run/step-1") == 2.0


def test_a_deletion_that_is_given_up_before_its_turn_takes_nothing(tmp_path: Path) -> None:
    with hanging(tmp_path) as (daemon, control, listed):
        command = [sys.executable, "-m", "ckptd", "prune", "--keep-last", "5", "--address", daemon.address]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as pruning, grpc.insecure_channel(daemon.address) as channel:
            try:
                until(listed.exists, daemon)
                with pytest.raises(grpc.RpcError) as given_up:
                    DaemonStub(channel).Delete(daemon_pb2.DeleteRequest(id="step-1"), timeout=0.5)  # type: ignore[no-untyped-call]
                assert given_up.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            finally:
                control.write_text("{}")  # else the command would wait for ever
            assert pruning.wait(60) == 0
        assert daemon.cli("prune", "--keep-last", "5").returncode == 0  # what was asked for before comes before it
        assert sorted(daemon.list()) == ["step-1"]


def test_a_deletion_that_has_begun_is_done_to_its_end_though_its_caller_goes(tmp_path: Path) -> None:
    with hanging(tmp_path) as (daemon, control, listed):
        with grpc.insecure_channel(daemon.address) as channel:
            call = DaemonStub(channel).Delete.future(daemon_pb2.DeleteRequest(id="step-1"))  # type: ignore[no-untyped-call]
            until(listed.exists, daemon)
            call.cancel()
            with grpc.insecure_channel(daemon.address) as other:  # by the time of its answer the daemon has heard of that
                DaemonStub(other).Status(daemon_pb2.StatusRequest(), timeout=30)  # type: ignore[no-untyped-call]
        time.sleep(0.5)
        control.write_text("{}")
        until(lambda: not daemon.list(), daemon)


def test_what_is_accepted_while_a_deletion_of_its_id_waits_for_the_store_stays(tmp_path: Path) -> None:
    with hanging(tmp_path) as (daemon, control, listed):
        with subprocess.Popen([sys.executable, "-m", "ckptd", "delete", "step-1", "--address", daemon.address]) as deleting:
            try:
                until(listed.exists, daemon)
                save(daemon, "step-1", 2.0, durable=False, overwrite=True)
            finally:
                control.write_text("{}")
            assert deleting.wait(60) == 0
        wait("step-1", address=daemon.address, timeout=60)
        assert load(daemon, "step-1") == 2.0
        daemon.restart()
        assert load(daemon, "step-1") == 2.0


@pytest.mark.filterwarnings("ignore:ckptd. checkpoint run/step-2 could not be made durable:UserWarning")
def test_what_has_failed_and_is_not_in_memory_any_more_is_told_to_who_loads_until_it_is_deleted(tmp_path: Path) -> None:
    control = tmp_path / "control"
    control.write_text(json.dumps({"raise": "EACCES", "only": "run/step-2"}))
    with DaemonProcess(f"faulty://{tmp_path}/store", program=FAULTY, env={"FAULTY_CONTROL": str(control)}, memory="20MiB") as daemon:
        save(daemon, "run/step-0", 0.5)
        save(daemon, "run/step-1")
        save(daemon, "run/step-2", durable=False, nbytes=8_000_000)
        daemon.until("run/step-2", "failed")
        for number in range(3):  # which need the memory
            save(daemon, f"other/step-{number}", nbytes=8_000_000)
        told = "run/step-2 was accepted later, and memory does not hold it any more: .*Permission denied"
        with pytest.warns(UserWarning, match=told):
            assert load(daemon, "run/latest") == 1.0
        (manifest,) = (tmp_path / "store" / "run/step-1/.ckptd").glob("*.manifest")
        whole = manifest.read_bytes()
        manifest.write_bytes(whole[:-1])
        with pytest.warns(UserWarning, match=told), pytest.warns(UserWarning, match="run/step-0 is loaded instead of run/latest"):
            assert load(daemon, "run/latest", fallback=True) == 0.5
        manifest.write_bytes(whole)
        deleted = daemon.cli("delete", "run/step-2")
        assert deleted.returncode == 0, deleted
        assert load(daemon, "run/latest") == 1.0
        assert "run/step-2" not in daemon.list()


@pytest.mark.filterwarnings("ignore:ckptd. checkpoint run/step-. could not be made durable:UserWarning")
def test_who_loads_one_by_its_id_and_may_go_back_is_told_of_later_saves_of_it_and_of_those_that_are_passed_over(tmp_path: Path) -> None:
    control = tmp_path / "control"
    with DaemonProcess(f"faulty://{tmp_path}/store", program=FAULTY, env={"FAULTY_CONTROL": str(control)}, memory="20MiB") as daemon:

        def lose(name: str) -> None:
            """A save that fails and whose memory the next large one needs."""
            control.write_text('{"raise": "EACCES", "only": "run/"}')
            save(daemon, name, 9.0, durable=False, nbytes=8_000_000, overwrite=True)
            until(lambda: f"{name} cannot be made durable" in daemon.log.read_text(), daemon)
            control.write_text("{}")

        def finds(value: float, *told: str) -> None:
            """A load of run/step-3 does, and is told this and nothing else."""
            with ExitStack() as warned:
                for text in told:
                    warned.enter_context(pytest.warns(UserWarning, match=text))
                assert load(daemon, "run/step-3", fallback=True) == value

        save(daemon, "run/step-1", 1.0)
        lose("run/step-2")
        save(daemon, "run/step-3", 3.0)
        lose("run/step-3")
        lose("run/step-4")
        save(daemon, "other/step-1", nbytes=8_000_000)
        later = "a save of run/step-3 was accepted later, and memory does not hold it any more: .*Permission denied"
        finds(3.0, f"an older save of run/step-3 is loaded, .*{later}")
        assert "reading run/step-3 back" not in daemon.log.read_text()  # memory holds it
        save(daemon, "other/step-2", nbytes=8_000_000)
        (manifest,) = (tmp_path / "store" / "run/step-3/.ckptd").glob("*.manifest")
        manifest.write_bytes(manifest.read_bytes()[:-1])
        passed_over = "a save of run/step-2 was accepted later, and memory does not hold it any more: .*Permission denied"
        finds(1.0, *(f"run/step-1 is loaded {text}" for text in ("instead of run/step-3", f"as .*{later}", f"as .*{passed_over}")))


def test_a_deletion_that_waits_too_long_for_the_store_deletes_nothing_and_says_so(tmp_path: Path) -> None:
    with hanging(tmp_path, HASTY) as (daemon, control, listed):
        command = [sys.executable, "-m", "ckptd", "delete", "step-1", "--address", daemon.address]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as deleting:
            try:
                until(listed.exists, daemon)
                time.sleep(1.0)
            finally:
                control.write_text("{}")
            _, said = deleting.communicate(timeout=60)
        assert (deleting.returncode, "was not deleted" in said) == (3, True), said
        assert sorted(daemon.list()) == ["step-1"]


@pytest.mark.filterwarnings("ignore:ckptd. old checkpoints of run")
def test_a_policy_that_may_delete_nothing_says_so_and_goes_on_when_it_may(tmp_path: Path) -> None:
    control = tmp_path / "control"
    control.write_text("{}")
    arguments = ("--keep-last", "1")
    with DaemonProcess(f"faulty://{tmp_path}/store", *arguments, program=FAULTY, env={"FAULTY_CONTROL": str(control)}) as daemon:
        save(daemon, "step-1")
        control.write_text('{"raise": "EACCES", "only": "step-1/"}')
        save(daemon, "step-2")
        until(lambda: "Permission denied" in status(daemon)["warning"], daemon)
        assert sorted(daemon.list()) == ["step-1", "step-2"]
        control.write_text("{}")
        until(lambda: sorted(daemon.list()) == ["step-2"], daemon)  # though nothing else is saved
        until(lambda: not status(daemon)["warning"], daemon)


def test_one_checkpoint_that_cannot_be_deleted_keeps_no_other(tmp_path: Path) -> None:
    control = tmp_path / "control"
    control.write_text("{}")
    environment = {"FAULTY_CONTROL": str(control)}
    with DaemonProcess(f"faulty://{tmp_path}/store", program=FAULTY, env=environment) as daemon:
        for step in (1, 2, 3):
            save(daemon, f"step-{step}")
        control.write_text('{"raise": "EACCES", "only": "step-1/"}')
        pruned = json.loads(daemon.cli("prune", "--keep-last", "1", "--json").stdout)
        assert {one["id"]: one["kept"] for one in pruned["verdicts"]} == {"step-1": True, "step-2": False, "step-3": True}
        assert "Permission denied" in next(one["reason"] for one in pruned["verdicts"] if one["id"] == "step-1")
        assert sorted(daemon.list()) == ["step-1", "step-3"]


def test_what_is_left_of_old_saves_and_cannot_be_deleted_keeps_no_policy_from_its_work(tmp_path: Path) -> None:
    control = tmp_path / "control"
    control.write_text("{}")
    environment = {"FAULTY_CONTROL": str(control)}
    with DaemonProcess(f"faulty://{tmp_path}/store", program=FAULTY, env=environment) as daemon:
        save(daemon, "step-1")
        save(daemon, "step-2")
        save(daemon, "step-2", 2.0, overwrite=True)
        control.write_text('{"raise": "EACCES", "only": "step-2/"}')
        with grpc.insecure_channel(daemon.address) as channel, pytest.raises(grpc.RpcError, match="Permission denied"):
            list(DaemonStub(channel).Prune(daemon_pb2.PruneRequest(keep_last=1, delete_grace_seconds=0.0)))  # type: ignore[no-untyped-call]
        assert not (tmp_path / "store" / "step-1" / ".metadata").exists()


def test_what_is_left_in_a_directory_that_takes_no_writes_keeps_nothing_else_from_going(tmp_path: Path) -> None:
    control = tmp_path / "control"
    control.write_text("{}")
    with DaemonProcess(f"faulty://{tmp_path}/store", program=FAULTY, env={"FAULTY_CONTROL": str(control)}) as daemon:
        for name in ("step-1", "step-2"):  # in the order in which they are swept
            save(daemon, name)
            save(daemon, name, 2.0, overwrite=True)
        control.write_text('{"raise": "EACCES", "only": "step-1/"}')
        refused = daemon.cli("prune", "--delete-grace", "0s")
        assert (refused.returncode, "Permission denied" in refused.stderr) == (3, True), refused
        kept = {name: len(list((tmp_path / "store" / name).glob("*.distcp"))) for name in ("step-1", "step-2")}
        assert kept == {"step-1": 2, "step-2": 1}


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning")
def test_a_copied_or_renamed_checkpoint_is_read_from_its_own_files(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with DaemonProcess(str(store)) as daemon:
        save(daemon, "run/step-1", 1.0)
        stock = {"t": torch.full((1000,), 7.0)}
        dcp.save(stock, checkpoint_id=store / "stock" / "step-1")
        daemon.restart()
        assert (load(daemon, "run/step-1"), load(daemon, "stock/step-1")) == (1.0, 7.0)
        shutil.copytree(store / "stock" / "step-1", store / "kept" / "stock")
        for path in (store / "stock" / "step-1").iterdir():  # a copy of all times, too
            shutil.copystat(path, store / "kept" / "stock" / path.name)
        (store / "run" / "step-1").rename(store / "kept" / "ours")
        stock["t"].fill_(9.0)
        dcp.save(stock, checkpoint_id=store / "stock" / "step-1")
        assert (load(daemon, "kept/ours"), load(daemon, "kept/stock"), load(daemon, "stock/step-1")) == (1.0, 7.0, 9.0)


def test_a_drain_of_a_daemon_that_ends_is_told_so_and_leaves_no_traceback(held: tuple[DaemonProcess, Path]) -> None:
    daemon, _ = held
    save(daemon, "step-1", durable=False)
    command = [sys.executable, "-m", "ckptd", "drain", "--address", daemon.address]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as draining:
        until(lambda: status(daemon)["draining"], daemon)  # however long that command takes to start: else the daemon has ended by then
        assert daemon.process is not None
        daemon.process.terminate()
        _, said = draining.communicate(timeout=60)
    assert (draining.returncode, "the daemon is shutting down" in said) == (3, True), said
    daemon.process.wait(60)
    assert "Traceback" not in daemon.log.read_text()
