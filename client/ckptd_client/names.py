"""What a user may call a checkpoint, and the error for what looks like something else.

Pure. The rule itself is ``ckptd.model``'s; this room knows that DCP's users are used
to paths and URLs.
"""

from __future__ import annotations

import os

from ckptd import model
from ckptd.errors import InvalidRequest


def text_of(checkpoint_id: object) -> str:
    """A checkpoint id as text, unchecked: what was given, or its path."""
    return os.fsdecode(checkpoint_id) if isinstance(checkpoint_id, str | os.PathLike) else str(checkpoint_id)


def checked_id(checkpoint_id: object) -> str:
    """The id as text; raises InvalidRequest with the rule if it is none."""
    return str(model.CheckpointId.parse(_no_path(checkpoint_id)))


def checked_target(checkpoint_id: object) -> str:
    """As `checked_id`, but also ``latest`` and ``<run>/latest``."""
    text = _no_path(checkpoint_id)
    model.parse_target(text)
    return text


def _no_path(checkpoint_id: object) -> str:
    if checkpoint_id is None:
        raise InvalidRequest("no checkpoint_id: pass one to DCP's save or load, or to the plugin")
    if not isinstance(checkpoint_id, str | os.PathLike):
        raise InvalidRequest(f"a checkpoint_id is a str, not {type(checkpoint_id).__name__}: {checkpoint_id!r}")
    text = text_of(checkpoint_id)
    if text.startswith(("/", "./", "../", "~")) or "://" in text:
        raise InvalidRequest(
            f"{text!r} is a path or URL, not a checkpoint id: an id names a checkpoint within the daemon's store, such as "
            "'step-100' or 'run-a/step-100'; the store itself is given to `ckptd serve --store`"
        )
    return text
