"""What goes wrong is one of our errors, says what to do, and reaches the caller through DCP as itself."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan

from ckptd.errors import TABLE, ArenaFull, CkptdError, InvalidRequest, LeaseLost, NotFound, StoreError, Unavailable, WrongPhase
from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from ckptd_client.channel import Daemon
from client.states import assert_equal
from daemons import DaemonProcess
from hosts import until

MIB = 1024 * 1024
STATE = {"x": torch.arange(10)}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(str(tmp_path_factory.mktemp("store")), memory="32MiB") as running:
        yield running


def failure_of(save_or_load: Any, state: dict[str, Any], **arguments: Any) -> CkptdError:
    """What DCP says that rank 0 has failed with."""
    with pytest.raises(CheckpointException) as caught:
        save_or_load(state, **arguments)
    (error, _) = caught.value.failures[0]
    assert isinstance(error, CkptdError), repr(error)
    assert "\n" not in str(error)
    assert type(pickle.loads(pickle.dumps(error))) in TABLE.values()
    return error


def save_failure(checkpoint_id: Any, state: dict[str, Any] | None = None, **options: Any) -> CkptdError:
    return failure_of(dcp.save, STATE if state is None else state, storage_writer=DaemonStorageWriter(checkpoint_id, **options))


def load_failure(checkpoint_id: Any, **options: Any) -> CkptdError:
    return failure_of(dcp.load, {"x": torch.zeros(10)}, storage_reader=DaemonStorageReader(checkpoint_id, **options))


@pytest.mark.parametrize(
    "bad",
    [
        *("", "../x", "a/b/c", "x" * 300, "a b", "latest", "a/latest", "a//b", "\u00e9"),
        "/data/x",
        Path("/data/x"),
        "s3://bucket/x",
        "~/x",
        None,
        5,
    ],
)
def test_a_malformed_id_is_refused_before_anything_happens(daemon: DaemonProcess, bad: Any) -> None:
    error = save_failure(bad, address=daemon.address)
    assert isinstance(error, InvalidRequest)
    assert "id" in str(error)
    assert not DaemonStorageWriter.validate_checkpoint_id(bad)
    if "latest" not in str(bad):
        assert isinstance(load_failure(bad, address=daemon.address), InvalidRequest)
        with pytest.raises(InvalidRequest):
            wait(bad, address=daemon.address)


def test_an_id_may_be_a_relative_path(daemon: DaemonProcess) -> None:
    dcp.save(STATE, checkpoint_id=Path("paths/step-1"), storage_writer=DaemonStorageWriter(address=daemon.address))
    state = {"x": torch.zeros(10, dtype=torch.int64)}
    dcp.load(state, checkpoint_id=Path("paths/latest"), storage_reader=DaemonStorageReader(address=daemon.address))
    assert_equal(state, STATE)


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "tcp://localhost:1",
        "unix:relative",
        "unix:",
        "localhost",
        "localhost:",
        ":1",
        "h:99999",
        "h:0",
        "http://x",
        "unix:/" + "x" * 200,
    ],
)
def test_a_malformed_address_says_what_is_allowed(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(save_failure("step-1", address=bad), InvalidRequest)
    monkeypatch.setenv("CKPTD_ADDRESS", bad)
    error = load_failure("step-1")
    assert isinstance(error, InvalidRequest)
    assert "CKPTD_ADDRESS" in str(error)


def test_the_address_may_come_from_the_environment(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTD_ADDRESS", daemon.address)
    dcp.save(STATE, checkpoint_id="environment/step-1", storage_writer=DaemonStorageWriter())
    wait("environment/step-1", timeout=60)


@pytest.mark.parametrize("name", ["CKPTD_CONNECT_TIMEOUT", "CKPTD_SAVE_TIMEOUT"])
@pytest.mark.parametrize("bad", ["soon", "-1", "0", "nan", "inf", "10s"])
def test_a_malformed_number_in_the_environment_is_named(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, name: str, bad: str
) -> None:
    monkeypatch.setenv(name, bad)
    error = save_failure("numbers/step-1", address=daemon.address)
    assert isinstance(error, InvalidRequest)
    assert name in str(error)


@pytest.mark.parametrize("gone", ["unix:/nowhere/ckptd.sock", "127.0.0.1:9"])
def test_no_daemon_is_said_with_the_address_and_what_to_do(monkeypatch: pytest.MonkeyPatch, gone: str) -> None:
    monkeypatch.setenv("CKPTD_CONNECT_TIMEOUT", "0.5")
    for error in (save_failure("step-1", address=gone), load_failure("latest", address=gone)):
        assert isinstance(error, Unavailable)
        assert gone in str(error)
        assert "ckptd serve" in str(error)
    with pytest.raises(Unavailable, match="ckptd serve --store URL"):
        wait("step-1", address=gone)
    with pytest.raises(TimeoutError, match="step-1"):
        wait("step-1", address=gone, timeout=0.1)


def test_somebody_else_at_the_address_is_no_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTD_CONNECT_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    caller, _ = server.accept()
                except OSError:
                    return
                with caller, suppress(OSError):  # who called may have gone
                    caller.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        error = save_failure("step-1", address=f"127.0.0.1:{server.getsockname()[1]}")
        server.shutdown(socket.SHUT_RDWR)
    thread.join()
    assert isinstance(error, Unavailable)


def test_no_checkpoint_is_not_found_and_not_another_error(daemon: DaemonProcess) -> None:
    for target in ("never/step-1", "never/latest"):
        error = load_failure(target, address=daemon.address)
        assert isinstance(error, NotFound)
        assert "never" in str(error)
        with pytest.raises(NotFound):
            DaemonStorageReader(target, address=daemon.address).read_metadata()
    with pytest.raises(NotFound):
        wait("never/step-1", address=daemon.address, timeout=30)


def test_a_durable_id_is_not_overwritten_unless_asked(daemon: DaemonProcess) -> None:
    def save(value: int, **options: Any) -> None:
        writer = DaemonStorageWriter("again/step-1", address=daemon.address, **options)
        dcp.save({"x": torch.tensor(value)}, storage_writer=writer)

    save(1)
    wait("again/step-1", address=daemon.address, timeout=60)
    error = save_failure("again/step-1", address=daemon.address)
    assert isinstance(error, WrongPhase)
    for words in ("'again/step-1' is already durable", "choose another id", "overwrite=True", "is another job saving to this run?"):
        assert words in str(error)
    save(2, overwrite=True)
    state = {"x": torch.tensor(0)}
    dcp.load(state, storage_reader=DaemonStorageReader("again/step-1", address=daemon.address))
    assert state["x"] == 2


def test_a_save_larger_than_the_budget_is_refused_with_the_numbers(daemon: DaemonProcess) -> None:
    error = save_failure("huge/step-1", {"x": torch.zeros(64 * MIB, dtype=torch.uint8)}, address=daemon.address)
    assert isinstance(error, ArenaFull)
    assert "--memory" in str(error)
    dcp.save(STATE, checkpoint_id="huge/step-2", storage_writer=DaemonStorageWriter(address=daemon.address))


def test_a_save_larger_than_half_of_the_budget_warns(daemon: DaemonProcess) -> None:
    state = {"x": torch.zeros(18 * MIB, dtype=torch.uint8)}
    with pytest.warns(UserWarning, match="has to wait until this one is durable"):
        dcp.save(state, checkpoint_id="half/step-1", storage_writer=DaemonStorageWriter(address=daemon.address))


def test_use_collectives_false_is_refused_with_the_way_out(daemon: DaemonProcess) -> None:
    with pytest.raises(InvalidRequest, match="process_group"):
        dcp.save(STATE, checkpoint_id="step-1", storage_writer=DaemonStorageWriter(address=daemon.address), use_collectives=False)


@pytest.mark.parametrize("bad", [{"a": 1}, {1: "a"}, ["a"], "a"])
def test_tags_map_text_to_text(bad: Any) -> None:
    with pytest.raises(InvalidRequest, match="tags"):
        DaemonStorageWriter("step-1", tags=bad)


def test_tags_are_small() -> None:
    DaemonStorageWriter("step-1", tags={"a": "b" * 65_535})
    with pytest.raises(InvalidRequest, match=r"65536 bytes together, and these take 65537"):
        DaemonStorageWriter("step-1", tags={"a": "\N{SNOWMAN}" * 21_845, "b": ""})


def test_a_target_of_another_shape_is_an_error(daemon: DaemonProcess) -> None:
    dcp.save(STATE, checkpoint_id="shape/step-1", storage_writer=DaemonStorageWriter(address=daemon.address))
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp.load({"x": torch.zeros(11)}, storage_reader=DaemonStorageReader("shape/step-1", address=daemon.address))


def test_a_checkpoint_that_stock_wrote_is_not_overwritten_unasked(daemon: DaemonProcess) -> None:
    dcp.save(STATE, checkpoint_id=Path(daemon.store) / "stock" / "step-1")
    assert isinstance(save_failure("stock/step-1", address=daemon.address), WrongPhase)


def test_planner_data_of_an_unknown_class_is_named_and_can_be_allowed(daemon: DaemonProcess) -> None:
    class Planner(dcp.DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            metadata.planner_data = Note("mine")  # type: ignore[assignment]
            return plans, metadata

    writer = DaemonStorageWriter("note/step-1", address=daemon.address)
    dcp.save(STATE, storage_writer=writer, planner=Planner(flatten_state_dict=False))
    error = load_failure("note/step-1", address=daemon.address)
    assert isinstance(error, InvalidRequest)
    assert "Note" in str(error)
    assert "add_safe_globals" in str(error)
    with torch.serialization.safe_globals([Note]):
        state = {"x": torch.zeros(10, dtype=torch.int64)}
        dcp.load(state, storage_reader=DaemonStorageReader("note/step-1", address=daemon.address))
    assert_equal(state, STATE)


class Note:
    """A class of a planner's own."""

    def __init__(self, text: str) -> None:
        self.text = text


def test_a_daemon_that_dies_between_two_saves_is_only_a_new_lease(tmp_path: Path) -> None:
    with DaemonProcess(str(tmp_path)) as daemon:
        writer = DaemonStorageWriter(address=daemon.address)
        for step in range(3):
            dcp.save({"step": step}, checkpoint_id=f"step-{step}", storage_writer=writer)
            daemon.restart()
        for step in range(3):
            state = {"step": -1}
            dcp.load(state, storage_reader=DaemonStorageReader(f"step-{step}", address=daemon.address))
            assert state == {"step": step}


def test_waiting_outlives_a_restart_of_the_daemon(tmp_path: Path) -> None:
    with DaemonProcess(str(tmp_path)) as daemon:
        dcp.save(STATE, checkpoint_id="step-1", storage_writer=DaemonStorageWriter(address=daemon.address))
        daemon.kill()
        errors: list[BaseException] = []

        def waiting() -> None:
            try:
                wait("step-1", address=daemon.address, timeout=60)
            except BaseException as error:  # noqa: BLE001 - the test looks at it
                errors.append(error)

        thread = threading.Thread(target=waiting)
        thread.start()
        daemon.start()
        thread.join()
        assert errors == []
        assert (tmp_path / "step-1" / ".metadata").exists()


def test_a_store_that_refuses_fails_the_wait_and_warns_the_next_save(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the run's directory should be")
    with DaemonProcess(str(tmp_path)) as daemon:
        writer = DaemonStorageWriter(address=daemon.address)
        dcp.save(STATE, checkpoint_id="run/step-1", storage_writer=writer)
        with pytest.raises((StoreError, WrongPhase), match="run/step-1"):
            wait("run/step-1", address=daemon.address, timeout=60)
        with pytest.warns(UserWarning, match="run/step-1"):
            dcp.save(STATE, checkpoint_id="other/step-1", storage_writer=writer)


def test_ranks_that_resolved_different_attempts_are_told_to_retry() -> None:
    reader = DaemonStorageReader("run/latest")
    plans = [LoadPlan([], storage_data=("run/step-1", attempt, ("",))) for attempt in ("a", "a", "b")]
    with pytest.raises(WrongPhase, match="retry"):
        reader.prepare_global_plan(plans)


def test_ranks_of_different_nodes_learn_of_each_other() -> None:
    reader = DaemonStorageReader("run/latest")
    nodes = ["host-b:1", "host-a:1", "", "host-b:1"]
    plans = [LoadPlan([], storage_data=("run/step-1", "a", (address,))) for address in nodes]
    found = reader.prepare_global_plan(plans)
    assert [plan.storage_data for plan in found] == [("run/step-1", "a", ("host-a:1", "host-b:1"))] * 4


class Meddling(dcp.DefaultSavePlanner):
    """A planner that does something in the middle of the copy: it is asked twice, first for the layout."""

    def __init__(self, meddle: Callable[[], object]) -> None:
        super().__init__()
        self.meddle = meddle
        self.asked = 0

    def resolve_data(self, write_item: Any) -> Any:
        self.asked += 1
        if self.asked == 2:
            self.meddle()
        return super().resolve_data(write_item)


def test_an_error_in_the_middle_of_the_copy_gives_the_memory_back(daemon: DaemonProcess) -> None:
    def fail() -> None:
        raise OSError(5, "Input/output error")

    for _ in range(5):
        with pytest.raises(CheckpointException, match="Input/output error"):
            dcp.save(
                {"x": torch.zeros(10 * MIB, dtype=torch.uint8)},
                checkpoint_id="middle/step-1",
                storage_writer=DaemonStorageWriter(address=daemon.address),
                planner=Meddling(fail),
            )
    status = json.loads(daemon.cli("status", "--json").stdout)
    assert status["open_shards"] == 0
    dcp.save({"x": torch.zeros(10 * MIB, dtype=torch.uint8)}, storage_writer=DaemonStorageWriter("middle/step-1", address=daemon.address))


def test_a_daemon_that_is_restarted_in_the_middle_of_the_copy_loses_the_save_and_no_other(tmp_path: Path) -> None:
    with DaemonProcess(str(tmp_path)) as daemon:
        writer = DaemonStorageWriter(address=daemon.address)
        dcp.save({"x": torch.ones(10)}, checkpoint_id="step-1", storage_writer=writer)
        for meddle in (daemon.restart, daemon.kill):
            error = failure_of(dcp.save, {"x": torch.zeros(10)}, checkpoint_id="step-2", storage_writer=writer, planner=Meddling(meddle))
            assert isinstance(error, LeaseLost)
            assert "save again" in str(error)
        daemon.start()
        dcp.save({"x": torch.full((10,), 3.0)}, checkpoint_id="step-3", storage_writer=writer)
        for step, value in ((1, 1.0), (3, 3.0)):
            state = {"x": torch.zeros(10)}
            dcp.load(state, storage_reader=DaemonStorageReader(f"step-{step}", address=daemon.address))
            assert_equal(state, {"x": torch.full((10,), value)})
        assert isinstance(load_failure("step-2", address=daemon.address), NotFound)


def test_a_daemon_that_dies_in_the_middle_of_a_load_fails_the_load_and_the_next_one_works(tmp_path: Path) -> None:
    class Killing(dcp.DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            daemon.kill()
            return cast("torch.Tensor", super().resolve_tensor(read_item))

    with DaemonProcess(str(tmp_path)) as daemon:
        dcp.save(STATE, checkpoint_id="step-1", storage_writer=DaemonStorageWriter(address=daemon.address))
        reader = DaemonStorageReader("step-1", address=daemon.address)
        state = {"x": torch.zeros(10, dtype=torch.int64)}
        error = failure_of(dcp.load, state, storage_reader=reader, planner=Killing())
        assert isinstance(error, Unavailable)
        assert "load 'step-1'" in str(error)
        daemon.start()
        dcp.load(state, storage_reader=reader)
        assert_equal(state, STATE)


def test_tags_and_durability_reach_the_daemon(daemon: DaemonProcess) -> None:
    writer = DaemonStorageWriter("tagged/step-1", address=daemon.address, durable=False, tags={"note": "first \N{SNOWMAN}"})
    dcp.save(STATE, storage_writer=writer)
    line = daemon.list()["tagged/step-1"]
    assert line["tags"] == {"note": "first \N{SNOWMAN}"}
    assert line["state"] == "accepted"


def test_plugins_survive_pickling() -> None:
    writer = DaemonStorageWriter("run/step-1", overwrite=True, tags={"a": "b"})
    writer.reset("run/step-2")
    assert pickle.loads(pickle.dumps(writer)).checkpoint_id == "run/step-2"
    assert pickle.loads(pickle.dumps(DaemonStorageReader("run/latest"))).checkpoint_id == "run/latest"


def test_a_tensor_whose_storage_was_freed_is_named(daemon: DaemonProcess) -> None:
    freed = torch.ones(1000)
    freed.untyped_storage().resize_(0)
    with pytest.raises(CheckpointException, match=r"'freed'.*freed or shortened"):
        dcp.save({"freed": freed}, checkpoint_id="freed", storage_writer=DaemonStorageWriter(address=daemon.address))


@pytest.mark.parametrize("timeout", [0, 1e30, 10**400])
def test_any_timeout_is_enough_for_what_is_durable(daemon: DaemonProcess, timeout: float) -> None:
    id = f"durable-{str(timeout)[:4]}/step-1"
    dcp.save(STATE, checkpoint_id=id, storage_writer=DaemonStorageWriter(address=daemon.address))
    wait(id, address=daemon.address, timeout=60)

    def waited() -> bool:
        with suppress(TimeoutError):  # of a machine that is busy just then
            wait(id, address=daemon.address, timeout=timeout)
            return True
        return False

    until("it is seen to be durable", waited)


@pytest.mark.parametrize("bad", [float("nan"), -1, "3"])
def test_a_timeout_that_is_none_is_refused(daemon: DaemonProcess, bad: Any) -> None:
    with pytest.raises(InvalidRequest, match="timeout"):
        wait("step-1", address=daemon.address, timeout=bad)


def test_a_daemon_that_stands_still_during_a_save_leaves_no_memory_behind(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptd_client.channel._CALL_SECONDS", 1.0)
    monkeypatch.setattr("ckptd_client.channel._CLEANUP_SECONDS", 0.5)
    stopped = []

    class Stopping(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if stopped.count("resolved") == 1:  # the second time is that of the copy: Allocate has been answered
                os.kill(daemon.pid, signal.SIGSTOP)
            stopped.append("resolved")
            return super().resolve_data(write_item)

    try:
        with pytest.raises(CheckpointException):
            dcp.save(
                {"t": torch.ones(1000)},
                checkpoint_id="standstill",
                storage_writer=DaemonStorageWriter(address=daemon.address),
                planner=Stopping(),
            )
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    deadline = time.monotonic() + 60
    while json.loads(daemon.cli("status", "--json").stdout)["open_shards"]:
        assert time.monotonic() < deadline
    dcp.save({"t": torch.ones(1000)}, checkpoint_id="standstill", storage_writer=DaemonStorageWriter(address=daemon.address))


def test_a_daemon_that_is_slow_to_answer_a_new_connection_is_waited_for(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTD_CONNECT_TIMEOUT", "60")
    connection = Daemon(daemon.address)
    os.kill(daemon.pid, signal.SIGSTOP)
    going_on = threading.Timer(1.0, os.kill, (daemon.pid, signal.SIGCONT))
    going_on.start()
    try:
        assert not connection.lease().lost
    finally:
        going_on.join()
        connection.close()


def test_a_daemon_that_stands_still_is_not_one_that_has_to_be_started(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTD_CONNECT_TIMEOUT", "1")
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        error = save_failure("stopped/step-1", address=daemon.address)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert f"the ckptd daemon at {daemon.address} does not answer" in str(error)
    assert "start one" not in str(error)
