"""DCP's ``.metadata`` in and out, without torch and without running a pickle.

Out: the trainer pickles its Metadata (protocol 2, no storage data); `splice` takes
that pickle's STOP away and appends opcodes that fill in where every item is stored
and which manifest says more. Stock then reads what it would have written itself.
In: `save_id` finds that manifest's name in the file's last bytes; `read` makes the
content of any ``.metadata``, ours or stock's, into plain values.

Promises: a spliced file begins with the trainer's bytes, all but the last, unchanged.
Never imports or calls what a pickle names, and never repairs: what is not as DCP
writes it is Corrupt.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast

from ckptd import collector, idioms, inert, unpickler
from ckptd.errors import Corrupt, InvalidRequest
from ckptd.vocabulary import FILESYSTEM, METADATA, PLAIN, dtype_name, is_known

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_T = TypeVar("_T")

#: How much of the end of a ``.metadata`` `save_id` has to see.
TAIL_NBYTES: Final = 512

#: Attributes of a _StorageInfo.
_PLACE: Final = ("relative_path", "offset", "length", "transform_descriptors")
#: So many different sizes may have one hash, which by chance never happens.
_ALIKE: Final = 16
_SAVE_ID = re.compile(r"[0-9A-Za-z]{1,80}-[0-9A-Za-z]{1,80}\.manifest")
# The last thing in a spliced file: the key, the name, SETITEMS, BUILD (StorageMeta), SETITEM, BUILD (Metadata), STOP.
_ENDING = re.compile(rb"X\x07\0\0\0save_idX(.)\0\0\0([0-9A-Za-z]+-[0-9A-Za-z]+\.manifest)ubsb\.\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Placed:
    """Where one item is stored: `nbytes` stored bytes at `at` of `file`, a name beside ``.metadata``."""

    fqn: bytes
    offset: tuple[int, ...] | None
    index: int | None
    file: str
    at: int
    nbytes: int


def splice(client_pickle: bytes, placed: Iterable[Placed], *, descriptors: Sequence[str], checkpoint_id: str, save_id: str) -> bytes:
    """The whole ``.metadata``: `client_pickle` without its STOP, then storage data and storage meta.

    Of items with equal fqn and offset the last one counts, as in stock. Raises
    InvalidRequest if `client_pickle` is not a pickle of protocol 2 that ends in
    STOP, a name is not UTF-8 (surrogates pass), or `save_id` no manifest's name.
    """
    if len(client_pickle) < 4 or client_pickle[:2] != b"\x80\x02" or client_pickle[-1:] != b".":
        raise InvalidRequest(f"the metadata is not a pickle of protocol 2 (its {len(client_pickle)} bytes end in {client_pickle[-1:]!r})")
    if not _SAVE_ID.fullmatch(save_id):
        raise InvalidRequest(f"{save_id[:80]!r} is not the name of a manifest")
    parts = [client_pickle[:-1], *_storage_data(placed, descriptors), *_storage_meta(checkpoint_id, save_id), b"."]
    return b"".join(parts)


# The trainer's part is complete, so its memo is used no more: slots are written anew from 0. Slots of what every item needs:
_INDEX, _SIZE, _INFO, _FQN, _OFFSET, _HINT, _FILE, _LENGTH, _TRANSFORMS, _DESCRIPTORS = (b"h" + bytes([slot]) for slot in range(10))
_FILE_SLOTS: Final = 10


def _storage_data(placed: Iterable[Placed], descriptors: Sequence[str]) -> Iterable[bytes]:
    shared = [
        _global(METADATA, "MetadataIndex"),
        _global("torch", "Size"),
        _global(FILESYSTEM, "_StorageInfo"),
        *(_text(key) for key in (b"fqn", b"offset", b"index", b"relative_path", b"length", b"transform_descriptors")),
        b"](" + b"".join(_text(one.encode()) for one in descriptors) + b"e",
    ]
    for slot, value in enumerate(shared):
        yield value + b"q" + bytes([slot]) + b"0"  # put into the memo, off the stack
    transforms = _TRANSFORMS + _DESCRIPTORS if descriptors else b""
    files: dict[str, bytes] = {}
    yield b"}" + _text(b"storage_data") + b"}"
    for item in placed:
        file = files.get(item.file)
        if file is None:
            place = struct.pack("<I", _FILE_SLOTS + len(files))
            file, files[item.file] = _text(item.file.encode("utf-8", "surrogatepass")) + b"r" + place, b"j" + place
        # A new object of the class, its __dict__ in one go, as a dataclass reduces; _StorageInfo leaves out what is None.
        offset = b"" if item.offset is None else _OFFSET + _SIZE + _tuple(item.offset) + b"\x85R"
        hint = b"N" if item.index is None else _int(item.index)
        yield b"%b)\x81}(%b%b%b%b%bub" % (_INDEX, _FQN, _text(_checked(item.fqn)), _HINT, hint, offset)
        yield b"%b)\x81}(%b%b%b%b%b%b%bubs" % (_INFO, _FILE, file, _OFFSET, _int(item.at), _LENGTH, _int(item.nbytes), transforms)
    yield b"sb"


def _storage_meta(checkpoint_id: str, save_id: str) -> Iterable[bytes]:
    yield b"}" + _text(b"storage_meta") + _global(METADATA, "StorageMeta") + b")\x81}("
    yield _text(b"checkpoint_id") + _text(checkpoint_id.encode("utf-8", "surrogatepass"))
    yield _text(b"load_id") + b"N" + _text(b"modules") + b"]"
    yield _text(b"save_id") + _text(save_id.encode()) + b"ubsb"


def _checked(fqn: bytes) -> bytes:
    try:
        fqn.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as exc:
        raise InvalidRequest(f"the name {fqn[:80]!r} of an item is not UTF-8") from exc
    return fqn


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(utf8: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(utf8)) + utf8


def _int(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return b"K" + bytes([value])
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    nbytes = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([nbytes]) + value.to_bytes(nbytes, "little", signed=True)


def _tuple(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(_int, values)) + b"t" if values else b")"


def save_id(tail: bytes) -> str | None:
    """The manifest's name, given the last 512 bytes of a ``.metadata`` (or all of it); None if ckptd did not write it."""
    found = _ENDING.search(tail[-TAIL_NBYTES:])
    if found is None or found.group(1)[0] != len(found.group(2)):
        return None
    return found.group(2).decode()


class Tensor(NamedTuple):
    """A tensor of a checkpoint: torch's dtype without the module, shape and chunks ``(offsets, sizes)`` in elements."""

    fqn: bytes
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


class StoredAt(NamedTuple):
    """Where an item is stored: `length` bytes at `offset` of `file`, which is relative to the checkpoint's directory."""

    file: str
    offset: int
    length: int
    descriptors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Contents:
    """What a ``.metadata`` says. Keys of `storage` are ``(fqn, offset)``; `save_id` is None if ckptd did not write it."""

    tensors: list[Tensor]
    objects: list[bytes]
    storage: dict[tuple[bytes, tuple[int, ...] | None], StoredAt]
    save_id: str | None


def read(data: bytes) -> Contents:
    """Reads a whole ``.metadata``, of ckptd or of stock DCP.

    Raises Corrupt for everything else; names the global if it is one that DCP's
    metadata never has. File names that lead out of the checkpoint are Corrupt too.
    """
    with collector.paused():
        return _Reader(len(data)).read(data)


class _Reader:
    """Takes inert records apart. What is shared by reference may not grow: all lengths together are bounded by the file's."""

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes
        self.sizes: dict[int, list[tuple[int, ...]]] = {}
        self.files: set[str] = set()

    def read(self, data: bytes) -> Contents:
        known = idioms.Idioms(self.size, dtype_name, self.place).by_class()
        state = _state(unpickler.load(data, is_known, PLAIN, known), "Metadata")
        tensors, objects = [], []
        for key, entry in _consumed(state.get("state_dict_metadata"), "state_dict_metadata"):
            fqn = _fqn(key)
            if type(entry) is inert.Record and entry.callee.name == "BytesStorageMetadata":
                objects.append(fqn)
            else:
                found = entry if type(entry) is idioms.Entry else self.entry(fqn, entry)
                self.spend(len(found.shape) + len(found.chunks))
                tensors.append(Tensor(fqn, *found))
        storage = {}
        if state.get("storage_data") is not None:
            for key, info in _consumed(state["storage_data"], "storage_data"):
                storage[self.index(key)] = info if type(info) is StoredAt else self.place(*map(_state(info, "_StorageInfo").get, _PLACE))
        return Contents(tensors, objects, storage, self.save_id(state.get("storage_meta")))

    def entry(self, fqn: bytes, entry: Any) -> idioms.Entry:
        state = _state(entry, "TensorStorageMetadata")
        chunks = []
        for chunk in _of(list, state.get("chunks"), "chunks"):
            fields = _state(chunk, "ChunkStorageMetadata")
            chunks.append((self.size(fields.get("offsets")), self.size(fields.get("sizes"))))
        dtype = dtype_name(_dtype(state.get("properties")))
        if dtype is None:
            raise Corrupt(f"the metadata of {fqn[:80]!r} has no dtype")
        return idioms.Entry(dtype, self.size(state.get("size")), tuple(chunks))

    def index(self, key: Any) -> tuple[bytes, tuple[int, ...] | None]:
        if type(key) is inert.Key and type(key.value) is idioms.Index:
            return _fqn(key.value.fqn), key.value.offset
        state = _state(key, "MetadataIndex")
        offset = state.get("offset")
        return _fqn(state.get("fqn")), None if offset is None else self.size(offset)

    def place(self, file: Any, offset: Any, length: Any, descriptors: Any) -> StoredAt:
        names: tuple[str, ...] = ()
        if descriptors:
            if type(descriptors) not in (list, tuple):
                raise Corrupt("the metadata has transform descriptors that are no list")
            self.spend(len(descriptors))
            names = tuple([_of(str, one, "a descriptor") for one in descriptors])
        return StoredAt(self.file(file), _count(offset), _count(length), names)

    def file(self, name: Any) -> str:
        if type(name) is not str or name not in self.files:
            _of(str, name, "a file's name")
            if "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
                raise Corrupt(f"the metadata names the file {name[:80]!r}, which is not inside the checkpoint")
            self.files.add(name)
        return cast("str", name)

    def save_id(self, meta: Any) -> str | None:
        found = None if meta is None else _state(meta, "StorageMeta").get("save_id")
        return found if type(found) is str and _SAVE_ID.fullmatch(found) else None

    def size(self, value: Any) -> tuple[int, ...]:
        """A shape or an offset; equal ones are one object. Whoever hashes them need not fear ones that were made to collide."""
        dims = _of(tuple, value, "a size")
        self.spend(len(dims))
        for dim in dims:
            _count(dim)
        alike = self.sizes.setdefault(hash(dims), [])
        for one in alike:
            if one == dims:
                return one
        if len(alike) == _ALIKE:
            raise Corrupt("the metadata has sizes whose hashes are all the same")
        alike.append(dims)
        return dims

    def spend(self, amount: int) -> None:
        self.left -= amount
        if self.left < 0:
            raise Corrupt("the metadata describes more chunks than its length allows")


def _consumed(value: Any, what: str) -> Iterator[tuple[Any, Any]]:
    """The entries of a mapping, each freed when the next one is asked for: all at once would stop the whole process."""
    if type(value) is inert.Record and value.callee.name in ("OrderedDict", "defaultdict"):
        entries, value.entries = value.entries or [], None
    else:
        entries = list(_of(dict, value, what).items())
        value.clear()
    entries.reverse()
    while entries:
        entry = entries.pop()
        if type(entry) is not tuple or len(entry) != 2:
            raise Corrupt(f"the metadata has an entry of {what} that is no key with a value")
        yield entry


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise Corrupt("the metadata has a size or position that is no number")
    return value


def _of(kind: type[_T], value: Any, what: str) -> _T:
    if type(value) is not kind:
        raise Corrupt(f"the metadata has a {type(value).__name__} as {what}, not a {kind.__name__}")
    return value


def _state(record: Any, name: str) -> dict[str, Any]:
    if type(record) is not inert.Record or record.callee.name != name:
        raise Corrupt(f"the metadata has no {name} where one should be")
    return {} if record.state is None else _of(dict, record.state, name)


def _dtype(properties: Any) -> Any:
    if type(properties) is not inert.Record or properties.callee.name != "TensorProperties":
        raise Corrupt("the metadata of a tensor has no properties")
    fields = properties.state
    if type(fields) is dict:
        return fields.get("dtype")
    return fields[0] if type(fields) is tuple and fields else None


def _fqn(value: Any) -> bytes:
    return _of(str, value, "a name").encode("utf-8", "surrogatepass")
