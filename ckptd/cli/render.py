"""What people see: tables and lines. Programs read `documents` instead.

Rendered to text first and then written at once, so that a reader that goes away
is noticed in one place. Whatever comes from a checkpoint is shown without
control characters. When stdout is no terminal nothing is cut to its width.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ckptd.cli import documents
from ckptd.v1 import daemon_pb2

#: Columns when nobody's terminal limits them.
_UNLIMITED = 10_000
_STYLES = {"durable": "green", "accepted": "cyan", "replicated": "cyan", "failed": "red", "lost": "red", "incomplete": "yellow"}


def checkpoints(listed: Sequence[daemon_pb2.Checkpoint], where: str, run: str | None = None) -> str:
    """One line per checkpoint."""
    if not listed:
        return f"no checkpoints {f'of run {run!r} ' if run is not None else ''}in {_plain(where)} yet\n"
    table = _table("ID", "STEP", "STATE", "CREATED", "RAW", "STORED", "WORLD", "NOTE", right=("STEP", "RAW", "STORED", "WORLD"))
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
    table = _table("NAME", "DTYPE", "SHAPE", "BYTES", "CHUNKS", right=("BYTES", "CHUNKS"))
    for tensor in whole.tensors:
        table.add_row(
            _text(documents.name(tensor.fqn)),
            _text(tensor.dtype or "object"),
            Text(f"[{', '.join(map(str, tensor.shape))}]" if tensor.dtype else ""),
            _size(tensor.raw_bytes),
            str(tensor.chunks or ""),
        )
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
            ("accepted, not durable", str(reply.accepted)),
            ("failed", str(reply.failed)),
            ("served from", ", ".join(f"{source} {_size(nbytes)}" for source, nbytes in served.items())),
            ("warning", reply.warning),
        )
    )


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
