"""What goes in comes out, bit by bit: through memory, through the store, and with stock DCP."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ckptd.errors import InvalidRequest
from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from client.pairs import Pair
from client.states import assert_equal, blank
from daemons import DaemonProcess

MIB = 1024 * 1024


REQUIRED = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    torch.float4_e2m1fn_x2,
}


def stock_dtypes(directory: Path) -> list[torch.dtype]:
    """The dtypes that stock DCP itself brings through save and load."""
    found = []
    for dtype in sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                dcp.save({"x": torch.empty(4, dtype=dtype)}, checkpoint_id=directory / str(dtype))
                dcp.load({"x": torch.empty(4, dtype=dtype)}, checkpoint_id=directory / str(dtype))
            except (CheckpointException, RuntimeError, NotImplementedError):
                continue
        found.append(dtype)
    return found


def random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Any bit pattern: NaNs with payloads, -0.0, denormals."""
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if raw.numel() else torch.empty(shape, dtype=dtype)


def everywhere(pair: Pair, checkpoint_id: str, state: dict[str, Any], *, stock: bool = True) -> None:
    pair.save(checkpoint_id, state)
    assert_equal(pair.load_from_memory(checkpoint_id, blank(state)), state)
    pair.wait(checkpoint_id)
    assert_equal(pair.load_from_store(checkpoint_id, blank(state)), state)
    if stock:
        assert_equal(pair.load_with_stock(checkpoint_id, blank(state)), state)


def test_every_dtype_and_shape_keeps_its_bits(pair: Pair, tmp_path: Path) -> None:
    dtypes = stock_dtypes(tmp_path)
    assert set(dtypes) >= REQUIRED
    shapes = [(), (0,), (7,), (0, 4), (3, 5), (2, 3, 4)]
    state = {f"{dtype}": {str(shape): random_bits(dtype, shape) for shape in shapes} for dtype in dtypes}
    everywhere(pair, "dtypes/step-1", state)


def test_layouts_keep_their_values(pair: Pair) -> None:
    base = torch.randn(6, 8)
    compound = torch.randn(4, 5, dtype=torch.complex64)
    leaf = torch.nn.Parameter(torch.randn(3, 3))
    state = {
        "transposed": base.t(),
        "strided": base[::2, ::3],
        "view": base[1:3],
        "column": base[:, 2:3],
        "expanded": torch.randn(3, 1).expand(3, 7),
        "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "channels_last_3d": torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
        "conj": compound.conj(),
        "conj_strided": compound.t()[::2].conj(),
        "neg": torch._neg_view(base),
        "parameter": leaf,
        "computed": leaf * 2,
        "buffer": torch.nn.Buffer(torch.randn(3)),
        "float8_strided": random_bits(torch.float8_e8m0fnu, (4, 6))[:, ::2],
        "double_complex": torch.randn(3, 4, dtype=torch.complex128).t(),
    }
    assert state["conj"].is_conj()
    assert state["neg"].is_neg()
    everywhere(pair, "layouts/step-1", state)


def test_a_checkpoint_loads_into_any_layout_and_dtype(pair: Pair) -> None:
    value = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    pair.save("targets/step-1", {"x": value})
    for target in (torch.zeros(2, 3, 4, 5), torch.zeros(5, 4, 3, 2).permute(3, 2, 1, 0), torch.zeros(2, 3, 4, 5, dtype=torch.float64)):
        pair.load_from_memory("targets/step-1", {"x": target})
        assert torch.equal(target, value.to(target.dtype))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # deprecated, and still in use
def test_quantised_tensors_round_trip(pair: Pair) -> None:
    state = {str(dtype): torch.quantize_per_tensor(torch.randn(20), 0.5, 0, dtype) for dtype in (torch.qint8, torch.quint8, torch.qint32)}
    state["view"] = torch.quantize_per_tensor(torch.randn(20), 0.5, 0, torch.qint8)[5:9]
    everywhere(pair, "quantised/step-1", state, stock=False)
    # Stock keeps the target's scale, so it gets one that has the right one already.
    same_scale = {name: torch.quantize_per_tensor(torch.zeros(value.shape), 0.5, 0, value.dtype) for name, value in state.items()}
    assert_equal(pair.load_with_stock("quantised/step-1", same_scale), state)


class Tagged(torch.Tensor):
    """A tensor subclass of somebody's own."""


def test_a_subclass_loads_once_its_class_is_allowed(pair: Pair) -> None:
    state = {"tagged": torch.randn(3, 4).as_subclass(Tagged)}
    pair.save("subclass/step-1", state)
    with pytest.raises(CheckpointException) as caught:
        pair.load_from_memory("subclass/step-1", {"tagged": torch.zeros(3, 4)})
    (error, _) = caught.value.failures[0]
    assert isinstance(error, InvalidRequest)
    assert "'tagged'" in str(error)
    assert "Tagged" in str(error)
    assert "add_safe_globals" in str(error)
    with torch.serialization.safe_globals([Tagged]):
        target = torch.zeros(3, 4).as_subclass(Tagged)
        pair.load_from_memory("subclass/step-1", {"tagged": target})
        assert torch.equal(target, state["tagged"])
        pair.wait("subclass/step-1")
        for load in (pair.load_from_store, pair.load_with_stock):
            target.zero_()
            load("subclass/step-1", {"tagged": target})
            assert torch.equal(target, state["tagged"])


def test_what_torch_cannot_save_is_named(pair: Pair) -> None:
    class Local:
        pass

    for state, words in (
        ({"hollow": torch.empty(3, device="meta")}, ["'hollow'", "meta"]),
        ({"closure": lambda: None}, ["'closure'", "pickle"]),
        ({"local": Local()}, ["'local'", "Local"]),
    ):
        with pytest.raises(CheckpointException) as caught:
            pair.save("refused/step-1", state)
        (error, _) = caught.value.failures[0]
        assert isinstance(error, InvalidRequest), error
        assert all(word in str(error) for word in words), error


def test_odd_keys_are_only_names(pair: Pair) -> None:
    keys = ["a/b", "../../etc/passwd", "..", "*", "[a-z]?", "\u043a\u043b\u044e\u0447 \U0001f511", "", " ", "k" * 1000]
    keys += ["new\nline", "nul\0", "-", "latest", "%2e%2e", ".metadata"]
    state = {key: torch.tensor([number]) for number, key in enumerate(keys)}
    state |= {f"{key}#object": number for number, key in enumerate(keys)}
    everywhere(pair, "keys/step-1", state)
    assert sorted(path.name for path in (pair.store / "keys").iterdir()) == ["step-1"]


def test_lone_surrogates_in_keys_survive(pair: Pair) -> None:
    everywhere(pair, "surrogates/step-1", {"lone \udc80 surrogate": torch.arange(3), "\ud800": 5})


def test_objects_of_all_kinds_round_trip(pair: Pair) -> None:
    state = {"n": 3, "text": "x", "none": None, "list": [1, 2.5, "c"], "set": {1, 2}, "nested": {"deep": {"er": (1,)}}}
    state["big"] = bytes(range(256)) * (10 * MIB // 256)
    everywhere(pair, "objects/step-1", state)


def test_a_tensor_of_64_mib_streams_through_a_daemon_that_could_not_hold_two(pair: Pair) -> None:
    everywhere(pair, "large/step-1", {"w": random_bits(torch.float32, (4096, 4096)), "v": random_bits(torch.uint8, (70 * MIB + 3,))})


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_many_keys_round_trip(pair: Pair) -> None:
    state = {f"layer.{number}": torch.tensor([number, number + 1]) for number in range(20_000)}
    everywhere(pair, "many/step-1", state)


def test_an_empty_state_is_a_checkpoint(pair: Pair) -> None:
    everywhere(pair, "empty/step-1", {})
    assert (pair.store / "empty/step-1/.metadata").exists()


def bytes_from(daemon: DaemonProcess) -> dict[str, int]:
    done = daemon.cli("status", "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)["bytes_from"]
    return found


def test_a_part_of_the_state_reads_only_its_bytes(pair: Pair) -> None:
    state = {"model": {"w": random_bits(torch.float32, (1024, 1024))}, "optimizer": {"m": random_bits(torch.float32, (8, 1024, 1024))}}
    pair.save("part/step-1", state)
    pair.wait("part/step-1")
    before = bytes_from(pair.other)["store"]
    assert_equal(pair.load_from_store("part/step-1", blank({"model": state["model"]})), {"model": state["model"]})
    assert bytes_from(pair.other)["store"] - before < 6 * MIB


def test_missing_keys_are_an_error_unless_partial_loads_are_allowed(pair: Pair) -> None:
    pair.save("partial/step-1", {"a": torch.ones(2), "b": torch.ones(2)})
    with pytest.raises(CheckpointException, match="Missing key"):
        pair.load_from_memory("partial/step-1", {"a": torch.zeros(2), "c": torch.zeros(2)})
    state = {"a": torch.zeros(2), "c": torch.zeros(2)}
    pair.load_from_memory("partial/step-1", state, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert_equal(state, {"a": torch.ones(2), "c": torch.zeros(2)})


def test_latest_is_what_was_accepted_last_and_metadata_says_which(pair: Pair) -> None:
    for step in (9, 10, 100, 99):
        pair.save(f"newest/step-{step}", {"step": step})
    state: dict[str, Any] = {"step": 0}
    pair.load_from_memory("newest/latest", state)
    assert state == {"step": 99}
    found = DaemonStorageReader("newest/latest", address=pair.saving.address).read_metadata()
    assert found.storage_meta is not None
    assert found.storage_meta.checkpoint_id == "newest/step-99"


def test_a_planner_that_makes_tensors_up_is_asked_for_them_again(pair: Pair) -> None:
    class Halving(dcp.DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            made = super().transform_object(write_item, object)
            return made / 2 if isinstance(made, torch.Tensor) else made

    dcp.save(
        {"x": torch.arange(6.0), "n": 1},
        checkpoint_id="planner/step-1",
        storage_writer=DaemonStorageWriter(address=pair.saving.address),
        planner=Halving(),
    )
    assert_equal(pair.load_from_memory("planner/step-1", {"x": torch.zeros(6), "n": 0}), {"x": torch.arange(6.0) / 2, "n": 1})


def test_dcps_plan_cache_is_harmless(pair: Pair) -> None:
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    writer = DaemonStorageWriter(address=pair.saving.address)
    for step in range(3):
        state = {"x": torch.full((5,), float(step)), "n": step}
        dcp.save(state, checkpoint_id=f"cached/step-{step}", storage_writer=writer, planner=planner)
        assert_equal(pair.load_from_memory(f"cached/step-{step}", blank(state)), state)


def test_async_save_keeps_the_values_at_call_time(pair: Pair) -> None:
    writer = DaemonStorageWriter(address=pair.saving.address)
    with torch.no_grad():
        weight, futures = torch.zeros(1000), []
        for step in range(3):
            weight.fill_(step)
            futures.append(dcp.async_save({"w": weight, "step": step}, checkpoint_id=f"async/step-{step}", storage_writer=writer))
        weight.fill_(-1)
    for future in futures:
        future.result()
    for step in range(3):
        state = pair.load_from_memory(f"async/step-{step}", {"w": torch.zeros(1000), "step": 0})
        assert_equal(state, {"w": torch.full((1000,), float(step)), "step": step})


@pytest.mark.parametrize("codec", ["none", "zstd:1"])
def test_a_restart_with_an_emptied_shm_dir_loads_from_the_store(tmp_path: Path, codec: str) -> None:
    state = {"w": random_bits(torch.float32, (300, 70)), "t": torch.randn(9, 4).t(), "n": 7}
    with DaemonProcess(str(tmp_path / "store"), "--codec", codec) as daemon:
        dcp.save(state, checkpoint_id="step-1", storage_writer=DaemonStorageWriter(address=daemon.address))
        wait("step-1", address=daemon.address, timeout=60)
        daemon.kill()
        shutil.rmtree(daemon.shm_dir)
        daemon.shm_dir.mkdir(mode=0o700)
        daemon.start()
        loaded = blank(state)
        dcp.load(loaded, storage_reader=DaemonStorageReader("latest", address=daemon.address))
    assert_equal(loaded, state)
    stock = blank(state)
    dcp.load(stock, storage_reader=dcp.FileSystemReader(tmp_path / "store" / "step-1"))
    assert_equal(stock, state)


def test_sparse_tensors_round_trip(pair: Pair) -> None:
    state = {"coo": torch.eye(3).to_sparse()}
    pair.save("sparse/step-1", state)
    target = {"coo": torch.zeros(3, 3).to_sparse()}
    assert torch.equal(pair.load_from_memory("sparse/step-1", target)["coo"].to_dense(), torch.eye(3))
