"""Where a command looks: a running daemon or the store itself, and the flags that say which.

Promises: every command spells these flags alike, and what cannot go together is wrong use
before anything is asked. A daemon's callers import no store, a store's readers no gRPC.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from ckptd import addresses, options
from ckptd.errors import InvalidRequest

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from ckptd.cli.dial import Daemon
    from ckptd.cli.direct import Direct

T = TypeVar("T")

#: Options of ``serve`` by name, which other commands take as well.
OPTIONS = {option.name: option for option in options.OPTIONS}
#: Help for an argument that `model.parse_target` reads.
TARGET = "ID, RUN/ID, latest or RUN/latest"


def add_parser(
    commands: _SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    *,
    description: str = "",
    store: bool = True,
    json: bool = True,
) -> argparse.ArgumentParser:
    """A command with the flags that all have; `store`: it works on a store without a daemon, too."""
    parser = commands.add_parser(name, help=summary, description=description or f"{summary.capitalize()}.", allow_abbrev=False)
    where = parser.add_argument_group("where to look (default: the daemon at CKPTD_ADDRESS, else at the usual socket)")
    where.add_argument("--address", metavar="ADDRESS", help="of the daemon: unix:PATH or HOST:PORT")
    if store:
        where.add_argument("--store", metavar="URL", help="open the store itself: needs no daemon")
        add_store_option(where)
    if json:
        add_json(parser)
    add_log_level(parser)
    return parser


def add_store_option(parser: argparse._ActionsContainer) -> None:
    """The flag that goes with ``--store``."""
    parser.add_argument("--store-option", metavar="K=V", action="append", help="option of the store's filesystem, repeatable")


def add_option(parser: argparse._ActionsContainer, option: options.Option) -> None:
    """An option that ``serve`` has, too: spelled and explained alike."""
    if option.switch:
        # Not given is not the same as false: the environment may say true.
        parser.add_argument(f"--{option.name}", help=option.help, action="store_true", default=None)
        return
    parser.add_argument(
        f"--{option.name}",
        metavar=option.metavar,
        help=option.help + (", repeatable" if option.repeated else ""),
        action="append" if option.repeated else "store",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """The flag of commands that can print a document."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def add_log_level(parser: argparse.ArgumentParser) -> None:
    """The flag of every command but ``serve``, which has one of its own."""
    parser.add_argument("--log-level", metavar="LEVEL", choices=options.LOG_LEVELS, help="debug shows tracebacks")


def opened(arguments: argparse.Namespace) -> AbstractContextManager[Daemon | Direct]:
    """What the flags say to look at. Raises InvalidRequest, Unavailable."""
    if arguments.store is None:
        if arguments.store_option:
            raise InvalidRequest("--store-option goes with --store URL; a daemon has its own")
        return daemon(arguments)
    if arguments.address is not None:
        raise InvalidRequest("give --address or --store, not both: the first asks a daemon, the second opens the store itself")
    if not arguments.store:
        raise InvalidRequest("--store: it names no store; give a directory or a URL such as s3://bucket/prefix")
    from ckptd.cli.direct import Direct  # a daemon's callers need no store

    return nullcontext(Direct(arguments.store, options.parse_store_options(arguments.store_option or [])))


def daemon(arguments: argparse.Namespace) -> Daemon:
    """The daemon that the flags or the environment name. Raises InvalidRequest, Unavailable."""
    from ckptd.cli.dial import Daemon  # a store's readers need no gRPC

    return Daemon(address(arguments))


def address(arguments: argparse.Namespace) -> str:
    """Where the daemon listens: the flag, else the environment, else the usual socket. Raises InvalidRequest."""
    if arguments.address is not None:
        source, text = "--address", arguments.address
    elif os.environ.get("CKPTD_ADDRESS"):
        source, text = "CKPTD_ADDRESS", os.environ["CKPTD_ADDRESS"]
    else:
        source, text = "", addresses.default_address()
    try:
        return addresses.parse_address(text)
    except InvalidRequest as error:
        raise InvalidRequest(f"{source}: {error}") from None


def option(arguments: argparse.Namespace, name: str) -> Any:
    """What the flag of that option of ``serve`` says; None if it was not given. Raises InvalidRequest."""
    return _read(arguments, name, OPTIONS[name].parse)


def duration(arguments: argparse.Namespace, name: str) -> float | None:
    """Seconds from the flag ``--name``; None if it was not given. Raises InvalidRequest."""
    return _read(arguments, name, options.parse_duration)


def _read(arguments: argparse.Namespace, name: str, parse: Callable[[str], T]) -> T | None:
    text = getattr(arguments, name.replace("-", "_"))
    if text is None:
        return None
    try:
        return parse(text)
    except InvalidRequest as error:
        raise InvalidRequest(f"--{name}: {error}") from None
