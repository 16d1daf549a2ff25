"""What a pickle becomes here: inert values, and the machine that its opcodes drive.

Where Python's unpickler would look a class up, this keeps its name (`Global`); where it
would call something, this keeps what would have been called (`Record`). Promises: nothing
is imported, called or built; of what the input says only text is hashed; a value is made
once, however often it is referred to. What the opcodes are is `unpickler`'s affair.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from ckptd.errors import Corrupt

#: No module or class has a longer name, in letters.
NAME_LIMIT: Final = 200

#: Tries to read what follows a reference to a class, given the pickle, where that is, and the memo. Returns the value that
#: it makes, where it ends, and how often something of it is remembered; None if the machine has to find out.
Idiom: TypeAlias = Callable[[bytes, int, list[Any]], tuple[Any, int, int] | None]


class Global(NamedTuple):
    """The name of a class or function."""

    module: str
    name: str


class Plain(Global):
    """A class that stands for the tuple that it is called with."""

    __slots__ = ()


class Frequent(Global):
    """A class that has an idiom."""

    idiom: Idiom


class Record:
    """What a pickle would have built by calling `callee` with `args`, and then filled with `state` and `entries`."""

    __slots__ = ("args", "callee", "entries", "state")

    def __init__(self, callee: Global, args: tuple[Any, ...]) -> None:
        self.callee = callee
        self.args = args
        #: What BUILD was given; dicts one after another are merged.
        self.state: Any = None
        #: What was appended: (key, value) pairs of a mapping, values of a list; None if nothing was.
        self.entries: list[Any] | None = None


class Key:
    """A key of a dict that is neither text nor a Record. No two are equal: hashing values of the input could take for ever."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Hole:
    """What an idiom remembered and nobody is known to ask for."""

    __slots__ = ()


class Again(Exception):
    """Something that an idiom passed over is needed: read the pickle without idioms."""


class Machine:
    """The pickle machine: a stack, the heights at which MARKs stand in it, and a memo."""

    def __init__(
        self,
        data: bytes,
        known: Callable[[str, str], bool],
        plain: Collection[tuple[str, str]],
        idioms: Mapping[tuple[str, str], Idiom],
    ) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        # Picklers number what they remember one after another: a list is enough, and no number makes it grow.
        self.memo: list[Any] = []
        self._known = known
        self._plain = plain
        self._idioms = idioms
        self._globals: dict[tuple[str, str], Global] = {}
        self._left = 4 * len(data)

    def since_mark(self) -> list[Any]:
        """Takes everything above the last MARK from the stack."""
        first = self.marks.pop()
        found = self.stack[first:]
        del self.stack[first:]
        return found

    def put(self, number: int) -> None:
        """Remembers the top of the stack. Raises IndexError if that would leave a gap: no pickler leaves one."""
        if self._idioms:
            raise Again
        if number == len(self.memo):
            self.memo.append(self.stack[-1])
        else:
            self.memo[number] = self.stack[-1]

    def recognise(self, frequent: Frequent, at: int) -> int:
        """Lets the class's idiom read on from `at`; returns where it ended, 0 if it could not."""
        made = frequent.idiom(self.data, at, self.memo)
        if made is None:
            return 0
        value, end, remembered = made
        self.stack.append(value)
        self.memo.extend([_HOLE] * remembered)
        return end

    def refer(self, module: object, name: object) -> None:
        """Pushes the class or function of that name. Raises Corrupt, with the name, if it is not known."""
        if type(module) is not str or type(name) is not str:
            raise Corrupt(f"a pickle names a class by a {type(name).__name__} in a {type(module).__name__}")
        found = self._globals.get((module, name))
        if found is None:
            if len(module) > NAME_LIMIT or len(name) > NAME_LIMIT or not self._known(module, name):
                raise Corrupt(f"a pickle names {module[:100]}.{name[:100]}, which no checkpoint's metadata has")
            if (module, name) in self._plain:
                found = Plain(module, name)
            elif (module, name) in self._idioms:
                found = Frequent(module, name)
                found.idiom = self._idioms[module, name]
            else:
                found = Global(module, name)
            self._globals[module, name] = found
        self.stack.append(found)

    def call(self, args: object) -> None:
        """Replaces what is on top of the stack by what calling it with `args` would make."""
        callee = self.stack[-1]
        if not isinstance(callee, Global) or type(args) is not tuple:
            raise Corrupt(f"a pickle calls a {type(callee).__name__} with a {type(args).__name__}")
        if type(callee) is Plain and len(args) == 1 and type(args[0]) is tuple:
            self.stack[-1] = args[0]
        else:
            self.stack[-1] = Record(callee, args)

    def give(self, state: Any) -> None:
        """Gives the Record on top of the stack its state, or more of it."""
        target = self.stack[-1]
        if type(target) is not Record:
            raise Corrupt(f"a pickle gives state to a {type(target).__name__}")
        if type(target.state) is dict and type(state) is dict:
            self._left -= len(target.state) + len(state)
            if self._left < 0:
                raise Corrupt("a pickle gives its objects more state than its length allows")
            state = {**target.state, **state}  # a new one: the old one may be in the memo
        target.state = state

    def extend(self, values: list[Any]) -> None:
        """Adds values to the list or Record on top of the stack."""
        target = self.stack[-1]
        if type(target) is list:
            target.extend(values)
        elif type(target) is Record:
            if target.entries is None:
                target.entries = []
            target.entries.extend(values)
        else:
            raise Corrupt(f"a pickle adds to a {type(target).__name__}")

    def assign(self, pairs: list[Any]) -> None:
        """Sets keys of the dict or Record on top of the stack: `pairs` has keys and values in turn."""
        target = self.stack[-1]
        values = iter(pairs)
        if type(target) is dict:
            for key in values:
                target[key if type(key) is str or type(key) is Record else Key(key)] = next(values)
        elif type(target) is Record:
            self.extend([(key, next(values)) for key in values])
        else:
            raise Corrupt(f"a pickle sets keys of a {type(target).__name__}")


_HOLE: Final = Hole()
