"""Reads a pickle into inert values, in one pass over its opcodes.

It knows the opcodes that the C pickler writes at protocols 2 to 5 and no other.
Promises: a value made of plain Python types, `Global`, `Record`, `Key` and what idioms
make, or Corrupt; memory within a hundred times the input, and time in proportion to it,
whatever sizes and memo numbers the input claims; no recursion. Never executes anything
of the input.

The opcodes: CPython's Lib/pickletools.py.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, TypeAlias

from ckptd.errors import Corrupt
from ckptd.inert import NAME_LIMIT, Again, Frequent, Hole, Idiom, Machine, Record

#: More than this is refused unread: .metadata of millions of items is below it.
LIMIT_NBYTES: Final = 1 << 30
#: From this protocol on, what is remembered is never replaced, so an idiom may rely on it.
_IDIOMATIC_PROTOCOL: Final = 4

_U8, _U16, _U32, _U64, _I32, _DOUBLE = (struct.Struct(one).unpack_from for one in ("<B", "<H", "<I", "<Q", "<i", ">d"))


def load(
    data: bytes,
    known: Callable[[str, str], bool],
    plain: Collection[tuple[str, str]] = (),
    idioms: Mapping[tuple[str, str], Idiom] | None = None,
) -> Any:
    """Reads one whole pickle; `known` says which ``(module, name)`` may occur.

    A call of one that is in `plain`, with a tuple as its only argument, is read as that
    tuple. Sets are read as lists, frozensets as tuples. `idioms`: by class.

    Raises Corrupt: for every other global, with its name; for whatever is no such
    pickle; for bytes after its end; for more than 1 GiB.
    """
    if len(data) > LIMIT_NBYTES:
        raise Corrupt(f"a pickle of {len(data)} bytes is too large to be read: the limit is {LIMIT_NBYTES}")
    if idioms and data[:1] == b"\x80" and data[1:2] >= bytes([_IDIOMATIC_PROTOCOL]):
        try:
            return _load(Machine(data, known, plain, idioms))
        except (Again, Corrupt):  # the machine alone tells what is wrong, and whether anything is
            pass
    return _load(Machine(data, known, plain, {}))


def _load(machine: Machine) -> Any:
    size = len(machine.data)
    try:
        _run(machine)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RecursionError,
        StopIteration,
        TypeError,
        ValueError,
        struct.error,
    ) as exc:
        raise Corrupt(f"a pickle is damaged before byte {machine.at} of {size}: {type(exc).__name__}: {exc}") from exc
    if len(machine.stack) != 1 or machine.marks or machine.at != size:
        raise Corrupt(f"a pickle ends at byte {machine.at} of {size} with {len(machine.stack)} values")
    return machine.stack[0]


def _run(machine: Machine) -> None:  # noqa: PLR0915 - a call per opcode would take longer than what it does
    """Runs up to STOP. What a large `.metadata` has most of is done here, in the order of how often it occurs; the rest in steps.

    Nothing asks whether the end is near: the next opcode is missed there.
    """
    data, stack, marks, memo = machine.data, machine.stack, machine.marks, machine.memo
    push, pop, remember = stack.append, stack.pop, memo.append
    at = 0
    try:
        while True:
            opcode = data[at]
            at += 1
            if opcode == 0x94:  # MEMOIZE
                remember(stack[-1])
            elif opcode == 0x68 or opcode == 0x6A:  # noqa: PLR1714 - BINGET, LONG_BINGET; a tuple of both would take longer
                if opcode == 0x68:
                    value = memo[data[at]]
                    at += 1
                else:
                    value = memo[_U32(data, at)[0]]
                    at += 4
                if type(value) is Frequent:
                    end = machine.recognise(value, at)
                    if end:
                        at = end
                        continue
                elif type(value) is Hole:
                    raise Again
                push(value)
            elif opcode == 0x4B:  # BININT1
                push(data[at])
                at += 1
            elif opcode == 0x28:  # MARK
                marks.append(len(stack))
            elif opcode == 0x29:  # EMPTY_TUPLE
                push(())
            elif opcode == 0x81 or opcode == 0x52:  # noqa: PLR1714 - NEWOBJ, REDUCE
                machine.call(pop())
            elif opcode == 0x62:  # BUILD
                state, target = pop(), stack[-1]
                if type(target) is Record and target.state is None:
                    target.state = state
                else:
                    machine.give(state)
            elif opcode == 0x85:  # TUPLE1
                stack[-1] = (stack[-1],)
            elif opcode == 0x75:  # SETITEMS
                machine.assign(machine.since_mark())
            elif opcode == 0x7D:  # EMPTY_DICT
                push({})
            elif opcode == 0x86:  # TUPLE2
                second = pop()
                stack[-1] = (stack[-1], second)
            elif opcode == 0x89:  # NEWFALSE
                push(False)
            elif opcode == 0x8C:  # SHORT_BINUNICODE
                end = at + 1 + data[at]
                push(data[at + 1 : end].decode("utf-8", "surrogatepass"))
                at = end
            elif opcode == 0x4D:  # BININT2
                push(_U16(data, at)[0])
                at += 2
            elif opcode == 0x4A:  # BININT
                push(_I32(data, at)[0])
                at += 4
            elif opcode == 0x2E:  # STOP
                return
            elif opcode in _STEPS:
                at = _STEPS[opcode](machine, at)
            else:
                raise Corrupt(f"a pickle has opcode {opcode:#04x} at byte {at - 1}, which no checkpoint's metadata has")
    finally:
        machine.at = at


#: Does one opcode, given where its argument starts; returns where the next opcode is.
_Step: TypeAlias = Callable[[Machine, int], int]


def _sized(length: Callable[[bytes, int], tuple[int]], length_nbytes: int, make: Callable[[bytes], Any]) -> _Step:
    """Pushes what `make` makes of as many bytes as the number before them says."""

    def step(machine: Machine, at: int) -> int:
        data = machine.data
        start = at + length_nbytes
        end = start + length(data, at)[0]
        if end > len(data):
            raise Corrupt(f"a pickle of {len(data)} bytes is cut short: {end - start} more are needed at byte {start}")
        machine.stack.append(make(data[start:end]))
        return end

    return step


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _skip(nbytes: int) -> _Step:
    return lambda _machine, at: at + nbytes


def _then(act: Callable[[Machine], object]) -> _Step:
    """Has no argument."""

    def step(machine: Machine, at: int) -> int:
        act(machine)
        return at

    return step


def _push(make: Callable[[], Any]) -> _Step:
    return _then(lambda machine: machine.stack.append(make()))


def _float(machine: Machine, at: int) -> int:
    machine.stack.append(_DOUBLE(machine.data, at)[0])
    return at + 8


def _binput(machine: Machine, at: int) -> int:
    machine.put(machine.data[at])
    return at + 1


def _long_binput(machine: Machine, at: int) -> int:
    machine.put(_U32(machine.data, at)[0])
    return at + 4


def _tuple3(machine: Machine) -> None:
    third, second = machine.stack.pop(), machine.stack.pop()
    machine.stack[-1] = (machine.stack[-1], second, third)


def _append(machine: Machine) -> None:
    value = machine.stack.pop()
    machine.extend([value])


def _setitem(machine: Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.assign([key, value])


def _global(machine: Machine, at: int) -> int:
    data = machine.data
    middle = data.index(b"\n", at, at + NAME_LIMIT)
    end = data.index(b"\n", middle + 1, middle + NAME_LIMIT)
    machine.refer(data[at:middle].decode(), data[middle + 1 : end].decode())
    return end + 1


def _stack_global(machine: Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.refer(module, name)


def _newobj_ex(machine: Machine) -> None:
    _, args = machine.stack.pop(), machine.stack.pop()
    machine.call(args)


_STEPS: Final[dict[int, _Step]] = {
    0x80: _skip(1),  # PROTO
    0x95: _skip(8),  # FRAME
    0x30: _then(lambda machine: machine.stack.pop()),  # POP
    0x31: _then(Machine.since_mark),  # POP_MARK
    0x32: _then(lambda machine: machine.stack.append(machine.stack[-1])),  # DUP
    0x4E: _push(lambda: None),  # NONE
    0x88: _push(lambda: True),  # NEWTRUE
    0x8A: _sized(_U8, 1, _number),  # LONG1
    0x8B: _sized(_U32, 4, _number),  # LONG4
    0x47: _float,  # BINFLOAT
    0x58: _sized(_U32, 4, _text),  # BINUNICODE
    0x8D: _sized(_U64, 8, _text),  # BINUNICODE8
    0x42: _sized(_U32, 4, bytes),  # BINBYTES
    0x43: _sized(_U8, 1, bytes),  # SHORT_BINBYTES
    0x8E: _sized(_U64, 8, bytes),  # BINBYTES8
    0x87: _then(_tuple3),  # TUPLE3
    0x74: _then(lambda machine: machine.stack.append(tuple(machine.since_mark()))),  # TUPLE
    0x91: _then(lambda machine: machine.stack.append(tuple(machine.since_mark()))),  # FROZENSET
    0x5D: _push(list),  # EMPTY_LIST
    0x8F: _push(list),  # EMPTY_SET
    0x61: _then(_append),  # APPEND
    0x65: _then(lambda machine: machine.extend(machine.since_mark())),  # APPENDS
    0x90: _then(lambda machine: machine.extend(machine.since_mark())),  # ADDITEMS
    0x73: _then(_setitem),  # SETITEM
    0x71: _binput,  # BINPUT
    0x72: _long_binput,  # LONG_BINPUT
    0x63: _global,  # GLOBAL
    0x93: _then(_stack_global),  # STACK_GLOBAL
    0x92: _then(_newobj_ex),  # NEWOBJ_EX
}
