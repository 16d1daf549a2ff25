"""The doctor: what it reads of the machine, what it makes of facts, and that it leaves nothing behind.

Facts that this machine does not have are trees of files as the kernel shows them, and stores
that break one promise each.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptd import codec, doctor, findings, gauge, machine, trial
from ckptd.cli.main import main
from ckptd.config import Settings
from ckptd.errors import StoreError, Unavailable
from ckptd.localstore import LocalStore
from ckptd.machine import Limit, Mount
from ckptd.store import Object, Source
from ckptd.stores import open_store

MiB = 1024 * 1024
GiB = 1024 * MiB


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


# --- what the kernel says ----------------------------------------------------------------------------------------


def test_a_directory_on_tmpfs_is_found_with_its_mount_options(shm_dir: Path) -> None:
    mount = machine.mount_of(shm_dir)
    assert mount is not None
    assert mount.kind == "tmpfs"
    assert shm_dir.is_relative_to(mount.point)
    assert "rw" in mount.options


def test_a_mount_is_found_by_its_device_and_the_last_one_counts(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    here = f"{os.major(device)}:{os.minor(device)}"
    proc = tree(
        tmp_path / "proc",
        {
            "self/mountinfo": f"1 0 9999:1 / /elsewhere rw - tmpfs tmpfs rw,huge=always\n"
            f"2 0 {here} / /under rw shared:1 - tmpfs tmpfs rw,huge=never\n"
            f"3 0 {here} / /with\\040blank rw - tmpfs none rw,size=65536k,huge=within_size\n"
            "garbage\n"
        },
    )
    assert machine.mount_of(tmp_path, proc) == Mount("/with blank", "tmpfs", {"rw": "", "size": "65536k", "huge": "within_size"})
    assert machine.mount_of(tmp_path, tmp_path / "nothing") is None


def test_the_kernels_word_on_huge_pages_is_the_bracketed_one(tmp_path: Path) -> None:
    sys_ = tree(tmp_path, {"kernel/mm/transparent_hugepage/shmem_enabled": "always within_size advise never [deny] force\n"})
    assert machine.huge_shm(sys_) == "deny"
    assert machine.huge_shm(tmp_path / "nothing") is None


def test_memory_is_in_bytes_and_unknown_where_the_kernel_says_nothing(tmp_path: Path) -> None:
    assert machine.memory(tree(tmp_path, {"meminfo": "MemTotal:  1000 kB\nMemAvailable:  400 kB\n"})) == (1000 * 1024, 400 * 1024)
    assert machine.memory(tree(tmp_path / "odd", {"meminfo": "MemTotal: many\n"})) is None
    total, available = machine.memory() or (0, 0)
    assert 0 < available <= total


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        # v2: the tightest of the groups above counts, by what is left; cached files can be given back.
        (
            "0::/a/b\n",
            {
                "a/b/memory.max": "max\n",
                "a/b/memory.current": "5\n",
                "a/memory.max": "1000\n",
                "a/memory.current": "900\n",
                "a/memory.stat": "anon 5\ninactive_file 300\n",
                "memory.max": "2000\n",
                "memory.current": "1900\n",
            },
            Limit(2000, 1900),
        ),
        ("0::/a\n", {"a/memory.max": "1000\n", "a/memory.current": "900\n", "a/memory.stat": "inactive_file 300\n"}, Limit(1000, 600)),
        # v1, in a container that sees the host's path.
        (
            "9:cpu,cpuacct:/x\n4:memory:/docker/ab12\n0::/\n",
            {
                "memory/memory.limit_in_bytes": "700\n",
                "memory/memory.usage_in_bytes": "50\n",
                "memory/memory.stat": "total_inactive_file 20\n",
            },
            Limit(700, 30),
        ),
        # v1 without a limit.
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n", "memory/memory.usage_in_bytes": "50\n"}, None),
        ("", {}, None),
    ],
    ids=["v2 nested", "v2 cached", "v1 container", "v1 no limit", "none"],
)
def test_the_memory_limit_of_control_groups(tmp_path: Path, groups: str, files: dict[str, str], expected: Limit | None) -> None:
    proc = tree(tmp_path / "proc", {"self/cgroup": groups})
    sys_ = tree(tmp_path / "sys", {f"fs/cgroup/{name}": text for name, text in files.items()})
    assert machine.memory_limit(proc, sys_) == expected


def test_processors_are_no_more_than_the_share_that_a_control_group_grants(tmp_path: Path) -> None:
    own = float(len(os.sched_getaffinity(0)))
    assert machine.processors(tmp_path, tmp_path) == own
    v2 = tree(tmp_path / "v2", {"self/cgroup": "0::/a\n", "fs/cgroup/a/cpu.max": "50000 100000\n", "fs/cgroup/cpu.max": "max 100000\n"})
    assert machine.processors(v2, v2) == 0.5
    v1 = tree(
        tmp_path / "v1",
        {
            "self/cgroup": "4:cpu,cpuacct:/\n",
            "fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "25000\n",
            "fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )
    assert machine.processors(v1, v1) == 0.25
    unlimited = tree(tmp_path / "no", {"self/cgroup": "4:cpu:/\n", "fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n"})
    assert machine.processors(unlimited, unlimited) == own


def test_copying_is_measured_without_a_name_and_refused_where_there_is_no_room(shm_dir: Path) -> None:
    speed = gauge.copying(shm_dir, 4 * MiB)
    assert min(speed.fresh, speed.touched, speed.mapped_anew) > 0
    assert os.listdir(shm_dir) == []
    with pytest.raises(OSError, match=r"No space left|Cannot allocate|too large"):
        gauge.copying(shm_dir, 1 << 50)


def test_compressing_is_measured_with_numbers_that_compress_as_weights_do() -> None:
    speed, ratio = gauge.compressing(codec.parse("zstd:1"))
    assert speed > 0
    assert 1.0 < ratio < 1.5


# --- what the facts mean -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "capacity", "free", "held", "verdict", "wanted", "words"),
    [
        (None, 20 * GiB, 20 * GiB, 0, "ok", 10 * GiB, "10.0 GiB of the 20.0 GiB"),
        (8 * GiB, 20 * GiB, 20 * GiB, 0, "ok", 8 * GiB, ""),
        (8 * GiB, 20 * GiB, 2 * GiB, 6 * GiB, "ok", 8 * GiB, ""),  # what the daemon has already counts as its own
        (8 * GiB, 20 * GiB, 2 * GiB, 5 * GiB, "warn", 8 * GiB, "others leave"),
        (8 * GiB, 4 * GiB, 4 * GiB, 0, "fail", 8 * GiB, "enlarge the tmpfs"),
        (None, 64 * MiB, 64 * MiB, 0, "warn", 32 * MiB, "--shm-size"),
        (GiB, 64 * MiB, 64 * MiB, 0, "fail", GiB, "--shm-size"),
        (None, 20 * MiB, 20 * MiB, 0, "fail", 10 * MiB, "--shm-size"),
    ],
)
def test_the_budget_against_the_tmpfs(
    memory: int | None, capacity: int, free: int, held: int, verdict: str, wanted: int, words: str
) -> None:
    found, budget = findings.budget(memory, capacity, free, held, Path("/dev/shm"))
    assert (found.verdict, budget) == (verdict, wanted)
    assert words in f"{found.found} {found.advice}"
    assert bool(found.advice) == (verdict != "ok")


@pytest.mark.parametrize(
    ("held", "sizes", "limit", "verdict", "words"),
    [
        (0, (16 * GiB, 12 * GiB), None, "ok", "available"),
        (0, (16 * GiB, 12 * GiB), Limit(12 * GiB, 2 * GiB), "ok", "control group"),
        (0, (16 * GiB, 4 * GiB), None, "warn", "does not fit"),
        (5 * GiB, (16 * GiB, 4 * GiB), None, "ok", ""),
        (0, (4 * GiB, 4 * GiB), None, "fail", "the machine has"),
        (0, (16 * GiB, 12 * GiB), Limit(4 * GiB, 0), "fail", "MemoryMax"),
        (0, (16 * GiB, 12 * GiB), Limit(12 * GiB, 10 * GiB), "warn", "control group"),
        (7 * GiB, (16 * GiB, 12 * GiB), Limit(12 * GiB, 10 * GiB), "ok", ""),
        (0, None, None, "warn", "/proc"),
    ],
)
def test_a_budget_of_8_gib_against_memory_and_control_group(
    held: int, sizes: tuple[int, int] | None, limit: Limit | None, verdict: str, words: str
) -> None:
    found = findings.free_memory(8 * GiB, held, sizes, limit)
    assert found.verdict == verdict
    assert words in f"{found.found} {found.advice}"
    assert bool(found.advice) == (verdict != "ok")


@pytest.mark.parametrize(
    ("option", "word", "verdict", "words"),
    [
        ("always", "never", "ok", "huge=always"),
        ("within_size", None, "ok", "huge=within_size"),
        ("advise", "never", "warn", "mount -t tmpfs"),
        (None, "never", "warn", "mount -t tmpfs"),
        ("always", "deny", "warn", "shmem_enabled"),
        (None, "force", "ok", "kernel"),
    ],
)
def test_huge_pages_are_recommended_unless_they_are_there(option: str | None, word: str | None, verdict: str, words: str) -> None:
    found = findings.pages(Mount("/dev/shm", "tmpfs", {} if option is None else {"huge": option}), word)
    assert found.verdict == verdict
    assert words in f"{found.found} {found.advice}"


def test_small_limits_are_told() -> None:
    unlimited = resource.RLIM_INFINITY
    assert [findings.open_files(most).verdict for most in (256, 1024, unlimited)] == ["warn", "ok", "ok"]
    assert [findings.file_size(most, 8 * GiB).verdict for most in (GiB, 16 * GiB, unlimited)] == ["fail", "warn", "ok"]


def test_a_torch_without_stream_extensions_fails() -> None:
    assert findings.versions({"ckptd": "1", "torch": "2.6.1"}).verdict == "fail"
    for good in ({"torch": "2.7.0+cpu"}, {"torch": "3.0"}, {"torch": "odd"}, {}):
        assert findings.versions({"ckptd": "1", **good}).verdict == "ok"


def test_clocks_may_differ_by_what_the_put_and_the_stores_seconds_explain() -> None:
    tried = trial.Tried("", "", 0.0, 3.0, 0.01)
    for skew, verdict in ((0.0, "ok"), (7.9, "ok"), (-7.9, "ok"), (9.0, "warn"), (-200.0, "warn"), (4000.0, "fail"), (None, "warn")):
        assert findings.clock(replace(tried, skew_seconds=skew)).verdict == verdict
    assert "behind" in findings.clock(replace(tried, skew_seconds=-200.0)).found


def test_a_store_in_memory_and_a_full_disk_are_told() -> None:
    assert findings.disk(Path("/s"), 50, 100, tmpfs=False).verdict == "ok"
    assert findings.disk(Path("/s"), 1, 100, tmpfs=False).verdict == "warn"
    assert findings.disk(Path("/s"), 50, 100, tmpfs=True).verdict == "fail"


# --- stores ------------------------------------------------------------------------------------------------------


class Torn(LocalStore):
    """Writes in place."""

    def put(self, key: str, source: Source, *, nbytes_hint: int | None = None, replacing: str | None = None) -> int:
        nbytes = 0
        with (Path(self.url) / key).open("wb", buffering=0) as file:
            for piece in source():
                half = len(piece) // 2
                nbytes += file.write(piece[:half])
                time.sleep(0.05)
                nbytes += file.write(piece[half:])
        return nbytes


class Gone(LocalStore):
    """Deletes before it writes, as some do for a rename."""

    def put(self, key: str, source: Source, *, nbytes_hint: int | None = None, replacing: str | None = None) -> int:
        super().delete([key])
        time.sleep(0.05)
        return super().put(key, source, nbytes_hint=nbytes_hint, replacing=replacing)


class Partial(LocalStore):
    """Publishes what was written before an exception, as fsspec's files do."""

    def put(self, key: str, source: Source, *, nbytes_hint: int | None = None, replacing: str | None = None) -> int:
        pieces: list[bytes] = []
        try:
            pieces.extend(bytes(piece) for piece in source())  # what came before an exception stays
        finally:
            nbytes = super().put(key, lambda: pieces, nbytes_hint=nbytes_hint, replacing=replacing)
        return nbytes


class Cached(LocalStore):
    """Lists what it knew before."""

    def list(self, prefix: str = "", *, temporary: bool = False) -> Iterator[Object]:
        self.known = getattr(self, "known", None) or [*super().list(prefix, temporary=temporary)]
        return iter(self.known)


class Blind(LocalStore):
    """Does not list what was just written."""

    def list(self, prefix: str = "", *, temporary: bool = False) -> Iterator[Object]:
        return iter(())


class Skewed(LocalStore):
    """Has a clock of its own."""

    def list(self, prefix: str = "", *, temporary: bool = False) -> Iterator[Object]:
        for found in super().list(prefix, temporary=temporary):
            yield replace(found, modified=found.modified + 1000)


class Worn(LocalStore):
    """Takes large objects and does not give them back."""

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        if (end or 0) > MiB:
            raise Unavailable(f"cannot read {key}: Input/output error")
        return super().get(key, start, end)


def test_a_good_store_keeps_its_promises_and_nothing_stays_in_it(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    tried = trial.promises(store)
    assert (tried.torn, tried.stale) == ("", "")
    assert abs(tried.skew_seconds or 0.0) <= 1.0 + tried.skew_within_seconds
    assert min(trial.speed(store)) > 0
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("kind", "words"),
    [(Torn, "neither the old one nor the new one"), (Gone, "gone for a moment"), (Partial, "a part of the object")],
)
def test_a_store_that_replaces_in_pieces_is_found_out(tmp_path: Path, kind: type[LocalStore], words: str) -> None:
    tried = trial.promises(kind(tmp_path))
    assert words in tried.torn
    assert findings.promises("s", tried, local=True).verdict == "fail"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("kind", "words"), [(Cached, "still listed"), (Blind, "not listed")])
def test_a_listing_that_lags_behind_is_found_out(tmp_path: Path, kind: type[LocalStore], words: str) -> None:
    tried = trial.promises(kind(tmp_path))
    assert words in tried.stale
    assert findings.promises("s", tried, local=True).verdict == "fail"


def test_a_stores_clock_is_compared_with_ours(tmp_path: Path) -> None:
    assert findings.clock(trial.promises(Skewed(tmp_path))).verdict == "fail"


def test_a_store_that_fails_in_the_middle_is_left_as_it_was(tmp_path: Path) -> None:
    store = Worn(tmp_path)
    trial.promises(store)
    with pytest.raises(Unavailable):
        trial.speed(store)
    assert os.listdir(tmp_path) == []


def test_a_missing_root_is_an_error_and_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not exist"):
        trial.promises(open_store(str(tmp_path / "none"), retries=0))
    assert os.listdir(tmp_path) == []


# --- the whole ---------------------------------------------------------------------------------------------------


def seen(root: Path) -> dict[str, tuple[int, int, int]]:
    found = {path: path.lstat() for path in (root, *root.rglob("*"))}
    return {str(path): (status.st_ino, status.st_mode, status.st_size) for path, status in found.items()}


def examined(**options: Any) -> dict[str, findings.Finding]:
    return {finding.name: finding for finding in doctor.examine(Settings(listen=(), **options))}


@pytest.mark.parametrize("made", [True, False], ids=["shm-dir there", "shm-dir to be made"])
def test_it_looks_at_everything_and_leaves_nothing_behind(tmp_path: Path, shm_dir: Path, made: bool) -> None:
    store = tmp_path / "store"
    tree(store, {"step-1/.metadata": "x"})
    directory = shm_dir / "own"
    if made:
        directory.mkdir(mode=0o700)
        (directory / f"{'0' * 16}.sealed").write_bytes(bytes(8 * MiB))
    before = seen(store), seen(shm_dir)
    found = examined(store=str(store), shm_dir=directory, memory=64 * MiB)
    assert {name for name, finding in found.items() if finding.verdict == "fail"} == set()
    looked_at = "versions, shm-dir, memory budget, free memory, file size, huge pages, copy speed, open files, processors"
    assert list(found) == [*looked_at.split(", "), "store", "store clock", "disk", "store speed"]
    assert found["memory budget"].figures["budget"] == 64 * MiB
    assert found["memory budget"].figures["held"] == (8 * MiB if made else 0)
    assert (seen(store), seen(shm_dir)) == before


def test_a_directory_that_is_everybodys_fails_and_its_mode_stays(shm_dir: Path) -> None:
    shm_dir.chmod(0o1777)
    found = examined(store="", shm_dir=shm_dir)
    assert found["shm-dir"].verdict == "fail"
    assert "give a directory in it" in found["shm-dir"].advice
    assert "memory budget" not in found
    assert shm_dir.stat().st_mode & 0o7777 == 0o1777
    assert os.listdir(shm_dir) == []


def test_a_directory_below_a_file_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert examined(store="", shm_dir=tmp_path / "file" / "shm")["shm-dir"].verdict == "fail"


def test_a_disk_is_no_shared_memory(tmp_path: Path) -> None:
    found = examined(store="", shm_dir=tmp_path / "shm")
    # Where the tests' own directory is a tmpfs there is nothing to see.
    expected = "ok" if (mount := machine.mount_of(tmp_path)) and mount.kind == "tmpfs" else "warn"
    assert found["shm-dir"].verdict == expected


# --- the command -------------------------------------------------------------------------------------------------


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No daemon of this user is asked."""
    monkeypatch.setenv("CKPTD_LISTEN", f"unix:{tmp_path}/none.sock")


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict[str, Any]], str]:
    status = main(["doctor", "--json", *arguments])
    document = json.loads(capsys.readouterr().out)
    return status, {check["name"]: check for check in document["checks"]}, document["verdict"]


@pytest.mark.usefixtures("quiet")
def test_nothing_failed_is_0_and_the_environment_counts_as_for_serve(
    tmp_path: Path, shm_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTD_STORE", str(tmp_path))
    monkeypatch.setenv("CKPTD_MEMORY", "48MiB")
    monkeypatch.setenv("CKPTD_CODEC", "none")
    status, checks, verdict = ran(capsys, "--shm-dir", str(shm_dir))
    assert (status, verdict) == (0, "warn" if any(check["verdict"] == "warn" for check in checks.values()) else "ok")
    assert checks["memory budget"]["figures"]["budget"] == 48 * MiB
    assert checks["store"]["verdict"] == "ok"
    assert checks["daemon"]["found"] == f"none runs at unix:{tmp_path}/none.sock"
    assert "compressed" not in checks["processors"]["figures"]


@pytest.mark.usefixtures("quiet")
def test_something_failed_is_1(tmp_path: Path, shm_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, checks, verdict = ran(capsys, "--shm-dir", str(shm_dir), "--memory", "4096GiB", "--store", str(tmp_path))
    assert (status, verdict, checks["memory budget"]["verdict"]) == (1, "fail", "fail")
    assert "give less" in checks["memory budget"]["advice"]


@pytest.mark.usefixtures("quiet")
def test_a_store_or_a_daemon_that_is_not_there_is_3(tmp_path: Path, shm_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, checks, _ = ran(capsys, "--shm-dir", str(shm_dir), "--store", str(tmp_path / "none"))
    assert (status, checks["store"]["verdict"]) == (3, "fail")
    status, checks, _ = ran(capsys, "--shm-dir", str(shm_dir), "--store", str(tmp_path), "--address", f"unix:{tmp_path}/other.sock")
    assert (status, checks["daemon"]["verdict"]) == (3, "fail")


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "lots"], "--memory: 'lots'"),
        (["--address", "nonsense"], "--address: 'nonsense'"),
        (["--config", "/nonexistent.toml"], "cannot read"),
        (["--listen", "unix:/x"], "unrecognized"),
    ],
)
def test_wrong_use_is_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


@pytest.mark.usefixtures("quiet")
def test_a_store_that_cannot_be_opened_is_one_of_the_findings(shm_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, checks, _ = ran(capsys, "--shm-dir", str(shm_dir), "--store", "nosuch://x")
    assert (status, checks["store"]["verdict"]) == (1, "fail")
    assert "nosuch" in checks["store"]["found"]


@pytest.mark.usefixtures("quiet")
def test_people_get_a_line_each_with_the_way_out_below(tmp_path: Path, shm_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--shm-dir", str(shm_dir), "--store", str(tmp_path / "none")]) == 3
    lines = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("fail  store "))
    assert "does not exist" in lines[at]
    assert lines[at + 1].strip().startswith("→ is it mounted")
    assert lines[-1].endswith("1 failed")


def test_it_imports_no_torch(tmp_path: Path, shm_dir: Path) -> None:
    script = "import sys; from ckptd.cli.main import main; main(sys.argv[1:]); sys.exit(int('torch' in sys.modules))"
    command = [sys.executable, "-c", script, "doctor", "--store", str(tmp_path), "--shm-dir", str(shm_dir)]
    environ = {**os.environ, "CKPTD_LISTEN": f"unix:{tmp_path}/none.sock"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch 2" in done.stdout
