"""What people see: tables and lines. Programs read `documents` instead.

Rendered to text first and then written at once, so that a reader that goes away
is noticed in one place. Whatever comes from a checkpoint is shown without
control characters. When stdout is no terminal nothing is cut to its width.
"""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ckptd.cli import columns, documents
from ckptd.v1 import daemon_pb2

if TYPE_CHECKING:
    from ckptd.findings import Finding

#: So many rows take rich a moment; more of them are written plainly.
_MANY = 1000
#: Columns when nobody's terminal limits them.
_UNLIMITED = 10_000
_STYLES = {"durable": "green", "accepted": "cyan", "replicated": "cyan", "failed": "red", "lost": "red", "incomplete": "yellow"}


def checkpoints(listed: Sequence[daemon_pb2.Checkpoint], where: str, run: str | None = None) -> str:
    """One line per checkpoint."""
    if not listed:
        return f"no checkpoints {f'of run {run!r} ' if run is not None else ''}in {_plain(where)} yet\n"
    table = _table("ID", "STEP", "STATE", "CREATED (UTC)", "RAW", "STORED", "WORLD", "NOTE", right=("STEP", "RAW", "STORED", "WORLD"))
    for one in listed:
        number = documents.step(one)
        state = documents.state(one)
        table.add_row(
            _text(one.summary.id),
            "" if number is None else str(number),
            Text(state, style=_STYLES.get(state, "")),
            _when(one),
            _known_size(one.summary.raw_bytes),
            _known_size(one.summary.stored_bytes),
            str(one.summary.world_size or ""),
            _text(_note(one)),
        )
    return _render(table)


def shown(whole: documents.Shown) -> str:
    """One checkpoint: its facts, then its tensors and objects."""
    one = whole.checkpoint
    summary = one.summary
    facts = _facts(
        ("id", summary.id),
        ("step", "" if documents.step(one) is None else str(documents.step(one))),
        ("state", documents.state(one)),
        ("note", _note(one)),
        ("created", documents.created(one) or ""),
        ("raw", _known_size(summary.raw_bytes)),
        ("stored", _known_size(summary.stored_bytes)),
        ("codec", summary.codec),
        ("world size", str(summary.world_size or "")),
        ("tags", ", ".join(f"{key}={value}" for key, value in sorted(summary.tags.items()))),
        ("files", str(len(whole.files) or "")),
    )
    names, right = ("NAME", "DTYPE", "SHAPE", "BYTES", "CHUNKS", "SHARDS"), ("BYTES", "CHUNKS", "SHARDS")
    rows = [
        (
            _plain(documents.name(tensor.fqn)),
            _plain(tensor.dtype or "object"),
            f"[{', '.join(map(str, tensor.shape))}]" if tensor.dtype else "",
            _size(tensor.raw_bytes),
            str(tensor.chunks or ""),
            str(tensor.shards or ""),
        )
        for tensor in whole.tensors
    ]
    if len(rows) > _MANY:
        rule = "─" if _Page().encoding.lower().startswith("utf") else "-"
        return _render(facts) + "\n" + columns.plain(names, rows, right=right, rule=rule)
    table = _table(*names, right=right)
    for row in rows:
        table.add_row(*map(Text, row))
    return _render(facts) + "\n" + _render(table)


def status(reply: daemon_pb2.StatusReply) -> str:
    """A daemon's figures."""
    served = documents.status(reply)["bytes_from"]
    share = f" ({100 * reply.used / reply.memory:.0f} %)" if reply.memory else ""
    return _render(
        _facts(
            ("node", reply.node),
            ("version", reply.version),
            ("pid", str(reply.pid)),
            ("up", _duration(reply.uptime_seconds)),
            ("store", reply.store),
            ("shm-dir", reply.shm_dir),
            ("memory", f"{_size(reply.used)} of {_size(reply.memory)}{share} in {reply.segments} segments"),
            ("leases", str(reply.leases)),
            ("open shards", str(reply.open_shards)),
            ("waiting for memory", str(reply.waiting)),
            ("accepted, not durable", f"{reply.accepted}" + (f", {reply.replicated} of them replicated" if reply.replicated else "")),
            ("lost", str(reply.lost) if reply.lost else ""),
            ("failed", str(reply.failed)),
            ("draining", "yes: no new saves are taken" if reply.draining else ""),
            ("reached at", reply.address),
            ("peers", ", ".join(_peer(peer) for peer in reply.peers)),
            ("served from", ", ".join(f"{source} {_size(nbytes)}" for source, nbytes in served.items())),
            ("warning", reply.warning),
        )
    )


def _peer(peer: daemon_pb2.PeerStatus) -> str:
    if peer.never_answered:
        return f"{peer.address} (never answered)"
    return peer.address + (f" (gone for {_duration(peer.gone_seconds)})" if peer.gone_seconds else "")


def pruned(reply: daemon_pb2.PruneReply, *, dry_run: bool) -> str:
    """A line per checkpoint with the reason, then what it comes to."""
    swept = reply.swept
    gone = [verdict for verdict in reply.verdicts if not verdict.kept]
    page = ""
    if reply.verdicts:
        table = _table("ID", "STORED", "VERDICT", right=("STORED",))
        for verdict in reply.verdicts:
            style = "" if verdict.kept else "red"
            reason = verdict.reason.replace("deleted:", "would delete:", 1) if dry_run and not verdict.kept else verdict.reason
            table.add_row(_text(verdict.id), _known_size(verdict.stored_bytes), Text(_plain(reason), style=style))
        page = _render(table) + "\n"
    nbytes = sum(verdict.stored_bytes for verdict in gone)
    page += f"{'would delete' if dry_run else 'deleted'} {_count(len(gone), 'checkpoint')} ({_size(nbytes)}), "
    page += f"{'would keep' if dry_run else 'kept'} {len(reply.verdicts) - len(gone)}\n"
    page += f"{'would sweep' if dry_run else 'swept'} {_count(swept.files, 'file')} ({_size(swept.nbytes)})"
    if swept.later_files:
        page += f"; {_count(swept.later_files, 'file')} ({_size(swept.later_nbytes)}) wait for their time"
    return page + "\n"


def deleted(reply: daemon_pb2.Deleted) -> str:
    """What is gone, and when its files go."""
    if not reply.files:
        return f"{reply.id} is deleted\n"
    files = f"{_count(reply.files, 'file')} ({_size(reply.nbytes)})"
    return f"{reply.id} is deleted; {files} go with the first `ckptd prune`, or sweep of a daemon, after {_duration(reply.grace_seconds)}\n"


def verified(one: documents.Verified) -> str:
    """One line, and one for each place that is damaged."""
    style = {"ok": "green", "damaged": "red"}.get(one.verdict, "yellow")
    line = Text.assemble(_plain(one.id), ": ", (one.verdict, style))
    if not one.absent:
        line.append(f", {_size(one.nbytes)} read")
    if one.note:
        line.append(f"; {_plain(one.note)}")
    return _render(line) + "".join(_render(_text(f"    {place}")) for place in one.damage)


def verdict(found: Sequence[documents.Verified], where: str, run: str | None) -> str:
    """What all of it comes to."""
    if not found:
        return checkpoints([], where, run)
    count = Counter(one.verdict for one in found)
    return ", ".join(f"{count[word]} {word}" for word in ("ok", "damaged", "incomplete", "unstored") if count[word]) + "\n"


def drained(reply: daemon_pb2.DrainReply, *, draining: bool) -> str:
    """How far it is, and what never will be durable."""
    page = "".join(f"{_plain(why)}\n" for why in reply.failed)
    page += "".join(f"{_plain(id_)}, saved with durable=False: it stays in memory only\n" for id_ in reply.memory_only)
    if not draining:
        return page + "the daemon takes new saves again\n"
    page += "".join(f"{_plain(id_)} has begun to be saved, and is not accepted yet\n" for id_ in reply.begun)
    if reply.accepted:
        return page + f"still on the way: {_count(reply.accepted, 'checkpoint')} ({_size(reply.nbytes)})\n"
    if reply.begun:
        return page + "all that was accepted is durable\n"
    if reply.failed:
        return page + "nothing else is on the way, and no new saves are taken (`ckptd drain --cancel` ends that)\n"
    rest = "all else" if reply.memory_only else "all"
    return page + f"{rest} that was accepted is durable, and no new saves are taken (`ckptd drain --cancel` ends that)\n"


def finding(found: Finding) -> str:
    """One line of what was found, and the way out below it."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(width=4)
    table.add_column(width=13)
    table.add_column(overflow="fold")
    style = {"ok": "green", "warn": "yellow", "fail": "red"}[found.verdict]
    table.add_row(Text(found.verdict, style=style), Text(found.name), _text(found.found))
    if found.advice:
        table.add_row("", "", _text(f"→ {found.advice}"))
    return _render(table)


def _note(one: daemon_pb2.Checkpoint) -> str:
    notes = [word for word, true in (("pinned", one.pinned), ("stock", one.stock), ("abandoned", one.abandoned)) if true]
    return "; ".join([*notes, one.reason] if one.reason else notes)


def _when(one: daemon_pb2.Checkpoint) -> str:
    return (documents.created(one) or "")[:19].replace("T", " ")


def _size(nbytes: float) -> str:
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _known_size(nbytes: int) -> str:
    """Nothing where nothing is known: an incomplete checkpoint, a stock one's raw bytes, stored bytes before there are any."""
    return _size(nbytes) if nbytes else ""


def _duration(seconds: float) -> str:
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {int(seconds) % 60} s" if minutes else f"{int(seconds)} s"


def _plain(text: str) -> str:
    """The text with what a terminal would act upon, or cannot show, written out."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def _text(text: str) -> Text:
    """Text that rich takes literally: no markup."""
    return Text(_plain(text))


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        free = column in ("ID", "NAME", "NOTE")
        table.add_column(column, justify="right" if column in right else "left", no_wrap=not free, overflow="fold")
    return table


def _facts(*pairs: tuple[str, str]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in pairs:
        if value:
            table.add_row(Text(key, style="dim"), _text(value))
    return table


def _render(content: RenderableType) -> str:
    page = _Page()
    Console(file=page, width=None if page.isatty() else _UNLIMITED, highlight=False).print(content)
    return "".join(line.rstrip() + "\n" for line in page.getvalue().splitlines())


class _Page(io.StringIO):
    """Text that is rendered for what standard output can show. Touches that as little as if it were closed."""

    encoding = "utf-8"

    def __init__(self) -> None:
        super().__init__()
        if sys.stdout is not None:  # None: it was closed from the start
            self.encoding = sys.stdout.encoding or self.encoding

    def isatty(self) -> bool:
        return sys.stdout is not None and sys.stdout.isatty()
