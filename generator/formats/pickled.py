"""Pickles read without executing them: the opcodes that tables of tensors consist of, and no others.

Python's own unpickler is not used, not even with a restricted list of classes: a pickle of 100 bytes makes it reserve
gigabytes for its memo, and tuples that share their parts make it hash or compare without end. Here a value is text, a
number, a tuple, a list, a dict with plain keys or what a constructor of the caller returns, and nothing looks into a
value twice.
"""

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_OPCODES = 500_000  # a tensor takes about 30
MAX_KEY = 2**31  # larger numbers can be chosen so that a dict of them becomes slow

PLAIN = frozenset(
    ["BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
     "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"]
)  # fmt: skip
"""The opcodes whose argument is the value."""

CODE = frozenset(["INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"])
"""The opcodes that make objects, beside those that every state dict has."""


class RefusedError(Exception):
    """A pickle names a class or a function that tables of tensors do not need. Its text is that name."""


class MalformedError(Exception):
    """No table of tensors, or one that is cut short."""


@dataclass(frozen=True)
class Constructor:
    """What a pickle may call: a function of this program that checks its arguments."""

    call: Callable[..., Any]


def read_pickle(data: bytes, globals_: Mapping[str, Any], load: Callable[[Any], Any]) -> tuple[Any, int]:
    """The value of the pickle at the beginning of some bytes, and the pickle's length.

    Args:
        data: may go on behind the pickle.
        globals_: `module.name` -> what stands for it: a `Constructor` or a value.
        load: what a persistent reference stands for.

    Raises:
        RefusedError: another global, or an opcode that makes objects.
        MalformedError: anything else that is wrong.
    """
    machine = _Machine(globals_, load)
    try:
        for number, (opcode, argument, position) in enumerate(pickletools.genops(data)):
            if number == MAX_OPCODES:
                raise MalformedError(f"it has more than {MAX_OPCODES} parts")
            if opcode.name == "STOP":
                return machine.stack[-1], (position or 0) + 1
            machine.step(opcode.name, argument)
    except ValueError as error:
        raise MalformedError(str(error)[:200]) from error
    except LookupError as error:
        raise MalformedError("it refers to what is not there") from error
    except TypeError as error:
        raise MalformedError("it calls a constructor with other arguments") from error
    raise AssertionError("genops ends with STOP or an error")


class _Machine:
    """The stack, marks and memo of the pickle protocol."""

    def __init__(self, globals_: Mapping[str, Any], load: Callable[[Any], Any]) -> None:
        self.globals = globals_
        self.load = load
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks below each mark
        self.memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        """One opcode."""
        if name in PLAIN:
            self.stack.append(argument)
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self.memo[len(self.memo) if argument is None else argument] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            self.stack.append(self.memo[argument])
        elif name in _STEPS:
            _STEPS[name](self)
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            self.push_global(argument)
        elif name in CODE:
            raise RefusedError(str(argument).replace(" ", ".")[:200] if name == "INST" else f"an object ({name})")
        elif name not in ("PROTO", "FRAME"):
            raise MalformedError(f"it has the part {name}")

    def push_global(self, argument: str | None) -> None:
        """A class or a function by its name, which must be a known one."""
        if argument is None:
            name, module = self.stack.pop(), self.stack.pop()
            argument = f"{module} {name}" if isinstance(name, str) and isinstance(module, str) else "?"
        dotted = argument.replace(" ", ".")
        if dotted not in self.globals:
            raise RefusedError(dotted[:200])
        self.stack.append(self.globals[dotted])

    def take_marked(self) -> list[Any]:
        """What lies above the last mark."""
        above, self.stack = self.stack, self.below.pop()
        return above

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def push_marked_tuple(self) -> None:
        above = self.take_marked()
        self.stack.append(tuple(above))

    def push_tuple(self, count: int) -> None:
        if count > len(self.stack):
            raise MalformedError("a tuple lacks parts")
        self.stack[-count:] = [tuple(self.stack[-count:])]

    def append(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise MalformedError("something is appended to what is no list")
        self.stack[-1].extend(items)

    def append_one(self) -> None:
        item = self.stack.pop()
        self.append([item])

    def set_one(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def set_items(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], dict) or len(items) % 2:
            raise MalformedError("something is set in what is no dict")
        for key in items[::2]:
            if not (isinstance(key, str) or (isinstance(key, int) and abs(key) < MAX_KEY)):
                raise MalformedError("a key is neither text nor a small number")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Constructor) or not isinstance(arguments, tuple):
            raise MalformedError("it calls what cannot be called")
        self.stack.append(function.call(*arguments))

    def build(self) -> None:
        self.stack.pop()  # what is set on a dict from outside, such as the versions of modules, is no tensor
        if not isinstance(self.stack[-1], dict):
            raise MalformedError("it sets the state of what has none")


_STEPS: dict[str, Callable[[_Machine], None]] = {
    "MARK": _Machine.mark,
    "EMPTY_DICT": lambda machine: machine.stack.append({}),
    "EMPTY_LIST": lambda machine: machine.stack.append([]),
    "EMPTY_TUPLE": lambda machine: machine.stack.append(()),
    "NONE": lambda machine: machine.stack.append(None),
    "NEWTRUE": lambda machine: machine.stack.append(True),
    "NEWFALSE": lambda machine: machine.stack.append(False),
    "TUPLE": _Machine.push_marked_tuple,
    "TUPLE1": lambda machine: machine.push_tuple(1),
    "TUPLE2": lambda machine: machine.push_tuple(2),
    "TUPLE3": lambda machine: machine.push_tuple(3),
    "APPEND": _Machine.append_one,
    "APPENDS": lambda machine: machine.append(machine.take_marked()),
    "SETITEM": _Machine.set_one,
    "SETITEMS": lambda machine: machine.set_items(machine.take_marked()),
    "REDUCE": _Machine.reduce,
    "BUILD": _Machine.build,
    "BINPERSID": lambda machine: machine.stack.append(machine.load(machine.stack.pop())),
}
