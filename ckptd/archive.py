"""The container that ``torch.save`` makes around one tensor, without torch.

A container is a zip whose only large record is the tensor's raw bytes, stored as
they are, so a segment can be laid out exactly like a data file: the client writes
the raw bytes, the daemon fills the gaps around them. `layout` says where the raw
bytes go and `gaps` gives everything else; the two always agree, on every node, so
nothing but the table has to travel.

Promises: raw bytes start at a multiple of 64 in the shard, offsets inside the zip
count from the container's own start (DCP hands ``torch.load`` that slice alone),
and stock ``torch.load(weights_only=True)`` reads the result, also past 4 GiB.
Never reads the raw bytes: their CRC is written as zero, which torch does not
check (Python's `zipfile` does). Damage is found by block hashes, not here.

The zip format: PKWARE's APPNOTE 6.3, sections 4.3 and 4.5.3.
"""

from __future__ import annotations

import struct
import sys
import zlib
from typing import Final

from ckptd.errors import InvalidRequest

#: Raw bytes start at a multiple of this, in absolute shard coordinates.
ALIGNMENT: Final = 64

_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END = struct.Struct("<IHHHHIIH")
_END64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<IIQI")
_EXTRA = struct.Struct("<HH")
_SIZES64 = struct.Struct("<HHQQ")

_MAX32: Final = 0xFFFFFFFF
_MOST: Final = (1 << 63) - 1
_VERSION: Final = 20
_VERSION64: Final = 45
_DATE: Final = 0x0021  # 1980-01-01, the zip format's zero
_PADDING_ID: Final = 0x4246  # "FB": the id that torch itself pads with
_SIZES64_ID: Final = 0x0001

# What torch.load insists on: data.pkl, version and the data; byteorder keeps big-endian readers right.
_PKL: Final = b"archive/data.pkl"
_DATA: Final = b"archive/data/0"
_SMALL: Final = ((b"archive/byteorder", sys.byteorder.encode()), (b"archive/version", b"3\n"))


def _local(name: bytes, crc: int, nbytes: int, extra: bytes = b"", version: int = _VERSION) -> bytes:
    head = _LOCAL.pack(0x04034B50, version, 0, 0, 0, _DATE, crc, nbytes, nbytes, len(name), len(extra))
    return head + name + extra


def _central(name: bytes, crc: int, nbytes: int, offset: int, *, extra: bytes = b"", version: int = _VERSION) -> bytes:
    sizes = (crc, nbytes, nbytes, len(name), len(extra))
    head = _CENTRAL.pack(0x02014B50, version, version, 0, 0, 0, _DATE, *sizes, 0, 0, 0, 0, offset)
    return head + name + extra


_SMALL_RECORDS: Final = b"".join(_local(name, zlib.crc32(body), len(body)) + body for name, body in _SMALL)

#: Bytes before the padding's content, without data.pkl itself.
_HEAD: Final = len(_local(_PKL, 0, 0)) + len(_SMALL_RECORDS) + len(_local(_DATA, 0, 0)) + _EXTRA.size
_TAIL: Final = sum(len(_central(name, 0, 0, 0)) for name in (_PKL, *(name for name, _ in _SMALL), _DATA)) + _END.size
_HEAD64: Final = _HEAD + _SIZES64.size
_TAIL64: Final = _TAIL + _SIZES64.size + _END64.size + _LOCATOR64.size

#: From here on the directory might start past 32 bits: decided before any padding is known, so that it is no circle.
_LARGE: Final = _MAX32 - _HEAD64 - ALIGNMENT


def layout(at: int, pkl_nbytes: int, nbytes: int) -> tuple[int, int]:
    """Places one container that starts at byte `at` of its shard.

    Returns ``(raw_at, end)``, absolute: the `nbytes` raw bytes lie at
    ``[raw_at, raw_at + nbytes)``, the next container may start at `end`.
    Raises InvalidRequest for negative arguments, a data.pkl past 1 GiB, and an end
    past 2^63, where no file can have one.
    """
    if at < 0 or nbytes < 0 or not 0 <= pkl_nbytes <= 1 << 30:
        raise InvalidRequest(f"no container has position {at}, {pkl_nbytes} bytes of data.pkl and {nbytes} bytes of data")
    if pkl_nbytes + nbytes > _LARGE:
        head, tail = _HEAD64, _TAIL64
    else:
        head, tail = _HEAD, _TAIL
    raw_at = -(-(at + head + pkl_nbytes) // ALIGNMENT) * ALIGNMENT
    end = raw_at + nbytes + tail
    if end > _MOST:
        raise InvalidRequest(f"no file holds a container at byte {at} with {nbytes} bytes of data")
    return raw_at, end


def gaps(at: int, pkl: bytes, nbytes: int) -> tuple[bytes, bytes]:
    """The bytes around the raw data of the container at `at`: ``[at, raw_at)`` and ``[raw_at + nbytes, end)`` of `layout`.

    `pkl` is the pickle that torch.save would have stored as data.pkl, naming storage "0".
    """
    raw_at, _ = layout(at, len(pkl), nbytes)
    large = len(pkl) + nbytes > _LARGE
    version = _VERSION64 if large else _VERSION
    sizes = _SIZES64.pack(_SIZES64_ID, _SIZES64.size - _EXTRA.size, nbytes, nbytes) if large else b""
    shown_nbytes = _MAX32 if large else nbytes

    pkl_crc = zlib.crc32(pkl)
    head = [_local(_PKL, pkl_crc, len(pkl)), pkl, _SMALL_RECORDS]
    data_offset = sum(map(len, head))
    padding = raw_at - at - (_HEAD64 if large else _HEAD) - len(pkl)
    extra = sizes + _EXTRA.pack(_PADDING_ID, padding) + bytes(padding)
    head.append(_local(_DATA, 0, shown_nbytes, extra, version))

    tail = [_central(_PKL, pkl_crc, len(pkl), 0)]
    offset = len(head[0]) + len(pkl)
    for name, body in _SMALL:
        tail.append(_central(name, zlib.crc32(body), len(body), offset))
        offset += _LOCAL.size + len(name) + len(body)
    tail.append(_central(_DATA, 0, shown_nbytes, data_offset, extra=sizes, version=version))
    directory_at = raw_at - at + nbytes
    directory_nbytes = sum(map(len, tail))
    entries = len(tail)
    if large:
        fields = (0, 0, entries, entries, directory_nbytes, directory_at)
        tail.append(_END64.pack(0x06064B50, _END64.size - 12, version, version, *fields))
        tail.append(_LOCATOR64.pack(0x07064B50, 0, directory_at + directory_nbytes, 1))
        directory_at = _MAX32
    tail.append(_END.pack(0x06054B50, 0, 0, entries, entries, directory_nbytes, directory_at, 0))
    return b"".join(head), b"".join(tail)
