"""A shm-dir as small as a container's /dev/shm: what fits works, what does not is an error that says how much, never a SIGBUS."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ckptd.errors import ArenaFull
from ckptd_client import DaemonStorageReader, DaemonStorageWriter, channel, wait
from daemons import DaemonProcess
from invariants import assert_accounts_balance
from mounts import small_tmpfs

MiB = 1024 * 1024
# A shard that takes more than half of the memory is saved with a warning.
pytestmark = pytest.mark.filterwarnings("ignore:ckptd. the shard of rank:UserWarning")


def on(daemon: DaemonProcess, shm_dir: Path) -> DaemonProcess:
    """The daemon with its memory there."""
    daemon.shm_dir.rmdir()
    daemon.shm_dir = shm_dir
    return daemon


def state(nbytes: int, value: int) -> dict[str, torch.Tensor]:
    return {"t": torch.full((nbytes // 4,), value, dtype=torch.int32)}


def save(address: str, id: str, nbytes: int, value: int) -> None:
    dcp.save(state(nbytes, value), checkpoint_id=id, storage_writer=DaemonStorageWriter(address=address), no_dist=True)


def load(address: str, id: str, nbytes: int) -> int:
    found = state(nbytes, -1)
    dcp.load(found, checkpoint_id=id, storage_reader=DaemonStorageReader(address=address), no_dist=True)
    assert bool((found["t"] == found["t"][0]).all())
    return int(found["t"][0])


def cause(failed: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    return next(iter(failed.value.failures.values()))[0]


def test_in_64_mib_what_fits_is_saved_and_what_does_not_is_refused(tmp_path: Path) -> None:
    with small_tmpfs("64m") as shm_dir, on(DaemonProcess(str(tmp_path / "store"), memory="60MiB"), shm_dir) as daemon:
        for step in range(6):  # six times 16 MiB through 60
            save(daemon.address, f"step-{step}", 16 * MiB, step)
        wait("step-5", address=daemon.address, timeout=60)
        assert [load(daemon.address, f"step-{step}", 16 * MiB) for step in (0, 5)] == [0, 5]
        with pytest.raises(CheckpointException) as refused:
            save(daemon.address, "step-6", 80 * MiB, 6)
        assert isinstance(cause(refused), ArenaFull)
        assert "can never fit into 60.0 MiB" in str(cause(refused))
        save(daemon.address, "step-7", 40 * MiB, 7)
        assert load(daemon.address, "step-7", 40 * MiB) == 7
        channel._daemons.pop(daemon.address).close()
        assert_accounts_balance(daemon)
        assert "step-6" not in daemon.list()


def test_several_ranks_share_64_mib_and_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four processes as far as the daemon can tell: each has a lease of its own."""
    monkeypatch.setenv("CKPTD_SAVE_TIMEOUT", "90")  # as long as a slow disk takes
    homes = [tmp_path / f"{rank}.sock" for rank in range(4)]
    listen = [part for home in homes for part in ("--listen", f"unix:{home}")]
    failed: list[BaseException] = []
    with small_tmpfs("64m") as shm_dir, on(DaemonProcess(str(tmp_path / "store"), *listen, memory="60MiB"), shm_dir) as daemon:

        def rank(number: int) -> None:
            try:
                for step in range(4):
                    save(f"unix:{homes[number]}", f"rank-{number}/step-{step}", 12 * MiB, 10 * number + step)
            except BaseException as exc:  # noqa: BLE001 - DCP raises one
                failed.append(exc)

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []
        for number in range(4):
            wait(f"rank-{number}/step-3", address=daemon.address, timeout=60)
            assert load(daemon.address, f"rank-{number}/step-3", 12 * MiB) == 10 * number + 3
        for address in (*(f"unix:{home}" for home in homes), daemon.address):
            channel._daemons.pop(address).close()
        assert_accounts_balance(daemon)


def test_a_tmpfs_that_others_fill_is_an_error_and_no_sigbus(tmp_path: Path) -> None:
    with small_tmpfs("64m") as shm_dir, on(DaemonProcess(str(tmp_path / "store"), memory="60MiB"), shm_dir) as daemon:
        save(daemon.address, "step-1", 8 * MiB, 1)
        wait("step-1", address=daemon.address, timeout=60)
        filler = shm_dir / "not-ours"
        with filler.open("wb", buffering=0) as full, pytest.raises(OSError, match="No space"):  # noqa: PT012 - until it is full
            while True:
                full.write(bytes(MiB))
        with pytest.raises(CheckpointException) as refused:
            save(daemon.address, "step-2", 30 * MiB, 2)
        assert isinstance(cause(refused), ArenaFull)
        assert "is full" in str(cause(refused))
        assert load(daemon.address, "step-1", 8 * MiB) == 1
        filler.unlink()
        save(daemon.address, "step-2", 30 * MiB, 2)
        assert load(daemon.address, "step-2", 30 * MiB) == 2
        channel._daemons.pop(daemon.address).close()
        assert_accounts_balance(daemon)


def test_a_tmpfs_of_1_mib_is_refused_at_the_start_with_the_way_out(tmp_path: Path) -> None:
    with small_tmpfs("1m") as shm_dir:
        for memory, said in (("16MiB", "enlarge the tmpfs"), ("512KiB", "too little memory")):
            daemon = on(DaemonProcess(str(tmp_path / "store"), memory=memory), shm_dir)
            try:
                with pytest.raises(RuntimeError, match=said) as refused:
                    daemon.start()
                assert "exit 2" in str(refused.value)
            finally:
                daemon.remove()
