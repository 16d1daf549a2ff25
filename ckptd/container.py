"""A ``torch.save`` container read back, without torch: its records lie where they should, and match their CRC32.

torch itself does not look at those checksums: it loads a flipped bit as data (tried, torch 2.13).
`check` does, with memory that does not depend on the container. A checksum that was not
written is zero: torch leaves them out after ``torch.serialization.set_crc32_options(False)``,
and ckptd's own containers have none for the tensor's bytes. It is counted, not guessed.

Promises: damage is Corrupt; nothing is unpickled, and no record is read twice, whatever the
directory claims. Knows nothing of stores and segments: bytes come from a function.

The zip format: PKWARE's APPNOTE 6.3, sections 4.3 and 4.5.3.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from ckptd.errors import Corrupt

#: Gives the bytes ``[start, end)`` of a container, all of them.
Read: TypeAlias = Callable[[int, int], bytes | memoryview]

#: A record is read in pieces of this many bytes.
PIECE_NBYTES: Final = 1024 * 1024

_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END = struct.Struct("<IHHHHIIH")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<IIQI")

_LOCAL_MAGIC: Final = 0x04034B50
_CENTRAL_MAGIC: Final = 0x02014B50
_END_MAGIC: Final = 0x06054B50
_END64_MAGIC: Final = 0x06064B50
_LOCATOR64_MAGIC: Final = 0x07064B50
_SIZES64_ID: Final = 1
_MAX16: Final = 0xFFFF
_MAX32: Final = 0xFFFFFFFF
_ENCRYPTED: Final = 0x1
#: Among the external attributes: a directory. torch.load gives what it finds in memory as such a record's bytes.
_IS_DIRECTORY: Final = 0x10
_STORED, _DEFLATED = 0, 8


@dataclass(frozen=True, slots=True)
class _Record:
    """One entry of the directory."""

    name: bytes
    method: int
    crc: int
    nbytes: int
    stored_nbytes: int
    at: int


def is_container(read: Read, nbytes: int) -> bool:
    """Whether the bytes are meant as a container: they begin, or end, as one. Then `check` should find it whole."""
    if nbytes < _END.size:
        return False
    ends = struct.pack("<I", _LOCAL_MAGIC), struct.pack("<I", _END_MAGIC)
    return bytes(read(0, 4)) == ends[0] or bytes(read(nbytes - _END.size, nbytes - _END.size + 4)) == ends[1]


def check(read: Read, nbytes: int) -> int:
    """Reads every record once; returns how many have no checksum to be checked by.

    Raises Corrupt for a record that does not match its checksum, and for whatever is no container
    of exactly `nbytes` bytes.
    """
    directory_at, directory_end, entries = _directory(read, nbytes)
    unchecked = found = read_nbytes = 0
    for record in _records(read, directory_at, directory_end):
        found += 1
        start = _data_at(read, record, directory_at)
        read_nbytes += record.stored_nbytes
        if read_nbytes > directory_at:
            raise Corrupt("its records overlap")
        if record.crc == 0 and record.nbytes:
            unchecked += 1
        elif _crc(read, record, start) != record.crc:
            raise Corrupt(f"its record {record.name[:80]!r} does not match its checksum")
    if found != entries:
        raise Corrupt(f"its directory has {found} records instead of {entries}")
    return unchecked


def sizes(read: Read, nbytes: int) -> Iterator[tuple[bytes, int]]:
    """Name and content's bytes of each record, as the directory has them. Raises Corrupt."""
    directory_at, directory_end, _ = _directory(read, nbytes)
    for record in _records(read, directory_at, directory_end):
        yield record.name, record.nbytes


def _directory(read: Read, nbytes: int) -> tuple[int, int, int]:
    """Where the directory begins and ends, and how many entries it should have."""
    if nbytes < _END.size:
        raise Corrupt(f"its {nbytes} bytes are too few for what torch.save writes")
    end_at = nbytes - _END.size
    magic, _, _, _, entries, directory_nbytes, directory_at, comment_nbytes = _END.unpack(read(end_at, nbytes))
    if magic != _END_MAGIC or comment_nbytes:
        raise Corrupt("it does not end as torch.save ends it: it is cut short, or something else")
    locator_at = end_at - _LOCATOR64.size
    if locator_at >= _END64.size:
        magic, _, end64_at, _ = _LOCATOR64.unpack(read(locator_at, end_at))
        if magic == _LOCATOR64_MAGIC:
            end_at = locator_at - _END64.size
            magic, *_, entries64, directory_nbytes64, directory_at64 = _END64.unpack(read(end_at, locator_at))
            if magic != _END64_MAGIC or end64_at != end_at:
                raise Corrupt("the end of its directory is damaged")
            given = ((entries, entries64, _MAX16), (directory_nbytes, directory_nbytes64, _MAX32), (directory_at, directory_at64, _MAX32))
            if any(short not in (long, full) for short, long, full in given):
                raise Corrupt("the two ends of its directory contradict each other")
            entries, directory_nbytes, directory_at = entries64, directory_nbytes64, directory_at64
    if directory_at + directory_nbytes != end_at:
        raise Corrupt("its directory is not where its end says")
    return directory_at, end_at, entries


def _records(read: Read, start: int, end: int) -> Iterator[_Record]:
    """The entries of the directory, some of it at a time."""
    held, here, at = b"", 0, start
    while here < len(held) or at < end:
        if len(held) - here < _CENTRAL.size + 3 * _MAX16 and at < end:
            upto = min(end, at + PIECE_NBYTES)
            held, here, at = held[here:] + bytes(read(at, upto)), 0, upto
        if len(held) - here < _CENTRAL.size:
            raise Corrupt("its directory is cut short")
        fields = _CENTRAL.unpack_from(held, here)
        magic, _, _, flags, method, _, _, crc, stored_nbytes, nbytes, name_nbytes, *extra_nbytes, disk, _, attributes, offset = fields
        name_at = here + _CENTRAL.size
        name_end = name_at + name_nbytes
        extra_end = name_end + extra_nbytes[0]
        entry_end = extra_end + extra_nbytes[1]
        if magic != _CENTRAL_MAGIC or entry_end > len(held) or flags & _ENCRYPTED or attributes & _IS_DIRECTORY or disk:
            raise Corrupt("its directory is damaged")
        nbytes, stored_nbytes, offset = _sizes64(held[name_end:extra_end], nbytes, stored_nbytes, offset)
        yield _Record(held[name_at:name_end], method, crc, nbytes, stored_nbytes, offset)
        here = entry_end


def _sizes64(extra: bytes, *values: int) -> tuple[int, ...]:
    """What stands in the entry as "too large" stands in its extra field, in the same order."""
    at, found = 0, b""
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<HH", extra, at)
        if kind == _SIZES64_ID:
            found = extra[at + 4 : at + 4 + nbytes]
        at += 4 + nbytes
    full = []
    for value in values:
        if value == _MAX32:
            if len(found) < 8:
                raise Corrupt("its directory lacks a size")
            value, found = int.from_bytes(found[:8], "little"), found[8:]  # noqa: PLW2901 - the value, wherever it stands
        full.append(value)
    return tuple(full)


def _data_at(read: Read, record: _Record, end: int) -> int:
    """Where the record's bytes begin: after a header of its own, all before `end`."""
    if record.at + _LOCAL.size > end:
        raise Corrupt(f"its record {record.name[:80]!r} lies outside of it")
    magic, name_nbytes, extra_nbytes = _header(read(record.at, record.at + _LOCAL.size))
    name_at = record.at + _LOCAL.size
    start = name_at + name_nbytes + extra_nbytes
    if start + record.stored_nbytes > end:
        raise Corrupt(f"its record {record.name[:80]!r} lies outside of it")
    if magic != _LOCAL_MAGIC or bytes(read(name_at, name_at + name_nbytes)) != record.name:
        raise Corrupt(f"the header of its record {record.name[:80]!r} is damaged")
    return start


def _header(data: bytes | memoryview) -> tuple[int, int, int]:
    magic, *_, name_nbytes, extra_nbytes = _LOCAL.unpack(data)
    return magic, name_nbytes, extra_nbytes


def _crc(read: Read, record: _Record, start: int) -> int:
    """CRC32 of the record's content, which others than torch may have deflated."""
    crc = nbytes = 0
    for piece in _content(read, record, start):
        crc = zlib.crc32(piece, crc)
        nbytes += len(piece)
        if nbytes > record.nbytes:
            break
    if nbytes != record.nbytes:
        raise Corrupt(f"its record {record.name[:80]!r} does not have the {record.nbytes} bytes that it should")
    return crc


def _content(read: Read, record: _Record, start: int) -> Iterator[bytes | memoryview]:
    if record.method not in (_STORED, _DEFLATED):
        raise Corrupt(f"its record {record.name[:80]!r} is compressed in a way that torch.load does not know")
    inflating = zlib.decompressobj(-zlib.MAX_WBITS) if record.method == _DEFLATED else None
    end = start + record.stored_nbytes
    for at in range(start, end, PIECE_NBYTES):
        piece = read(at, min(end, at + PIECE_NBYTES))
        if inflating is None:
            yield piece
            continue
        try:
            while piece:
                yield inflating.decompress(piece, PIECE_NBYTES)
                piece = inflating.unconsumed_tail
        except zlib.error as exc:
            raise Corrupt(f"its record {record.name[:80]!r} is damaged: {exc}") from exc
