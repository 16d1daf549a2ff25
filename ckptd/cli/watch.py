"""``ckptd wait``, ``verify`` and ``drain``: commands that take their time, and say how far they have come.

The answer can be no: then it stands on standard output like any other, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckptd.cli import documents, output, source
from ckptd.cli.documents import Verified
from ckptd.cli.progress import Bar
from ckptd.errors import InvalidRequest, NotFound, Unavailable
from ckptd.model import CheckpointId, parse_run, parse_target
from ckptd.v1 import daemon_pb2

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from ckptd.cli.dial import Daemon
    from ckptd.cli.direct import Direct


_INCOMPLETE = daemon_pb2.Checkpoint.INCOMPLETE


def add_commands(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the commands that wait for something."""
    wait = source.add_parser(commands, "wait", "wait until a checkpoint is durable")
    wait.add_argument("id", metavar="ID", help=source.TARGET)
    wait.add_argument("--timeout", metavar="D", help="give up after this time, such as 90s (never)")
    wait.set_defaults(run=_wait)

    verify = source.add_parser(
        commands,
        "verify",
        "read checkpoints back from the store, and say what is damaged",
        description="Reads every byte of one checkpoint, or of all, back from the store and checks it. "
        "Exit status 1 if anything is damaged. What is not, or not yet, in the store is said to be incomplete or unstored: "
        "that is no damage, but 1 if its ID was given.",
    )
    verify.add_argument("id", metavar="ID", nargs="?", help=f"{source.TARGET} (all)")
    verify.add_argument("--all", action="store_true", help="all checkpoints, which is the default")
    verify.add_argument("--run", metavar="RUN", dest="only_run", help="all of this run ('' is the run of ids without one)")
    verify.set_defaults(run=_verify)

    drain = source.add_parser(
        commands,
        "drain",
        "take no new saves, and wait until all that was accepted is durable",
        description="The daemon takes no new saves from now on, and this command waits until all that it accepted is durable. "
        "Exit status 1 with the reasons if something never will be, or is not within the time. What was saved with durable=False "
        "stays in memory only: it is named, and is no failure. Loads go on.",
        store=False,
    )
    drain.add_argument("--timeout", metavar="D", help="stop waiting after this time, such as 90s (never); the daemon stays drained")
    drain.add_argument("--cancel", action="store_true", help="take new saves again")
    drain.set_defaults(run=_drain)


def _wait(arguments: argparse.Namespace) -> int:
    parse_target(arguments.id)
    timeout_seconds = source.duration(arguments, "timeout")
    with source.opened(arguments) as opened:
        durable = opened.wait(arguments.id, timeout_seconds)
        reason = opened.delayed(arguments.id) if durable is None else ""
    if arguments.json:
        output.write(documents.text(documents.waited(durable or arguments.id, durable=durable is not None, reason=reason)) + "\n")
    elif durable is not None:
        output.write(f"{durable} is durable\n")
    if durable is None:
        return _late(arguments.id + " is not durable{}", timeout_seconds, reason)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    target, run = arguments.id, arguments.only_run
    if target is not None and (arguments.all or run is not None):
        raise InvalidRequest("give an ID, or --all, or --run: an ID is verified alone")
    if target is not None:
        parse_target(target)
    if run is not None:
        parse_run(run)
    found: list[Verified] = []
    with source.opened(arguments) as opened, Bar() as bar:
        for one in _verified(opened, bar, target, run):
            found.append(one)
            if not arguments.json:
                from ckptd.cli import render  # only people need rich

                bar.clear()
                output.write(render.verified(one))
        where = opened.where
    if arguments.json:
        output.write(documents.text(documents.verified(found)) + "\n")
    elif target is None:
        from ckptd.cli import render  # only people need rich

        output.write(render.verdict(found, where, run))
    # What was asked for by name has to be there; among all, what is not there yet is no damage.
    return 1 if any(one.damage or (one.absent and target is not None) for one in found) else 0


def _verified(opened: Daemon | Direct, bar: Bar, target: str | None, run: str | None) -> Iterator[Verified]:
    """Each checkpoint as soon as it is known, then what is incomplete."""
    listed = opened.checkpoints(run) if target is None else []
    number = sum(one.state == _INCOMPLETE for one in listed)
    told: set[str] = set()
    now: Verified | None = None
    try:
        for reply in opened.verify(target or "", run):
            if now is None or now.id != reply.id:
                now = Verified(reply.id)
                told.add(reply.id)
            now.nbytes, now.total_nbytes, now.note = reply.nbytes, reply.total_nbytes, reply.note or now.note
            now.damage.extend(reply.damage)
            place = f"[{len(told)} of {len(listed) - number}] " if listed else ""
            bar.show(place + reply.id, reply.nbytes, reply.total_nbytes)
            if reply.ended:
                # Whatever is in the store has bytes.
                now.absent = "" if reply.total_nbytes or now.damage else "unstored"
                yield now
                now = None
    except NotFound:
        wanted = parse_target(target or "")
        if not isinstance(wanted, CheckpointId):
            raise
        listed = [one for one in opened.checkpoints(wanted.run) if one.summary.id == str(wanted)]
        if not any(one.state == _INCOMPLETE for one in listed):
            raise
    if now is not None:
        raise Unavailable(f"the answer about {now.id} ended early: try again")
    for one in listed:
        if one.state == _INCOMPLETE and one.summary.id not in told:
            yield Verified(one.summary.id, note=one.reason, absent="incomplete")


def _drain(arguments: argparse.Namespace) -> int:
    timeout_seconds = source.duration(arguments, "timeout")
    if arguments.cancel and timeout_seconds is not None:
        raise InvalidRequest("--cancel does not wait: leave out --timeout")
    last: daemon_pb2.DrainReply | None = None
    most = 0
    with source.daemon(arguments) as daemon, Bar() as bar:
        for last in daemon.drain(cancel=arguments.cancel, timeout_seconds=timeout_seconds):
            most = max(most, last.nbytes)
            bar.show(f"{last.accepted + len(last.begun)} on the way", most - last.nbytes, most)
    if last is None:
        return _late("the daemon did not say how far it is{}", timeout_seconds)
    if arguments.json:
        output.write(documents.text(documents.drained(last, draining=not arguments.cancel)) + "\n")
    else:
        from ckptd.cli import render  # only people need rich

        output.write(render.drained(last, draining=not arguments.cancel))
    if (last.accepted or last.begun) and not arguments.cancel:
        return _late("not everything is durable{}; the daemon goes on, and takes no new saves", timeout_seconds)
    return 1 if last.failed else 0


def _late(what: str, timeout_seconds: float | None, reason: str = "") -> int:
    after = "" if timeout_seconds is None else f" after {timeout_seconds:g} s"
    why = f": {' '.join(reason.split())}" if reason else ""
    print(f"ckptd: {what.format(after)}{why}", file=sys.stderr)
    return 1
