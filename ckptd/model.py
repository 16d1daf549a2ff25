"""Value types that all rooms share: names, and nothing that does anything.

Rules of names are DESIGN's: an id has at most two parts, ``run/name``; a step is
the trailing integer of the name; an attempt's token sorts by time.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ckptd.errors import InvalidRequest

#: Bytes of uncompressed container per block: the unit of compression, checksum and transfer.
BLOCK_NBYTES: Final = 4 * 1024 * 1024
#: Name that marks a directory of the store as a checkpoint: written last, deleted first.
METADATA_NAME: Final = ".metadata"
#: Directory inside a checkpoint for what is ours alone.
OWN_DIRECTORY: Final = ".ckptd"
#: The name that means "the checkpoint accepted last" and therefore is no id.
LATEST: Final = "latest"
#: What the tags of a checkpoint may take together: they are in every answer about it.
TAGS_NBYTES: Final = 64 * 1024
#: A century: longer waits are this one, because gRPC's clock ends somewhere.
LONGEST_SECONDS: Final = 36500 * 86400.0
#: No clock tells more, in microseconds since the epoch: kernels count its nanoseconds in 63 bits, which end in the year 2262.
CLOCK_LAST_US: Final = 2**63 // 1000

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,127}")
_ATTEMPT = re.compile(r"[0-9a-f]{24}")
_TRAILING_INTEGER = re.compile(r"\d+\Z")
_RULE = (
    "an id is NAME or RUN/NAME; each part starts with a letter or digit, has at most 128 characters "
    "out of letters, digits and . _ = + -, and is not 'latest'"
)


def _check_part(part: str, whole: str) -> str:
    if not _PART.fullmatch(part) or part == LATEST:
        shown = whole if len(whole) <= 80 else whole[:77] + "..."
        raise InvalidRequest(f"{shown!r} is not a checkpoint id: {_RULE}")
    return part


@dataclass(frozen=True, slots=True, order=True)
class CheckpointId:
    """Names a checkpoint inside a store: ``step-1200`` (run "") or ``run-a/step-1200``."""

    run: str
    name: str

    @classmethod
    def parse(cls, text: str) -> CheckpointId:
        """Reads an id; raises InvalidRequest with the rule if it is none."""
        parts = text.split("/")
        if len(parts) > 2:
            _check_part("", text)
        for part in parts:
            _check_part(part, text)
        return cls(run=parts[0] if len(parts) == 2 else "", name=parts[-1])

    def __str__(self) -> str:
        return f"{self.run}/{self.name}" if self.run else self.name

    @property
    def step(self) -> int | None:
        """The trailing integer of the name, or None."""
        found = _TRAILING_INTEGER.search(self.name)
        return int(found.group()) if found else None


def parse_run(text: str) -> str:
    """Reads the name of a run ("" is the run of ids that have none)."""
    return _check_part(text, text) if text else ""


def parse_target(text: str) -> CheckpointId | str:
    """Reads an id, ``latest`` or ``<run>/latest``; for the last two returns the run's name."""
    run, _, name = text.rpartition("/")
    if name == LATEST:
        return parse_run(run) if run or text == LATEST else _check_part("", text)
    return CheckpointId.parse(text)


def mint_token() -> str:
    """A random name that nothing else has: 16 hex digits."""
    return secrets.token_hex(8)


def mint_attempt(now_us: int, newest: str | None) -> str:
    """A time-ordered attempt token, later than `newest` (of the same run) whatever the clock says.

    24 hex digits: 16 of microseconds since the epoch, 8 random. Sorts as text by time.
    """
    if newest is not None:
        now_us = max(now_us, int(newest[:16], 16) + 1)
    return f"{now_us:016x}{secrets.token_hex(4)}"


def is_attempt(text: str) -> bool:
    """Whether an attempt's token can have been minted by somebody's clock: later ones can still be newer than it."""
    return _ATTEMPT.fullmatch(text) is not None and int(text[:16], 16) <= CLOCK_LAST_US


def data_key(id: CheckpointId, file: str) -> str:
    """Key of a data file."""
    return f"{id}/{file}"


def metadata_key(id: CheckpointId) -> str:
    """Key of the object whose presence makes the checkpoint exist."""
    return f"{id}/{METADATA_NAME}"


def pin_key(id: CheckpointId) -> str:
    """Key of the object whose presence keeps the checkpoint from every policy."""
    return f"{id}/{OWN_DIRECTORY}/pin"


def manifest_key(id: CheckpointId, save_id: str) -> str:
    """Key of the manifest that `save_id` names."""
    return f"{id}/{OWN_DIRECTORY}/{save_id}"


def check_tags(tags: Mapping[str, str]) -> None:
    """Raises InvalidRequest if they take more than TAGS_NBYTES in UTF-8."""
    nbytes = sum(len(text.encode()) for pair in tags.items() for text in pair)
    if nbytes > TAGS_NBYTES:
        raise InvalidRequest(f"tags may take {TAGS_NBYTES} bytes together, and these take {nbytes}: put large things into the state")
