"""`show` of every kind of checkpoint, from a real daemon and from the store: the same, or a clear error."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata

from ckptd import codec
from ckptd.ledger import Ledger
from ckptd.localstore import LocalStore
from ckptd.model import CheckpointId, data_key, mint_attempt, mint_token
from ckptd.v1.manifest_pb2 import Form, Manifest, Stored, StoredShard, Summary, Table
from ckptd_client import DaemonStorageWriter, wait
from daemons import DaemonProcess

MIB = 1024 * 1024


class Scaled(torch.Tensor):
    """A tensor subclass of somebody's own."""


def state() -> dict[str, Any]:
    with torch.no_grad():
        quantised = torch.quantize_per_tensor(torch.randn(4, 5), 0.5, 0, torch.qint8)
    return {
        "w": torch.arange(12, dtype=torch.float32).reshape(3, 4),
        "quantised": quantised,
        "sparse": torch.eye(3, dtype=torch.float64).to_sparse(),
        "scaled": torch.ones(2, 3, dtype=torch.float16).as_subclass(Scaled),
        "scalar": torch.tensor(7),
        "note": "hello",
    }


def write(store: Path, name: str, shards: list[list[tuple[str, list[int], list[int]]]]) -> None:
    """A checkpoint of int8 tensors: per shard (fqn, offset, shape) of each chunk."""
    id = CheckpointId.parse(name)
    found = Manifest(summary=Summary(id=name, attempt=mint_attempt(1, None), accepted_us=1, codec="none"), block_nbytes=4 * MIB)
    for rank, chunks in enumerate(shards):
        forms: dict[tuple[int, ...], int] = {}
        table, stored, at = Table(), [], 0
        for fqn, offset, shape in chunks:
            if tuple(shape) not in forms:
                forms[tuple(shape)] = len(forms)
                table.forms.append(Form(pkl=b"pkl", dtype="int8", shape=shape, strides=[shape[1], 1]))
            nbytes = shape[0] * shape[1]
            table.items.add(fqn=fqn.encode(), offset=offset, has_offset=True, at=at, raw_at=at, nbytes=nbytes, form=forms[tuple(shape)])
            stored.append(Stored(offset=at, lengths=[nbytes], hashes=codec.block_hash(bytes(nbytes))))
            at += nbytes
        table.end = at
        file = f"__{rank}_{mint_token()}.distcp"
        found.shards.append(StoredShard(rank=rank, file=file, nbytes=at, table=table, stored=stored))
        LocalStore(store).put(data_key(id, file), lambda at=at: [bytes(at)])
    Ledger(LocalStore(store)).commit(id, found, pickle.dumps(Metadata({}), 2))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    store = tmp_path_factory.mktemp("store")
    halves = [[("w", [0, 0], [2, 3]), ("v", [0, 0], [1, 3])], [("w", [2, 0], [2, 3])], [("w", [4, 0], [1, 3])]]
    write(store, "halves/step-1", halves)
    plain = {"w": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros(7), "note": "x"}
    dcp.save(plain, storage_writer=dcp.FileSystemWriter(store / "stock" / "step-3", single_file_per_rank=False), no_dist=True)
    (store / "partly" / "step-9").mkdir(parents=True)
    (store / "partly" / "step-9" / f"__0_{mint_token()}.distcp").write_bytes(b"x")
    with DaemonProcess(str(store)) as running:
        for name, durable in (("ours/step-1", True), ("memory/step-5", False)):
            dcp.save(state(), storage_writer=DaemonStorageWriter(name, address=running.address, durable=durable), no_dist=True)
        wait("ours/step-1", address=running.address, timeout=60)
        yield running


@pytest.fixture(params=["daemon", "store"])
def where(request: pytest.FixtureRequest, daemon: DaemonProcess) -> list[str]:
    """The flags that say where to look."""
    return ["--address", daemon.address] if request.param == "daemon" else ["--store", daemon.store]


def ckptd(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ckptd", *arguments], capture_output=True, text=True, timeout=100, check=False)


def shown(*arguments: str) -> Any:
    done = ckptd("show", *arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def refused(*arguments: str) -> str:
    done = ckptd("show", *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    return done.stderr


def kinds(whole: Any) -> dict[str, tuple[Any, ...]]:
    return {one["name"]: (one["dtype"], one["shape"], one["chunks"], one["shards"]) for one in whole["tensors"]}


EXPECTED = {
    "w": ("float32", [3, 4], 1, 1),
    "quantised": ("qint8", [4, 5], 1, 1),
    "sparse": ("float64", [3, 3], 1, 1),
    "scaled": ("float16", [2, 3], 1, 1),
    "scalar": ("int64", [], 1, 1),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_tensors_of_every_kind_are_shown_with_dtype_and_shape(where: list[str]) -> None:
    whole = shown("ours/step-1", *where)
    assert kinds(whole) == EXPECTED
    assert {one["name"]: one["raw_bytes"] for one in whole["tensors"]}["w"] == 48
    assert [one["name"] for one in whole["objects"]] == ["note"]
    assert len(whole["files"]) == 1


def test_what_is_only_in_memory_is_shown_by_its_daemon(daemon: DaemonProcess) -> None:
    whole = shown("memory/step-5", "--address", daemon.address)
    assert (whole["state"], whole["files"]) == ("accepted", [])
    assert kinds(whole) == EXPECTED
    assert "memory/step-5 is not in the store" in refused("memory/step-5", "--store", daemon.store)


def test_shards_are_counted_per_tensor(where: list[str]) -> None:
    whole = shown("halves/step-1", *where)
    assert kinds(whole) == {"w": ("int8", [5, 3], 3, 3), "v": ("int8", [1, 3], 1, 1)}
    assert len(whole["files"]) == 3


def test_of_a_stock_checkpoint_shards_are_its_files(where: list[str]) -> None:
    whole = shown("stock/latest", *where)
    assert kinds(whole) == {"w": ("bfloat16", [2, 3], 1, 1), "b": ("float32", [7], 1, 1)}
    assert [(one["name"], one["raw_bytes"] > 0) for one in whole["objects"]] == [("note", True)]
    assert len(whole["files"]) == 3


def test_daemon_and_store_say_the_same(daemon: DaemonProcess) -> None:
    for name in ("ours/step-1", "halves/step-1", "stock/step-3"):
        assert shown(name, "--address", daemon.address) == shown(name, "--store", daemon.store)


def test_an_incomplete_one_is_an_error_that_says_why(where: list[str]) -> None:
    told = refused("partly/step-9", *where)
    assert "partly/step-9 is incomplete: 1 data file and no manifest: the upload did not finish" in told
    assert "step-10" in refused("partly/step-10", *where)


@pytest.mark.parametrize("object", ["halves/step-1/.ckptd/*.manifest", "stock/step-3/.metadata"], ids=["ours", "stock"])
@pytest.mark.parametrize("asked", ["daemon", "store"])
def test_a_damaged_one_is_an_error_that_names_the_object(daemon: DaemonProcess, tmp_path: Path, object: str, asked: str) -> None:
    shutil.copytree(daemon.store, tmp_path / "store")
    path = next((tmp_path / "store").glob(object))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    name = "/".join(object.split("/")[:2])
    if asked == "store":
        told = refused(name, "--store", str(tmp_path / "store"))
    else:
        with DaemonProcess(str(tmp_path / "store")) as other:
            told = refused(name, "--address", other.address)
    assert f"{path.relative_to(tmp_path / 'store')} is damaged" in told


def many(count: int) -> list[list[tuple[str, list[int], list[int]]]]:
    names = [f"model.layers.{number}.\x1b[31m{chr(0x4E00 + number % 100)}" for number in range(count)]
    return [[(name, [0, 0], [1, 2]) for name in names]]


def test_a_long_list_is_written_plainly_and_whole(daemon: DaemonProcess, where: list[str]) -> None:
    if not (Path(daemon.store) / "many").exists():
        write(Path(daemon.store), "many/step-1", many(1500))
    people = ckptd("show", "many/step-1", *where)
    assert (people.returncode, people.stderr) == (0, "")
    rows = people.stdout.split("\n\n")[-1].splitlines()
    assert rows[0].split() == ["NAME", "DTYPE", "SHAPE", "BYTES", "CHUNKS", "SHARDS"]
    assert len(rows) == 2 + 1500
    assert all(r"\x1b[31m" in row and row.endswith("[1, 2]     2 B        1        1") for row in rows[2:])
    whole = shown("many/step-1", *where)
    assert [one["name"] for one in whole["tensors"]] == sorted(name for name, _, _ in many(1500)[0])


def peak(*arguments: str) -> tuple[int, str]:
    """Runs ``ckptd …``; its largest resident memory, in bytes, and its output."""
    script = (
        "import resource, subprocess, sys; "
        "done = subprocess.run([sys.executable, '-m', 'ckptd', *sys.argv[1:]], stdout=subprocess.PIPE, check=True); "
        "sys.stdout.buffer.write(b'%d\\n' % resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss + done.stdout)"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, timeout=100, check=True)
    kib, _, output = done.stdout.partition(b"\n")
    return int(kib) * 1024, output.decode()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["ours/step-1", "stock/step-1"])
def test_a_hundred_thousand_tensors_take_less_than_500_mb_to_show(tmp_path: Path, name: str) -> None:
    keys = [f"optimizer.state.model.layers.{number}.self_attn.q_proj.weight.exp_avg" for number in range(100_000)]
    if name.startswith("ours"):
        write(tmp_path, name, [[(key, [0, 0], [1, 8]) for key in keys]])
    else:
        of = Metadata({key: tensor_of(8) for key in keys}, planner_data={key: (key,) for key in keys})
        of.storage_data = {MetadataIndex(key, [0, 0], 0): _StorageInfo("__0_0.distcp", at * 1000, 1000) for at, key in enumerate(keys)}
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / ".metadata").write_bytes(pickle.dumps(of, 4))
    with DaemonProcess(str(tmp_path)) as daemon:
        for where in (["--store", str(tmp_path)], ["--address", daemon.address]):
            for form in ([], ["--json"]):
                nbytes, output = peak("show", name, *where, *form)
                assert nbytes < 500 * 1000 * 1000
                assert output.count("self_attn.q_proj") == 100_000
        status = Path(f"/proc/{daemon.pid}/status").read_text()
        most = int(status.split("VmHWM:")[1].split()[0]) * 1024
        assert most < 500 * 1000 * 1000


def tensor_of(width: int) -> TensorStorageMetadata:
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([1, width]))
    return TensorStorageMetadata(TensorProperties(torch.int8), torch.Size([1, width]), [chunk])
