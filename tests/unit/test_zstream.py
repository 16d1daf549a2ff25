"""Streams of zstd frames of others: undone whole, in small pieces, or refused."""

from __future__ import annotations

import random

import pytest
import zstandard

from ckptd import zstream
from ckptd.errors import Corrupt


def undone(stored: bytes) -> bytes:
    pieces = list(zstream.plain(lambda start, end: stored[start:end], 0, len(stored)))
    assert all(len(piece) <= 4 * 1024 * 1024 for piece in pieces)
    return b"".join(pieces)


@pytest.mark.parametrize(
    "content",
    [b"", b"a", random.Random(1).randbytes(300_000), bytes(40 * 1024 * 1024), random.Random(2).randbytes(128 * 1024)],
    ids=["nothing", "one byte", "noise", "zeros", "a block"],
)
def test_a_stream_of_frames_is_undone_whole_or_not_at_all(content: bytes) -> None:
    whole = zstandard.ZstdCompressor(write_checksum=True).compress(content) + zstandard.ZstdCompressor(write_content_size=False).compress(
        content
    )
    assert undone(whole) == 2 * content
    assert undone(b"\x50\x2a\x4d\x18\x03\0\0\0abc" + whole) == 2 * content
    for cut in (1, 2, 3, 5, 8):
        with pytest.raises(Corrupt):
            undone(whole[:-cut])
    for behind in (b"\0", b"PK\x03\x04", b"\x28\xb5\x2f\xfd"):
        with pytest.raises(Corrupt):
            undone(whole + behind)
