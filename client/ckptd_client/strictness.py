"""Keys that a load asks for and the checkpoint does not have, and the other way round.

DCP's planner stops at the first key that is missing, and says nothing of a checkpoint's
keys that nobody asked for. The planner is the user's, so this room decides nothing: it
names all keys where DCP would name one, and logs what was left out.

Promises: whether a missing key is an error stays the planner's decision; a planner that
looks keys up in another way than DCP's own gets the answers of a plain dict.
"""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any, Final

from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ckptd.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from torch.distributed.checkpoint.planner import LoadPlan

#: A message goes to every rank: names beyond so many characters are only counted.
_NAMES_CHARACTERS: Final = 64 * 1024
#: What the checkpoint has instead is only a hint.
_HINT_CHARACTERS: Final = 1024

_log = logging.getLogger(__name__)


class Keys(dict[str, Any]):
    """A checkpoint's ``state_dict_metadata``: a dict that names all missing keys when DCP's strict planner finds the first."""

    def __init__(self, found: Mapping[str, Any], checkpoint_id: str) -> None:
        super().__init__(found)
        self.checkpoint_id = checkpoint_id

    def __contains__(self, key: object) -> bool:
        """Raises InvalidRequest with every key that is missing where DCP would raise with this one."""
        if super().__contains__(key):
            return True
        # Only the planner knows whether a missing key is an error, and only at this place has it made up its mind.
        frame = inspect.currentframe()
        asking = frame.f_back if frame else None
        if asking is not None and asking.f_code is create_default_local_load_plan.__code__ and asking.f_locals.get("strict"):
            raise InvalidRequest(self._lacking(asking.f_locals.get("state_dict") or {key: None}))
        return False

    def log_left_out(self, plans: Iterable[LoadPlan]) -> None:
        """Logs, at level INFO, which keys no rank of `plans` asks for."""
        if not _log.isEnabledFor(logging.INFO):
            return
        asked = {item.storage_index.fqn for plan in plans for item in plan.items}
        left_out = [key for key, found in self.items() if key not in asked and not _is_empty(found)]
        if left_out:
            _log.info("ckptd: %d keys of %r are not loaded: %s", len(left_out), self.checkpoint_id, _listed(left_out, _HINT_CHARACTERS))

    def _lacking(self, wanted: Collection[str]) -> str:
        missing = [key for key in wanted if not super(Keys, self).__contains__(key)]
        others = [key for key in self if key not in wanted]
        instead = f"; it has {_listed(others, _HINT_CHARACTERS)}, which nobody asked for" if others else ""
        return (
            f"Missing key in checkpoint state_dict: {_listed(missing, _NAMES_CHARACTERS)}. Checkpoint {self.checkpoint_id!r} lacks "
            f"{len(missing)} of the {len(wanted)} keys that it is to be loaded into{instead}. Ask for the keys that it has, or pass "
            "planner=DefaultLoadPlanner(allow_partial_load=True) to leave the others as they are"
        )


def _is_empty(found: object) -> bool:
    """Whether there is nothing to read: no plan has an item for a tensor without elements."""
    return isinstance(found, TensorStorageMetadata) and 0 in found.size


def _listed(keys: list[str], characters: int) -> str:
    shown: list[str] = []
    for key in keys:
        characters -= len(key) + 4
        if characters < 0 and shown:
            break
        shown.append(repr(key))
    more = f" and {len(keys) - len(shown)} more" if len(shown) < len(keys) else ""
    return ", ".join(shown) + more
