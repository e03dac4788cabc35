"""Pickles as plain data: nothing is run, imported or called, whatever the file says.

:func:`unpickle` knows only the opcodes that build tuples, lists, dicts, strings and numbers, and turns every call of a
class or function into an inert :class:`Record`.  No allocation exceeds what the file's length bounds.

A ``pickle.Unpickler`` with an allow-list in ``find_class`` is not enough: a few bytes make it ask for a memo table
of gigabytes, and a deeply nested tuple as a dict key overflows its C stack.

Source: Python's ``pickletools``.
"""

from __future__ import annotations

import pickle
import re
import struct
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar, cast

from ....algebra.box import MAX_ELEMENTS, Index
from ....names.errors import DamageError, SourceError
from ...io import limits

_LONGEST_SEQUENCE = 64
"""Most items in a sequence of sizes or path parts: a hostile file could share a longer one often."""

_STRIDE = 1 << 16
"""Bytes of a pickle after which the number of objects in it is compared with its limit."""

T = TypeVar("T")


class Global(str):
    """``"module name"`` of a class or function.  Never looked up."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class Record:
    """Represents the object that a pickle makes with ``kind(*args)``, with its ``state`` and mapping ``items``."""

    # Not frozen: BUILD sets the state later.  Compared by identity, so it is harmless as a dict key.
    kind: Global
    args: object
    state: object = None
    items: dict[object, object] | None = None

    def mapping(self) -> dict[object, object]:
        """Return the dict of items, made when first needed: few of the millions of records in a file have any."""
        if self.items is None:
            self.items = {}
        return self.items


PERSISTENT = "persistent id"
"""The name of a reference that a pickle leaves to its reader; refused unless it is allowed."""

_MEMOIZE, _BINGET, _LONG_BINGET = pickle.MEMOIZE[0], pickle.BINGET[0], pickle.LONG_BINGET[0]
_BININT, _BININT1, _BININT2 = pickle.BININT[0], pickle.BININT1[0], pickle.BININT2[0]
_CALLS, _WIDE = (pickle.NEWOBJ[0], pickle.REDUCE[0]), (_BININT2, _BININT)
_BUILD, _STOP = pickle.BUILD[0], pickle.STOP[0]
_MARK, _TUPLE, _APPENDS, _SETITEMS = pickle.MARK[0], pickle.TUPLE[0], pickle.APPENDS[0], pickle.SETITEMS[0]
_EMPTY_DICT, _TUPLE1, _TUPLE2 = pickle.EMPTY_DICT[0], pickle.TUPLE1[0], pickle.TUPLE2[0]
_ADDING, _FROZENSET = (_APPENDS, pickle.ADDITEMS[0]), pickle.FROZENSET[0]
_EMPTY_TUPLE, _SHORT_TEXT = pickle.EMPTY_TUPLE[0], pickle.SHORT_BINUNICODE[0]
_CONSTANTS = {pickle.NONE: None, pickle.NEWTRUE: True, pickle.NEWFALSE: False}
_PUTS = {pickle.BINPUT: 1, pickle.LONG_BINPUT: 4}
_SKIPS = {pickle.PROTO: 1, pickle.FRAME: 8}
_BYTES = "builtins bytes"
_LONG_TEXTS = {
    pickle.SHORT_BINBYTES: (1, _BYTES),
    pickle.BINBYTES: (4, _BYTES),
    pickle.BINBYTES8: (8, _BYTES),
    pickle.BYTEARRAY8: (8, "builtins bytearray"),
    pickle.LONG4: (4, "builtins int"),
}
"""Opcodes of bytes, and of objects made of them: the bytes of the length before them, and the kind of object."""
_HASHED = (str, bytes, int, float, bool, type(None), Global, Record)


class Anything:
    """Contains every name: for files whose other content does not matter, because no name is looked up or run."""

    def __contains__(self, name: object) -> bool:
        return True


def unpickle(data: bytes, names: Container[str], max_parts: int | None = None) -> object:
    """Read a pickle as tuples, lists, dicts, scalars and :class:`Record`; nothing in it is run.

    Args:
        names: the names (``"module name"``) that may occur.
        max_parts: how many tuples, lists, dicts and records there may be; None: in proportion to the data.

    Raises:
        LimitError: there are more.
        SourceError: another name or opcode occurs, the data is cut, or it is not a pickle of plain data.
    """
    return _Machine(data, names, memo=[], max_parts=max_parts).content()


def unpickle_in_columns(data: bytes, names: Container[str]) -> object:
    """Read a pickle as :func:`unpickle` does, but with :class:`ObjectColumns` for objects that recur in a list or dict.

    Raises:
        LimitError, SourceError: as `unpickle`; or something refers to a part of such an object, which is never made.
    """
    memo: list[object] = []
    return _Machine(data, names, memo, recurrence=_Recurrence(data, memo)).content()


class _Machine:
    """Runs the opcodes of one pickle, as far as they build plain data."""

    def __init__(
        self,
        data: bytes,
        names: Container[str],
        memo: list[object],
        max_parts: int | None = None,
        recurrence: _Recurrence | None = None,
    ) -> None:
        self._data, self._names, self._memo, self._recurrence = data, names, memo, recurrence
        self._max_parts = limits.FREE_PARTS + len(data) // limits.PICKLE_BYTES if max_parts is None else max_parts
        self._num_hard_keys = 0

    def content(self) -> object:
        try:
            return self._run()
        except (IndexError, ValueError, struct.error) as error:
            raise DamageError(f"expected a pickle of plain data, found it cut or damaged ({error})") from None

    def _run(self) -> object:
        # The opcodes are ordered by how often a large file has them, and the rare ones are in _run_rare.
        data, memo, recurrence = self._data, self._memo, self._recurrence
        stack: list[object] = []
        marks: list[list[object]] = []
        position = num_parts = 0
        for stop in chain(range(_STRIDE, len(data), _STRIDE), (len(data),)):
            # The results of an opcode are counted at once and compared once in a while, which costs less.
            limits.check_limit(num_parts, self._max_parts, "tuples, lists, dicts and objects in a pickle")
            while position < stop:
                code = data[position]
                position += 1
                if code == _MEMOIZE:
                    memo.append(stack[-1])
                elif code == _LONG_BINGET:
                    stack.append(memo[int.from_bytes(data[position : position + 4], "little")])
                    position += 4
                elif code == _BINGET:
                    stack.append(memo[data[position]])
                    position += 1
                elif code == _BININT1:
                    stack.append(data[position])
                    position += 1
                elif code in _WIDE:
                    width = 2 if code == _BININT2 else 4
                    stack.append(int.from_bytes(data[position : position + width], "little", signed=code == _BININT))
                    position += width
                elif code in _CALLS:
                    args = stack.pop()
                    stack[-1] = Record(expect(Global, stack[-1]), args)
                    num_parts += 1
                elif code == _EMPTY_TUPLE:
                    stack.append(())
                    num_parts += 1
                elif code == _SHORT_TEXT:
                    start, position = position + 1, position + 1 + data[position]
                    stack.append(data[start:position].decode("utf-8", "surrogatepass"))
                    num_parts += 1
                elif code == _TUPLE1:
                    stack[-1] = (stack[-1],)
                    num_parts += 1
                elif code == _TUPLE2:
                    second = stack.pop()
                    stack[-1] = (stack[-1], second)
                    num_parts += 1
                elif code == _MARK:
                    marks.append(stack)
                    stack = []
                    num_parts += 1
                elif code == _BUILD:
                    state = stack.pop()
                    expect(Record, stack[-1]).state = state
                    if recurrence is not None and marks and marks[-1]:
                        position, num_recurring = recurrence.after(position, stack, marks[-1][-1])
                        num_parts += num_recurring
                elif code == _SETITEMS:
                    items, stack = stack, marks.pop()
                    self._update(stack[-1], items)
                elif code == _EMPTY_DICT:
                    stack.append({})
                    num_parts += 1
                elif code == _TUPLE:
                    items, stack = stack, marks.pop()
                    stack.append(tuple(items))
                elif code in _ADDING:
                    items, stack = stack, marks.pop()
                    self._extend(stack[-1], items)
                elif code == _FROZENSET:
                    items, stack = stack, marks.pop()
                    stack.append(Record(self._read_global("builtins frozenset"), (items,)))
                elif code == _STOP:
                    if position != len(data):
                        excess = len(data) - position
                        raise SourceError(
                            f"expected the end of the pickle at byte {position}, found {excess} bytes more"
                        )
                    return stack.pop()
                else:
                    position = self._run_rare(data[position - 1 : position], position, stack)
                    num_parts += 1
        raise ValueError(f"no end within {len(data)} bytes")

    def _run_rare(self, opcode: bytes, position: int, stack: list[object]) -> int:
        """Run one of the rarer opcodes, whose argument starts at byte ``position``; return the position after it."""
        data, memo = self._data, self._memo
        if opcode in _CONSTANTS:
            stack.append(_CONSTANTS[opcode])
        elif opcode == pickle.BINUNICODE:
            start = position + 4
            position = start + int.from_bytes(data[position:start], "little")
            stack.append(data[start:position].decode("utf-8", "surrogatepass"))
        elif opcode in _PUTS:
            start, position = position, position + _PUTS[opcode]
            if int.from_bytes(data[start:position], "little") != len(memo):
                raise SourceError(f"expected number {len(memo)} for the next memo entry, found another at byte {start}")
            memo.append(stack[-1])
        elif opcode in _SKIPS:
            position += _SKIPS[opcode]
        elif opcode == pickle.EMPTY_LIST:
            stack.append([])
        elif opcode == pickle.EMPTY_SET:
            stack.append(Record(self._read_global("builtins set"), ()))
        elif opcode == pickle.APPEND:
            item = stack.pop()
            self._extend(stack[-1], [item])
        elif opcode == pickle.SETITEM:
            value, key = stack.pop(), stack.pop()
            self._update(stack[-1], [key, value])
        elif opcode == pickle.TUPLE3:
            third, second = stack.pop(), stack.pop()
            stack[-1] = (stack[-1], second, third)
        elif opcode == pickle.LONG1:
            start, position = position + 1, position + 1 + data[position]
            stack.append(int.from_bytes(data[start:position], "little", signed=True))
        elif opcode in _LONG_TEXTS:
            width, made = _LONG_TEXTS[opcode]
            start = position + width
            position = start + int.from_bytes(data[position:start], "little")
            if position > len(data):
                raise ValueError(f"no end of bytes within {len(data)}")
            text = data[start:position]
            stack.append(text if made == _BYTES else Record(self._read_global(made), (text,)))
        elif opcode == pickle.NEWOBJ_EX:
            options, args = stack.pop(), stack.pop()
            stack[-1] = Record(expect(Global, stack[-1]), (args, options))
        elif opcode == pickle.BINFLOAT:
            stack.append(struct.unpack_from(">d", data, position)[0])
            position += 8
        elif opcode == pickle.STACK_GLOBAL:
            name, module = expect(str, stack.pop()), expect(str, stack.pop())
            stack.append(self._read_global(f"{module} {name}"))
        elif opcode == pickle.GLOBAL:
            start, position = position, data.index(b"\n", data.index(b"\n", position) + 1) + 1
            stack.append(self._read_global(data[start : position - 1].decode().replace("\n", " ")))
        elif opcode == pickle.BINPERSID:
            stack[-1] = Record(self._read_global(PERSISTENT), stack[-1])
        else:
            from pickletools import opcodes  # not needed where nothing is wrong

            kind = SourceError if opcode.decode("latin1") in {each.code for each in opcodes} else DamageError
            raise kind(f"expected only opcodes of plain data, found {opcode!r} at byte {position - 1}")
        return position

    def _read_global(self, name: str) -> Global:
        if name not in self._names:
            raise SourceError(f"expected only the names that a stock file has, found {name!r}; nothing was run")
        return Global(name)

    def _extend(self, target: object, items: list[object]) -> None:
        """Add items to a list, or to the object of a class, by their number."""
        if type(target) is Record:
            parts = target.mapping()
            parts.update(enumerate(items, len(parts)))
        else:
            expect(list, target).extend(items)

    def _update(self, target: object, items: list[object]) -> None:
        """Set items of a dict, or of the mapping that a record represents: keys and values in turn."""
        keys = items[::2]
        for key in keys:
            if type(key) is not str:
                self._check_key(key)
        if type(target) is Record:
            target = target.mapping()
        expect(dict, target).update(zip(keys, items[1::2], strict=True))

    def _check_key(self, key: object) -> None:
        """Let a key of a dict pass, unless there are too many whose equal hashes an attacker could have chosen.

        Raises:
            LimitError: there are.
            SourceError: it is not of a type that is hashed without running code, and without end.
        """
        kind = type(key)
        if kind in (Record, Global, ObjectColumns) or (kind is int and abs(cast(int, key)) < limits.SMALL_KEY):
            return
        # Tuples may be in a tuple, but no deeper.
        parts: list[object] = [key]
        for _ in range(2):
            parts = [*chain.from_iterable(part if type(part) is tuple else (part,) for part in parts)]
            if len(parts) > _LONGEST_SEQUENCE:
                break
        if len(parts) > _LONGEST_SEQUENCE or any(type(part) not in _HASHED for part in parts):
            raise SourceError(f"expected a string, an integer or an object as a dict key, found {kind.__name__}")
        self._num_hard_keys += 1
        limits.check_limit(self._num_hard_keys, limits.KEYS, "dict keys that are large integers, floats or tuples")


def expect(kind: type[T], value: object) -> T:
    """Return the value, which must be of exactly this type (so a bool is not an int)."""
    if type(value) is not kind:
        raise SourceError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value


def sequence(value: object) -> Sequence[object]:
    """Return a short tuple, list or ``torch.Size``; in a hostile file many objects can share one."""
    if type(value) is Record and value.kind == _SIZE:
        (value,) = expect(tuple, value.args)
    if type(value) is not tuple and type(value) is not list:
        raise SourceError(f"expected a sequence, found {type(value).__name__}")
    if len(value) > _LONGEST_SEQUENCE:
        raise SourceError(f"expected a sequence of at most {_LONGEST_SEQUENCE} items, found {len(value)}")
    return cast(Sequence[object], value)


def sizes_of(value: object) -> Index:
    """Return a ``torch.Size``, tuple or list of integers >= 0."""
    numbers = tuple(sequence(value))
    for number in numbers:
        if not 0 <= expect(int, number) <= MAX_ELEMENTS:
            raise SourceError(f"expected sizes and offsets of at most {MAX_ELEMENTS} and >= 0, found {number}")
    return cast(Index, numbers)


_SIZE = "torch Size"


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """Represents, in the model of :class:`ObjectColumns`, a part that differs; its values are a column."""

    number: int


@dataclass(frozen=True, slots=True, eq=False)
class ObjectColumns:
    """Represents ``count`` objects in a list, or for as many pairs in a dict, where it is both the key and the value.

    ``model`` is one of them, an object or a key and its value, with a :class:`Leaf` where they differ.
    """

    model: tuple[object, ...]
    count: int = 1
    columns: tuple[list[object], ...] = ()
    _sizes: dict[int, list[object]] = field(default_factory=dict)
    """Columns of sizes that were made of others, by the part's id."""

    def column(self, part: object) -> list[object]:
        """Return the values that a part of the model has, a scalar or a size, in each of the objects."""
        if type(part) is Leaf:
            return self.columns[part.number]
        if type(part) is not Record or part.kind != _SIZE or {*map(type, sequence(part))} != {Leaf}:
            return [part] * self.count
        if id(part) not in self._sizes:
            self._sizes[id(part)] = list(zip(*map(self.column, sequence(part)), strict=True))
        return self._sizes[id(part)]


class _Recurrence:
    """Reads objects that recur in a list, or pairs in a dict, as columns.

    The opcodes of one are compiled to a regular expression with groups for scalars, texts and values of the memo; bytes
    that match make an object that differs from it in nothing else.
    """

    def __init__(self, data: bytes, memo: list[object]) -> None:
        self._data, self._memo, self._values = data, memo, _Values(memo)
        self._patterns: dict[int, list[_Pattern]] = {1: [], 2: []}
        self._runs: dict[int, list[_Run]] = {1: [], 2: []}
        self._target: object = None
        self._end = self._one_by_one = 0

    def after(self, position: int, stack: list[object], target: object) -> tuple[int, int]:
        """Push the objects that recur after one that was just made; return the position after them, and their parts.

        Args:
            stack: the objects to be added to ``target``.
        """
        # An object in a list is one value on the stack, a pair in a dict two.
        width = 1 if type(target) is list else 2 if type(target) is dict else 0
        if not width or len(stack) % width:
            return position, 0
        num_parts, self._one_by_one = 0, self._one_by_one + 1
        while (run := self._run_at(position, width)) is not None:
            stack += [run.objects] * width
            self._memo += run.memo
            position, num_parts = position + len(run.code), num_parts + run.num_parts

        # The opcodes since the object before are those of one object, or pair, from which a pattern can be learnt.
        patterns = self._patterns[width]
        can_learn = len(patterns) < _MAX_PATTERNS and position - self._end <= _MAX_PATTERN_BYTES
        if can_learn and not num_parts and self._target is target and self._one_by_one > _LEARN_AFTER:
            pattern = _Pattern.learn(self._data[self._end : position], self._memo)
            if pattern is not None and len(pattern.model) == width:
                patterns.append(pattern)
        self._target, self._end = target, position
        return position, num_parts

    def _run_at(self, position: int, width: int) -> _Run | None:
        """Return the objects, or pairs, from a position on that match one pattern, if any do."""
        runs = self._runs[width]
        # Tensors that are cut alike repeat the bytes of a run, which need no matching.
        for run in runs:
            if self._data.startswith(run.code, position):
                return run
        for pattern in self._patterns[width]:
            if (match := pattern.run_expression.match(self._data, position)) is not None:
                run = pattern.run(match, self._values)
                if len(run.code) <= _MAX_RUN_BYTES:
                    runs[:] = [run, *runs[: _MAX_RUNS - 1]]
                return run
        return None


_LEARN_AFTER = 64
"""Objects that are made one by one before a pattern is compiled, which takes as long as some hundred of them."""

_MAX_PATTERNS, _MAX_PATTERN_BYTES = 8, 1024
"""Patterns, and the most bytes of the opcodes in one."""

_MAX_RUNS, _MAX_RUN_BYTES = 8, 1 << 16
"""Runs of objects that are kept, and the most bytes of one."""


class _Values(dict[bytes, object]):
    """The values of opcodes that push a scalar, a text, or a text or size from the memo, each decoded once."""

    def __init__(self, memo: list[object]) -> None:
        self._memo = memo

    def __missing__(self, opcode: bytes) -> object:
        # A number, unless the opcode has no argument, refers to the memo, or has a text or a long number.
        kind, argument = opcode[0], opcode[1:]
        number = int.from_bytes(argument, "little", signed=kind == _BININT)
        value: object = number if argument else None
        if kind in (_BINGET, _LONG_BINGET):
            value = self._memo[number]
            if not _is_scalar(value):
                raise SourceError(f"expected a text or a size, found {type(value).__name__}")
        elif kind == _SHORT_TEXT:
            value = argument[1:].decode("utf-8", "surrogatepass")
            if argument[0] != len(argument) - 1:
                raise ValueError(f"expected a text of {argument[0]} bytes, found {len(argument) - 1}")
        elif kind == _LONG1:
            value = int.from_bytes(argument[1:], "little", signed=True)
        self[opcode] = value
        return value


def _split_opcodes(code: bytes) -> tuple[list[bytes], set[int]]:
    """Split the opcodes of objects; return, too, the numbers of the opcodes that push keys of dicts.

    Returns nothing if there are other opcodes than of objects with dicts of scalars and tuples.
    """
    opcodes, keys, position = list[bytes](), set[int](), 0
    frames: list[list[int]] = [[]]  # the numbers of the opcodes that pushed the values on the stack since each mark
    while position < len(code):
        kind = code[position]
        length = 2 + code[position + 1] if kind in (_SHORT_TEXT, _LONG1) else _SCALAR_LENGTHS.get(kind, 1)
        # The objects that it pushes, and that it takes from the stack.
        if kind == _MARK:
            frames.append([])
        elif kind == _SETITEMS and len(frames) > 1:
            keys.update(frames.pop()[::2])
        elif kind in _SCALAR_LENGTHS or kind in _POPS:
            pops = _POPS.get(kind, 0)
            frames[-1][len(frames[-1]) - pops :] = [len(opcodes)]
        elif kind != _MEMOIZE:
            return [], set()
        opcodes.append(code[position : position + length])
        position += length
    return opcodes, keys


def _is_scalar(value: object) -> bool:
    """Return whether a value is a text or a size."""
    if type(value) is tuple:
        return {*map(type, value)} == {int}
    return type(value) is str or (type(value) is Record and value.kind == _SIZE)


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Holds objects that recur: their opcodes, what these add to the memo, and the number of their parts."""

    code: bytes
    objects: ObjectColumns
    memo: list[object]
    num_parts: int


@dataclass(frozen=True, slots=True, eq=False)
class _Pattern:
    """Matches the opcodes of one object, or of a key and its value, and of others that differ from it in scalars only.

    Attributes:
        run_expression, object_expression: match several in a row, and one, with a group for each leaf.
        model: as of `ObjectColumns`.
        memo: what the model adds to the memo.
        num_parts: how many tuples, dicts, texts and objects.
    """

    run_expression: re.Pattern[bytes]
    object_expression: re.Pattern[bytes]
    model: tuple[object, ...]
    memo: tuple[object, ...]
    num_parts: int

    @classmethod
    def learn(cls, code: bytes, memo: Sequence[object]) -> _Pattern | None:
        """Learn from the opcodes of one; return None if there are others than of objects with a dict of scalars."""
        opcodes, keys = _split_opcodes(code)
        if not opcodes:
            return None

        # Each scalar becomes a group that matches others, and a leaf that the model's program takes from its own memo.
        run_parts, object_parts, program, model_memo = list[bytes](), list[bytes](), pickle.MARK, list[object]()
        for number, opcode in enumerate(opcodes):
            kind = opcode[0]
            memo_value = memo[int.from_bytes(opcode[1:], "little")] if kind in (_BINGET, _LONG_BINGET) else None
            is_constant = number in keys or (memo_value is not None and not _is_scalar(memo_value))
            if kind in _SCALAR_LENGTHS:
                program += pickle.LONG_BINGET + len(model_memo).to_bytes(4, "little")
                num_leaves = sum(type(value) is Leaf for value in model_memo)
                model_memo.append(memo_value if is_constant else Leaf(num_leaves))
            else:
                program += opcode
            if kind in _SCALAR_LENGTHS and not is_constant:
                pattern = _TEXT if kind == _SHORT_TEXT else _SCALAR
                run_parts.append(b"(?:%b)" % pattern)
                object_parts.append(b"(%b)" % pattern)
            else:
                run_parts.append(re.escape(opcode))
                object_parts.append(re.escape(opcode))

        # The program makes the model, and adds to the memo what each object adds.
        num_values = len(model_memo)
        machine = _Machine(program + pickle.TUPLE + pickle.STOP, (), model_memo, max_parts=len(code))
        model = expect(tuple, machine.content())
        return cls(
            run_expression=re.compile(b"(?:%b)++" % b"".join(run_parts), re.DOTALL),
            object_expression=re.compile(b"".join(object_parts), re.DOTALL),
            model=model,
            memo=tuple(model_memo[num_values:]),
            num_parts=sum(opcode[0] in _MAKING for opcode in opcodes),
        )

    def run(self, match: re.Match[bytes], values: _Values) -> _Run:
        """Return the objects of a match of ``run_expression``."""
        rows: list[Any] = self.object_expression.findall(match.string, *match.span())
        num_leaves = self.object_expression.groups
        opcode_columns = zip(*rows, strict=True) if num_leaves > 1 else [rows] * num_leaves
        columns = tuple([*map(values.__getitem__, opcodes)] for opcodes in opcode_columns)
        objects = ObjectColumns(self.model, len(rows), columns)
        memo: list[object] = [_UNMADE] * (len(self.memo) * len(rows))
        for number, part in enumerate(self.memo):
            if type(part) is Leaf or _is_scalar(part):
                memo[number :: len(self.memo)] = objects.column(part)
        return _Run(code=match[0], objects=objects, memo=memo, num_parts=self.num_parts * len(rows))


class _Unmade:
    """Represents, in the memo, a part of an object that is kept in columns.  Code that expects that part refuses it."""


_UNMADE = _Unmade()
_LONG1 = pickle.LONG1[0]
_SCALAR_LENGTHS = {
    pickle.NONE[0]: 1,
    _BININT1: 2,
    _BININT2: 3,
    _BININT: 5,
    _BINGET: 2,
    _LONG_BINGET: 5,
    _SHORT_TEXT: 0,
    _LONG1: 0,
}
"""Bytes of opcodes that push a scalar; 0 where a byte says how many follow."""
_SCALAR = rb"[Kh].|[jJ]....|M..|N|\x8a(?:\x05|\x06.)....."
_TEXT = rb"\x8c.[^\x94]{0,255}(?=\x94)"
_POPS = {
    **dict.fromkeys((_EMPTY_TUPLE, _EMPTY_DICT), 0),
    _TUPLE1: 1,
    _TUPLE2: 2,
    pickle.TUPLE3[0]: 3,
    _BUILD: 2,
    **dict.fromkeys(_CALLS, 2),
}
"""How many values other opcodes take from the stack, before they push one."""
_MAKING = (_SHORT_TEXT, _MARK, _TUPLE1, _TUPLE2, pickle.TUPLE3[0], _EMPTY_TUPLE, _EMPTY_DICT, *_CALLS)


class Pickler:
    """Pickles plain data and records.  Strings and names are memoised, or the file grows several-fold."""

    def __init__(self) -> None:
        self.out = bytearray(pickle.PROTO + b"\x04")
        self.memo: dict[tuple[type, str], int] = {}

    def put(self, value: object) -> None:
        """Append the opcodes that push this value."""
        if isinstance(value, str):
            self._put_text(value)
        elif value is None or isinstance(value, bool):
            self.out += pickle.NONE if value is None else pickle.NEWTRUE if value else pickle.NEWFALSE
        elif isinstance(value, int):
            self.out += integer(value)
        elif isinstance(value, float):
            self.out += pickle.BINFLOAT + struct.pack(">d", value)
        elif isinstance(value, tuple):
            self._put_all(pickle.MARK, value, pickle.TUPLE)
        elif isinstance(value, list):
            self._put_all(pickle.EMPTY_LIST + pickle.MARK, value, pickle.APPENDS)
        elif isinstance(value, dict):
            self._put_all(pickle.EMPTY_DICT + pickle.MARK, chain.from_iterable(value.items()), pickle.SETITEMS)
        elif isinstance(value, Record) and value.kind == PERSISTENT:
            self._put_all(b"", (value.args,), pickle.BINPERSID)
        elif isinstance(value, Record):
            self._put_all(b"", (value.kind, value.args), pickle.REDUCE if value.args else pickle.NEWOBJ)
            if value.items:
                self._put_all(pickle.MARK, chain.from_iterable(value.items.items()), pickle.SETITEMS)
            if value.state is not None:
                self._put_all(b"", (value.state,), pickle.BUILD)
        else:
            raise TypeError(f"expected plain data to pickle, found {type(value).__name__}")

    def _put_all(self, opcodes_before: bytes, values: Iterable[object], opcode_after: bytes) -> None:
        self.out += opcodes_before
        for value in values:
            self.put(value)
        self.out += opcode_after

    def _put_text(self, text: str) -> None:
        number = self.memo.get((type(text), text))
        if number is not None:
            self.out += pickle.LONG_BINGET + number.to_bytes(4, "little")
            return
        if isinstance(text, Global):
            self._put_all(b"", text.split(" "), pickle.STACK_GLOBAL)
        else:
            data = text.encode("utf-8", "surrogatepass")
            self.out += pickle.BINUNICODE + len(data).to_bytes(4, "little") + data
        self.memo[type(text), text] = len(self.memo)
        self.out += pickle.MEMOIZE


def integer(value: int) -> bytes:
    """Return the opcode that pushes this integer, as Python's pickler chooses it for those >= 0."""
    if 0 <= value < 1 << 8:
        return pickle.BININT1 + value.to_bytes(1, "little")
    if 0 <= value < 1 << 16:
        return pickle.BININT2 + value.to_bytes(2, "little")
    if 0 <= value < 1 << 31:
        return pickle.BININT + value.to_bytes(4, "little")
    data = pickle.encode_long(value)
    return pickle.LONG1 + len(data).to_bytes(1, "little") + data
