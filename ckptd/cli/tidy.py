"""``ckptd prune``, ``delete``, ``pin`` and ``unpin``: what may go, and what has to stay.

The same commands, documents and exit statuses whether a daemon or the store itself is asked.
What is deleted is gone at once for who lists and loads; its files stay for the grace.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ckptd.cli import documents, output, source
from ckptd.errors import InvalidRequest
from ckptd.model import CheckpointId, parse_run, parse_target
from ckptd.retention import Policy

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_commands(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the commands that delete, and those that prevent it."""
    prune = source.add_parser(
        commands,
        "prune",
        "delete old checkpoints, and sweep what is left over",
        description="Deletes, of each run, the checkpoints that no rule keeps and nobody pinned, never the newest; then the files "
        "whose time has come: of what was deleted before, and of uploads that were cut off. Without a rule no checkpoint is deleted "
        "(a daemon applies the rules that it was started with, if any). Without --delete-grace and --orphan-age: the daemon's own. "
        "With --store, only --orphan-age tells an upload that is under way from one that was cut off.",
    )
    for name in ("keep-last", "keep-every", "keep-within", "delete-grace", "orphan-age"):
        source.add_option(prune, source.OPTIONS[name])
    prune.add_argument("--run", metavar="RUN", dest="only_run", help="only this run ('' is the run of ids without one)")
    prune.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    prune.set_defaults(run=_prune)

    delete = source.add_parser(commands, "delete", "delete one checkpoint")
    delete.add_argument("id", metavar="ID", help="ID or RUN/ID")
    delete.set_defaults(run=_delete)

    pin = source.add_parser(commands, "pin", "keep a checkpoint from being deleted")
    pin.add_argument("id", metavar="ID", help=source.TARGET)
    pin.set_defaults(run=_pin, pinned=True)

    unpin = source.add_parser(commands, "unpin", "let a pinned checkpoint be deleted again")
    unpin.add_argument("id", metavar="ID", help="ID or RUN/ID")
    unpin.set_defaults(run=_pin, pinned=False)


def _prune(arguments: argparse.Namespace) -> int:
    run = None if arguments.only_run is None else parse_run(arguments.only_run)
    rules = Policy(
        keep_last=source.option(arguments, "keep-last"),
        keep_every=source.option(arguments, "keep-every"),
        keep_within_seconds=source.option(arguments, "keep-within"),
    )
    delete_grace_seconds = source.option(arguments, "delete-grace")
    orphan_age_seconds = source.option(arguments, "orphan-age")
    with source.opened(arguments) as opened:
        pruned = opened.prune(
            run,
            None if rules.empty else rules,
            dry_run=arguments.dry_run,
            delete_grace_seconds=delete_grace_seconds,
            orphan_age_seconds=orphan_age_seconds,
        )
    if arguments.json:
        output.write(documents.text(documents.pruned(pruned, dry_run=arguments.dry_run)) + "\n")
        return 0
    from ckptd.cli import render  # only people need rich

    output.write(render.pruned(pruned, dry_run=arguments.dry_run))
    if rules.empty and all("no rule was given" in verdict.reason for verdict in pruned.verdicts):  # a daemon may have its own
        output.write("without a rule no checkpoint is deleted: --keep-last N, --keep-every K or --keep-within AGE is one\n")
    return 0


def _delete(arguments: argparse.Namespace) -> int:
    named = _id(arguments.id, "is deleted")
    with source.opened(arguments) as opened:
        deleted = opened.delete(named)
    if arguments.json:
        output.write(documents.text(documents.deleted(deleted)) + "\n")
        return 0
    from ckptd.cli import render  # only people need rich

    output.write(render.deleted(deleted))
    return 0


def _pin(arguments: argparse.Namespace) -> int:
    target = arguments.id
    if arguments.pinned:
        parse_target(target)
    else:
        _id(target, "is unpinned")
    with source.opened(arguments) as opened:
        checkpoint = opened.pin(target, pinned=arguments.pinned)
    if arguments.json:
        output.write(documents.text(documents.checkpoint(checkpoint)) + "\n")
    else:
        output.write(f"{checkpoint.summary.id} is {'pinned' if arguments.pinned else 'no longer pinned'}\n")
    return 0


def _id(target: str, fate: str) -> CheckpointId:
    wanted = parse_target(target)
    if isinstance(wanted, CheckpointId):
        return wanted
    raise InvalidRequest(f"{target!r} may be another one by now: `ckptd show {target}` tells its id, and an id is what {fate}")
