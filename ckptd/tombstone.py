"""The note that comes before every deletion: which files go, once nobody can be reading them.

::

    magic, 8 bytes | Tombstone (protobuf) | xxh3_128 of everything before it, 16 bytes, big-endian

Two kinds of files have this content, and their names tell them apart. A *tombstone*, `….deleted`, belongs to
a `.metadata` that is taken away right after it. A *list of debris*, `….debris`, takes no `.metadata` away: it names
what saves that were cut off or superseded have left.

A *refusal*, `<attempt>.refused`, is empty: an attempt that was deleted before it was durable, as far as was known, never shall be.

Promises: `decode` returns what `encode` was given or raises Corrupt, and never a name that leads out of
the checkpoint's directory or to a `.metadata`. Never touches a store.
"""

from __future__ import annotations

import re
from typing import Final

import xxhash
from google.protobuf.message import DecodeError

from ckptd.codec import HASH_NBYTES
from ckptd.errors import Corrupt, InvalidRequest
from ckptd.model import METADATA_NAME, OWN_DIRECTORY, mint_token
from ckptd.store import is_key
from ckptd.v1.manifest_pb2 import Tombstone

#: A deletion takes `.metadata` away at most half so long after its tombstone was put (see ckptd/sweeper.py); the rest is for
#: what is on its way. By the store's clock.
DELETION_SECONDS: Final = 10.0
#: So often whoever pins looks whether a deletion that is under way has ended.
PIN_PAUSE_SECONDS: Final = 0.3
#: So long it is remembered that an attempt was deleted before it was durable: a node that holds it may be away.
REFUSAL_SECONDS: Final = 86400.0
#: A commit puts `.metadata` at most half so long after its manifest (see ckptd/ledger.py); no manifest is debris before.
COMMIT_SECONDS: Final = 300.0

_MAGIC: Final = b"ckptd/x\n"
_REFUSAL: Final = re.compile(r"([0-9a-f]{24})\.refused")
_NAME: Final = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}\.(deleted|debris)")


def name(now_us: int) -> str:
    """A fresh file name for a tombstone of this time, in microseconds since the epoch."""
    return f"{now_us:016x}-{mint_token()}.deleted"


def debris_name(now_us: int) -> str:
    """A fresh file name for a list of debris of this time, in microseconds since the epoch."""
    return f"{now_us:016x}-{mint_token()}.debris"


def is_tombstone(file: str) -> bool:
    """Whether `name` made it."""
    return _kind(file) == "deleted"


def refusal(attempt: str) -> str:
    """The file name of the refusal of an attempt."""
    return f"{attempt}.refused"


def refused(file: str) -> str:
    """The attempt whose refusal has this name; "" if it is none's."""
    found = _REFUSAL.fullmatch(file)
    return found.group(1) if found else ""


def is_list(file: str) -> bool:
    """Whether `name` or `debris_name` made it: it lists files that are to go."""
    return _kind(file) is not None


def encode(tombstone: Tombstone) -> bytes:
    """The whole file. Raises InvalidRequest for names that `decode` would refuse."""
    if bad := [file for file in tombstone.files if not may_list(file)]:
        raise InvalidRequest(f"{bad[0][:80]!r} is not a file that a checkpoint may consist of")
    whole = _MAGIC + tombstone.SerializeToString(deterministic=True)
    return whole + xxhash.xxh3_128_digest(whole)


def decode(data: bytes) -> Tombstone:
    """Reads a whole file; raises Corrupt for any byte that is not as `encode` wrote it."""
    whole, digest = data[:-HASH_NBYTES], data[-HASH_NBYTES:]
    if not whole.startswith(_MAGIC) or xxhash.xxh3_128_digest(whole) != digest:
        raise Corrupt(f"a tombstone of {len(data)} bytes does not match its checksum: it is damaged")
    try:
        found = Tombstone.FromString(whole[len(_MAGIC) :])
    except DecodeError as exc:
        raise Corrupt(f"a tombstone cannot be parsed: {exc}") from exc
    if bad := [file for file in found.files if not may_list(file)]:
        raise Corrupt(f"a tombstone names {bad[0][:80]!r}, which is not a file that a checkpoint may consist of")
    return found


def may_list(file: str) -> bool:
    """Whether a tombstone may name it: inside the checkpoint's directory, no `.metadata`, no other checkpoint's own files."""
    parts = file.split("/")
    inside = is_key(file) and file.encode("utf-8", "replace").decode() == file  # protobuf holds no lone surrogates
    own = OWN_DIRECTORY not in parts or (len(parts) == 2 and parts[0] == OWN_DIRECTORY)
    return inside and own and parts[-1] != METADATA_NAME


def _kind(file: str) -> str | None:
    found = _NAME.fullmatch(file)
    return found.group(1) if found else None
