"""``ckptd list``, ``show``, ``status`` and ``wait``: what there is, from a daemon or from the store itself.

The same commands, documents and exit statuses whichever is asked. Changes nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from ckptd import config
from ckptd.cli import documents, output
from ckptd.errors import InvalidRequest
from ckptd.model import parse_run, parse_target

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from ckptd.cli.dial import Daemon
    from ckptd.cli.direct import Direct

_TARGET = "ID, RUN/ID, latest or RUN/latest"


def add_commands(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the reading commands to the CLI."""
    listing = _add(commands, "list", "list checkpoints, by run and step", store=True)
    listing.add_argument("--run", metavar="RUN", dest="only_run", help="only this run's ('' is the run of ids without one)")
    listing.set_defaults(run=_list)

    show = _add(commands, "show", "show one checkpoint and its tensors", store=True)
    show.add_argument("id", metavar="ID", help=_TARGET)
    show.set_defaults(run=_show)

    status = _add(commands, "status", "show how the daemon is", store=False)
    status.set_defaults(run=_status)

    wait = _add(commands, "wait", "wait until a checkpoint is durable", store=True, json=False)
    wait.add_argument("id", metavar="ID", help=_TARGET)
    wait.add_argument("--timeout", metavar="D", help="give up after this time, such as 90s (never)")
    wait.set_defaults(run=_wait)


def _add(
    commands: _SubParsersAction[argparse.ArgumentParser], name: str, summary: str, *, store: bool, json: bool = True
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, description=f"{summary.capitalize()}.", allow_abbrev=False)
    where = parser.add_argument_group("where to look (default: the daemon at CKPTD_ADDRESS, else at the usual socket)")
    where.add_argument("--address", metavar="ADDRESS", help="of the daemon: unix:PATH or HOST:PORT")
    if store:
        where.add_argument("--store", metavar="URL", help="read the store itself: needs no daemon")
        where.add_argument("--store-option", metavar="K=V", action="append", help="option of the store's filesystem, repeatable")
    if json:
        parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--log-level", metavar="LEVEL", choices=config.LOG_LEVELS, help="debug shows tracebacks")
    return parser


def _list(arguments: argparse.Namespace) -> int:
    run = None if arguments.only_run is None else parse_run(arguments.only_run)
    with _source(arguments) as source:
        listed = sorted(source.checkpoints(run), key=documents.order)
        where = source.where
    if arguments.json:
        output.write(documents.text([documents.checkpoint(one) for one in listed]) + "\n")
        return 0
    from ckptd.cli import render  # only people need rich

    output.write(render.checkpoints(listed, where, arguments.only_run))
    return 0


def _show(arguments: argparse.Namespace) -> int:
    parse_target(arguments.id)
    with _source(arguments) as source:
        whole = source.show(arguments.id)
    if arguments.json:
        output.write(documents.text(documents.shown(whole)) + "\n")
        return 0
    from ckptd.cli import render  # only people need rich

    output.write(render.shown(whole))
    return 0


def _status(arguments: argparse.Namespace) -> int:
    with _daemon(arguments) as daemon:
        reply = daemon.status()
    if arguments.json:
        output.write(documents.text(documents.status(reply)) + "\n")
        return 0
    from ckptd.cli import render  # only people need rich

    output.write(render.status(reply))
    return 0


def _wait(arguments: argparse.Namespace) -> int:
    parse_target(arguments.id)
    timeout_seconds = None
    if arguments.timeout is not None:
        try:
            timeout_seconds = config.parse_duration(arguments.timeout)
        except InvalidRequest as error:
            raise InvalidRequest(f"--timeout: {error}") from None
    with _source(arguments) as source:
        durable = source.wait(arguments.id, timeout_seconds)
    if durable is None:
        print(f"ckptd: {arguments.id} is not durable after {timeout_seconds:g} s", file=sys.stderr)
        return 1
    output.write(f"{durable} is durable\n")
    return 0


def _source(arguments: argparse.Namespace) -> AbstractContextManager[Daemon | Direct]:
    """What the flags say to look at."""
    if arguments.store is None:
        if arguments.store_option:
            raise InvalidRequest("--store-option goes with --store URL; a daemon has its own")
        return _daemon(arguments)
    if arguments.address is not None:
        raise InvalidRequest("give --address or --store, not both: the first asks a daemon, the second reads the store itself")
    if not arguments.store:
        raise InvalidRequest("--store: it names no store; give a directory or a URL such as s3://bucket/prefix")
    from ckptd.cli.direct import Direct  # a daemon's callers need no store

    return nullcontext(Direct(arguments.store, config.parse_store_options(arguments.store_option or [])))


def _daemon(arguments: argparse.Namespace) -> Daemon:
    from ckptd.cli.dial import Daemon  # a store's readers need no gRPC

    if arguments.address is not None:
        source, address = "--address", arguments.address
    elif os.environ.get("CKPTD_ADDRESS"):
        source, address = "CKPTD_ADDRESS", os.environ["CKPTD_ADDRESS"]
    else:
        source, address = "", config.default_address()
    try:
        address = config.parse_address(address)
    except InvalidRequest as error:
        raise InvalidRequest(f"{source}: {error}") from None
    return Daemon(address)
