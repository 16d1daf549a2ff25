"""Raw block to stored block and back, and the hash that names a block's content.

A codec is a tiny frozen value. Both directions are thread-safe and release the
GIL for the bulk of the work. `Zstd` writes one frame per block, with content size
and checksum, so that the blocks of an item, put one after another, are what stock
DCP's ``stream.zstd/1`` reads (and stock, too, notices flipped bits).

Promises: whatever bytes come in, `decode` returns exactly the number of bytes
asked for or raises Corrupt, and its memory is bounded by that number. Never
guesses: a frame without size or checksum, a second frame, a byte too many is damage.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import xxhash
import zstandard

from ckptd.errors import Corrupt, InvalidRequest

#: Contiguous bytes, read only or not.
Buffer: TypeAlias = bytes | bytearray | memoryview

#: Bytes of a block's hash.
HASH_NBYTES: Final = 16

_SPELLING = re.compile(r"zstd(?::([1-9]|1[0-9]|2[0-2]))?")
_FRAME_MAGIC: Final = b"\x28\xb5\x2f\xfd"
# Contexts are costly to make and belong to one thread at a time.
_THREAD = threading.local()


class Codec(Protocol):
    """Turns a block into what the store keeps, and back."""

    @property
    def name(self) -> str:
        """As `parse` reads it and manifests record it."""

    @property
    def descriptors(self) -> tuple[str, ...]:
        """What DCP's storage info has to say so that stock undoes the codec; () if there is nothing to undo."""

    def encode(self, block: Buffer) -> bytes | memoryview:
        """The stored form; may be a view of `block`."""

    def decode(self, stored: Buffer, nbytes: int) -> bytes:
        """The `nbytes` bytes that were encoded; raises Corrupt for anything that is not one stored block of as many."""


@dataclass(frozen=True, slots=True)
class Raw:
    """Stores blocks as they are."""

    @property
    def name(self) -> str:
        """As `parse` reads it."""
        return "none"

    @property
    def descriptors(self) -> tuple[str, ...]:
        """There is nothing to undo."""
        return ()

    def encode(self, block: Buffer) -> bytes | memoryview:
        """A view; nothing is copied."""
        return block if isinstance(block, bytes) else memoryview(block)

    def decode(self, stored: Buffer, nbytes: int) -> bytes:
        """The same bytes; Corrupt if they are not `nbytes`."""
        found = memoryview(stored).nbytes
        if found != nbytes:
            raise Corrupt(f"a stored block has {found} bytes instead of {nbytes}")
        return bytes(stored)


@dataclass(frozen=True, slots=True)
class Zstd:
    """One zstd frame per block, at `level` 1 to 22."""

    level: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.level <= 22:
            raise InvalidRequest(f"there is no zstd level {self.level}: it is 1 to 22")

    @property
    def name(self) -> str:
        """As `parse` reads it."""
        return f"zstd:{self.level}"

    @property
    def descriptors(self) -> tuple[str, ...]:
        """Stock DCP's own name of a stream of zstd frames."""
        return ("stream.zstd/1",)

    def encode(self, block: Buffer) -> bytes:
        """One frame with content size and checksum."""
        return _compressor(self.level).compress(block)

    def decode(self, stored: Buffer, nbytes: int) -> bytes:
        """The content of one whole frame, whatever its level was; Corrupt for everything else."""
        if nbytes == 0:
            # zstandard answers "no content" from the header alone and would not look at the rest.
            if bytes(stored) != self.encode(b""):
                raise Corrupt("a stored block is not the empty zstd frame that it should be")
            return b""
        if bytes(stored[:4]) != _FRAME_MAGIC:
            raise Corrupt("a stored block does not start with a zstd frame")
        try:
            frame = zstandard.get_frame_parameters(stored)
            # With this size in the header, zstd writes into one buffer of that size and needs no window of its own.
            if frame.content_size != nbytes:
                raise Corrupt(f"a stored block claims {frame.content_size} bytes of content instead of {nbytes}")
            if _ignored_bits(stored):
                raise Corrupt("a stored block's zstd frame has bits in its header that nothing here writes")
            if not frame.has_checksum or frame.dict_id:
                raise Corrupt("a stored block's zstd frame has no checksum or needs a dictionary: nothing here wrote it")
            block = _decompressor().decompress(stored, max_output_size=nbytes, read_across_frames=False, allow_extra_data=False)
        except (zstandard.ZstdError, ValueError, MemoryError, OverflowError) as exc:
            raise Corrupt(f"a stored block of {memoryview(stored).nbytes} bytes is damaged: {exc}") from exc
        if len(block) != nbytes:
            raise Corrupt(f"a stored block has {len(block)} bytes of content instead of {nbytes}")
        return block


def _ignored_bits(frame: Buffer) -> bool:
    """Whether a frame's header has a bit set that decoders ignore, or may: a flip there would pass unseen (RFC 8878, 3.1.1.1)."""
    descriptor, window = memoryview(frame)[4:6]
    has_window = not descriptor & 0x20
    return bool(descriptor & 0x10 or (has_window and window & 0x07))


def _compressor(level: int) -> zstandard.ZstdCompressor:
    compressors: dict[int, zstandard.ZstdCompressor] = _THREAD.__dict__.setdefault("compressors", {})
    if level not in compressors:
        compressors[level] = zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)
    return compressors[level]


def _decompressor() -> zstandard.ZstdDecompressor:
    found = _THREAD.__dict__.get("decompressor")
    if found is None:
        found = _THREAD.decompressor = zstandard.ZstdDecompressor()
    assert isinstance(found, zstandard.ZstdDecompressor)
    return found


def parse(text: str) -> Codec:
    """Reads ``none``, ``zstd`` (level 1) or ``zstd:LEVEL``; raises InvalidRequest that says so for anything else."""
    if text == "none":
        return Raw()
    found = _SPELLING.fullmatch(text)
    if found is None:
        raise InvalidRequest(f"{text[:80]!r} is no codec: use none, zstd, or zstd:LEVEL with a level from 1 to 22")
    return Zstd(int(found.group(1) or 1))


def block_hash(data: Buffer) -> bytes:
    """xxh3_128 of a block's uncompressed bytes: 16 bytes, big-endian."""
    return xxhash.xxh3_128_digest(data)
