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

# A reference into the memo; an int; a bool; what follows the reference to torch.Size; what opens an object with a dict as its state.
_REF = rb"(?:h.|j....)"
_INT = rb"(?:K.|M..|J....|\x8a\x05.....|\x8a\x06......)"
_BOOL = rb"[\x88\x89]"
_DIMS = rb"(?:\)|%b\x85\x94|%b{2}\x86\x94|%b{3}\x87\x94|\(%b{4,64}t\x94)\x85\x94R\x94" % (_INT, _INT, _INT, _INT)
_OPEN = rb"\)\x81\x94\}\x94\("
# Up to a tensor's dims: properties, their class, dtype, layout, memory format; size, torch.Size. Then to a chunk's offsets: its
# class, offsets, torch.Size; and to its sizes: sizes, torch.Size. In all of a checkpoint there are few of each of these.
_HEAD = _REF + _REF + rb"\)\x81\x94\(" + _REF + _REF + _BOOL + _REF + _BOOL + rb"t\x94b" + _REF + _REF
_TO_OFFSETS = _REF + _OPEN + _REF + _REF
_TO_SIZES = _REF + _REF
_CHUNK = rb"(%b)(%b)(%b)(%b)ub" % (_TO_OFFSETS, _DIMS, _TO_SIZES, _DIMS)
_CHUNKS = rb"(?:%b%b%b%bub){2,1000}" % (_TO_OFFSETS, _DIMS, _TO_SIZES, _DIMS)

_TENSOR = re.compile(_OPEN + rb"(%b)(%b)(%b)\]\x94(?:%ba|\((%b)e)ub" % (_HEAD, _DIMS, _REF, _CHUNK, _CHUNKS), re.DOTALL)
_ONE_CHUNK = re.compile(_CHUNK, re.DOTALL)
# fqn and its text, index and its number; offset with torch.Size, its dims.
_INDEX = re.compile(_OPEN + rb"(%b)(%b)(%b)(?:N|%b)(?:(%b)(%b))?ub" % (_REF, _REF, _REF, _INT, _TO_SIZES, _DIMS), re.DOTALL)
# relative_path and its text, offset and length with their numbers; transform_descriptors and their list.
_PLACE = re.compile(_OPEN + rb"(%b)(%b)(%b)(%b)(%b)(%b)(?:(%b)(%b))?ub" % (_REF, _REF, _REF, _INT, _REF, _INT, _REF, _REF), re.DOTALL)

_SIZE: Final = Global("torch", "Size")
_ANYTHING: Final = object()
_WIDTHS: Final = {0x4B: 1, 0x4D: 2, 0x4A: 4}
_U32 = struct.Struct("<I").unpack_from


class _Part:
    """A part that is nearly always the same bytes, and what its references have to lead to."""

    def __init__(self, pattern: bytes, *expected: Any) -> None:
        self._pattern = re.compile(pattern.replace(_REF, rb"(" + _REF + rb")"), re.DOTALL)
        self._expected = expected

    def fetched(self, part: bytes, memo: list[Any]) -> list[Any] | None:
        """What the references lead to, if that is as it should be."""
        refs = self._pattern.fullmatch(part)
        assert refs is not None
        found = [_fetch(ref, memo) for ref in refs.groups()]
        for one, expected in zip(found, self._expected, strict=True):
            if expected is not _ANYTHING and not (isinstance(one, type(expected)) and one == expected):
                return None
        return found


_HEAD_PART: Final = _Part(_HEAD, "properties", *[_ANYTHING] * 4, "size", _SIZE)
_IN_TENSOR: Final = (
    _Part(_REF, "chunks"),
    _Part(_TO_OFFSETS, Global(METADATA, "ChunkStorageMetadata"), "offsets", _SIZE),
    _Part(_TO_SIZES, "sizes", _SIZE),
)
_IN_INDEX: Final = (_Part(_REF, "fqn"), _Part(_REF, "index"), _Part(_TO_SIZES, "offset", _SIZE))
_IN_PLACE: Final = tuple(_Part(_REF, name) for name in ("relative_path", "offset", "length", "transform_descriptors"))


class Entry(NamedTuple):
    """A TensorStorageMetadata: dtype by its name, shape, chunks as ``(offsets, sizes)``."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


class Index(NamedTuple):
    """A MetadataIndex without its hint."""

    fqn: str
    offset: tuple[int, ...] | None


class Idioms:
    """The idioms of one ``.metadata``. What a part's references lead to is looked at once: where idioms are used, the memo only grows."""

    def __init__(
        self,
        size: Callable[[tuple[int, ...]], tuple[int, ...]],
        dtype: Callable[[Any], str | None],
        place: Callable[[Any, Any, Any, Any], Any],
    ) -> None:
        """`size` checks a shape or an offset and may return an equal one; `dtype` gives a dtype's name, None for what is none.

        `place` makes what a _StorageInfo of this path, offset, length and these descriptors becomes. All may raise Corrupt.
        """
        self._size = size
        self._dtype = dtype
        self._place = place
        self._dims: dict[bytes, tuple[int, ...]] = {}
        self._dtypes: dict[bytes, str | None] = {}
        self._good: dict[tuple[_Part, ...], set[tuple[bytes | None, ...]]] = {_IN_TENSOR: set(), _IN_INDEX: set(), _IN_PLACE: set()}

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
        head, dims, chunks_key, *one, several = found.groups()
        if head not in self._dtypes:
            self._dtypes[head] = self._dtype_of(head, memo)
        dtype = self._dtypes[head]
        if dtype is None:
            return None
        remembered = 5 + _remembered(dims)
        chunks = []
        for to_offsets, offsets, to_sizes, sizes in [one] if several is None else map(re.Match.groups, _ONE_CHUNK.finditer(several)):
            if not self._are(_IN_TENSOR, (chunks_key, to_offsets, to_sizes), memo):
                return None
            chunks.append((self._sized(offsets), self._sized(sizes)))
            remembered += 2 + _remembered(offsets) + _remembered(sizes)
        return Entry(dtype, self._sized(dims), tuple(chunks)), found.end(), remembered

    def index(self, data: bytes, at: int, memo: list[Any]) -> tuple[Index, int, int] | None:
        """A MetadataIndex; see `Idiom`."""
        found = _INDEX.match(data, at)
        if found is None:
            return None
        fqn_key, fqn, index_key, to_offset, dims = found.groups()
        name = _fetch(fqn, memo)
        if type(name) is not str or not self._are(_IN_INDEX, (fqn_key, index_key, to_offset), memo):
            return None
        if dims is None:
            return Index(name, None), found.end(), 2
        return Index(name, self._sized(dims)), found.end(), 2 + _remembered(dims)

    def place(self, data: bytes, at: int, memo: list[Any]) -> tuple[Any, int, int] | None:
        """A _StorageInfo; see `Idiom`."""
        found = _PLACE.match(data, at)
        if found is None:
            return None
        path_key, path, offset_key, offset, length_key, length, descriptors_key, descriptors = found.groups()
        if not self._are(_IN_PLACE, (path_key, offset_key, length_key, descriptors_key), memo):
            return None
        given = None if descriptors is None else _fetch(descriptors, memo)
        return self._place(_fetch(path, memo), _number(offset), _number(length), given), found.end(), 2

    def _are(self, expected: tuple[_Part, ...], parts: tuple[bytes | None, ...], memo: list[Any]) -> bool:
        """Whether the references of all parts that are there lead to what they should."""
        good = self._good[expected]
        if parts not in good:
            for part, one in zip(parts, expected, strict=True):
                if part is not None and one.fetched(part, memo) is None:
                    return False
            good.add(parts)
        return True

    def _dtype_of(self, head: bytes, memo: list[Any]) -> str | None:
        """The dtype of tensors with this head, None if it is not as it should be."""
        fetched = _HEAD_PART.fetched(head, memo)
        if fetched is None or not isinstance(fetched[1], Global) or fetched[1].name != "TensorProperties":
            return None
        return self._dtype(fetched[2])

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


def _number(opcode: bytes) -> int:
    """One int."""
    kind = opcode[0]
    if kind == 0x4B:
        return opcode[1]
    return int.from_bytes(opcode[2 if kind == 0x8A else 1 :], "little", signed=kind != 0x4D)


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
