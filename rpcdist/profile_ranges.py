"""Ranges in the profiles of `torch.profiler` (of calls, handlers, collective operations and buckets of DDP), the spans
of `rpcdist.trace`, and torch's older profiler, `profile`, with the events of remote functions.

While no profiler runs in this process, a range costs the check of one attribute. A profiler records the thread that
started it; with `_ExperimentalConfig(profile_all_threads=True)` it records all threads, on which handlers and
asynchronous operations run.

[Note: ranges and the end of a profiler] torch frees the memory of a range when the profiler ends, and still writes to
it when the range ends later, even in the range's destructor. So a range ends with its block, on its thread; if its
profiler has ended before, the range is never ended, and its object is leaked on purpose.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar, Final, Self

import torch
from torch.autograd import profiler, profiler_legacy
from torch.autograd.profiler_util import EventList, FunctionEvent, Interval

_forget: Final = ctypes.pythonapi.Py_IncRef
_forget.argtypes, _forget.restype = (ctypes.py_object,), None


span_taps: Final[list[Callable[[str, str, float, float], object]]] = []
"""Called after each action of DDP, a pipeline or the reader of a stream in this process, on the acting thread, with the
lane, the name, and begin and end in monotonic seconds. Empty while there is no trace."""


operation_taps: Final[list[Callable[[str, str], Callable[[float, float, BaseException | None], object]]]] = []
"""Called with the group and the name of each operation when it is called. The returned function is called when the
operation has ended, with begin and end in seconds since the epoch, and its error. Usually empty."""


def is_profiling() -> bool:
    """Whether a profiler runs in this process, on any thread."""
    return profiler._is_profiler_enabled


class record_function:
    """torch's range for a `with` block, but safe if the profiler ends before the block."""

    _lock: ClassVar = threading.Lock()  # held while `_num_ended` changes, and while a range ends
    _num_ended: ClassVar = 0  # profilers, each counted before torch frees its memory
    _disable: ClassVar[Any] = None  # torch's function, which its profilers look up when they end

    def __init__(self, name: str) -> None:
        cls = record_function
        with cls._lock:
            if cls._disable is None:
                cls._disable = profiler._disable_profiler
                profiler._disable_profiler = cls._disabled
        self._range = profiler.record_function(name)

    @classmethod
    def _disabled(cls) -> Any:
        with cls._lock:
            cls._num_ended += 1
        return cls._disable()

    def __enter__(self) -> None:
        self._began = self._num_ended
        self._range.__enter__()

    def __exit__(self, *error: object) -> None:
        with self._lock:
            if self._began == self._num_ended:
                self._range.__exit__(None, None, None)
            else:
                _forget(self._range)


_SENT: Final = "id thread fwd_thread input_shapes stack scope cpu_memory_usage device_memory_usage sequence_nr flops"
_OPTIONS: Final = "use_cuda record_shapes with_flops profile_memory with_stack with_modules"
_here: Final = threading.local()
Row = dict[str, Any]
"""An event as it travels: the arguments of a `FunctionEvent`."""


def profiling_key(mode: str, function: str, caller: str, callee: str) -> str:
    """The name of a call's event in `profile`, which is that in torch: `rpc_sync#add(worker0 -> worker1)`."""
    return f"rpc_{mode}#{function}({caller} -> {callee})"


class profile(profiler_legacy.profile):
    """torch's older profiler, which also gets the events of functions that its thread calls on other workers.

    The name of a remote event begins with the key of its call and `#remote_op: `, and its `node_id` is the id of the
    worker. Its times are those of the callee, moved so that they lie in the middle of the call.
    """

    running: Final[list[profile]] = []
    """The running profiles of all threads."""
    of_process: Final[list[_server_process_global_profile]] = []
    """The running profiles of the functions that peers call in this process."""

    @staticmethod
    def here() -> profile | None:
        """The profile of this thread, if one runs."""
        found: profile | None = getattr(_here, "profile", None)
        return found

    def options(self) -> dict[str, bool]:
        """The arguments for a profiler of a callee."""
        return {name: getattr(self, name) for name in _OPTIONS.split()}

    def add(self, key: str, node_id: int) -> Callable[..., None]:
        """Records a call that begins now, in a range called `key`, on this thread.

        Args:
            key: the name of the event.
            node_id: the id of this worker.

        Returns:
            A function that ends the event. Call it with the done future of the call, and a function that extracts the
            callee's events from the result, or None.
        """
        times, found = [time.monotonic()], list[Row]()
        self._calls.append((key, node_id, times, found))

        def ended(rows: Callable[[Any], list[Row]] | None, done: Any) -> None:
            times.append(time.monotonic())
            if rows is not None and done.exception() is None:
                found.extend(rows(done.value()))

        return ended

    def __enter__(self) -> Self:
        self._calls: list[tuple[str, int, list[float], list[Row]]] = []
        if self.enabled:
            super().__enter__()  # type: ignore[no-untyped-call]
            self.running.append(self)
            _here.profile = self
        return self

    def __exit__(self, *error: object) -> None:
        if self.enabled:
            _here.profile = None
            self.running.remove(self)
            if self.use_cuda:
                torch.cuda.synchronize()
            self._parsed: list[FunctionEvent] = profiler_legacy._parse_legacy_records(
                profiler_legacy._disable_profiler_legacy()
            )
            self.function_events = EventList(
                self._merged(), use_device="cuda" if self.use_cuda else None,
                profile_memory=self.profile_memory, with_flops=self.with_flops,
            )  # fmt: skip
            self.function_events._build_tree()

    def rows(self, node_id: int) -> list[Row]:
        """The events for the caller of this worker, including those of calls that ended after the block."""
        rows: list[Row] = []
        for event in self._merged():
            row: Row = {name: getattr(event, name) for name in _SENT.split()}
            row |= {"name": event.name, "start_us": event.time_range.start, "end_us": event.time_range.end}
            rows.append(row | {"node_id": event.node_id if event.is_remote else node_id, "is_async": event.is_async})
        return rows

    @classmethod
    def serve(cls, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a function that a peer calls, under the profiles `of_process`, unless it is `profiles_itself`."""
        profiles, is_profiled = list(cls.of_process), any(function is each for each in profiles_itself)
        if not profiles or is_profiled or cls.here() is not None:
            return function(*args, **kwargs)
        with profile(**profiles[0].options()) as ran:  # type: ignore[no-untyped-call]
            result = function(*args, **kwargs)
        ran.note()
        return result

    def note(self) -> None:
        """Adds the events to the profiles `of_process`; call it after the block."""
        for one in list(self.of_process):
            # Not as a tree, which cannot be sent well.
            one.process_global_function_events.append(self._merged())

    def _merged(self) -> list[FunctionEvent]:
        """The events of this thread, with the true ends of its calls, and the events of the callees."""
        by_name: dict[str, list[FunctionEvent]] = {}
        for event in self._parsed:
            by_name.setdefault(event.name, []).append(event)
        events = list(self._parsed)
        for key, node_id, times, rows in self._calls:
            of_call = by_name[key].pop(0)
            start, end = of_call.time_range.start, of_call.time_range.end
            of_call.node_id = node_id
            if len(times) == 2:
                of_call.is_async = True  # it may end after events that begin later
                end = max(end, start + (times[1] - times[0]) * 1e6)
                of_call.time_range = Interval(start, end)
            first, last = (min(row["start_us"] for row in rows), max(row["end_us"] for row in rows)) if rows else (0, 0)
            moved_us = start + max(0.0, (end - start - (last - first)) / 2) - first
            for row in rows:
                name = f"{key}#remote_op: {row['name']}"
                at: Row = {"start_us": row["start_us"] + moved_us, "end_us": row["end_us"] + moved_us}
                at |= {"name": name, "trace_name": name}
                events.append(FunctionEvent(**row | at, is_remote=True, is_legacy=True))
        return sorted(events, key=lambda event: (event.time_range.start, -event.time_range.end))


profiles_itself: Final[list[Callable[..., Any]]] = []
"""Functions that peers call, which have their own `profile` and call its `note`: torch allows one on a thread."""


class _server_process_global_profile(profile):
    """torch's profiler of the functions that others call in this process, on any threads.

    Attributes:
        process_global_function_events: a list of events for each call that has ended meanwhile.
        function_events: all of them, after the block.
    """

    def __enter__(self) -> Self:
        self.process_global_function_events: list[list[FunctionEvent]] = []
        if self.enabled:
            self.of_process.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        if not self.enabled:
            return
        self.of_process.remove(self)
        events = [event for of_call in self.process_global_function_events for event in of_call]
        self.function_events = EventList(events, profile_memory=self.profile_memory)
        self.function_events._tree_built = True  # each call has its own tree
