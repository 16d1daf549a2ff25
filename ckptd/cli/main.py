"""The command ``ckptd``: parse, dispatch, and turn whatever goes wrong into one line and an exit status.

Exit statuses: 0 done, 1 the answer is no, 2 wrong use, 3 store or daemon
unreachable; 130 after Ctrl-C, 141 when whoever read our output went away.
Never shows a traceback, unless ``--log-level debug`` asks for it.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from ckptd import __version__
from ckptd.cli import doctor, output, read, serve, tidy, watch
from ckptd.errors import CkptdError, InvalidRequest

_log = logging.getLogger(__name__)


class _Parser(argparse.ArgumentParser):
    """Reports wrong use as every other error is reported: in one line."""

    def error(self, message: str) -> NoReturn:
        where = f"{self.prog} COMMAND" if message.startswith("unrecognized") else self.prog  # argparse has the main parser say that
        raise InvalidRequest(f"{message}; see {where} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    arguments: argparse.Namespace | None = None
    # gRPC would say on stderr, in its own words, what we say in one line.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # What the rooms warn of goes to stderr as all else that we have to say; `serve` logs in its own way.
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(logging.Formatter("ckptd: %(message)s"))
    # A key of a checkpoint may hold what the terminal's encoding cannot show.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    with _unraisable(lambda: _wants_traceback(arguments)):
        try:
            arguments = _parsed(argv)
            status: int = arguments.run(arguments)
            output.flush()
        except CkptdError as error:
            _say(str(error) or type(error).__name__)
            _trace(arguments)
            return error.exit_status
        except KeyboardInterrupt:
            return 130
        except BrokenPipeError:
            output.abandon(sys.stdout)
            return 141
        except Exception as error:  # noqa: BLE001 - the last edge: a user gets a line, not a traceback
            hint = "" if _wants_traceback(arguments) else " (this is a defect of ckptd; --log-level debug shows where)"
            _say(f"{type(error).__name__}: {error}{hint}")
            _trace(arguments)
            return 1
        return status


@contextlib.contextmanager
def _unraisable(wants_traceback: Callable[[], bool]) -> Iterator[None]:
    """Inside it, what goes wrong where Python can raise nothing is a line of the log: some storage packages fail once more in `__del__`."""
    before = sys.unraisablehook

    def tell(what: Any) -> None:
        if wants_traceback():
            before(what)
        else:
            _log.info("ignored %s: %s", what.exc_type.__name__, what.exc_value)

    sys.unraisablehook = tell
    try:
        yield
    finally:
        sys.unraisablehook = before


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    try:
        return _parser().parse_args(argv)
    except SystemExit:  # --help or --version has been answered
        output.flush()
        raise


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(prog="ckptd", description="A checkpoint daemon for PyTorch training.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"ckptd {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    serve.add_commands(commands)
    read.add_commands(commands)
    watch.add_commands(commands)
    tidy.add_commands(commands)
    doctor.add_commands(commands)
    return parser


def _say(message: str) -> None:
    if sys.stderr is not None:  # print would take standard output instead
        try:
            print(f"ckptd: {' '.join(message.split())}", file=sys.stderr)
        except OSError:
            output.abandon(sys.stderr)  # the exit status says what it can


def _trace(arguments: argparse.Namespace | None) -> None:
    if _wants_traceback(arguments):
        traceback.print_exc()


def _wants_traceback(arguments: argparse.Namespace | None) -> bool:
    level = getattr(arguments, "log_level", None) or os.environ.get("CKPTD_LOG_LEVEL") or ""
    return str(level).lower() == "debug"
