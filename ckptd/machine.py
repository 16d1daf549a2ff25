"""What the kernel says of this machine: file systems, memory, limits, processors.

Only reads the kernel's own files; what one of them does not say is None, never a guess.
`proc` and `sys` are where those file systems are mounted. Judges nothing: that is `doctor`'s.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
SYS: Final = Path("/sys")

#: cgroup v1 writes "no limit" as the largest number of pages.
_UNLIMITED: Final = 1 << 60
_ESCAPE: Final = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One mounted file system."""

    point: str
    #: The kernel's name of its kind, such as ``tmpfs``.
    kind: str
    #: Its own options; those without a value have "".
    options: dict[str, str]


@dataclass(frozen=True, slots=True)
class Limit:
    """What a control group grants, and what of it is taken and cannot be given back. In bytes."""

    nbytes: int
    used: int


def mount_of(path: Path, proc: Path = PROC) -> Mount | None:
    """The file system on which an existing `path` lies."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    found = None
    for line in _lines(proc / "self" / "mountinfo"):
        # 30 25 0:27 / /dev/shm rw,relatime … - tmpfs tmpfs rw,size=24684096k
        fields, _, own = line.partition(" - ")
        parts, rest = fields.split(), own.split()
        if len(parts) < 5 or len(rest) < 3 or parts[2] != wanted:
            continue
        options = dict(_pair(word) for word in rest[2].split(","))
        found = Mount(_ESCAPE.sub(lambda code: chr(int(code[1], 8)), parts[4]), rest[0], options)
    return found


def huge_shm(sys: Path = SYS) -> str | None:
    """The kernel's word on huge pages in shared memory: ``deny`` and ``force`` overrule what a mount says."""
    for line in _lines(sys / "kernel" / "mm" / "transparent_hugepage" / "shmem_enabled"):
        if found := re.search(r"\[(\w+)\]", line):
            return found[1]
    return None


def memory(proc: Path = PROC) -> tuple[int, int] | None:
    """Bytes of memory in all, and what can be had now without swapping."""
    found = dict(_pair(line, ":") for line in _lines(proc / "meminfo"))
    sizes = [_number(found.get(name, "").removesuffix("kB")) for name in ("MemTotal", "MemAvailable")]
    return None if None in sizes else ((sizes[0] or 0) * 1024, (sizes[1] or 0) * 1024)


def memory_limit(proc: Path = PROC, sys: Path = SYS) -> Limit | None:
    """The memory limit with the least left, of this process's control groups; None if none has one."""
    found = [
        *_limits(_groups("memory", proc, sys), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        *_limits(_groups("", proc, sys), "memory.max", "memory.current", "inactive_file"),
    ]
    return min(found, key=lambda limit: limit.nbytes - limit.used, default=None)


def processors(proc: Path = PROC, sys: Path = SYS) -> float:
    """How many processors this process may use at once: those it may run on, or a control group's share of time."""
    shares = [float(len(os.sched_getaffinity(0)))]
    for group in _groups("cpu", proc, sys):
        shares += _ratio(_word(group / "cpu.cfs_quota_us"), _word(group / "cpu.cfs_period_us"))
    for group in _groups("", proc, sys):
        quota, _, period = _word(group / "cpu.max").partition(" ")
        shares += _ratio(quota, period)
    return min(shares)


def _groups(controller: str, proc: Path, sys: Path) -> Iterator[Path]:
    """The control groups of this process, innermost first: of a v1 controller, or ("") of the one v2 hierarchy."""
    root = sys / "fs" / "cgroup"
    for line in _lines(proc / "self" / "cgroup"):
        # 4:memory:/docker/ab12, or 0::/system.slice/ckptd.service. In a container the path may be the host's.
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if controller in names.split(","):
            top = root / names if controller else root
            inner = top / path.strip().lstrip("/")
            yield inner
            yield from (above for above in inner.parents if above.is_relative_to(top))


def _limits(groups: Iterator[Path], limit: str, used: str, given_back: str) -> Iterator[Limit]:
    for group in groups:
        granted, taken = _number(_word(group / limit)), _number(_word(group / used))
        if granted is None or taken is None or granted >= _UNLIMITED:
            continue
        statistics = dict(_pair(line, " ") for line in _lines(group / "memory.stat"))
        # Cached files count as used until somebody needs the memory; shared memory is not among them.
        yield Limit(granted, max(0, taken - (_number(statistics.get(given_back, "")) or 0)))


def _ratio(quota: str, period: str) -> list[float]:
    granted, whole = _number(quota), _number(period)
    return [granted / whole] if granted is not None and whole else []


def _pair(text: str, separator: str = "=") -> tuple[str, str]:
    name, _, value = text.partition(separator)
    return name.strip(), value.strip()


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\s*[0-9]{1,20}\s*", text) else None


def _word(path: Path) -> str:
    return next(_lines(path), "").strip()


def _lines(path: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield from path.read_text(encoding="utf-8", errors="replace").splitlines()
