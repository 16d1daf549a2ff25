"""A stream of zstd frames that another program wrote, undone piece by piece in bounded memory.

A frame says neither how long it is nor, often, what it holds, and a few bytes can stand for
gigabytes. So the frames are taken apart here into their blocks, whose headers do say it, and
zstd is given a few blocks at a time. Promises: everything between the given bytes is a frame's
and every frame is whole, or Corrupt; at most some MiB are held, whatever comes in. A flipped bit
is found only if the frame has a checksum, which those of stock DCP's ``stream.zstd/1`` have not.

The format: RFC 8878, section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import zstandard

from ckptd.errors import Corrupt

#: Blocks that are undone together: each holds at most 128 KiB.
_BLOCKS: Final = 32
_BLOCK_NBYTES: Final = 128 * 1024
_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_SKIPPABLE: Final = b"\x2a\x4d\x18"
_DICTIONARY_NBYTES: Final = (0, 1, 2, 4)
_RLE: Final = 1
_RESERVED: Final = 3


@dataclass(slots=True)
class _Cursor:
    """Walks over bytes [at, end) that `read(start, end)` gives."""

    read: Callable[[int, int], bytes]
    at: int
    end: int

    def take(self, nbytes: int) -> bytes:
        if nbytes > self.end - self.at:
            raise Corrupt(f"its zstd stream ends inside a frame, at byte {self.end}")
        found = self.read(self.at, self.at + nbytes)
        self.at += nbytes
        return found


def plain(read: Callable[[int, int], bytes], start: int, end: int) -> Iterator[bytes]:
    """What the zstd frames in bytes [start, end) of an object hold, in pieces of at most 4 MiB.

    `read(start, end)` gives any of these bytes; it is asked for them in order. Raises Corrupt.
    """
    cursor = _Cursor(read, start, end)
    while cursor.at < end:
        at = cursor.at
        magic = cursor.take(4)
        if magic[1:] == _SKIPPABLE and magic[0] >> 4 == 5:
            _skip(cursor)
        elif magic == _MAGIC:
            try:
                yield from _frame(cursor)
            except (zstandard.ZstdError, MemoryError) as exc:
                raise Corrupt(f"its zstd frame at byte {at} is damaged: {exc}") from exc
        else:
            raise Corrupt(f"no zstd frame begins at byte {at}")


def _skip(cursor: _Cursor) -> None:
    nbytes = int.from_bytes(cursor.take(4), "little")
    if nbytes > cursor.end - cursor.at:
        raise Corrupt(f"its zstd stream ends inside a frame, at byte {cursor.end}")
    cursor.at += nbytes


def _frame(cursor: _Cursor) -> Iterator[bytes]:
    """The content of the frame whose magic has been taken."""
    descriptor = cursor.take(1)
    flags = descriptor[0]
    single = flags >> 5 & 1
    size_nbytes = 1 << (flags >> 6) if flags >> 6 else single
    head = descriptor + cursor.take((1 - single) + _DICTIONARY_NBYTES[flags & 3] + size_nbytes)
    decoder = zstandard.ZstdDecompressor().decompressobj()
    pending = [_MAGIC, head]
    last = False
    while not last:
        for _ in range(_BLOCKS):
            header = cursor.take(3)
            word = int.from_bytes(header, "little")
            last, kind, nbytes = bool(word & 1), word >> 1 & 3, word >> 3
            if kind == _RESERVED or nbytes > _BLOCK_NBYTES:
                raise Corrupt(f"its zstd stream is damaged: no block begins at byte {cursor.at - 3}")
            pending += [header, cursor.take(1 if kind == _RLE else nbytes)]
            if last:
                break
        if last and flags >> 2 & 1:
            pending.append(cursor.take(4))
        found = decoder.decompress(b"".join(pending))
        pending = []
        if decoder.eof != last or decoder.unused_data:
            raise Corrupt(f"its zstd stream is damaged: a frame ends before byte {cursor.at}")
        if found:
            yield found
