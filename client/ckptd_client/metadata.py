"""DCP's Metadata from the pickle that the writer made, ours or stock's, without running what is in it.

Only the classes that a Metadata consists of are known, and those that the user has
listed with ``torch.serialization.add_safe_globals``; everything else is refused by name.
Never imports a module because a pickle says so.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict, defaultdict
from enum import Enum
from pathlib import PosixPath, PurePosixPath
from typing import Any, Final

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.metadata import Metadata

from ckptd.errors import Corrupt, InvalidRequest

#: What a torch that knows no versions is taken to write.
DCP_VERSION: Final[str] = getattr(filesystem, "CURRENT_DCP_VERSION", "1.0.0")
#: Old enough that the daemon can append to it, new enough for every string and tuple.
_PROTOCOL: Final = 2

_CLASSES: Final = (
    *(dcp.Metadata, dcp.MetadataIndex, dcp.StorageMeta, dcp.TensorProperties, dcp._MEM_FORMAT_ENCODING),  # noqa: SLF001 - what TensorProperties pickles to
    *(dcp.TensorStorageMetadata, dcp.BytesStorageMetadata, dcp.ChunkStorageMetadata),
    *(filesystem._StorageInfo, filesystem._StoragePrefix),  # noqa: SLF001 - what stock's FileSystemWriter puts into it
    *(OrderedDict, defaultdict, torch.Size, torch.device),
)
#: Where torch before 2.3 had them.
_OLD_MODULE: Final = "torch.distributed._shard.sharded_tensor.metadata"


def _member(kind: Any, name: str) -> Enum:
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"{kind!r} is no enum")
    return kind[name]


_BUILTINS: Final = (set, frozenset, list, dict, int, float, complex, slice)
_PATHS: Final = (PosixPath, PurePosixPath)
_KNOWN: Final[dict[tuple[str, str], Any]] = {
    **{(kind.__module__, kind.__qualname__): kind for kind in _CLASSES},
    # Where the classes are pickled from is not always where they say they are.
    **{("torch", kind.__name__): kind for kind in (torch.Size, torch.device)},
    **{(module, kind.__name__): kind for module in ("builtins", "__builtin__") for kind in _BUILTINS},
    **{(module, kind.__name__): kind for module in ("pathlib", "pathlib._local") for kind in _PATHS},
    # Protocol 2 writes bytes as text and layouts by name.
    ("_codecs", "encode"): lambda text, encoding: str(text).encode("latin1" if encoding == "latin1" else "ascii"),
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,  # noqa: SLF001 - what a layout pickles to
    (_OLD_MODULE, "TensorProperties"): dcp.TensorProperties,
    (_OLD_MODULE, "MEM_FORMAT_ENCODING"): dcp._MEM_FORMAT_ENCODING,  # noqa: SLF001 - the same
    # Some Pythons write a member of an enum as an attribute of it.
    **{(module, "getattr"): _member for module in ("builtins", "__builtin__")},
}


class _RefusedError(Exception):
    """A global that is not known."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is not None:
            return known
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout | torch.memory_format):
            return getattr(torch, name)
        for allowed in torch.serialization.get_safe_globals():
            target, called = allowed if isinstance(allowed, tuple) else (allowed, f"{allowed.__module__}.{allowed.__qualname__}")
            if called == f"{module}.{name}":
                return target
        raise _RefusedError(f"{module}.{name}")


def dump(metadata: Metadata) -> bytes:
    """The pickle that the daemon completes: `metadata` with DCP's version and without anything of the storage."""
    bare = copy.copy(metadata)
    # A key of a class of one's own (numpy's str_, an enum) that is text is that text: no class has to be known to read it.
    bare.state_dict_metadata = {str.__str__(key): found for key, found in metadata.state_dict_metadata.items()}
    bare.version = DCP_VERSION
    bare.storage_data = None
    bare.storage_meta = None
    return pickle.dumps(bare, protocol=_PROTOCOL)


def load(data: bytes, checkpoint_id: str) -> Metadata:
    """Reads what `dump` made; raises InvalidRequest for an unknown class, Corrupt for what is no Metadata."""
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
    except _RefusedError as error:
        raise InvalidRequest(
            f"the metadata of {checkpoint_id!r} contains {error}, which is not loaded unless you allow it: "
            f"torch.serialization.add_safe_globals([{error}])"
        ) from error
    except Exception as error:
        raise Corrupt(f"the metadata of {checkpoint_id!r} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(metadata, Metadata):
        raise Corrupt(f"the metadata of {checkpoint_id!r} is a {type(metadata).__name__}, not DCP's Metadata")
    return metadata
