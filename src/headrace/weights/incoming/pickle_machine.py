"""Interprets a pickle without Python's own unpickler: plain data and what an allow-list builds, nothing else.

Called by `torch_file.py`. Opcodes are read one by one from a memoryview. Nothing is imported or looked up by name: a
global is whatever `find_global` returns, which is one of our own inert values, and a call, an instance or a state is
possible only on `Builder`, `RecordClass` and `Record`. Bytes stay views of the payload. Only the opcodes that protocols
2 to 5 write for such data exist here; the rest (POP, DUP, INST, sets, extension codes, ...) are refused.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from headrace.errors import InvalidRequest

MAX_OPCODES = 2_000_000  # a pickled tensor takes about 100: enough for 20,000, and at worst some 200 MB of objects
MAX_LONG_BYTES = 16
MAX_TEXT_BYTES = 1 << 16  # longer text must be ASCII: one wide character would quadruple its memory
MAX_GLOBAL_BYTES = 512

_STOP = ord(".")
_OPCODE_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}


@dataclass(slots=True)
class Budget:
    """What one payload may still cost; shared by the pickles nested in it, so that reuse cannot multiply it."""

    copy_bytes: int
    num_opcodes: int = MAX_OPCODES

    def spend_opcodes(self, count: int) -> None:
        self.num_opcodes -= count
        if self.num_opcodes < 0:
            raise InvalidRequest(f"the pickle has more than {MAX_OPCODES} operations, the most that are allowed.")

    def spend_copy(self, num_bytes: int, what: str) -> None:
        """Called before bytes of the payload are copied; `what` says whose, and what would avoid it."""
        self.copy_bytes -= num_bytes
        if self.copy_bytes < 0:
            raise InvalidRequest(f"{what}: its copy of {num_bytes} bytes would need more memory than the payload has.")


@dataclass(frozen=True, slots=True)
class Builder:
    """An allowed callable: `build` checks its arguments and returns inert data, or raises InvalidRequest."""

    name: str
    build: Callable[[tuple[object, ...]], object]


@dataclass(frozen=True, slots=True)
class RecordClass:
    """An allowed class of plain fields; its instances become `Record`s."""

    name: str
    fields: frozenset[str]


@dataclass(slots=True)
class Record:
    """An instance of a RecordClass; `values` stays empty until a BUILD gives exactly its fields."""

    cls: RecordClass
    values: dict[str, object] = field(default_factory=dict)


def type_name(value: object) -> str:
    """What a value is, for messages: its contents may be endless or refer to itself."""
    if isinstance(value, Builder | RecordClass):
        return value.name
    return value.cls.name if isinstance(value, Record) else type(value).__name__


class PickleMachine:
    """One pickle in `data` from byte `position` on; `run` once."""

    def __init__(
        self,
        data: memoryview,
        position: int,
        budget: Budget,
        find_global: Callable[[str, str], object],
        find_persistent: Callable[[object], object] | None = None,
    ) -> None:
        self._data = data
        self._position = position
        self._budget = budget
        self._find_global = find_global
        self._find_persistent = find_persistent
        self._stack: list[object] = []
        self._marks: list[int] = []  # heights of the stack at the open MARKs
        self._memo: dict[int, object] = {}  # a dict, so that a huge index costs one entry

    def run(self) -> tuple[object, int]:
        """The pickled value and the position after its STOP."""
        try:
            while True:
                self._budget.spend_opcodes(1)
                code = self._data[self._position]
                self._position += 1
                if code == _STOP:
                    value = self._pop()
                    if self._stack or self._marks:
                        self._refuse("it ends with values that nothing took")
                    return value, self._position
                operation = _OPERATIONS.get(code)
                if operation is None:
                    self._refuse(f"operation {_OPCODE_NAMES.get(code, hex(code))} is not allowed")
                operation(self)
        except (IndexError, struct.error):
            raise InvalidRequest(f"the pickle is truncated or malformed at byte {self._position}.") from None
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"the pickle holds broken text before byte {self._position}: {error}.") from None

    def _refuse(self, why: str) -> NoReturn:
        raise InvalidRequest(f"the pickle is refused at byte {self._position}: {why}.")

    # Reading the payload and the stack; an IndexError means that either ends too early.

    def _take(self, size: int) -> memoryview:
        taken = self._data[self._position : self._position + size]
        if len(taken) != size:
            raise IndexError
        self._position += size
        return taken

    def _unsigned(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _line(self) -> str:
        line, newline, _ = bytes(self._data[self._position : self._position + MAX_GLOBAL_BYTES]).partition(b"\n")
        if not newline:
            raise IndexError
        self._position += len(line) + 1
        return line.decode("utf-8")

    def _top(self) -> object:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise IndexError
        return self._stack[-1]

    def _pop(self) -> object:
        value = self._top()
        self._stack.pop()
        return value

    def _pop_mark(self) -> list[object]:
        height = self._marks.pop()
        values = self._stack[height:]
        del self._stack[height:]
        return values

    # Operations, in the order of the table below.

    def proto(self) -> None:
        version = self._unsigned(1)
        if not 2 <= version <= 5:
            self._refuse(f"protocol {version}; allowed: 2 to 5")

    def frame(self) -> None:
        if self._unsigned(8) > len(self._data) - self._position:
            raise IndexError

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def push(self, value: object) -> None:
        self._stack.append(value)

    def long(self) -> None:
        size = self._unsigned(1)
        if size > MAX_LONG_BYTES:
            self._refuse(f"an integer of {size} bytes; up to {MAX_LONG_BYTES} are allowed")
        self.push(int.from_bytes(self._take(size), "little", signed=True))

    def text(self, size_bytes: int) -> None:
        size = self._unsigned(size_bytes)
        self.push(str(self._take(size), "utf-8" if size <= MAX_TEXT_BYTES else "ascii"))

    def binary(self, size_bytes: int) -> None:
        self.push(self._take(self._unsigned(size_bytes)))

    def tuple_of(self, size: int) -> None:
        values = [self._pop() for _ in range(size)]
        self.push(tuple(reversed(values)))

    def append(self, values: list[object]) -> None:
        target = self._top()
        if type(target) is not list:
            self._refuse(f"items for a {type_name(target)}; allowed: a list")
        target.extend(values)

    def set_items(self, values: list[object]) -> None:
        target = self._top()
        if type(target) is not dict:
            self._refuse(f"keys for a {type_name(target)}; allowed: a dict")
        if len(values) % 2:
            raise IndexError
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) is not str:
                self._refuse(f"a dict key of type {type_name(key)}; allowed: str")
            target[key] = value

    def memoize(self, index: int) -> None:
        if index > MAX_OPCODES:
            self._refuse(f"memo index {index}; up to {MAX_OPCODES} are allowed")
        self._memo[index] = self._top()

    def recall(self, index: int) -> None:
        if index not in self._memo:
            self._refuse(f"memo index {index} was never set")
        self.push(self._memo[index])

    def stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            self._refuse("a global whose name is no text")
        self.push(self._find_global(module, name))

    def reduce(self) -> None:
        arguments, builder = self._pop(), self._pop()
        if not isinstance(builder, Builder) or not isinstance(arguments, tuple):
            self._refuse(f"a call of a {type_name(builder)}")
        self.push(builder.build(arguments))

    def new_object(self) -> None:
        arguments, cls = self._pop(), self._pop()
        if not isinstance(cls, RecordClass) or not isinstance(arguments, tuple) or arguments:
            self._refuse(f"an instance of a {type_name(cls)}")
        self.push(Record(cls))

    def build(self) -> None:
        state, record = self._pop(), self._top()
        if not isinstance(record, Record) or type(state) is not dict:
            self._refuse(f"a state of type {type_name(state)} for a {type_name(record)}")
        if state.keys() != record.cls.fields:
            self._refuse(f"a {record.cls.name} needs exactly the fields {', '.join(sorted(record.cls.fields))}")
        record.values = dict(state)

    def persistent(self) -> None:
        key = self._pop()
        if self._find_persistent is None:
            self._refuse("a persistent id, which only a file written by torch.save may hold")
        self.push(self._find_persistent(key))


_OPERATIONS: dict[int, Callable[[PickleMachine], None]] = {
    0x80: PickleMachine.proto,
    0x95: PickleMachine.frame,
    ord("("): PickleMachine.mark,
    ord("N"): lambda machine: machine.push(None),
    0x88: lambda machine: machine.push(True),
    0x89: lambda machine: machine.push(False),
    ord("K"): lambda machine: machine.push(machine._unsigned(1)),
    ord("M"): lambda machine: machine.push(machine._unsigned(2)),
    ord("J"): lambda machine: machine.push(int.from_bytes(machine._take(4), "little", signed=True)),
    0x8A: PickleMachine.long,
    ord("G"): lambda machine: machine.push(struct.unpack(">d", machine._take(8))[0]),
    0x8C: lambda machine: machine.text(1),
    ord("X"): lambda machine: machine.text(4),
    0x8D: lambda machine: machine.text(8),
    ord("C"): lambda machine: machine.binary(1),
    ord("B"): lambda machine: machine.binary(4),
    0x8E: lambda machine: machine.binary(8),
    0x96: lambda machine: machine.binary(8),  # a bytearray
    ord("]"): lambda machine: machine.push([]),
    ord("}"): lambda machine: machine.push({}),
    ord(")"): lambda machine: machine.push(()),
    ord("t"): lambda machine: machine.push(tuple(machine._pop_mark())),
    0x85: lambda machine: machine.tuple_of(1),
    0x86: lambda machine: machine.tuple_of(2),
    0x87: lambda machine: machine.tuple_of(3),
    ord("a"): lambda machine: machine.append([machine._pop()]),
    ord("e"): lambda machine: machine.append(machine._pop_mark()),
    ord("s"): lambda machine: machine.set_items([machine._pop(), machine._pop()][::-1]),
    ord("u"): lambda machine: machine.set_items(machine._pop_mark()),
    0x94: lambda machine: machine.memoize(len(machine._memo)),
    ord("q"): lambda machine: machine.memoize(machine._unsigned(1)),
    ord("r"): lambda machine: machine.memoize(machine._unsigned(4)),
    ord("h"): lambda machine: machine.recall(machine._unsigned(1)),
    ord("j"): lambda machine: machine.recall(machine._unsigned(4)),
    ord("c"): lambda machine: machine.push(machine._find_global(machine._line(), machine._line())),
    0x93: PickleMachine.stack_global,
    ord("R"): PickleMachine.reduce,
    0x81: PickleMachine.new_object,
    ord("b"): PickleMachine.build,
    ord("Q"): PickleMachine.persistent,
}
