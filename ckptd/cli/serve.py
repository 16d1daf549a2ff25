"""``ckptd serve``: from flags, environment and file to a running daemon."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from ckptd import config, options
from ckptd.cli import source

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_commands(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``serve`` to the commands of the CLI."""
    parser = commands.add_parser(
        "serve",
        help="run the daemon of this node",
        description="Runs the daemon of this node until SIGTERM or SIGINT. Each option is also an environment variable "
        "(--shm-dir is CKPTD_SHM_DIR; repeated ones comma-separated, those without a value true or false) and a key of the --config "
        "file; a flag goes before the environment, the environment before the file.",
        allow_abbrev=False,
    )
    for option in options.OPTIONS:
        source.add_option(parser, option)
    parser.add_argument("--config", metavar="FILE.toml", help="file with any of these options as keys")
    parser.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    flags = {name.replace("_", "-"): value for name, value in vars(arguments).items() if name != "run"}
    settings = config.load(flags, os.environ)
    # The daemon's rooms are of no use to the other commands, and take longest to import.
    from ckptd import daemon

    return daemon.serve(settings)
