"""Reads a pickle into inert records: nothing in it is imported, called or built.

Where Python's unpickler would look a class up, this keeps its name (`Global`);
where it would call something, this keeps what would have been called (`Record`).
It knows the opcodes that the C pickler writes at protocols 2 to 5 and no other.

Promises: a value made of plain Python types, `Global` and `Record`, or Corrupt;
memory within a small multiple of the input, whatever sizes and memo numbers the
input claims; no recursion. Never executes anything of the input.

The opcodes: CPython's Lib/pickletools.py.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ckptd.errors import Corrupt

if TYPE_CHECKING:
    from collections.abc import Callable

#: More than this is refused unread: .metadata of 10 million items is below it.
LIMIT_NBYTES: Final = 1 << 30

_STOP: Final = ord(".")


class Global(NamedTuple):
    """The name of a class or function."""

    module: str
    name: str


class Record:
    """What a pickle would have built by calling `callee` with `args`, and then filled with `state` and `entries`."""

    __slots__ = ("args", "callee", "entries", "state")

    def __init__(self, callee: Global, args: tuple[Any, ...]) -> None:
        self.callee = callee
        self.args = args
        #: What BUILD was given; dicts one after another are merged.
        self.state: Any = None
        #: What was appended: (key, value) pairs of a mapping, values of a list.
        self.entries: list[Any] = []


def load(data: bytes, known: Callable[[str, str], bool]) -> Any:
    """Reads one whole pickle; `known` says which ``(module, name)`` may occur.

    Raises Corrupt: for every other global, with its name; for whatever is no such
    pickle; for bytes after its end; for more than 1 GiB.
    """
    if len(data) > LIMIT_NBYTES:
        raise Corrupt(f"a pickle of {len(data)} bytes is too large to be read: the limit is {LIMIT_NBYTES}")
    machine = _Machine(data, known)
    try:
        return machine.run()
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
        struct.error,
    ) as exc:
        raise Corrupt(f"a pickle is damaged at byte {machine.at} of {len(data)}: {type(exc).__name__}: {exc}") from exc


class _Machine:
    """The pickle machine: a stack that MARK splits, and a memo."""

    def __init__(self, data: bytes, known: Callable[[str, str], bool]) -> None:
        self.data = data
        self.known = known
        self.at = 0
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        # A dict, not an array: a memo number may be anything below 2^32.
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, steps = self.data, _STEPS
        while (opcode := data[self.at]) != _STOP:
            if opcode not in steps:
                raise Corrupt(f"a pickle has opcode {opcode:#04x} at byte {self.at}, which no checkpoint's metadata has")
            self.at += 1
            steps[opcode](self)
        if len(self.stack) != 1 or self.below or self.at + 1 != len(data):
            raise Corrupt(f"a pickle ends at byte {self.at} of {len(data)} with {len(self.stack)} values")
        return self.stack[0]

    def take(self, nbytes: int) -> bytes:
        end = self.at + nbytes
        if nbytes < 0 or end > len(self.data):
            raise Corrupt(f"a pickle of {len(self.data)} bytes is cut short: {nbytes} more are needed at byte {self.at}")
        found = self.data[self.at : end]
        self.at = end
        return found

    def number(self, nbytes: int) -> int:
        # Not by take(), for speed: past the end this is some number, and the next opcode is missed.
        at = self.at
        self.at = at + nbytes
        return self.data[at] if nbytes == 1 else int.from_bytes(self.data[at : at + nbytes], "little")

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        found = self.data[self.at : end]
        self.at = end + 1
        return found.decode()

    def since_mark(self) -> list[Any]:
        found, self.stack = self.stack, self.below.pop()
        return found

    def refer(self, module: object, name: object) -> None:
        if type(module) is not str or type(name) is not str or not self.known(module, name):
            raise Corrupt(f"a pickle names {str(module)[:100]}.{str(name)[:100]}, which no checkpoint's metadata has")
        self.stack.append(Global(module, name))

    def call(self, callee: object, args: object) -> None:
        if type(callee) is not Global or type(args) is not tuple:
            raise Corrupt(f"a pickle calls what is no class or function, before byte {self.at}")
        self.stack.append(Record(callee, args))


def _key(value: Any) -> Any:
    """Only keys whose hash is cheap and flat: hashing nested tuples recurses in C without a limit."""
    if type(value) in _KEYS:
        return value
    for part in value if type(value) is tuple else (value,):
        if type(part) not in _KEYS:
            raise Corrupt(f"a pickle has a key of type {type(part).__name__}")
    return value


_KEYS: Final = frozenset({str, int, bool, float, bytes, type(None), Global, Record})


def _put(number_nbytes: int) -> Callable[[_Machine], None]:
    def step(m: _Machine) -> None:
        m.memo[m.number(number_nbytes)] = m.stack[-1]

    return step


def _get(number_nbytes: int) -> Callable[[_Machine], None]:
    def step(m: _Machine) -> None:
        m.stack.append(m.memo[m.number(number_nbytes)])

    return step


def _memoize(m: _Machine) -> None:
    m.memo[len(m.memo)] = m.stack[-1]


def _constant(value: Any) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(value)


def _fresh(kind: type) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(kind())


def _unsigned(nbytes: int) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(m.number(nbytes))


def _binint(m: _Machine) -> None:
    m.stack.append(int.from_bytes(m.take(4), "little", signed=True))


def _long(length_nbytes: int) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(int.from_bytes(m.take(m.number(length_nbytes)), "little", signed=True))


def _text(length_nbytes: int) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(m.take(m.number(length_nbytes)).decode("utf-8", "surrogatepass"))


def _bytes(length_nbytes: int) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(m.take(m.number(length_nbytes)))


def _mark(m: _Machine) -> None:
    m.below.append(m.stack)
    m.stack = []


def _tuple_of(count: int) -> Callable[[_Machine], None]:
    def step(m: _Machine) -> None:
        found = tuple(m.stack[-count:])
        if len(found) != count:
            raise Corrupt(f"a pickle takes {count} values from {len(found)}, before byte {m.at}")
        m.stack[-count:] = [found]

    return step


def _tuple(m: _Machine) -> None:
    found = m.since_mark()
    m.stack.append(tuple(found))


def _frozenset(m: _Machine) -> None:
    found = m.since_mark()
    m.stack.append(frozenset(map(_key, found)))


def _extend(target: object, values: list[Any]) -> None:
    if type(target) is list:
        target.extend(values)
    elif type(target) is set:
        target.update(map(_key, values))
    elif type(target) is Record:
        target.entries.extend(values)
    else:
        raise Corrupt(f"a pickle adds to a {type(target).__name__}")


def _append(m: _Machine) -> None:
    value = m.stack.pop()
    _extend(m.stack[-1], [value])


def _appends(m: _Machine) -> None:
    values = m.since_mark()
    _extend(m.stack[-1], values)


def _assign(target: object, pairs: list[Any]) -> None:
    if len(pairs) % 2:
        raise Corrupt("a pickle has a key without a value")
    keys = pairs[::2]
    for key in keys:
        if type(key) is not str:
            _key(key)
    entries = zip(keys, pairs[1::2], strict=True)
    if type(target) is dict:
        target.update(entries)
    elif type(target) is Record:
        target.entries.extend(entries)
    else:
        raise Corrupt(f"a pickle sets keys of a {type(target).__name__}")


def _setitem(m: _Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    _assign(m.stack[-1], [key, value])


def _setitems(m: _Machine) -> None:
    pairs = m.since_mark()
    _assign(m.stack[-1], pairs)


def _global(m: _Machine) -> None:
    module = m.line()
    m.refer(module, m.line())


def _stack_global(m: _Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    m.refer(module, name)


def _reduce(m: _Machine) -> None:
    args, callee = m.stack.pop(), m.stack.pop()
    m.call(callee, args)


def _newobj_ex(m: _Machine) -> None:
    _, args, callee = m.stack.pop(), m.stack.pop(), m.stack.pop()
    m.call(callee, args)


def _build(m: _Machine) -> None:
    state = m.stack.pop()
    target = m.stack[-1]
    if type(target) is not Record:
        raise Corrupt(f"a pickle gives state to a {type(target).__name__}")
    if type(target.state) is dict and type(state) is dict:
        target.state = {**target.state, **state}  # a new one: the old one may be in the memo
    else:
        target.state = state


_STEPS: Final[dict[int, Callable[[_Machine], Any]]] = {
    opcode[0]: step
    for opcode, step in {
        b"\x80": lambda m: m.take(1),  # PROTO
        b"\x95": lambda m: m.take(8),  # FRAME
        b"(": _mark,
        b"0": lambda m: m.stack.pop(),
        b"1": lambda m: m.since_mark(),
        b"2": lambda m: m.stack.append(m.stack[-1]),
        b"N": _constant(None),
        b"\x88": _constant(True),
        b"\x89": _constant(False),
        b"J": _binint,
        b"K": _unsigned(1),
        b"M": _unsigned(2),
        b"\x8a": _long(1),
        b"\x8b": _long(4),
        b"G": lambda m: m.stack.extend(struct.unpack(">d", m.take(8))),
        b"X": _text(4),
        b"\x8c": _text(1),
        b"\x8d": _text(8),
        b"B": _bytes(4),
        b"C": _bytes(1),
        b"\x8e": _bytes(8),
        b")": _constant(()),
        b"\x85": _tuple_of(1),
        b"\x86": _tuple_of(2),
        b"\x87": _tuple_of(3),
        b"t": _tuple,
        b"]": _fresh(list),
        b"a": _append,
        b"e": _appends,
        b"}": _fresh(dict),
        b"s": _setitem,
        b"u": _setitems,
        b"\x8f": _fresh(set),
        b"\x90": _appends,
        b"\x91": _frozenset,
        b"q": _put(1),
        b"r": _put(4),
        b"h": _get(1),
        b"j": _get(4),
        b"\x94": _memoize,
        b"c": _global,
        b"\x93": _stack_global,
        b"R": _reduce,
        b"\x81": _reduce,
        b"\x92": _newobj_ex,
        b"b": _build,
    }.items()
}
