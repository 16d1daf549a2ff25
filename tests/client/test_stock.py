"""What stock DCP saved is loaded through the daemon: bit by bit, resharded, only what is asked for, and never damaged or mixed."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import StreamTransformExtension, ZStandard
from torch.distributed.checkpoint.api import CheckpointException

from ckptd import errors
from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from client.states import assert_equal, blank
from client.test_save_load import random_bits, stock_dtypes
from daemons import DaemonProcess
from s3 import S3Server
from worlds import World

MIB = 1024 * 1024
#: In memory of this size nothing of what is loaded here fits twice.
MEMORY = 64 * MIB


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(str(tmp_path_factory.mktemp("store")), memory=str(MEMORY)) as started:
        yield started


def directory(daemon: DaemonProcess, checkpoint_id: str) -> Path:
    return Path(daemon.store) / checkpoint_id


def save(path: Path, state: dict[str, Any], *, compressed: bool = False, **options: Any) -> None:
    """What a user without ckptd calls."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that something is saved over, which some tests want
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, _extensions=[ZStandard()] if compressed else None, **options))


def load(daemon: DaemonProcess, checkpoint_id: str, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    dcp.load(state, storage_reader=DaemonStorageReader(checkpoint_id, address=daemon.address), **options)
    return state


def failure(call: Callable[[], Any]) -> BaseException:
    with pytest.raises(CheckpointException) as caught:
        call()
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, BaseException)
    return error


def bytes_from(daemon: DaemonProcess) -> dict[str, int]:
    found: dict[str, int] = json.loads(daemon.cli("status", "--json").stdout)["bytes_from"]
    return found


# -- what goes in comes out ------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressed", [False, True])
def test_every_dtype_and_shape_keeps_its_bits(daemon: DaemonProcess, tmp_path: Path, compressed: bool) -> None:
    dtypes = stock_dtypes(tmp_path)
    shapes = [(), (0,), (7,), (0, 4), (3, 5), (2, 3, 4)]
    state = {f"{dtype}": {str(shape): random_bits(dtype, shape) for shape in shapes} for dtype in dtypes}
    checkpoint_id = f"dtypes-{compressed}/step-1"
    save(directory(daemon, checkpoint_id), state, compressed=compressed)
    assert_equal(load(daemon, checkpoint_id, blank(state)), state)


@pytest.mark.parametrize("compressed", [False, True])
def test_layouts_and_objects_keep_their_values(daemon: DaemonProcess, compressed: bool) -> None:
    base = torch.randn(6, 8)
    state: dict[str, Any] = {
        "transposed": base.t(),
        "strided": base[::2, ::3],
        "expanded": torch.randn(3, 1).expand(3, 7),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conj": torch.randn(4, 5, dtype=torch.complex64).conj(),
        "neg": torch._neg_view(base),
        "parameter": torch.nn.Parameter(torch.randn(3, 3)),
        "objects": {"n": 3, "none": None, "tuple": (1, 2.5, "c"), "zeros": bytes(20 * MIB), "set": {1, 2}},
        "deep": {"er": {"t": torch.arange(3)}},
        "lone \udc80 surrogate/../x": torch.arange(3),
    }
    checkpoint_id = f"layouts-{compressed}/step-1"
    save(directory(daemon, checkpoint_id), state, compressed=compressed)
    assert_equal(load(daemon, checkpoint_id, blank(state)), state)


def test_lists_come_back_into_their_places(daemon: DaemonProcess) -> None:
    save(directory(daemon, "lists/step-1"), {"list": [torch.ones(2), {"a": [torch.arange(3), 7]}]})
    state = load(daemon, "lists/step-1", {"list": [torch.zeros(2), {"a": [torch.zeros(3, dtype=torch.int64), 0]}]})
    assert torch.equal(state["list"][0], torch.ones(2))
    assert torch.equal(state["list"][1]["a"][0], torch.arange(3))
    assert state["list"][1]["a"][1] == 7


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # deprecated, and still in use
def test_quantised_tensors_bring_their_scale(daemon: DaemonProcess) -> None:
    state = {"q": torch.quantize_per_tensor(torch.randn(20), 0.5, 3, torch.qint8)}
    save(directory(daemon, "quantised/step-1"), state)
    assert_equal(load(daemon, "quantised/step-1", blank(state)), state)


class Tagged(torch.Tensor):
    """A tensor subclass of somebody's own."""


@pytest.mark.parametrize("compressed", [False, True])
def test_a_subclass_loads_once_its_class_is_allowed(daemon: DaemonProcess, compressed: bool) -> None:
    checkpoint_id = f"subclass-{compressed}/step-1"
    state = {"tagged": torch.randn(3, 4).as_subclass(Tagged)}
    save(directory(daemon, checkpoint_id), state, compressed=compressed)
    error = failure(lambda: load(daemon, checkpoint_id, {"tagged": torch.zeros(3, 4)}))
    assert isinstance(error, errors.InvalidRequest)
    assert all(word in str(error) for word in ("'tagged'", "Tagged", "add_safe_globals"))
    with torch.serialization.safe_globals([Tagged]):
        assert_equal(load(daemon, checkpoint_id, {"tagged": torch.zeros(3, 4).as_subclass(Tagged)}), state)


@pytest.mark.parametrize("options", [{"single_file_per_rank": False}, {"thread_count": 3}])
def test_other_numbers_of_files_are_read(daemon: DaemonProcess, options: dict[str, Any]) -> None:
    checkpoint_id = f"files-{'-'.join(options)}/step-1"
    state = {f"t{number}": torch.full((100,), float(number)) for number in range(7)} | {"n": 1}
    save(directory(daemon, checkpoint_id), state, **options)
    assert len(list(directory(daemon, checkpoint_id).glob("*.distcp"))) > 1
    assert_equal(load(daemon, checkpoint_id, blank(state)), state)


def test_several_reads_of_one_item_unpack_it_once(daemon: DaemonProcess) -> None:
    """A planner that asks for the rows of a tensor one by one."""
    value = torch.randn(40, 3)

    class ByRows(dcp.DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            (whole,) = plan.items
            rows = [
                dataclasses.replace(
                    whole,
                    dest_offsets=torch.Size([row, 0]),
                    storage_offsets=torch.Size([row, 0]),
                    lengths=torch.Size([1, 3]),
                )
                for row in range(40)
            ]
            return dataclasses.replace(plan, items=rows)

    save(directory(daemon, "rows/step-1"), {"x": value})
    before = bytes_from(daemon)
    assert_equal(load(daemon, "rows/step-1", {"x": torch.zeros(40, 3)}, planner=ByRows()), {"x": value})
    after = bytes_from(daemon)
    assert sum(after.values()) - sum(before.values()) == (directory(daemon, "rows/step-1") / "__0_0.distcp").stat().st_size


def test_checkpoints_of_torch_before_2_3_are_read(daemon: DaemonProcess) -> None:
    """Their classes had other modules, and their storage infos no transforms."""
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

    path = directory(daemon, "old/step-1")
    state = {"x": torch.randn(5, 5), "n": 3}
    save(path, state)
    found = dcp.FileSystemReader(path).read_metadata()
    properties = found.state_dict_metadata["x"].properties
    old = TensorProperties(properties.dtype, properties.layout, properties.requires_grad, properties.memory_format, properties.pin_memory)
    found.state_dict_metadata["x"].properties = old
    for info in found.storage_data.values():
        info.__dict__.pop("transform_descriptors", None)
    del found.storage_meta
    del found.version
    for protocol in (2, 4, 5):
        (path / ".metadata").write_bytes(pickle.dumps(found, protocol=protocol))
        assert b"sharded_tensor" in (path / ".metadata").read_bytes()
        assert_equal(load(daemon, "old/step-1", blank(state)), state)


def test_unknown_classes_in_the_metadata_are_refused_by_name(daemon: DaemonProcess) -> None:
    path = directory(daemon, "foreign/step-1")
    save(path, {"x": torch.ones(2)})
    found = dcp.FileSystemReader(path).read_metadata()
    found.planner_data = {"x": Hostile()}
    (path / ".metadata").write_bytes(pickle.dumps(found))
    error = failure(lambda: load(daemon, "foreign/step-1", {"x": torch.zeros(2)}))
    assert isinstance(error, errors.InvalidRequest | errors.Corrupt)
    assert "system" in str(error)


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("false",)


# -- worlds ----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(400)
def test_every_world_and_placement_loads_what_every_other_saved(daemon: DaemonProcess) -> None:
    with World(Path(__file__).with_name("stock_world.py"), 4) as ranks:
        for size, compressed in ((2, False), (3, True), (4, False), (4, True)):
            checkpoint_id = f"world-{size}-{compressed}/step-1"
            ranks.call("save", directory=str(directory(daemon, checkpoint_id)), size=size, salt=size, compressed=compressed)
            for other in (1, 2, 3, 4):
                loads = ranks.call("load", address=daemon.address, checkpoint_id=checkpoint_id, size=other, salt=size)
                assert loads == [4] * other + [0] * (4 - other)
        save(directory(daemon, "apart/step-1"), {"x": torch.zeros(1000)})
        time.sleep(0.01)
        path = str(directory(daemon, "apart/step-1"))
        heard = ranks.call("resolve_apart", address=daemon.address, directory=path, checkpoint_id="apart/step-1")
        assert heard[0], heard
        for said in heard:
            assert said == heard[0]
            assert "WrongPhase" in said[0]
            assert "different checkpoints" in said[0]


# -- which one is meant ----------------------------------------------------------------------------------------


def test_latest_of_a_mixture_of_stock_and_ours_is_what_came_last(daemon: DaemonProcess) -> None:
    for step, ours in ((1, False), (2, True), (3, False), (4, False), (5, True)):
        if ours:
            dcp.save(
                {"x": torch.full((3,), float(step))},
                storage_writer=DaemonStorageWriter(f"mixed/step-{step}", address=daemon.address),
            )
            wait(f"mixed/step-{step}", address=daemon.address, timeout=60)
        else:
            save(directory(daemon, f"mixed/step-{step}"), {"x": torch.full((3,), float(step))})
        assert_equal(load(daemon, "mixed/latest", {"x": torch.zeros(3)}), {"x": torch.full((3,), float(step))})
    listed = [line for name, line in daemon.list().items() if name.startswith("mixed/")]
    assert [(line["id"], line["state"]) for line in listed] == [(f"mixed/step-{step}", "durable") for step in (1, 2, 3, 4, 5)]


def test_stock_checkpoints_are_listed_shown_and_waited_for(daemon: DaemonProcess) -> None:
    save(directory(daemon, "shown/step-7"), {"w": torch.zeros(3, 4, dtype=torch.bfloat16), "n": 1}, compressed=True)
    line = daemon.list()["shown/step-7"]
    assert (line["step"], line["state"], line["run"]) == (7, "durable", "shown")
    assert line["stored_bytes"] == (directory(daemon, "shown/step-7") / "__0_0.distcp").stat().st_size
    shown = json.loads(daemon.cli("show", "shown/latest", "--json").stdout)
    assert [(one["name"], one["dtype"], one["shape"]) for one in shown["tensors"]] == [("w", "bfloat16", [3, 4])]
    assert [one["name"] for one in shown["objects"]] == ["n"]
    assert shown["files"] == ["__0_0.distcp"]
    waited = daemon.cli("wait", "shown/step-7", "--timeout", "10s")
    assert (waited.returncode, waited.stdout) == (0, "shown/step-7 is durable\n")


def test_two_saves_into_one_directory_never_mix(daemon: DaemonProcess) -> None:
    path = directory(daemon, "again/step-1")
    for value in (1.0, 2.0, 3.0):  # the sizes stay the same: only times and `.metadata` tell them apart
        state = {f"t{number}": torch.full((1000,), value) for number in range(4)}
        save(path, state)
        assert_equal(load(daemon, "again/step-1", blank(state)), state)


def test_stock_and_ours_replace_each_other_under_one_id(daemon: DaemonProcess) -> None:
    for value, ours in ((1.0, False), (2.0, True), (3.0, False), (4.0, True), (5.0, True), (6.0, False)):
        state = {"t": torch.full((1000,), value)}
        if ours:
            dcp.save(state, storage_writer=DaemonStorageWriter("turns/step-1", address=daemon.address, overwrite=True))
            wait("turns/step-1", address=daemon.address, timeout=60)
        else:
            save(directory(daemon, "turns/step-1"), state)
        for name in ("turns/step-1", "turns/latest"):
            assert_equal(load(daemon, name, blank(state)), state)


@pytest.mark.parametrize("numel", [2 * MIB, MIB])
@pytest.mark.parametrize("when", ["before the first byte", "between items", "after the last byte"])
def test_a_save_over_what_is_being_read_is_told_as_such(daemon: DaemonProcess, when: str, numel: int) -> None:
    """Of the same size or of another one, which alone would look like damage."""
    checkpoint_id = f"over-{when.replace(' ', '-')}-{numel}/step-1"
    path = directory(daemon, checkpoint_id)
    old = {f"t{number}": torch.full((2 * MIB,), 1.0) for number in range(3)}
    new = {f"t{number}": torch.full((numel,), 2.0) for number in range(3)}
    save(path, old)

    class Planner(dcp.DefaultLoadPlanner):
        taken = 0

        def finish_plan(self, plan: Any) -> Any:
            if when == "before the first byte":
                save(path, new)
            return super().finish_plan(plan)

        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            super().commit_tensor(read_item, tensor)
            self.taken += 1
            if (when, self.taken) in {("between items", 1), ("after the last byte", 3)}:
                save(path, new)

    error = failure(lambda: load(daemon, checkpoint_id, blank(old), planner=Planner()))
    assert isinstance(error, errors.LeaseLost), error
    assert "saved again" in str(error)
    assert_equal(load(daemon, checkpoint_id, blank(new)), new)


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_no_fresh_start(daemon: DaemonProcess) -> None:
    save(directory(daemon, "deleted/step-1"), {"x": torch.ones(1000)})

    class Planner(dcp.DefaultLoadPlanner):
        def finish_plan(self, plan: Any) -> Any:
            shutil.rmtree(directory(daemon, "deleted/step-1"))
            return super().finish_plan(plan)

    error = failure(lambda: load(daemon, "deleted/step-1", {"x": torch.zeros(1000)}, planner=Planner()))
    assert isinstance(error, errors.LeaseLost)


# -- what it costs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressed", [False, True])
def test_only_what_is_asked_for_is_read_and_only_once(daemon: DaemonProcess, compressed: bool) -> None:
    """C10: loading the model does not fetch the optimizer."""
    checkpoint_id = f"part-{compressed}/step-1"
    state = {"model": {"w": random_bits(torch.float32, (1024, 1024))}, "optimizer": {"m": random_bits(torch.float32, (4, 1024, 1024))}}
    save(directory(daemon, checkpoint_id), state | {"n": 1}, compressed=compressed)
    before = bytes_from(daemon)["store"]
    model = {"model": state["model"]}
    assert_equal(load(daemon, checkpoint_id, blank(model)), model)
    read = bytes_from(daemon)["store"] - before
    assert 4 * MIB <= read < 4.1 * MIB
    assert_equal(load(daemon, checkpoint_id, blank(model)), model)
    assert bytes_from(daemon)["store"] - before == read
    assert_equal(load(daemon, checkpoint_id, blank(state)), state)
    stored = (directory(daemon, checkpoint_id) / "__0_0.distcp").stat().st_size
    assert bytes_from(daemon)["store"] - before <= stored


@pytest.mark.parametrize("compressed", [False, True])
def test_a_checkpoint_larger_than_the_memory_streams_through(daemon: DaemonProcess, compressed: bool) -> None:
    """Also an item that takes several requests, and most of the memory."""
    checkpoint_id = f"large-{compressed}/step-1"
    state = {f"t{number}": random_bits(torch.uint8, (12 * MIB + number,)) for number in range(6)}
    state["large"] = random_bits(torch.float32, (10 * MIB,))
    save(directory(daemon, checkpoint_id), state, compressed=compressed)
    assert_equal(load(daemon, checkpoint_id, blank(state)), state)
    assert json.loads(daemon.cli("status", "--json").stdout)["used"] <= MEMORY


def test_an_item_larger_than_the_memory_is_refused_with_the_numbers(daemon: DaemonProcess) -> None:
    state = {"huge": torch.zeros(MEMORY, dtype=torch.uint8), "small": torch.ones(3)}
    save(directory(daemon, "huge/step-1"), state)
    error = failure(lambda: load(daemon, "huge/step-1", blank(state)))
    assert isinstance(error, errors.ArenaFull)
    assert "--memory" in str(error)
    assert_equal(load(daemon, "huge/step-1", {"small": torch.zeros(3)}), {"small": torch.ones(3)})


def test_from_s3(tmp_path: Path) -> None:
    state = {"w": random_bits(torch.float32, (5 * MIB,)), "n": {"deep": 1}}
    with S3Server() as server:
        for step, compressed in ((1, False), (2, True)):
            save(tmp_path / f"step-{step}", state, compressed=compressed)
            for path in (tmp_path / f"step-{step}").iterdir():
                server.client().upload_file(str(path), server.bucket, f"ckpts/run/step-{step}/{path.name}")
        with DaemonProcess(server.url("ckpts"), *server.arguments, memory=str(MEMORY)) as daemon:
            for name in ("run/step-1", "run/step-2", "run/latest"):
                assert_equal(load(daemon, name, blank(state)), state)
            server.client().delete_object(Bucket=server.bucket, Key="ckpts/run/step-2/__0_0.distcp")
            error = failure(lambda: load(daemon, "run/step-2", blank(state)))
            assert isinstance(error, errors.Corrupt)
            assert "run/step-2/__0_0.distcp" in str(error)


# -- damage ----------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("damage", [flip, cut, empty, remove])
def test_damage_is_an_error_that_names_the_object_and_the_item(
    daemon: DaemonProcess, damage: Callable[[Path], None], compressed: bool
) -> None:
    checkpoint_id = f"damaged-{damage.__name__}-{compressed}/step-1"
    save(directory(daemon, checkpoint_id), {"x": random_bits(torch.float32, (MIB,))}, compressed=compressed)
    damage(directory(daemon, checkpoint_id) / "__0_0.distcp")
    target = torch.zeros(MIB)
    error = failure(lambda: load(daemon, checkpoint_id, {"x": target}))
    assert isinstance(error, errors.Corrupt), error
    assert all(word in str(error) for word in (f"{checkpoint_id}/__0_0.distcp", "'x'", "load another checkpoint"))
    assert not target.any()


def test_a_flipped_bit_in_an_object_is_found(daemon: DaemonProcess) -> None:
    save(directory(daemon, "object/step-1"), {"thing": "x" * 100_000})
    flip(directory(daemon, "object/step-1") / "__0_0.distcp")
    error = failure(lambda: load(daemon, "object/step-1", {"thing": None}))
    assert isinstance(error, errors.Corrupt)
    assert "'thing'" in str(error)


def test_without_checksums_a_checkpoint_is_loaded_as_stock_loads_it(daemon: DaemonProcess) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        save(directory(daemon, "unchecked/step-1"), {"x": torch.arange(10), "n": 4})
    finally:
        torch.serialization.set_crc32_options(True)
    assert_equal(
        load(daemon, "unchecked/step-1", {"x": torch.zeros(10, dtype=torch.int64), "n": 0}),
        {"x": torch.arange(10), "n": 4},
    )


def test_a_data_file_of_another_save_does_not_pass_for_this_one(daemon: DaemonProcess) -> None:
    """Of the same size, and whole in itself: only the shapes of what is in it tell."""
    for step, state in ((1, {"x": torch.randn(4, 6)}), (2, {"x": torch.randn(6, 4)})):
        save(directory(daemon, f"swapped/step-{step}"), state)
    one, two = (directory(daemon, f"swapped/step-{step}") / "__0_0.distcp" for step in (1, 2))
    assert one.stat().st_size == two.stat().st_size
    shutil.copyfile(two, one)
    error = failure(lambda: load(daemon, "swapped/step-1", {"x": torch.zeros(4, 6)}))
    assert isinstance(error, errors.Corrupt)
    assert "(6, 4)" in str(error)


class Shifted(StreamTransformExtension):
    """A transform of somebody's own."""

    @staticmethod
    def registry_name() -> str:
        return "stream.shifted"

    @staticmethod
    def from_descriptor(version: str) -> Shifted:
        raise NotImplementedError

    def get_descriptor(self) -> str:
        return "stream.shifted@example.org/3"

    def transform_to(self, output: Any) -> Any:
        return output

    def transform_from(self, input: Any) -> Any:
        return input


def test_an_unknown_transform_is_named(daemon: DaemonProcess) -> None:
    path = directory(daemon, "transformed/step-1")
    dcp.save({"x": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(path, _extensions=[Shifted()]))
    error = failure(lambda: load(daemon, "transformed/step-1", {"x": torch.zeros(3)}))
    assert isinstance(error, errors.InvalidRequest)
    assert "'stream.shifted@example.org/3'" in str(error)
    assert "FileSystemReader" in str(error)


def test_missing_keys_are_an_error_unless_partial_loads_are_allowed(daemon: DaemonProcess) -> None:
    save(directory(daemon, "keys/step-1"), {"a": torch.ones(2), "b": torch.ones(2)})
    with pytest.raises(CheckpointException, match="Missing key"):
        load(daemon, "keys/step-1", {"a": torch.zeros(2), "c": torch.zeros(2)})
    state = {"a": torch.zeros(2), "c": torch.zeros(2)}
    load(daemon, "keys/step-1", state, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert_equal(state, {"a": torch.ones(2), "c": torch.zeros(2)})
