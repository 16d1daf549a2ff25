"""A table of any length as plain text: aligned columns, and nothing else.

For what is too long for a layout that looks at every cell several times. Never cuts or wraps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

#: Between two columns.
_GAP = "   "


def plain(names: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[str] = (), rule: str = "-") -> str:
    """The table under a line of `rule`; the columns named in `right` are aligned there. Each row has a cell for each name."""
    widths = [max(map(len, cells)) for cells in zip(names, *rows, strict=True)]
    form = _GAP.join(f"{{:{'>' if name in right else '<'}{width}}}" for name, width in zip(names, widths, strict=True)).format
    lines = [form(*names), rule * (sum(widths) + len(_GAP) * (len(widths) - 1)), *[form(*row) for row in rows]]
    return "".join([line.rstrip() + "\n" for line in lines])
