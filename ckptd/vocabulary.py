"""The classes and functions that a ``.metadata`` may name, whichever torch and Python wrote it.

Names only: nothing here is ever imported. Everything else that a pickle names is refused.
"""

from __future__ import annotations

import re
from typing import Any, Final

from ckptd.inert import Global

METADATA: Final = "torch.distributed.checkpoint.metadata"
FILESYSTEM: Final = "torch.distributed.checkpoint.filesystem"
#: Those that stand for the tuple that they are called with.
PLAIN: Final = frozenset({("torch", "Size")})

_PATHS: Final = {"Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"}
# Sets and bytes below protocol 4; members of enums by some Pythons.
_BUILTINS: Final = {"set", "frozenset", "getattr", "list", "dict", "tuple", "int", "str"}
_KNOWN: Final[dict[str, set[str]]] = {
    "torch": {"Size", "device", "strided", "contiguous_format", "channels_last", "preserve_format"},
    "torch.serialization": {"_get_layout"},
    FILESYSTEM: {"_StorageInfo", "_StoragePrefix"},
    METADATA: {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    # Where TensorProperties lived before torch 2.3.
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
    "collections": {"OrderedDict", "defaultdict", "deque"},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
    "builtins": _BUILTINS,
    "__builtin__": _BUILTINS,
    "_codecs": {"encode"},
}
_DTYPE = re.compile(r"bool|(?:bfloat|float|complex|int|uint|qint|quint|bits)\d[0-9a-z_]*")


def is_known(module: str, name: str) -> bool:
    """Whether a pickle may name it."""
    return name in _KNOWN.get(module, ()) or (module == "torch" and _DTYPE.fullmatch(name) is not None)


def dtype_name(value: Any) -> str | None:
    """The name, without the module, of what names one of torch's dtypes; None for everything else."""
    is_dtype = isinstance(value, Global) and value.module == "torch" and _DTYPE.fullmatch(value.name) is not None
    return value.name if is_dtype else None
