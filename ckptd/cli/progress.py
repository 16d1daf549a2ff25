"""How far a long command has come: a bar on standard error, if that is a terminal, else nothing.

Promises: never writes to standard output, and leaves nothing on the terminal when it is done.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Bar:
    """Bytes of one thing after another. Use as a context manager."""

    def __init__(self) -> None:
        self._shown = sys.stderr is not None and sys.stderr.isatty()
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def show(self, what: str, nbytes: int, total_nbytes: int) -> None:
        """`what` has come to `nbytes` of `total_nbytes`."""
        if not self._shown:
            return
        if self._progress is None or self._task is None:
            self._progress = _bar()
            self._progress.start()
            self._task = self._progress.add_task("")
        self._progress.update(self._task, description=what, completed=nbytes, total=total_nbytes)

    def clear(self) -> None:
        """Takes it away, so that a line can be printed; the next `show` brings it back."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = self._task = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.clear()


def _bar() -> Progress:
    from rich.console import Console  # only terminals need rich
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
