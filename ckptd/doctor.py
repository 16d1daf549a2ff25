"""Looks for what an operator gets wrong before it hurts.

Promises: takes a few seconds, leaves nothing behind, changes nothing that is there and makes no
directory; what cannot be looked at is said, and never taken for good. What the facts mean is
`findings`' to say.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

from ckptd import __version__, findings, gauge, machine, shmdir, trial
from ckptd.codec import parse
from ckptd.config import Settings
from ckptd.errors import CkptdError, InvalidRequest, Unavailable
from ckptd.findings import Finding
from ckptd.stores import open_store

#: Copying is measured with this much memory, or an eighth of what is free if that is less.
COPY_NBYTES: Final = 64 * 1024 * 1024
_LEAST_COPY_NBYTES: Final = 1024 * 1024
_PACKAGES: Final = ("grpcio", "protobuf", "fsspec", "s3fs", "gcsfs", "zstandard", "xxhash", "torch")


def examine(settings: Settings, *, daemons_store: str = "") -> Iterator[Finding]:
    """Everything, one by one; `settings` as ``ckptd serve`` would have them (`store` may be empty: then none is looked at).

    `daemons_store`: of the daemon that runs. What it was given to reach it, options and credentials, is not known here.
    """
    yield findings.versions(_installed())
    yield from _memory(settings)
    yield findings.open_files(_limit(resource.RLIMIT_NOFILE))
    yield _processors(settings.codec)
    if settings.store:
        yield from _store(settings)
    elif daemons_store:
        yield Finding(
            "store", "warn", f"the daemon's, {daemons_store}, was not looked at", f"give --store {daemons_store}, as for `ckptd serve`"
        )
    else:
        yield Finding("store", "warn", "none was given, so none was looked at", "give --store URL, as for `ckptd serve`")


def _installed() -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3])), "ckptd": __version__}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)  # without importing it
        except metadata.PackageNotFoundError:
            continue
    return found


def _memory(settings: Settings) -> Iterator[Finding]:
    directory = settings.shm_dir
    try:
        place = _place(directory)
    except InvalidRequest as error:
        yield _refused("shm-dir", error, ": ")
        return
    tmpfs, exists = shmdir.is_tmpfs(place), place == directory
    yield findings.directory(directory, tmpfs=tmpfs, exists=exists)
    usage = os.statvfs(place)
    free = usage.f_bavail * usage.f_frsize
    held = sum(_taken(path) for path in directory.iterdir()) if exists else 0
    found, wanted = findings.budget(settings.memory, shmdir.capacity(place), free, held, place)
    yield found
    sizes, limit = machine.memory(), machine.memory_limit()
    yield findings.free_memory(wanted, held, sizes, limit)
    yield findings.file_size(_limit(resource.RLIMIT_FSIZE), wanted)
    if tmpfs:
        yield findings.pages(machine.mount_of(place), machine.huge_shm())
        left = [free, *([sizes[1]] if sizes else []), *([limit.nbytes - limit.used] if limit else [])]
        yield _copying(place, min(left))


def _place(directory: Path) -> Path:
    """The shm-dir, or the directory that is there and that it would be made in. Raises InvalidRequest if no daemon could have it."""
    if os.path.lexists(directory):
        shmdir.check(directory)
        return directory
    above = next(above for above in directory.parents if os.path.exists(above))
    if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
        raise InvalidRequest(f"{directory} cannot be made in {above}: give another --shm-dir")
    return above


def _taken(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except OSError:  # gone meanwhile
        return 0


def _copying(directory: Path, free: int) -> Finding:
    nbytes = min(COPY_NBYTES, free // 8 // _LEAST_COPY_NBYTES * _LEAST_COPY_NBYTES)
    if nbytes < _LEAST_COPY_NBYTES:
        return Finding("copy speed", "warn", "not measured: no memory is free", "stop what takes it")
    try:
        return findings.copying(gauge.copying(directory, nbytes))
    except OSError as error:
        return Finding("copy speed", "warn", f"not measured in {directory}: {error.strerror}", "look at what is wrong there")


def _processors(spelled: str) -> Finding:
    cores = machine.processors()
    found = f"{cores:g} to run on"
    figures = {"processors": cores}
    if spelled != "none":
        speed, ratio = gauge.compressing(parse(spelled))
        found += f"; {spelled} takes {findings.rate(speed)} on one, {ratio:.2f} to 1 for numbers like float32 weights"
        figures |= {"compressed": speed, "ratio": ratio}
    return Finding("processors", "ok", found, figures=figures)


def _store(settings: Settings) -> Iterator[Finding]:
    try:
        store = open_store(settings.store, settings.store_options, retries=0)
        tried = trial.promises(store)
        local = store.url.startswith("/")
        yield findings.promises(store.url, tried, local=local)
        yield findings.clock(tried)
        if local:
            usage = shutil.disk_usage(store.url)
            yield findings.disk(Path(store.url), usage.free, usage.total, tmpfs=shmdir.is_tmpfs(Path(store.url)))
        written, read = trial.speed(store)
        cached = " (maybe from the page cache)" if local else ""
        found = f"{findings.rate(written)} written, {findings.rate(read)} read{cached}; one stream"
        yield Finding("store speed", "ok", found, figures={"written": written, "read": read})
    except CkptdError as error:
        yield _refused("store", error, "; ")


def _refused(name: str, error: CkptdError, separator: str) -> Finding:
    """Our errors end with what to do."""
    found, _, advice = str(error).rpartition(separator)
    if not found:
        found, advice = advice, "is it up, and can it be reached from here?" if isinstance(error, Unavailable) else ""
    return Finding(name, "fail", found, advice, unreachable=error.exit_status == 3)


def _limit(of: int) -> int:
    return resource.getrlimit(of)[0]
