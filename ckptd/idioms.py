"""What the C pickler writes once per tensor, read in one go instead of opcode by opcode.

A stock ``.metadata`` of 100,000 tensors is eleven million opcodes, nearly all of them the same three
sequences with other numbers. An *idiom* knows one of them: what follows the reference to a class, up to
its BUILD, at protocols 4 and 5. Promises: what an idiom makes is what the pickle machine and the reader
behind it would have made of the same bytes; what it does not know to the last byte it leaves to them.
Nothing is called or imported; time and memory are in proportion to the bytes.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from ckptd.inert import Again, Global, Hole, Idiom
from ckptd.vocabulary import FILESYSTEM, METADATA

_SIZE: Final = Global("torch", "Size")

# A reference into the memo; an int; what follows the reference to torch.Size; what opens an object with a dict as its state.
_REF = rb"(?:h.|j....)"
_INT = rb"(?:K.|M..|J....|\x8a\x05.....|\x8a\x06......)"
_DIMS = rb"(?:\)|%b\x85\x94|%b{2}\x86\x94|%b{3}\x87\x94|\(%b{4,64}t\x94)\x85\x94R\x94" % (_INT, _INT, _INT, _INT)
_OPEN = rb"\)\x81\x94\}\x94\("
_CHUNK = rb"(%b)%b(%b)(%b)(%b)(%b)(%b)(%b)ub" % (_REF, _OPEN, _REF, _REF, _DIMS, _REF, _REF, _DIMS)
_CHUNKS = _CHUNK.replace(rb"(" + _REF + rb")", _REF).replace(rb"(" + _DIMS + rb")", _DIMS)

_ONE_CHUNK = re.compile(_CHUNK, re.DOTALL)
# properties, their class, dtype, layout, memory format; size, torch.Size, its dims; chunks: one, or up to a thousand.
_TENSOR = re.compile(
    _OPEN
    + rb"(%b)(%b)\)\x81\x94\((%b)(%b)[\x88\x89](%b)[\x88\x89]t\x94b" % (_REF, _REF, _REF, _REF, _REF)
    + rb"(%b)(%b)(%b)(%b)\]\x94" % (_REF, _REF, _DIMS, _REF)
    + rb"(?:%ba|\(((?:%b){2,1000})e)ub" % (_CHUNK, _CHUNKS),
    re.DOTALL,
)
_TENSOR_REFS: Final = (1, 2, 3, 4, 5, 6, 7, 9)
# fqn and its text, index and its number; offset, torch.Size, its dims.
_INDEX = re.compile(_OPEN + rb"(%b)(%b)(%b)(?:N|%b)(?:(%b)(%b)(%b))?ub" % (_REF, _REF, _REF, _INT, _REF, _REF, _DIMS), re.DOTALL)
# relative_path and its text, offset and length with their numbers; transform_descriptors and their list.
_PLACE = re.compile(_OPEN + rb"(%b)(%b)(%b)(%b)(%b)(%b)(?:(%b)(%b))?ub" % (_REF, _REF, _REF, _INT, _REF, _INT, _REF, _REF), re.DOTALL)

# What the references of a chunk, an index and a place lead to.
_EXPECTED: Final = (
    (Global(METADATA, "ChunkStorageMetadata"), "offsets", _SIZE, "sizes", _SIZE),
    ("fqn", "index", "offset", _SIZE),
    ("relative_path", "offset", "length", "transform_descriptors"),
)
_CHUNK_OF, _INDEX_OF, _PLACE_OF = range(3)
_WIDTHS: Final = {0x4B: 1, 0x4D: 2, 0x4A: 4}
_U32 = struct.Struct("<I").unpack_from


class Entry(NamedTuple):
    """A TensorStorageMetadata: dtype by its name, shape, chunks as ``(offsets, sizes)``."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


class Index(NamedTuple):
    """A MetadataIndex without its hint."""

    fqn: str
    offset: tuple[int, ...] | None


class Place(NamedTuple):
    """A _StorageInfo, as it was found."""

    file: Any
    offset: Any
    length: Any
    descriptors: Any


class Idioms:
    """The idioms of one ``.metadata``. References are looked at once: where idioms are used, the memo only grows."""

    def __init__(self, size: Callable[[tuple[int, ...]], tuple[int, ...]], dtype: Callable[[Any], str | None]) -> None:
        """`size` checks a shape or an offset and may return an equal one; `dtype` gives the name of a dtype, None for what is none."""
        self._size = size
        self._dtype = dtype
        self._dims: dict[bytes, tuple[int, ...]] = {}
        self._dtypes: dict[tuple[bytes, ...], str | None] = {}
        self._agreed: list[set[tuple[bytes | None, ...]]] = [set() for _ in _EXPECTED]

    def by_class(self) -> dict[tuple[str, str], Idiom]:
        """The idioms by module and name of their classes."""
        return {
            (METADATA, "TensorStorageMetadata"): self.tensor,
            (METADATA, "MetadataIndex"): self.index,
            (FILESYSTEM, "_StorageInfo"): self.place,
        }

    def tensor(self, data: bytes, at: int, memo: list[Any]) -> tuple[Entry, int, int] | None:
        """A TensorStorageMetadata; see `Idiom`."""
        found = _TENSOR.match(data, at)
        if found is None:
            return None
        dtype = self._dtype_of(found.group(*_TENSOR_REFS), memo)
        if dtype is None:
            return None
        dims, several = found.group(8, 17)
        parts = [found.groups()[9:16]] if several is None else [part.groups() for part in _ONE_CHUNK.finditer(several)]
        remembered = 5 + _remembered(dims)
        chunks = []
        for kind, offsets_key, size, offsets, sizes_key, same_size, sizes in parts:
            if not self._agree(_CHUNK_OF, (kind, offsets_key, size, sizes_key, same_size), memo):
                return None
            chunks.append((self._sized(offsets), self._sized(sizes)))
            remembered += 2 + _remembered(offsets) + _remembered(sizes)
        return Entry(dtype, self._sized(dims), tuple(chunks)), found.end(), remembered

    def index(self, data: bytes, at: int, memo: list[Any]) -> tuple[Index, int, int] | None:
        """A MetadataIndex; see `Idiom`."""
        found = _INDEX.match(data, at)
        if found is None:
            return None
        fqn_key, fqn, index_key, offset_key, size, dims = found.groups()
        name = _fetch(fqn, memo)
        if type(name) is not str or not self._agree(_INDEX_OF, (fqn_key, index_key, offset_key, size), memo):
            return None
        if dims is None:
            return Index(name, None), found.end(), 2
        return Index(name, self._sized(dims)), found.end(), 2 + _remembered(dims)

    def place(self, data: bytes, at: int, memo: list[Any]) -> tuple[Place, int, int] | None:
        """A _StorageInfo; see `Idiom`."""
        found = _PLACE.match(data, at)
        if found is None:
            return None
        path_key, path, offset_key, offset, length_key, length, descriptors_key, descriptors = found.groups()
        file = _fetch(path, memo)
        if type(file) is not str or not self._agree(_PLACE_OF, (path_key, offset_key, length_key, descriptors_key), memo):
            return None
        given = None if descriptors is None else _fetch(descriptors, memo)
        return Place(file, _numbers(offset)[0], _numbers(length)[0], given), found.end(), 2

    def _dtype_of(self, refs: tuple[bytes, ...], memo: list[Any]) -> str | None:
        """The dtype of an entry with these references, None if one of them leads to what the idiom does not expect."""
        if refs not in self._dtypes:
            properties, kind, dtype, *_, size_key, size, chunks_key = (_fetch(ref, memo) for ref in refs)
            as_expected = (properties, size_key, size, chunks_key) == ("properties", "size", _SIZE, "chunks")
            is_properties = isinstance(kind, Global) and kind.name == "TensorProperties" and isinstance(size, Global)
            self._dtypes[refs] = self._dtype(dtype) if as_expected and is_properties else None
        return self._dtypes[refs]

    def _agree(self, what: int, refs: tuple[bytes | None, ...], memo: list[Any]) -> bool:
        """Whether the references lead to the names and classes that the idiom expects; None stands for what is left out."""
        agreed = self._agreed[what]
        if refs not in agreed:
            for ref, expected in zip(refs, _EXPECTED[what], strict=True):
                found = expected if ref is None else _fetch(ref, memo)
                if not isinstance(found, type(expected)) or found != expected:
                    return False
            agreed.add(refs)
        return True

    def _sized(self, dims: bytes) -> tuple[int, ...]:
        found = self._dims.get(dims)
        if found is None:
            found = self._dims[dims] = self._size(_numbers(dims))
        return found


def _fetch(ref: bytes, memo: list[Any]) -> Any:
    """What a reference leads to. Raises IndexError if that is nowhere, Again if it is what an idiom passed over."""
    found = memo[ref[1] if len(ref) == 2 else _U32(ref, 1)[0]]
    if type(found) is Hole:
        raise Again
    return found


def _remembered(dims: bytes) -> int:
    """How often a torch.Size is remembered: the tuple unless it is empty, the arguments, the Size."""
    return 2 if dims[0] == 0x29 else 3


def _numbers(opcodes: bytes) -> tuple[int, ...]:
    """The ints at the beginning, behind a MARK or not."""
    found = []
    at = 1 if opcodes[0] == 0x28 else 0
    while at < len(opcodes):
        kind = opcodes[at]
        if kind in _WIDTHS:
            start, end = at + 1, at + 1 + _WIDTHS[kind]
        elif kind == 0x8A:
            start, end = at + 2, at + 2 + opcodes[at + 1]
        else:
            break
        found.append(int.from_bytes(opcodes[start:end], "little", signed=kind not in (0x4B, 0x4D)))
        at = end
    return tuple(found)
