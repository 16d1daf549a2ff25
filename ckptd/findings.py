"""What facts about a machine and a store mean to an operator: a verdict, what was found, the way out.

Pure: facts in, findings out. `fail` means that a daemon would not start or could not keep its
promises, `warn` that it would be slow, or may run into it. Sizes are bytes. `doctor` gathers the facts.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from ckptd.budget import Budget
from ckptd.errors import InvalidRequest
from ckptd.gauge import Copying
from ckptd.machine import Limit, Mount
from ckptd.segment import shown
from ckptd.trial import Tried

#: What a container's /dev/shm has unless somebody gave it more.
CONTAINER_NBYTES: Final = 64 * 1024 * 1024
#: Sockets of trainers, of the store and of the event loop; segments are open for moments only.
FEW_FILES: Final = 1024
#: Clocks may differ by so much: ages of files are judged by the store's times.
SKEWED_SECONDS: Final = 5.0
#: S3 refuses requests from about three times this on.
FAR_SECONDS: Final = 300.0
#: The first torch whose DCP has stream extensions.
TORCH: Final = (2, 7)

_HUGE: Final = (
    "the first save into a piece of memory, and a process's first load, are several times faster with them: "
    "mount -t tmpfs -o huge=within_size,size=…,mode=1777 tmpfs /mnt/shm, then --shm-dir /mnt/shm/ckptd"
)
_HUGE_DENIED: Final = "echo never > /sys/kernel/mm/transparent_hugepage/shmem_enabled, then the tmpfs's own huge= counts"
_CONTAINER: Final = "a container's /dev/shm has 64 MiB unless it is given more: docker run --shm-size=…, or --shm-dir on a larger tmpfs"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    #: What was looked at, in a word or two.
    name: str
    verdict: Literal["ok", "warn", "fail"]
    found: str
    #: The way out.
    advice: str = ""
    #: What was measured: bytes, seconds, bytes per second.
    figures: Mapping[str, float] = field(default_factory=dict)
    #: The store, or the daemon, is not there.
    unreachable: bool = False


def versions(installed: Mapping[str, str]) -> Finding:
    """`installed`: package to version; those that are not there are left out."""
    found = ", ".join(f"{name} {version}" for name, version in installed.items())
    torch = installed.get("torch", "").split(".")[:2]
    if len(torch) == 2 and all(part.isdigit() for part in torch) and tuple(map(int, torch)) < TORCH:
        advice = f"the plugins and compressed checkpoints need torch {TORCH[0]}.{TORCH[1]} or later"
        return Finding("versions", "fail", found, advice)
    return Finding("versions", "ok", found)


def directory(path: Path, *, tmpfs: bool, exists: bool) -> Finding:
    """Where segments will lie."""
    if not tmpfs:
        found = f"{path} is not on a tmpfs: every save goes through a disk"
        return Finding("shm-dir", "warn", found, "give a --shm-dir on a tmpfs, as /dev/shm is")
    return Finding("shm-dir", "ok", f"{path} is on a tmpfs" if exists else f"{path} will be made, on a tmpfs")


def budget(memory: int | None, capacity: int, free: int, held: int, where: Path) -> tuple[Finding, int]:
    """The budget against what `where` can hold, has free, and holds for the daemon already; and the budget itself."""
    name = "memory budget"
    figures = {"capacity": capacity, "free": free, "held": held}
    try:
        wanted = Budget.checked(memory, capacity, where).nbytes
    except InvalidRequest as error:
        found, _, advice = str(error).partition(": ")
        return Finding(name, "fail", found, _CONTAINER if capacity <= CONTAINER_NBYTES else advice, figures), memory or capacity // 2
    figures["budget"] = wanted
    found = f"{shown(wanted)} of the {shown(capacity)} that {where} can hold"
    if capacity <= CONTAINER_NBYTES:
        return Finding(name, "warn", found, _CONTAINER, figures), wanted
    if free + held < wanted:
        found += f", of which others leave {shown(free + held)}"
        return Finding(name, "warn", found, f"look at what else lies in {where}, or give less --memory", figures), wanted
    return Finding(name, "ok", found, figures=figures), wanted


def free_memory(wanted: int, held: int, sizes: tuple[int, int] | None, limit: Limit | None) -> Finding:
    """The budget against the machine's memory (in all, available) and against a control group's limit."""
    name = "free memory"
    if sizes is None:
        return Finding(name, "warn", "the kernel does not say how much there is", "is /proc mounted?")
    total, available = sizes
    figures = {"total": total, "available": available}
    less = "give less --memory"
    within = ""
    if limit is not None:
        figures |= {"limit": limit.nbytes, "limit_used": limit.used}
        raised = f"{less}, or raise the limit (docker run --memory=…, MemoryMax= of the service); shared memory counts"
        within = f"; the control group may use {shown(limit.nbytes)}, {shown(limit.used)} are taken"
        if limit.nbytes < wanted:
            found = f"the control group may use {shown(limit.nbytes)}, less than the budget of {shown(wanted)}"
            return Finding(name, "fail", found, raised, figures)
        if limit.nbytes - limit.used + held < wanted:
            found = (
                f"of {shown(limit.nbytes)} for the control group {shown(limit.used)} are taken: the budget of {shown(wanted)} does not fit"
            )
            return Finding(name, "warn", found, raised, figures)
    if total < wanted:
        return Finding(name, "fail", f"the machine has {shown(total)}, less than the budget of {shown(wanted)}", less, figures)
    if available + held < wanted:
        found = f"{shown(available)} of {shown(total)} are available: the budget of {shown(wanted)} does not fit"
        return Finding(name, "warn", found, f"{less}, or stop what takes the memory", figures)
    return Finding(name, "ok", f"{shown(available)} of {shown(total)} are available{within}", figures=figures)


def pages(mount: Mount | None, word: str | None) -> Finding:
    """Whether the shm-dir has huge pages. `word`: the kernel's setting, which may overrule the mount's."""
    option = "never" if mount is None else mount.options.get("huge", "never")
    if word == "force":
        return Finding("huge pages", "ok", "the kernel makes all shared memory of them")
    if word == "deny":
        return Finding("huge pages", "warn", "the kernel denies them to shared memory", _HUGE_DENIED)
    if option in ("always", "within_size"):
        return Finding("huge pages", "ok", f"the tmpfs has huge={option}")
    return Finding("huge pages", "warn", f"the tmpfs has huge={option}", _HUGE)


def open_files(most: int) -> Finding:
    """The soft limit of open files."""
    if most == resource.RLIM_INFINITY:
        return Finding("open files", "ok", "no limit")
    if most < FEW_FILES:
        advice = "many trainers and a store over the network may need more: ulimit -n 4096, or LimitNOFILE= of the service"
        return Finding("open files", "warn", f"{most} per process", advice, {"limit": most})
    return Finding("open files", "ok", f"{most} per process", figures={"limit": most})


def file_size(most: int, wanted: int) -> Finding:
    """The soft limit of a file's size; a segment is a file."""
    if most == resource.RLIM_INFINITY:
        return Finding("file size", "ok", "no limit")
    verdict: Literal["warn", "fail"] = "fail" if most < wanted else "warn"
    return Finding("file size", verdict, f"a file may have {shown(most)} at most", "ulimit -f unlimited", {"limit": most})


def copying(speed: Copying) -> Finding:
    """Nothing that could be wrong, but what the rest is to be measured by."""
    found = (
        f"{rate(speed.touched)} into warm memory (a save), {rate(speed.fresh)} into fresh pages, "
        f"{rate(speed.mapped_anew)} through a new mapping; one thread"
    )
    figures = {"touched": speed.touched, "fresh": speed.fresh, "mapped_anew": speed.mapped_anew}
    return Finding("copy speed", "ok", found, figures=figures)


def promises(where: str, tried: Tried, *, local: bool) -> Finding:
    """Whether a commit can rely on the store. A `local` one has called fsync."""
    figures = {"put_seconds": tried.put_seconds}
    if wrong := tried.torn or tried.stale:
        return Finding(
            "store", "fail", f"{where}: {wrong}", "no commit can rely on that: use another store, or other mount options", figures
        )
    found = f"{where}: what is put is whole{', synced to the disk' if local else ''}, replaced in one step, listed and deleted at once"
    return Finding("store", "ok", f"{found}; 256 KiB take {tried.put_seconds * 1e3:.1f} ms", figures=figures)


def clock(tried: Tried) -> Finding:
    """The store's clock against ours."""
    if tried.skew_seconds is None:
        found = "the store does not say when an object was written"
        return Finding("store clock", "warn", found, "what is old cannot be told there: look at what `ckptd prune --dry-run` says")
    figures = {"skew_seconds": tried.skew_seconds}
    off = max(0.0, abs(tried.skew_seconds) - tried.skew_within_seconds)
    if off <= SKEWED_SECONDS:
        return Finding("store clock", "ok", f"it agrees with this machine's to {abs(tried.skew_seconds):.1f} s", figures=figures)
    found = f"it is {abs(tried.skew_seconds):.0f} s {'ahead of' if tried.skew_seconds > 0 else 'behind'} this machine's"
    advice = "set both by NTP: --delete-grace and --orphan-age are measured by them"
    return Finding("store clock", "fail" if off > FAR_SECONDS else "warn", found, advice, figures)


def disk(root: Path, free: int, total: int, *, tmpfs: bool) -> Finding:
    """A local directory as a store."""
    if tmpfs:
        found = f"{root} is on a tmpfs: a reboot loses what is there"
        return Finding("disk", "fail", found, "give a --store on a disk; the daemon itself keeps checkpoints in memory")
    found = f"{shown(free)} of {shown(total)} are free"
    if free < total // 20:
        return Finding(
            "disk", "warn", found, "free some space, or have old checkpoints deleted (`ckptd prune`)", {"free": free, "total": total}
        )
    return Finding("disk", "ok", found, figures={"free": free, "total": total})


def rate(bytes_per_second: float) -> str:
    """A speed for people."""
    return f"{bytes_per_second / 1e9:.1f} GB/s" if bytes_per_second >= 1e9 else f"{bytes_per_second / 1e6:.1f} MB/s"
