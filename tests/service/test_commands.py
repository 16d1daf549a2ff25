"""The reading commands against a real daemon, and against the store that it wrote: they say the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptd_client import DaemonStorageWriter, wait
from daemons import DaemonProcess

STATE = {"model": {"w": torch.arange(12, dtype=torch.float32).reshape(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}, "note": "hello"}


def test_a_daemon_that_is_refused_for_its_memory_has_made_no_store(tmp_path: Path) -> None:
    shm_dir = Path(tempfile.mkdtemp(prefix="ckptd-test-", dir="/dev/shm"))
    try:
        where = ["--listen", f"unix:{tmp_path}/s", "--shm-dir", str(shm_dir)]
        done = ckptd("serve", "--store", str(tmp_path / "store"), *where, "--memory", "900TiB")
    finally:
        shutil.rmtree(shm_dir)
    assert (done.returncode, "can hold" in done.stderr) == (2, True)
    assert not (tmp_path / "store").exists()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    store = tmp_path_factory.mktemp("store")
    dcp.save({"w": torch.zeros(2, 3)}, checkpoint_id=str(store / "run-a" / "step-7"), no_dist=True)
    with DaemonProcess(str(store)) as running:
        for name in ("step-1", "run-a/step-2"):
            writer = DaemonStorageWriter(name, address=running.address, tags={"loss": "2.5"})
            dcp.save(STATE, storage_writer=writer, no_dist=True)
            wait(name, address=running.address, timeout=60)
        yield running


@pytest.fixture(params=["daemon", "store"])
def where(request: pytest.FixtureRequest, daemon: DaemonProcess) -> list[str]:
    """The flags that say where to look."""
    return ["--address", daemon.address] if request.param == "daemon" else ["--store", daemon.store]


def ckptd(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ckptd", *arguments], capture_output=True, text=True, timeout=60, check=False)


def document(*arguments: str) -> Any:
    done = ckptd(*arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_list_shows_ours_and_stock_by_run_and_step(where: list[str]) -> None:
    listed = document("list", *where)
    assert [(one["id"], one["run"], one["step"], one["state"]) for one in listed] == [
        ("step-1", "", 1, "durable"),
        ("run-a/step-2", "run-a", 2, "durable"),
        ("run-a/step-7", "run-a", 7, "durable"),
    ]
    assert listed[0]["tags"] == {"loss": "2.5"}
    assert listed[0]["world_size"] == 1
    assert listed[0]["raw_bytes"] > 0
    assert listed[0]["stored_bytes"] > 0
    assert [one["id"] for one in document("list", "--run", "run-a", *where)] == ["run-a/step-2", "run-a/step-7"]
    assert [one["id"] for one in document("list", "--run", "", *where)] == ["step-1"]


def test_daemon_and_store_say_the_same(daemon: DaemonProcess) -> None:
    for command in (["list"], ["show", "step-1"], ["show", "run-a/step-7"]):
        assert document(*command, "--address", daemon.address) == document(*command, "--store", daemon.store)


def test_show_names_tensors_objects_and_files(where: list[str], daemon: DaemonProcess) -> None:
    whole = document("show", "latest", *where)
    assert whole["id"] == "step-1"
    assert whole["tensors"] == [
        {"name": "model.b", "dtype": "bfloat16", "shape": [5], "raw_bytes": 10, "chunks": 1, "shards": 1},
        {"name": "model.w", "dtype": "float32", "shape": [3, 4], "raw_bytes": 48, "chunks": 1, "shards": 1},
    ]
    assert [one["name"] for one in whole["objects"]] == ["note"]
    assert whole["objects"][0]["raw_bytes"] > 0
    assert whole["files"]
    assert all((Path(daemon.store) / "step-1" / name).is_file() for name in whole["files"])


def test_people_get_tables(where: list[str]) -> None:
    listed = ckptd("list", *where)
    assert (listed.returncode, listed.stderr) == (0, "")
    assert "run-a/step-7" in listed.stdout
    assert "stock" in listed.stdout
    shown = ckptd("show", "run-a/step-2", *where)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "model.w" in shown.stdout


def test_wait_says_durable_and_what_is_not_there_is_1(where: list[str]) -> None:
    assert ckptd("wait", "step-1", *where).stdout == "step-1 is durable\n"
    for command in (["wait", "step-99", "--timeout", "1s"], ["show", "step-99"], ["show", "run-z/latest"]):
        done = ckptd(*command, *where)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)


def test_a_daemon_that_waits_in_vain_has_looked_into_memory_too(daemon: DaemonProcess) -> None:
    assert "no checkpoint step-99 in the store or in memory" in ckptd("wait", "step-99", "--address", daemon.address).stderr


def test_status_counts_what_there_is(daemon: DaemonProcess) -> None:
    status = document("status", "--address", daemon.address)
    assert status["pid"] == daemon.pid
    assert status["memory"] == 512 * 2**20
    assert 0 < status["used"] <= status["memory"]
    assert set(status["bytes_from"]) == {"memory", "peer", "store"}
    assert (status["accepted"], status["failed"], status["waiting"]) == (0, 0, 0)
    people = ckptd("status", "--address", daemon.address)
    assert (people.returncode, people.stderr) == (0, "")
    assert str(daemon.shm_dir) in people.stdout


def test_a_list_without_its_store_shows_what_memory_holds_and_is_no_answer(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with DaemonProcess(str(store), memory="64MiB") as daemon:
        for name, durable in (("run/step-1", True), ("run/step-2", False), ("other/step-1", False)):
            dcp.save(STATE, storage_writer=DaemonStorageWriter(name, address=daemon.address, durable=durable), no_dist=True)
        wait("run/step-1", address=daemon.address, timeout=60)
        store.rename(tmp_path / "away")
        done = daemon.cli("list", "--json")
        assert [(one["id"], one["state"]) for one in json.loads(done.stdout)] == [
            ("other/step-1", "accepted"),
            ("run/step-1", "durable"),
            ("run/step-2", "accepted"),
        ]
        assert done.stderr.startswith(f"ckptd: only what memory holds was found: the store {store} has been there")
        assert (done.returncode, done.stderr.count("\n")) == (3, 1)
        done = daemon.cli("list", "--run", "run")
        assert done.returncode == 3
        assert "run/step-2" in done.stdout
        assert "other/step-1" not in done.stdout
        # Where memory holds nothing there is no page that says so.
        done = daemon.cli("list", "--run", "elsewhere")
        assert (done.returncode, done.stdout) == (3, "")
        assert done.stderr.startswith(f"ckptd: the store {store} has been there")


def test_a_damaged_checkpoint_does_not_hide_the_others(daemon: DaemonProcess, tmp_path: Path) -> None:
    subprocess.run(["cp", "-r", f"{daemon.store}/.", tmp_path], check=True)
    manifest = next((tmp_path / "step-1" / ".ckptd").glob("*.manifest"))
    os.truncate(manifest, 20)
    listed = document("list", "--store", str(tmp_path))
    assert [(one["id"], one["state"]) for one in listed] == [
        ("step-1", "incomplete"),
        ("run-a/step-2", "durable"),
        ("run-a/step-7", "durable"),
    ]
    assert listed[0]["reason"]
    done = ckptd("show", "step-1", "--store", str(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data + b".", lambda _: b""], ids=["cut", "longer", "empty"])
@pytest.mark.parametrize("name", ["run-a/step-2", "run-a/step-7"], ids=["ours", "stock"])
def test_show_names_the_object_that_is_damaged(daemon: DaemonProcess, tmp_path: Path, name: str, damage: Callable[[bytes], bytes]) -> None:
    subprocess.run(["cp", "-r", f"{daemon.store}/.", tmp_path], check=True)
    path = tmp_path / name / ".metadata"
    path.write_bytes(damage(path.read_bytes()))
    done = ckptd("show", name, "--store", str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert f"{name}/.metadata is damaged" in done.stderr
