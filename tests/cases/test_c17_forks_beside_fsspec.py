"""C17: the plugins need no remote file system, so that a process may fork whatever fsspec does in it; the daemon itself never forks."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptd_client import DaemonStorageReader, DaemonStorageWriter, wait
from daemons import DaemonProcess


@pytest.fixture
def s3_daemon() -> Iterator[DaemonProcess]:
    """A daemon whose store is a bucket: s3fs and its event loop are at work in it."""
    from s3 import S3Server

    with S3Server() as server:
        env = {"SERVER": json.dumps({"bucket": server.bucket, "options": server.options})}
        with DaemonProcess(server.url("c17"), *server.arguments, env=env) as daemon:
            yield daemon


def children_of(pid: int) -> list[str]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found += (task / "children").read_text().split()
    return found


def test_a_process_forks_and_saves_beside_live_file_systems_and_the_daemon_has_no_children(s3_daemon: DaemonProcess) -> None:
    seen: list[str] = []
    env = {**s3_daemon.env, "CKPTD_ADDRESS": s3_daemon.address}
    with subprocess.Popen([sys.executable, __file__], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            while process.poll() is None:
                seen += children_of(s3_daemon.pid)
                try:
                    process.wait(0.05)
                except subprocess.TimeoutExpired:
                    continue
            assert process.stdout is not None
            said = process.stdout.read()
        finally:
            process.kill()
    assert (process.returncode, said) == (0, "done\n")
    assert seen == []
    assert {id: line["state"] for id, line in s3_daemon.list().items()} == {f"step-{step}": "durable" for step in range(5)}


# --- the process that forks ----------------------------------------------------------------------------------------


def save(step: int) -> None:
    dcp.save({"w": torch.full((1000,), float(step)), "step": step}, storage_writer=DaemonStorageWriter(f"step-{step}"))


def load(step: int) -> None:
    state: dict[str, Any] = {"w": torch.zeros(1000), "step": -1}
    dcp.load(state, storage_reader=DaemonStorageReader(f"step-{step}"))
    assert state["step"] == step
    assert torch.equal(state["w"], torch.full((1000,), float(step)))


def save_and_load(step: int) -> None:
    """What a child does: loads what its parent saved, saves, and loads that."""
    load(step - 1)
    save(step)
    load(step)
    wait(f"step-{step}", timeout=60)


def forked(work: Callable[[], None]) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001 - a child must end here, whatever happens
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def live_file_systems() -> list[Callable[[], None]]:
    """File systems of fsspec at work, and ckptd's own store beside them; each can be used again."""
    import fsspec
    import s3fs

    from ckptd.stores import open_store

    server = json.loads(os.environ["SERVER"])
    path = f"{server['bucket']}/others/file"
    options = server["options"]
    s3 = s3fs.S3FileSystem(
        endpoint_url=options["endpoint_url"],
        key=options["key"],
        secret=options["secret"],
        client_kwargs={"region_name": options["region_name"]},
    )
    memory = fsspec.filesystem("memory")
    store = open_store(f"s3://{server['bucket']}/own", options)

    def use_s3() -> None:
        s3.pipe_file(path, b"123")
        s3.invalidate_cache()
        assert s3.cat_file(path) == b"123"
        assert s3.ls(path.rpartition("/")[0], detail=False) == [path]

    def use_memory() -> None:
        memory.pipe_file("/others/file", b"123")
        assert memory.cat_file("/others/file") == b"123"

    def use_store() -> None:
        store.put("key", lambda: [b"123"])
        assert store.get("key") == b"123"

    return [use_s3, use_memory, use_store]


def main() -> None:
    save(0)
    load(0)
    assert not [name for name in ("fsspec", "s3fs", "aiobotocore") if name in sys.modules]
    uses = live_file_systems()
    for use in uses:
        use()
    assert "fsspecIO" in [thread.name for thread in threading.enumerate()]
    forked(lambda: save_and_load(1))
    child = multiprocessing.get_context("fork").Process(target=save_and_load, args=(2,))
    child.start()
    child.join()
    assert child.exitcode == 0
    for use in uses:
        use()
    save_and_load(3)
    forked(lambda: save_and_load(4))
    print("done")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    warnings.filterwarnings("ignore", message="This process .* is multi-threaded")
    main()
