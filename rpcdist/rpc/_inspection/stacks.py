"""The stacks of the threads and coroutines of this process at this moment, and the calls that they wait for.

Nothing is kept for this while nobody looks: the interpreter knows the frames of all threads, and those of our functions
that wait name the calls that they wait for.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from itertools import islice
from types import FrameType
from typing import Any, Final

from rpcdist.inspection import Frame, ThreadState
from rpcdist.rpc._calling.call_table import PendingCall, SyncReplySink
from rpcdist.rpc._calling.result_streams import StreamState
from rpcdist.rpc._futures.waiting import Completions
from rpcdist.rpc._inspection.locks import awaited_lock, holds_lock
from rpcdist.rpc.future import Future

MAX_FRAMES: Final = 60
"""Of a stack: the innermost ones."""

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
    """All threads but this one, or only the one with an identifier, and how many were left out for want of room."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    if only is not None:
        frames = {ident: frame for ident, frame in frames.items() if ident == only}
    found = []
    waiting: dict[int, Any] = {}
    chosen = list(islice(frames.items(), MAX_THREADS))
    for ident, frame in chosen:
        if (awaited := awaited_lock(frame)) is not None:
            waiting[ident] = awaited
    for ident, frame in chosen:
        stack, waits_for, is_callback = _walk(frame)
        awaited = waiting.get(ident)
        holder = None
        if awaited is not None and not waits_for:
            ordered = sorted(chosen, key=lambda one: one[0] == ident)  # it may hold the lock itself
            holder = awaited.owner or next((one for one, top in ordered if _holds(top, awaited.lock)), None)
        found.append(
            ThreadState(
                ident,
                names.get(ident, ""),
                stack,
                waits_for,
                "" if awaited is None or waits_for else awaited.name,
                holder,
                is_callback,
            )
        )
    return found, len(frames) - len(chosen)


def coroutine_stack(coroutine: Any) -> tuple[tuple[Frame, ...], tuple[int, ...]]:
    """The lines at which a coroutine stands, the outermost first, and the numbers of the calls that it awaits."""
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
    frame: FrameType | None = innermost
    while frame is not None:
        code = frame.f_code
        if len(stack) < MAX_FRAMES:
            stack.append(_frame(code.co_filename, frame.f_lineno, code.co_qualname))
        if not waits_for:
            waits_for += _waited_in(frame)
        is_callback |= code is _RUNS_CALLBACKS
        frame = frame.f_back
    return tuple(reversed(stack)), tuple(dict.fromkeys(waits_for))[:MAX_WAITS], is_callback


def _frame(file: str, line: int | None, function: str) -> Frame:
    return Frame(file[-MAX_PATH:], line or 0, function[:MAX_PATH])


def _waited_in(frame: FrameType) -> list[int]:
    """The numbers of the calls that one of our own functions waits for, if the frame is that of one."""
    code = frame.f_code
    if code is _WAITS_FOR_REPLY:
        call = _local(frame, "call")
        return [call.id] if isinstance(call, PendingCall) else []
    if code is _WAITS_FOR_FUTURE or code is _AWAITS_FUTURE:
        return call_of_future(_local(frame, "self"))
    if code is _WAITS_FOR_ITEM or code is _AWAITS_ITEM:
        stream = _local(frame, "self")
        return [stream.id] if isinstance(stream, StreamState) else []
    if code is _WAITS_FOR_SEVERAL:
        several = _local(frame, "self")
        return list(islice(_calls_of(several), MAX_WAITS)) if isinstance(several, Completions) else []
    return []


def _calls_of(several: Completions[Any]) -> Iterator[int]:
    for future in list(several._observed):
        if not future.done():
            yield from call_of_future(future)


def call_of_future(future: object) -> list[int]:
    """The number of the call whose result a future will be, as the only entry; empty for another future."""
    expected = future._expected if isinstance(future, Future) else None
    return [expected.id] if isinstance(expected, PendingCall) else []


def _local(frame: FrameType, name: str) -> object:
    """A local variable. The copy of all of them, which the frame makes for this question, is let go."""
    variables = frame.f_locals
    value = variables.get(name)
    if type(variables) is dict:  # before Python 3.13
        variables.clear()
    return value


def _holds(innermost: FrameType, lock: object) -> bool:
    frame: FrameType | None = innermost
    for _ in range(MAX_FRAMES):
        if frame is None:
            return False
        if holds_lock(frame, lock):
            return True
        frame = frame.f_back
    return False
