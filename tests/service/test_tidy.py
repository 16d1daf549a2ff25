"""The commands that delete, pin and verify, against a real daemon and against a store without one: they do the same."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptd.cli.main import main
from ckptd_client import DaemonStorageWriter, wait
from daemons import DaemonProcess
from invariants import assert_whole_or_absent, stock_state

OURS = ["run-a/step-1", "run-a/step-2", "run-a/step-3"]
STOCK = ["run-b/step-7", "run-b/step-8"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a run of ours, a run of stock's, and what is neither."""
    store = tmp_path_factory.mktemp("saved")
    for step, name in enumerate(STOCK):
        dcp.save({"w": torch.full((1000,), float(step))}, checkpoint_id=str(store / name), no_dist=True)
    with DaemonProcess(str(store)) as running:
        for step, name in enumerate(OURS):
            dcp.save(
                {"w": torch.full((1000,), float(step))}, storage_writer=DaemonStorageWriter(name, address=running.address), no_dist=True
            )
            wait(name, address=running.address, timeout=60)
    (store / "run-a" / "notes.txt").write_text("mine")
    (store / "run-a" / "step-1" / "notes.txt").write_text("mine")
    cut_off = store / "run-a" / "step-4"
    cut_off.mkdir()
    (cut_off / f"__0_{'a' * 16}.distcp").write_bytes(bytes(1000))
    return store


@pytest.fixture
def store(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "store"))


@pytest.fixture(params=["daemon", "store"])
def where(request: pytest.FixtureRequest, store: Path) -> Iterator[list[str]]:
    """The flags that say where to look; in either case at a store of the test's own."""
    if request.param == "store":
        yield ["--store", str(store)]
        return
    with DaemonProcess(str(store)) as running:
        yield ["--address", running.address]


Said = tuple[int, str, str]


@pytest.fixture
def ckptd(where: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command there: exit status, standard output (with --json: the document) and error output."""

    def run(*arguments: str) -> tuple[int, Any, str]:
        status = main([*arguments, *where])
        out, err = capsys.readouterr()
        return status, json.loads(out) if "--json" in arguments else out, err

    return run


def ids(ckptd: Any, *arguments: str) -> list[str]:
    _, listed, _ = ckptd("list", "--json", *arguments)
    return [one["id"] for one in listed if one["state"] == "durable"]


def files(store: Path) -> dict[str, bytes]:
    return {str(path.relative_to(store)): path.read_bytes() for path in store.rglob("*") if path.is_file()}


def test_a_dry_run_says_what_a_prune_does_and_does_nothing(store: Path, ckptd: Any) -> None:
    before = files(store)
    status, planned, _ = ckptd("prune", "--keep-last", "1", "--dry-run", "--json")
    assert (status, planned["dry_run"]) == (0, True)
    assert {verdict["id"]: verdict["kept"] for verdict in planned["verdicts"]} == {
        "run-a/step-1": False,
        "run-a/step-2": False,
        "run-a/step-3": True,
        "run-b/step-7": False,
        "run-b/step-8": True,
    }
    assert all(verdict["reason"] and verdict["stored_bytes"] for verdict in planned["verdicts"])
    assert files(store) == before
    status, done, _ = ckptd("prune", "--keep-last", "1", "--json")
    assert (status, done["verdicts"]) == (0, planned["verdicts"])
    assert ids(ckptd) == ["run-a/step-3", "run-b/step-8"]


def test_pruned_files_stay_for_the_grace_and_go_after_it_and_no_other_file_does(store: Path, ckptd: Any) -> None:
    before = files(store)
    keep = ["--keep-last", "1", "--run", "run-a"]
    status, done, _ = ckptd("prune", *keep, "--json")
    assert (status, ids(ckptd)) == (0, ["run-a/step-3", *STOCK])
    assert done["swept"]["later_files"] > 0
    gone = {f"{name}/.metadata" for name in OURS[:2]}
    assert {name: data for name, data in files(store).items() if not name.endswith(".deleted")} == {
        name: data for name, data in before.items() if name not in gone
    }
    status, text, _ = ckptd("prune", *keep, "--delete-grace", "0s", "--orphan-age", "0s")
    assert (status, "files wait for their time" in text) == (0, False)
    left = {name: data for name, data in before.items() if name.startswith(("run-a/step-3/", "run-b/")) or name.endswith("notes.txt")}
    # A list of what went may stay a while: it tells a save of the same id what happened.
    assert {name: data for name, data in files(store).items() if not name.endswith(".deleted")} == left
    assert assert_whole_or_absent(store).keys() == {"run-a/step-3", *STOCK}


def test_without_a_rule_no_checkpoint_is_deleted_and_that_is_said(store: Path, ckptd: Any) -> None:
    status, text, _ = ckptd("prune", "--orphan-age", "0s", "--delete-grace", "0s")
    assert status == 0
    assert "without a rule no checkpoint is deleted" in text
    assert "kept: no rule was given" in text
    assert not (store / "run-a" / "step-4").exists()  # what a cut-off upload left
    assert assert_whole_or_absent(store).keys() == {*OURS, *STOCK}


def test_what_cannot_be_read_stays_and_holds_up_nothing_else(store: Path, ckptd: Any) -> None:
    manifest = next((store / "run-a/step-1/.ckptd").glob("*.manifest"))
    os.truncate(manifest, 20)
    os.truncate(store / "run-b/step-8/.metadata", 20)
    kept = [files(store / name) for name in ("run-a/step-1", *STOCK)]
    status, done, _ = ckptd("prune", "--keep-last", "1", "--delete-grace", "0s", "--json")
    assert status == 0
    verdicts = {verdict["id"]: verdict for verdict in done["verdicts"]}
    assert [name for name, verdict in verdicts.items() if not verdict["kept"]] == ["run-a/step-2"]
    assert "damaged" in verdicts["run-a/step-1"]["reason"]
    assert "damaged" in verdicts["run-b/step-8"]["reason"]
    assert [files(store / name) for name in ("run-a/step-1", *STOCK)] == kept  # the newest good one is not the newest


def test_delete_takes_one_away_at_once_and_its_files_after_the_grace(store: Path, ckptd: Any) -> None:
    status, text, _ = ckptd("delete", "run-a/step-2")
    assert (status, text.startswith("run-a/step-2 is deleted; 2 files ("), "after 1 h" in text) == (0, True, True)
    assert ids(ckptd) == ["run-a/step-1", "run-a/step-3", *STOCK]
    assert list((store / "run-a/step-2").glob("*.distcp"))
    for name in ("run-a/step-2", "run-a/step-4", "run-z/step-1"):
        status, text, error = ckptd("delete", name)
        assert (status, text, error.count("\n")) == (1, "", 1)
    status, deleted, _ = ckptd("delete", "run-b/step-8", "--json")
    assert (status, deleted["id"], deleted["grace_seconds"]) == (0, "run-b/step-8", 3600.0)
    assert deleted["files"] == 1
    assert assert_whole_or_absent(store).keys() == {"run-a/step-1", "run-a/step-3", "run-b/step-7"}


def test_a_pinned_checkpoint_outlives_every_rule_and_delete_until_it_is_unpinned(store: Path, ckptd: Any) -> None:
    assert ckptd("pin", "run-a/step-1") == (0, "run-a/step-1 is pinned\n", "")
    assert ckptd("pin", "run-b/latest") == (0, "run-b/step-8 is pinned\n", "")
    _, listed, _ = ckptd("list", "--json")
    assert [one["id"] for one in listed if one["pinned"]] == ["run-a/step-1", "run-b/step-8"]
    status, text, error = ckptd("delete", "run-a/step-1")
    assert (status, text) == (1, "")
    assert "`ckptd unpin run-a/step-1` first" in error
    status, done, _ = ckptd("prune", "--keep-last", "1", "--json")
    assert {verdict["id"]: verdict["reason"] for verdict in done["verdicts"] if verdict["kept"]}["run-a/step-1"] == "kept: pinned"
    assert "run-a/step-1" in ids(ckptd)
    assert ckptd("unpin", "run-a/step-1") == (0, "run-a/step-1 is no longer pinned\n", "")
    assert ckptd("delete", "run-a/step-1")[0] == 0
    for command in ("pin", "unpin"):
        assert ckptd(command, "run-a/step-99")[0] == 1
    assert stock_state(store / "run-b/step-8")


def test_verify_reads_all_and_says_what_is_no_checkpoint(ckptd: Any) -> None:
    status, text, error = ckptd("verify")
    assert (status, error) == (0, "")
    lines = text.splitlines()
    assert [line.partition(",")[0].partition(";")[0] for line in lines] == [
        *(f"{name}: ok" for name in (*OURS, *STOCK)),
        "run-a/step-4: incomplete",
        "5 ok",
    ]
    status, document, _ = ckptd("verify", "--all", "--run", "run-b", "--json")
    assert (status, [one["id"] for one in document["checkpoints"]]) == (0, STOCK)
    assert all(one["verdict"] == "ok" and one["read_bytes"] > 4000 and one["note"] for one in document["checkpoints"])
    assert ckptd("verify", "run-a/latest")[1].startswith("run-a/step-3: ok")
    status, text, _ = ckptd("verify", "run-a/step-4")
    assert (status, text.startswith("run-a/step-4: incomplete; ")) == (1, True)
    assert ckptd("verify", "run-a/step-99")[:2] == (1, "")


def test_verify_names_every_object_that_is_damaged(store: Path, ckptd: Any) -> None:
    data = next((store / "run-a/step-1").glob("*.distcp"))
    damaged = bytearray(data.read_bytes())
    damaged[-100] ^= 1
    data.write_bytes(damaged)
    manifest = next((store / "run-a/step-2/.ckptd").glob("*.manifest"))
    manifest.write_bytes(manifest.read_bytes()[:-1])
    stock = next((store / "run-b/step-7").glob("*.distcp"))
    stock.write_bytes(stock.read_bytes()[:-1])
    status, document, _ = ckptd("verify", "--json")
    assert (status, document["damaged"]) == (1, 3)
    found = {one["id"]: one for one in document["checkpoints"]}
    assert len(document["checkpoints"]) == len(found)
    assert {name: one["verdict"] for name, one in found.items()} == {
        "run-a/step-1": "damaged",
        "run-a/step-2": "damaged",
        "run-a/step-3": "ok",
        "run-a/step-4": "incomplete",
        "run-b/step-7": "damaged",
        "run-b/step-8": "ok",
    }
    for name, path in (("run-a/step-1", data), ("run-a/step-2", manifest), ("run-b/step-7", stock)):
        assert any(path.name in place for place in found[name]["damage"]), found[name]
    status, text, _ = ckptd("verify", "run-a/step-1")
    assert status == 1
    assert data.name in text


def test_a_drain_says_when_all_is_durable_and_doctor_that_it_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "store").mkdir()
    with DaemonProcess(str(tmp_path / "store")) as running:
        where = ["--address", running.address]
        looked = ["doctor", "--json", "--codec", "none", "--store", running.store, "--shm-dir", str(running.shm_dir), *where]
        before = sorted(os.listdir(running.shm_dir))
        assert main(looked) == 0
        checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
        assert f"pid {running.pid}" in checks["daemon"]["found"]
        assert checks["memory budget"]["figures"]["budget"] == 512 * 2**20  # the daemon's own
        assert sorted(os.listdir(running.shm_dir)) == before
        assert os.listdir(running.store) == []

        writer = DaemonStorageWriter("step-1", address=running.address)
        dcp.save({"w": torch.ones(1000)}, storage_writer=writer, no_dist=True)
        assert main(["drain", "--json", *where]) == 0
        left = json.loads(capsys.readouterr().out)
        assert [what for what, there in left.items() if there] == ["draining"]  # nothing on its way, nothing that failed
        assert assert_whole_or_absent(Path(running.store)).keys() == {"step-1"}
        assert main(looked) == 0
        assert json.loads(capsys.readouterr().out)["checks"][0]["verdict"] == "warn"
        assert main(["drain", "--cancel", *where]) == 0
        assert "new saves are taken again" in running.log.read_text()
        capsys.readouterr()
        told = [word for word in looked if word not in ("--store", running.store)]
        assert main(told) == 0
        (store,) = (check for check in json.loads(capsys.readouterr().out)["checks"] if check["name"] == "store")
        assert (store["verdict"], store["found"]) == ("warn", f"the daemon's, {running.store}, was not looked at")
        assert f"--store {running.store}" in store["advice"]
