"""The stacks of the threads and coroutines of this process at this moment, and the calls that they wait for.

This needs no bookkeeping: the interpreter knows the frames of all threads, and the local variables of our waiting
functions name the calls that they wait for.

The byte code shows which lock a thread waits for, and which locks it holds. A thread that waits for a lock of the
standard library is at a call of `acquire`, or at the beginning of a `with` block; the instructions before it name the
lock. A thread is inside a `with` block if the block's entry in the exception table covers its current instruction.
Locks that are held without `with`, and locks that an expression with a call returns, are not found.
"""

from __future__ import annotations

import dis
import inspect
import re
import sys
import threading
import traceback
from functools import lru_cache
from itertools import islice, pairwise
from types import CodeType, FrameType, MemberDescriptorType
from typing import Any, Final

from rpcdist.inspection import Frame, ThreadState
from rpcdist.rpc._calling.call_table import PendingCall
from rpcdist.rpc._calling.new_calls import SyncReplySink
from rpcdist.rpc._calling.result_streams import StreamState
from rpcdist.rpc._futures.waiting import Completions
from rpcdist.rpc.future import Future

_TAKING: Final = frozenset({"acquire", "__enter__", "acquire_lock"})
_LOCK_TYPES: Final = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Semaphore)
_WAITS_FOR_NOTICE: Final = threading.Condition.wait.__code__  # on a lock of its own, which nobody holds
_OWNER: Final = re.compile(r"owner=(\d+)")
MAX_INSTRUCTIONS: Final = 5000
"""Limit on the instructions of a function that is analysed: longer ones would take too long."""


Path = tuple[str, ...]
"""The names that lead to a lock, such as ("self", "_lock")."""


def awaited_lock(frame: FrameType) -> tuple[str, object, int | None] | None:
    """The lock that a thread waits for: its name in the source line, the object, and the owning thread if it is known.

    Args:
        frame: the innermost frame of the thread.
    """
    path = _locks_in(frame.f_code)[0].get(frame.f_lasti)
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
        return None  # the thread has just acquired it
    owner = _OWNER.search(repr(found)) if isinstance(found, _LOCK_TYPES[1]) else None
    return name, found, int(owner[1]) if owner is not None else None


def holds_lock(frame: FrameType, lock: object) -> bool:
    for path, start, end in _locks_in(frame.f_code)[1]:
        if start <= frame.f_lasti < end:
            held = _value(frame, path)
            if held is lock or (isinstance(held, threading.Condition) and getattr(held, "_lock", None) is lock):
                return True
    return False


@lru_cache(maxsize=512)
def _locks_in(code: CodeType) -> tuple[dict[int, Path], list[tuple[Path, int, int]]]:
    """The lock that each instruction of a function takes; and for its `with` blocks the lock, and the offsets at which
    the instructions inside begin and end.
    """
    if len(code.co_code) > 2 * MAX_INSTRUCTIONS:
        return {}, []
    found = list(dis.get_instructions(code))
    taken_at: dict[int, Path] = {}
    begins: dict[int, Path] = {}  # of `with` blocks: by the offset of the instruction that begins it
    for index, instruction in enumerate(found):
        if instruction.opname == "BEFORE_WITH":
            if (path := _path_before(found, index)) is not None:
                begins[instruction.offset] = taken_at[instruction.offset] = path
        elif instruction.opname.startswith("CALL") and (at := _method_before(found, index)) is not None:
            if (path := _path_before(found, at)) is not None:
                taken_at[instruction.offset] = path
    return taken_at, _blocks(code, found, begins)


def _blocks(
    code: CodeType, instructions: list[dis.Instruction], begins: dict[int, Path]
) -> list[tuple[Path, int, int]]:
    """The `with` blocks: entries of the exception table whose handler calls `__exit__`."""
    if not begins:
        return []
    ends_with = {
        before.offset
        for before, after in pairwise(instructions)
        if before.opname == "PUSH_EXC_INFO" and after.opname == "WITH_EXCEPT_START"
    }
    ranges: dict[int, list[tuple[int, int]]] = {}
    for entry in getattr(dis, "_parse_exception_table", lambda code: ())(code):
        if entry.target in ends_with:
            ranges.setdefault(entry.target, []).append((entry.start, entry.end))
    found: list[tuple[Path, int, int]] = []
    for pieces in ranges.values():
        first = min(pieces)[0]
        begin = max((offset for offset in begins if offset < first), default=None)
        if begin is not None:
            found += [(begins[begin], start, end) for start, end in pieces]
    return found


def _method_before(instructions: list[dis.Instruction], index: int) -> int | None:
    """The index of the instruction that loads the called method `acquire`; None if another method is called."""
    for at in range(index - 1, max(index - 12, -1), -1):
        instruction = instructions[at]
        if instruction.opname in ("LOAD_METHOD", "LOAD_ATTR") and _name(instruction) in _TAKING:
            return at
        if instruction.opname.startswith(("CALL", "STORE")):
            return None
    return None


def _path_before(instructions: list[dis.Instruction], index: int) -> Path | None:
    """The path to the object on top of the stack before an instruction."""
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


def _value(frame: FrameType, path: Path) -> Any:
    """The object at a path, found without running user code; None if there is none."""
    local = frame.f_locals
    value = local.get(path[0], frame.f_globals.get(path[0]))
    if type(local) is dict and local is not frame.f_globals and frame.f_code.co_name != "<module>":
        local.clear()  # before Python 3.13 this copy would keep its values alive as long as the frame
    for name in path[1:]:
        value = _attribute(value, name)
    return value


def _attribute(value: object, name: str) -> object:
    try:
        found = inspect.getattr_static(value, name)
        return found.__get__(value) if isinstance(found, MemberDescriptorType) else found
    except AttributeError:
        return None


MAX_FRAMES: Final = 60
"""Limit on the frames of a stack; the innermost ones are kept."""

MAX_THREADS: Final = 300
MAX_WAITS: Final = 20
MAX_PATH: Final = 300

_WAITS_FOR_REPLY: Final = SyncReplySink.wait.__code__
_WAITS_FOR_FUTURE: Final = Future._block.__code__
_AWAITS_FUTURE: Final = Future.__await__.__code__
_WAITS_FOR_SEVERAL: Final = Completions._wait_for.__code__
_WAITS_FOR_ITEM: Final = StreamState.take.__code__
_AWAITS_ITEM: Final = StreamState.take_async.__code__
_RUNS_CALLBACKS: Final = Future._run_callbacks.__code__


def thread_states(only: int | None = None) -> tuple[list[ThreadState], int]:
    """The states of all other threads, or of the thread `only`, and how many exceeded the limit."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    if only is not None:
        frames = {ident: frame for ident, frame in frames.items() if ident == only}
    found = []
    waiting: dict[int, tuple[str, object, int | None]] = {}
    chosen = list(islice(frames.items(), MAX_THREADS))
    for ident, frame in chosen:
        if (awaited := awaited_lock(frame)) is not None:
            waiting[ident] = awaited
    for ident, frame in chosen:
        stack, waits_for, is_callback = _walk(frame)
        name, holder = "", None
        if ident in waiting and not waits_for:
            name, lock, holder = waiting[ident]
            ordered = sorted(chosen, key=lambda one: one[0] == ident)  # it may hold the lock itself
            holder = holder or next((one for one, top in ordered if _holds(top, lock)), None)
        found.append(ThreadState(ident, names.get(ident, ""), stack, waits_for, name, holder, is_callback))
    return found, len(frames) - len(chosen)


def coroutine_stack(coroutine: Any) -> tuple[tuple[Frame, ...], tuple[int, ...]]:
    """The current lines of a coroutine, the outermost first, and the numbers of the calls that it awaits."""
    stack: list[Frame] = []
    waits_for: list[int] = []
    awaited = coroutine
    while awaited is not None and len(stack) < MAX_FRAMES:
        frame, inner = _step_of(awaited)
        if frame is None:
            break
        stack.append(_frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname))
        waits_for += _waited_in(frame)
        awaited = inner
    return tuple(stack), tuple(dict.fromkeys(waits_for))[:MAX_WAITS]


def _step_of(awaited: Any) -> tuple[FrameType | None, Any]:
    """The frame of a coroutine, a generator or an async generator, and what it waits for."""
    for frame, inner in (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"), ("ag_frame", "ag_await")):
        found = getattr(awaited, frame, None)
        if isinstance(found, FrameType):
            return found, getattr(awaited, inner, None)
    return None, None


def _walk(innermost: FrameType) -> tuple[tuple[Frame, ...], tuple[int, ...], bool]:
    stack: list[Frame] = []
    waits_for: list[int] = []
    is_callback = False
    for frame, _ in traceback.walk_stack(innermost):
        code = frame.f_code
        if len(stack) < MAX_FRAMES:
            stack.append(_frame(code.co_filename, frame.f_lineno, code.co_qualname))
        if not waits_for:
            waits_for += _waited_in(frame)
        is_callback |= code is _RUNS_CALLBACKS
    return tuple(reversed(stack)), tuple(dict.fromkeys(waits_for))[:MAX_WAITS], is_callback


def _frame(file: str, line: int | None, function: str) -> Frame:
    return Frame(file[-MAX_PATH:], line or 0, function[:MAX_PATH])


def _waited_in(frame: FrameType) -> list[int]:
    """The numbers of the calls that a frame waits for; empty unless it is a frame of one of our waiting functions."""
    code = frame.f_code
    if code is _WAITS_FOR_REPLY:
        call = _value(frame, ("call",))
        return [call.id] if isinstance(call, PendingCall) else []
    if code is _WAITS_FOR_FUTURE or code is _AWAITS_FUTURE:
        return call_of_future(_value(frame, ("self",)))
    if code is _WAITS_FOR_ITEM or code is _AWAITS_ITEM:
        stream = _value(frame, ("self",))
        return [stream.id] if isinstance(stream, StreamState) else []
    if code is _WAITS_FOR_SEVERAL:
        several = _value(frame, ("self",))
        pending = [one for one in list(several._observed) if not one.done()] if isinstance(several, Completions) else []
        return [call for future in pending[:MAX_WAITS] for call in call_of_future(future)]
    return []


def call_of_future(future: object) -> list[int]:
    """The number of the call that will complete a future, as the only entry; empty for other futures."""
    expected = future._expected if isinstance(future, Future) else None
    return [expected.id] if isinstance(expected, PendingCall) else []


def _holds(innermost: FrameType, lock: object) -> bool:
    return any(holds_lock(frame, lock) for frame, _ in islice(traceback.walk_stack(innermost), MAX_FRAMES))
