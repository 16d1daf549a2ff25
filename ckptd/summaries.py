"""What the store knows of its checkpoints, a line of each; as `list` shows them and readers open them.

Promises: one that is damaged has a line, too, with the reason. Lives on the loop; the store is asked in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Final

from ckptd import errors
from ckptd.ledger import Ledger
from ckptd.scan import Entry
from ckptd.v1.daemon_pb2 import Checkpoint
from ckptd.v1.manifest_pb2 import Summary

#: Summaries kept: they never change, an attempt's name is theirs for good.
REMEMBERED: Final = 10_000


class Summaries:
    """Asks the ledger for what is not known yet."""

    def __init__(self, ledger: Ledger, threads: Executor) -> None:
        self.ledger = ledger
        self.threads = threads
        self._known: dict[tuple[str, str], Summary] = {}

    async def line(self, entry: Entry) -> Checkpoint:
        """Raises Corrupt if not even its summary can be read."""
        line = (await self.lines([entry]))[0]
        if line.state != Checkpoint.DURABLE:
            raise errors.Corrupt(line.reason)
        return line

    async def lines(self, entries: Sequence[Entry]) -> list[Checkpoint]:
        """In their order; what is damaged is incomplete, with the reason."""
        unknown = [entry for entry in entries if entry.save_id is None or (str(entry.id), entry.save_id) not in self._known]
        found = await asyncio.get_running_loop().run_in_executor(self.threads, self.ledger.summaries, unknown) if unknown else []
        fresh = dict(zip([entry.id for entry in unknown], found, strict=True))
        lines: list[Checkpoint] = []
        for entry in entries:
            key = (str(entry.id), entry.save_id or "")
            summary = fresh.get(entry.id) or self._known[key]
            if isinstance(summary, errors.Corrupt):
                lines.append(Checkpoint(summary=Summary(id=str(entry.id)), state=Checkpoint.INCOMPLETE, reason=str(summary)))
                continue
            if entry.save_id is not None and len(self._known) < REMEMBERED:
                self._known[key] = summary
            lines.append(Checkpoint(summary=summary, state=Checkpoint.DURABLE, stock=entry.attempt is None, pinned=entry.pinned))
        return lines
