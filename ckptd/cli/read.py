"""``ckptd list``, ``show`` and ``status``: what there is, from a daemon or from the store itself.

The same commands, documents and exit statuses whichever is asked. Changes nothing.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ckptd import collector
from ckptd.cli import documents, output, source
from ckptd.model import parse_run, parse_target

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_commands(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the reading commands to the CLI."""
    listing = source.add_parser(commands, "list", "list checkpoints, by run and step")
    listing.add_argument("--run", metavar="RUN", dest="only_run", help="only this run's ('' is the run of ids without one)")
    listing.set_defaults(run=_list)

    show = source.add_parser(commands, "show", "show one checkpoint and its tensors")
    show.add_argument("id", metavar="ID", help=source.TARGET)
    show.set_defaults(run=_show)

    status = source.add_parser(commands, "status", "show how the daemon is", store=False)
    status.set_defaults(run=_status)


def _list(arguments: argparse.Namespace) -> int:
    run = None if arguments.only_run is None else parse_run(arguments.only_run)
    with source.opened(arguments) as opened:
        found, trouble = opened.listing(run)
        listed = sorted(found, key=documents.order)
        where = opened.where
    if arguments.json:
        output.write(documents.text([documents.checkpoint(one) for one in listed]) + "\n")
    else:
        from ckptd.cli import render  # only people need rich

        output.write(render.checkpoints(listed, where, arguments.only_run))
    if trouble is not None:  # what is there is worth showing, and no answer
        raise trouble
    return 0


def _show(arguments: argparse.Namespace) -> int:
    parse_target(arguments.id)
    with source.opened(arguments) as opened, collector.paused():
        whole = opened.show(arguments.id)
        if arguments.json:
            text = documents.text(documents.shown(whole)) + "\n"
        else:
            from ckptd.cli import render  # only people need rich

            text = render.shown(whole)
    output.write(text)
    return 0


def _status(arguments: argparse.Namespace) -> int:
    with source.daemon(arguments) as daemon:
        reply = daemon.status()
    if arguments.json:
        output.write(documents.text(documents.status(reply)) + "\n")
        return 0
    from ckptd.cli import render  # only people need rich

    output.write(render.status(reply))
    return 0
