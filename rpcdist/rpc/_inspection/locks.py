"""Which lock a thread waits for, and which it holds, as far as its byte code says: nothing is kept for this.

A thread that waits for a lock of the standard library stands on a call of `acquire`, or at the beginning of a `with`
block; the instructions before it name the lock. One whose current instruction is covered by the exception table entry
of a `with` block is inside of that block. Locks that are held without `with`, and those that an expression with a
call yields, are not seen.
"""

from __future__ import annotations

import dis
import inspect
import re
import threading
from functools import lru_cache
from itertools import pairwise
from types import CodeType, FrameType, MemberDescriptorType
from typing import Any, Final, NamedTuple

_TAKING: Final = frozenset({"acquire", "__enter__", "acquire_lock"})
_LOCK_TYPES: Final = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Semaphore)
_WAITS_FOR_NOTICE: Final = threading.Condition.wait.__code__  # on a lock of its own, which nobody holds
_OWNER: Final = re.compile(r"owner=(\d+)")
MAX_INSTRUCTIONS: Final = 5000
"""Of a function that is looked at: a longer one would hold up the thread that looks."""


class AwaitedLock(NamedTuple):
    """A lock that a thread waits for: how its line names it, the object, and the thread that owns it, if it says so."""

    name: str
    lock: object
    owner: int | None


class _Block(NamedTuple):
    """A `with` block: the path of names to its lock, and the offsets of its instructions."""

    path: tuple[str, ...]
    ranges: tuple[tuple[int, int], ...]


class _LockCode(NamedTuple):
    """The parts of a function that matter: the lock that is taken at an instruction, and its `with` blocks."""

    taken_at: dict[int, tuple[str, ...]]
    blocks: tuple[_Block, ...]


def awaited_lock(frame: FrameType) -> AwaitedLock | None:
    """The lock that the thread of an innermost frame waits for, if it waits for one."""
    path = _read(frame.f_code).taken_at.get(frame.f_lasti)
    if path is None or (path == ("waiter",) and frame.f_code is _WAITS_FOR_NOTICE):
        return None
    lock = _value(frame, path)
    if not isinstance(lock, _LOCK_TYPES):
        return None
    found = lock
    name = ".".join(path)
    if isinstance(lock, threading.Condition):
        found = getattr(lock, "_lock", lock)
    if isinstance(found, _LOCK_TYPES[0]) and not found.locked():
        return None  # it has just got it
    owner = _OWNER.search(repr(found)) if isinstance(found, _LOCK_TYPES[1]) else None
    return AwaitedLock(name, found, int(owner[1]) if owner is not None else None)


def holds_lock(frame: FrameType, lock: object) -> bool:
    """Whether a frame is inside of a `with` block of a lock."""
    at = frame.f_lasti
    for block in _read(frame.f_code).blocks:
        if any(start <= at < end for start, end in block.ranges):
            held = _value(frame, block.path)
            if held is lock or (isinstance(held, threading.Condition) and getattr(held, "_lock", None) is lock):
                return True
    return False


@lru_cache(maxsize=512)
def _read(code: CodeType) -> _LockCode:
    if len(code.co_code) > 2 * MAX_INSTRUCTIONS:
        return _LockCode({}, ())
    found = list(dis.get_instructions(code))
    taken_at: dict[int, tuple[str, ...]] = {}
    begins: dict[int, tuple[str, ...]] = {}  # of `with` blocks: by the offset of the instruction that begins it
    for index, instruction in enumerate(found):
        if instruction.opname == "BEFORE_WITH":
            if (path := _path_before(found, index)) is not None:
                begins[instruction.offset] = taken_at[instruction.offset] = path
        elif instruction.opname.startswith("CALL") and (at := _method_before(found, index)) is not None:
            if (path := _path_before(found, at)) is not None:
                taken_at[instruction.offset] = path
    return _LockCode(taken_at, _blocks(code, found, begins))


def _blocks(
    code: CodeType, instructions: list[dis.Instruction], begins: dict[int, tuple[str, ...]]
) -> tuple[_Block, ...]:
    """The `with` blocks: entries of the exception table whose handler calls `__exit__`."""
    if not begins:
        return ()
    ends_with = {
        before.offset
        for before, after in pairwise(instructions)
        if before.opname == "PUSH_EXC_INFO" and after.opname == "WITH_EXCEPT_START"
    }
    ranges: dict[int, list[tuple[int, int]]] = {}
    for entry in getattr(dis, "_parse_exception_table", lambda code: ())(code):
        if entry.target in ends_with:
            ranges.setdefault(entry.target, []).append((entry.start, entry.end))
    found = []
    for pieces in ranges.values():
        first = min(pieces)[0]
        begin = max((offset for offset in begins if offset < first), default=None)
        if begin is not None:
            found.append(_Block(begins[begin], tuple(pieces)))
    return tuple(found)


def _method_before(instructions: list[dis.Instruction], index: int) -> int | None:
    """Where the method `acquire` is loaded that an instruction calls; None if it calls another one."""
    for at in range(index - 1, max(index - 12, -1), -1):
        instruction = instructions[at]
        if instruction.opname in ("LOAD_METHOD", "LOAD_ATTR") and _name(instruction) in _TAKING:
            return at
        if instruction.opname.startswith(("CALL", "STORE")):
            return None
    return None


def _path_before(instructions: list[dis.Instruction], index: int) -> tuple[str, ...] | None:
    """The names that lead to the object on top of the stack before an instruction: ("self", "_lock")."""
    names: list[str] = []
    for at in range(index - 1, -1, -1):
        instruction = instructions[at]
        if instruction.opname in ("COPY", "SWAP", "NOP", "PUSH_NULL"):
            continue
        if instruction.opname == "LOAD_ATTR":
            names.append(_name(instruction))
        elif instruction.opname in ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"):
            return (_name(instruction), *reversed(names))
        else:
            return None
    return None


def _name(instruction: dis.Instruction) -> str:
    return str(instruction.argval)


def _value(frame: FrameType, path: tuple[str, ...]) -> Any:
    """The object that names lead to, without running code of users; None if they lead nowhere."""
    local = frame.f_locals
    value = local.get(path[0], frame.f_globals.get(path[0]))
    if type(local) is dict and local is not frame.f_globals and frame.f_code.co_name != "<module>":
        local.clear()  # before Python 3.13 it is a copy, which would keep all of it alive as long as the frame lives
    for name in path[1:]:
        value = _attribute(value, name)
    return value


def _attribute(value: object, name: str) -> object:
    try:
        found = inspect.getattr_static(value, name)
        return found.__get__(value) if isinstance(found, MemberDescriptorType) else found
    except AttributeError:
        return None
