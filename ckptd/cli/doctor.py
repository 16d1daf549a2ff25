"""``ckptd doctor``: looks at this machine, the store and the daemon for what goes wrong in practice.

Prints each finding as it comes. Changes nothing and leaves nothing behind.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckptd import __version__, config
from ckptd.cli import documents, output, source
from ckptd.errors import CkptdError, Unavailable

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from ckptd.findings import Finding
    from ckptd.v1 import daemon_pb2

#: Options of ``serve`` that doctor takes as well.
_OPTIONS = ("store", "store-option", "memory", "shm-dir", "codec")


def add_commands(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``doctor`` to the commands of the CLI."""
    parser = commands.add_parser(
        "doctor",
        help="look for what is set up wrong",
        description="Looks at memory, limits, packages, speeds, the store and the daemon, and says what is wrong and the way out. "
        "Takes the options, the environment and the file of `ckptd serve`; leaves nothing behind. "
        "Exit status: 0 nothing failed, 1 something did, 3 the store cannot be reached or refuses.",
        allow_abbrev=False,
    )
    for name in _OPTIONS:
        source.add_option(parser, source.OPTIONS[name])
    parser.add_argument("--config", metavar="FILE.toml", help="file with the daemon's options")
    parser.add_argument("--address", metavar="ADDRESS", help="of the daemon, if one runs: unix:PATH or HOST:PORT")
    source.add_json(parser)
    source.add_log_level(parser)
    parser.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    flags = {name: getattr(arguments, name.replace("-", "_")) for name in (*_OPTIONS, "config")}
    settings = config.load(flags, os.environ, storeless=True)
    found: list[Finding] = []
    for finding in _look(arguments, settings):
        found.append(finding)
        if not arguments.json:
            from ckptd.cli import render  # only people need rich

            output.write(render.finding(finding))
    count = Counter(finding.verdict for finding in found)
    if arguments.json:
        output.write(documents.text(_document(found)) + "\n")
    else:
        output.write(f"{count['ok']} ok, {count['warn']} to look at, {count['fail']} failed\n")
    return 3 if any(finding.unreachable for finding in found) else 1 if count["fail"] else 0


def _look(arguments: argparse.Namespace, settings: config.Settings) -> Iterator[Finding]:
    from ckptd import doctor  # it imports what no other command needs

    named = arguments.address is not None or bool(os.environ.get("CKPTD_ADDRESS"))
    address = source.address(arguments) if named else settings.address
    finding, status = _daemon(address, named=named)
    yield finding
    if status is not None and settings.memory is None and status.shm_dir == str(settings.shm_dir):
        settings = dataclasses.replace(settings, memory=status.memory)
    yield from doctor.examine(settings, daemons_store="" if status is None else status.store)


def _daemon(address: str, *, named: bool) -> tuple[Finding, daemon_pb2.StatusReply | None]:
    from ckptd.cli.dial import Daemon
    from ckptd.findings import Finding

    try:
        with Daemon(address) as running:
            status = running.status()
    except Unavailable as error:
        if named:
            found, _, advice = str(error).partition(": ")
            return Finding("daemon", "fail", found, advice, unreachable=True), None
        return Finding("daemon", "ok", f"none runs at {address}"), None
    except CkptdError as error:
        return Finding("daemon", "fail", str(error), "restart it with this version"), None
    found = f"{address} is up, version {status.version}, pid {status.pid}, store {status.store}"
    if status.version != __version__:
        return Finding("daemon", "warn", found, f"this is version {__version__}: restart the daemon with it"), status
    if status.draining:
        return Finding("daemon", "warn", f"{found}; it takes no new saves", "`ckptd drain --cancel` ends that"), status
    if status.warning:
        return Finding("daemon", "warn", f"{found}; {status.warning}", "`ckptd list` shows what failed"), status
    return Finding("daemon", "ok", found), status


def _document(found: list[Finding]) -> dict[str, Any]:
    worst = max((finding.verdict for finding in found), key=("ok", "warn", "fail").index)
    return {
        "verdict": worst,
        "checks": [
            {
                "name": finding.name,
                "verdict": finding.verdict,
                "found": finding.found,
                "advice": finding.advice,
                "figures": dict(finding.figures),
            }
            for finding in found
        ],
    }
