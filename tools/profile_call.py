"""Where the time of one kind of call goes, stage by stage, in both processes: `python tools/profile_call.py noop`.

It starts two processes twice, without marks and with them. A mark is the nanosecond at which a function of the call
path begins or ends, on any thread. It costs a call, a look at the clock and an append; the output says how much slower
a call was with marks. `time.monotonic_ns` is one clock for all processes of a host, so marks of two processes can be
put into one order. Nothing here is part of a call: marks are wrapped around functions in these two processes only.

Calls are made one at a time, so all marks between the begin and the end of a call belong to it. Processes and threads
run side by side, so their marks do not come in one order in every call. Each mark therefore gets its own median, of the
time since its call began, and the table is in the order of these medians.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import re
import socket
import sys
import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from types import ModuleType
from typing import Any, Final, NamedTuple

import torch

from rpcdist import rpc
from rpcdist._launch.launching import launch
from rpcdist.errors import RpcdistError


class Mark(NamedTuple):
    """Something happened.

    Attributes:
        time_ns: when, on the host's monotonic clock.
        process: in which process.
        thread: the name of the thread.
        event: what happened.
    """

    time_ns: int
    process: str
    thread: str
    event: str


class Point(NamedTuple):
    """A function to be marked.

    Attributes:
        name: "module:function" or "module:Class.method".
        begins: what to call the moment in which it is called; "" for no mark.
        ends: the same for its return, however it returns.
    """

    name: str
    begins: str = ""
    ends: str = ""


class Recorder:
    """The marks of one process.

    Args:
        process: its name.

    Marks stay until the process ends, so a recorder is for processes that were started for nothing else.
    """

    def __init__(self, process: str) -> None:
        self._process = process
        self._times: list[tuple[int, int, str]] = []
        self._threads: dict[int, str] = {}

    def mark(self, event: str) -> None:
        """Something happens now, on this thread. Any thread may call it."""
        now = time.monotonic_ns()
        thread = threading.get_ident()
        if thread not in self._threads:
            self._threads[thread] = threading.current_thread().name
        self._times.append((now, thread, event))

    def marks(self) -> list[Mark]:
        """All marks so far, in the order in which they were made."""
        return [Mark(at, self._process, self._threads[thread], event) for at, thread, event in list(self._times)]

    def install(self, points: Sequence[Point]) -> list[str]:
        """Marks functions from now on. Call it before the parts that keep bound methods of them are made.

        Returns:
            The points that there are not: the call path has changed, and the table of points has not.
        """
        return [point.name for point in points if not self._wrap(point)]

    def install_sockets(self) -> None:
        """Marks what Python code writes to sockets and reads from them. Sockets of gRPC's own are not seen."""
        for name in ("sendmsg", "send", "sendall"):
            plain = getattr(socket.socket, name)
            setattr(socket.socket, name, self._marked(plain, "write begins", "written"))
        for name in ("recvmsg_into", "recv_into", "recv", "recvmsg"):
            setattr(socket.socket, name, self._marked_when_received(getattr(socket.socket, name)))

    def _wrap(self, point: Point) -> bool:
        found = find_function(point.name)
        if found is None:
            return False
        owner, name, plain = found
        marked = self._marked(plain, point.begins, point.ends)
        setattr(owner, name, marked)
        if isinstance(owner, ModuleType):  # other modules may know the function by `from ... import`
            for module in list(sys.modules.values()):
                if module.__name__.startswith("rpcdist") and vars(module).get(name) is plain:
                    setattr(module, name, marked)
        return True

    def _marked(self, plain: Callable[..., Any], begins: str, ends: str) -> Callable[..., Any]:
        mark = self.mark

        @functools.wraps(plain)
        def marked(*args: Any, **kwargs: Any) -> Any:
            if begins:
                mark(begins)
            try:
                return plain(*args, **kwargs)
            finally:
                if ends:
                    mark(ends)

        return marked

    def _marked_when_received(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Attempts that find nothing leave no mark: how often a reader looks in vain differs from call to call."""
        mark = self.mark

        @functools.wraps(plain)
        def marked(*args: Any, **kwargs: Any) -> Any:
            received = plain(*args, **kwargs)
            if received:
                mark("bytes received")
            return received

        return marked


def find_function(name: str) -> tuple[Any, str, Callable[..., Any]] | None:
    """The owner of the function of a `Point`, its name there, and the function; None if there is none."""
    module_name, _, path = name.partition(":")
    *parents, last = path.split(".")
    try:
        owner: Any = importlib.import_module(module_name)
        for parent in parents:
            owner = getattr(owner, parent)
        return owner, last, getattr(owner, last)
    except (ImportError, AttributeError):
        return None


USUAL_SHARE: Final = 0.9
"""A mark that fewer calls have is no stage of the call: a heartbeat, or something that happens now and then."""

_NUMBER: Final = re.compile(r"[-_ ]?\d+$")


class CallTimes(NamedTuple):
    """When a call began and ended, in nanoseconds."""

    began_ns: int
    ended_ns: int


class CallStage(NamedTuple):
    """An event at one moment of a call, and the time until the next stage.

    Attributes:
        thread: the name of the thread, without its number; several if the calls differ.
        at_us: median of the time since the call began.
        takes_us: until the next stage of the table begins, whichever thread that is on.
    """

    process: str
    thread: str
    event: str
    at_us: float
    takes_us: float


class Profile(NamedTuple):
    """The stages of one kind of call.

    Attributes:
        stages: in the order in which they begin; the last one takes until the call ends.
        total_us: median time of a call.
        rare: events that fewer than `USUAL_SHARE` of the calls had, with the number of calls that had them.
    """

    stages: list[CallStage]
    total_us: float
    rare: dict[str, int]


class _Key(NamedTuple):
    """The same mark in different calls, on whichever thread: which one it is of its kind."""

    process: str
    event: str
    number: int


def profile_calls(calls: Sequence[CallTimes], marks: Sequence[Mark]) -> Profile:
    """The stages of the calls.

    Args:
        calls: they do not overlap.
        marks: of all processes, in any order.

    Raises:
        ValueError: there are no calls.
    """
    if not calls:
        raise ValueError("a profile needs at least one call")
    offsets: dict[_Key, list[int]] = {}
    threads: dict[_Key, Counter[str]] = {}
    for call, own in _marks_of(calls, sorted(marks)):
        seen: Counter[tuple[str, str]] = Counter()
        for mark in own:
            kind = (mark.process, mark.event)
            key = _Key(*kind, seen[kind])
            seen[kind] += 1
            offsets.setdefault(key, []).append(mark.time_ns - call.began_ns)
            threads.setdefault(key, Counter())[_NUMBER.sub("", mark.thread)] += 1
    usual = {key: median(times) / 1e3 for key, times in offsets.items() if len(times) >= USUAL_SHARE * len(calls)}
    total_us = median(call.ended_ns - call.began_ns for call in calls) / 1e3
    ordered = sorted(usual, key=usual.__getitem__)
    ends_us = [*(usual[key] for key in ordered[1:]), total_us]
    stages = [
        CallStage(key.process, _name(threads[key], len(calls)), key.event, usual[key], end_us - usual[key])
        for key, end_us in zip(ordered, ends_us, strict=True)
    ]
    rare: Counter[str] = Counter()
    for key in offsets.keys() - usual.keys():
        rare[f"{key.event} ({key.process}, {_name(threads[key], len(calls))})"] += len(offsets[key])
    return Profile(stages, total_us, dict(sorted(rare.items())))


def _name(threads: Counter[str], num_calls: int) -> str:
    """The threads on which something happens, the most frequent one first, without those of single calls."""
    often = [thread for thread, number in threads.most_common() if number > (1 - USUAL_SHARE) * num_calls]
    return " or ".join(often or [threads.most_common(1)[0][0]])


def _marks_of(calls: Sequence[CallTimes], marks: Sequence[Mark]) -> Iterator[tuple[CallTimes, Sequence[Mark]]]:
    times = [mark.time_ns for mark in marks]
    for call in calls:
        yield call, marks[bisect_left(times, call.began_ns) : bisect_right(times, call.ended_ns)]


def table(profile: Profile) -> list[str]:
    """The profile as a Markdown table that is also readable as plain text."""
    before_us = profile.stages[0].at_us if profile.stages else profile.total_us
    lines = [("at us", "takes us", "share", "process", "thread", "what happens")]
    lines += [
        (
            f"{stage.at_us:.1f}",
            f"{stage.takes_us:.1f}",
            f"{stage.takes_us / profile.total_us:.0%}",
            stage.process,
            stage.thread,
            stage.event,
        )
        for stage in (CallStage("caller", "", "the call begins", 0, before_us), *profile.stages)
    ]
    lines.append((f"{profile.total_us:.1f}", "", "", "caller", "", "the call has ended"))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    lines.insert(1, tuple("-" * width for width in widths))  # type: ignore[arg-type]
    return [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]


POINTS: Final = (
    # Writes to sockets and reads from them are marked apart. A point is worth having where one part hands the call to
    # the next; more points would slow down what they measure.
    # The caller's thread.
    Point("rpcdist.rpc._calling.new_calls:NewCalls.of_function", "the worker is found, the call is made"),
    Point("rpcdist.rpc._peers.peer:Peer.send", "arguments are encoded, the message is routed"),
    Point("rpcdist.transport.session:Session.send", "the session takes the message"),
    # The callee.
    Point("rpcdist.transport.session:Session.receive", "the session takes a frame"),
    Point("rpcdist.rpc._serving.dispatcher:Dispatcher.on_call", "the dispatcher takes the call"),
    Point("rpcdist.rpc._executors.thread_pool:ThreadPool.submit_many", "the pool takes the call"),
    Point("rpcdist.rpc._serving.dispatcher:Dispatcher.run", "a worker takes the call"),
    Point(f"{__name__}:noop", "the function begins", "the function has returned"),
    Point(f"{__name__}:echo", "the function begins", "the function has returned"),
    Point(f"{__name__}:Target.increment", "the function begins", "the function has returned"),
    # The caller again.
    Point("rpcdist.rpc._calling.caller:Caller.on_reply", "the caller takes the reply"),
    Point("rpcdist.rpc._calling.new_calls:SyncReplySink.replied", "the result goes to the waiting thread"),
    Point("rpcdist.rpc._calling.new_calls:result_of", "the waiting thread has the result, and decodes it"),
)


CALLEE: Final = "callee"


def noop() -> None:
    """Does nothing."""


def echo(tensor: torch.Tensor) -> torch.Tensor:
    """Sends its argument back."""
    return tensor


class Target:
    """An object that lives on the callee."""

    def __init__(self) -> None:
        self.count = 0

    def increment(self) -> int:
        """Counts one more."""
        self.count += 1
        return self.count


def make_call(kind: str, size_bytes: int) -> Callable[[], object]:
    """A call of that kind; it returns when its answer is there.

    Args:
        kind: one of `KINDS`.
        size_bytes: of the tensor of an echo.
    """
    if kind == "noop":
        return partial(rpc.rpc_sync, CALLEE, noop)
    if kind == "echo":
        return partial(rpc.rpc_sync, CALLEE, echo, args=(torch.zeros(max(1, size_bytes // 4)),))
    if kind == "remote":
        return lambda: rpc.remote(CALLEE, noop).to_here()
    target = rpc.remote(CALLEE, Target)
    return lambda: target.rpc_sync().increment()


class Settings(NamedTuple):
    """How to measure.

    Attributes:
        kind: which call, one of `KINDS`.
        size_bytes: of the tensor of an echo.
        num_calls: calls that are measured; a tenth as many warm up.
        pause_s: how long to sleep before each call: what runs after a pause finds its data out of the caches.
        with_marks: whether to mark the stages.
    """

    kind: str
    size_bytes: int
    num_calls: int
    pause_s: float
    with_marks: bool


class Measured(NamedTuple):
    """The measurements of one process.

    Attributes:
        calls: the caller's; the callee has none.
        marks: of this process.
        missing: points that could not be marked.
    """

    calls: list[CallTimes]
    marks: list[Mark]
    missing: list[str]


def measure(rank: int, settings: Settings) -> Measured:
    """Runs in each process, see `launch`."""
    name = ("caller", CALLEE)[rank]
    recorder = Recorder(name)
    missing: list[str] = []
    if settings.with_marks:
        recorder.install_sockets()  # before `init_rpc`: sessions may keep bound methods
        missing = recorder.install(POINTS)
    rpc.init_rpc(name)
    calls = _call(settings) if rank == 0 else []
    rpc.shutdown()
    return Measured(calls, recorder.marks(), missing)


def _call(settings: Settings) -> list[CallTimes]:
    call = make_call(settings.kind, settings.size_bytes)
    for _ in range(settings.num_calls // 10 + 1):
        call()
    calls = []
    for _ in range(settings.num_calls):
        if settings.pause_s:
            time.sleep(settings.pause_s)
        began_ns = time.monotonic_ns()
        call()
        calls.append(CallTimes(began_ns, time.monotonic_ns()))
    return calls


LIMIT_S: Final = 300.0
"""One run of the two processes; then they are ended: take fewer calls."""

KINDS: Final = ("noop", "echo", "remote", "method")
"""The calls that can be profiled."""

_SIZE: Final = re.compile(r"(\d+) ?(B|KiB|MiB|GiB)?")
_UNITS: Final = {None: 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def main(given: list[str] | None = None) -> int:
    """Prints the profile; returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Calls from one process to another on this host, and prints where the time of a call goes: the "
        "median of each stage, in both processes. benchmarks/NOTES.md explains it.",
    )
    parser.add_argument("kind", nargs="?", choices=KINDS, default="noop",
                        help="noop: rpc_sync of a function that does nothing (default); echo: of one that sends a "
                        "tensor back; remote: remote().to_here(); method: rref.rpc_sync().method()")  # fmt: skip
    parser.add_argument("--size", type=parse_size, default="1KiB", help="of an echo's tensor (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=500, help="how many to measure (default: %(default)s)")
    parser.add_argument("--pause-ms", type=float, default=0.0, help="sleep before each call (default: %(default)g)")
    parser.add_argument("--channels", default="auto", help="value of RPCDIST_CHANNELS (default: %(default)s)")
    arguments = parser.parse_args(given)
    if arguments.calls < 1 or arguments.pause_ms < 0:
        print("error: --calls is at least 1, and --pause-ms at least 0", file=sys.stderr)
        return 2
    try:
        plain, _ = _measure(arguments, with_marks=False)
        caller, callee = _measure(arguments, with_marks=True)
    except RpcdistError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    profile = profile_calls(caller.calls, [*caller.marks, *callee.marks])
    plain_us = median(call.ended_ns - call.began_ns for call in plain.calls) / 1e3
    size = f" of {arguments.size} bytes" if arguments.kind == "echo" else ""
    print(f"{arguments.kind}{size}: {plain_us:.1f} us without marks, {profile.total_us:.1f} us with them; medians of "
          f"{arguments.calls} calls")  # fmt: skip
    print("\n".join(["", *table(profile)]))
    if profile.rare:
        events = ", ".join(f"{event}: {number}" for event, number in profile.rare.items())
        print(f"\nNot in every call: {events}.")
    if missing := sorted({*caller.missing, *callee.missing}):
        print(f"\nNot found, so without a mark: {', '.join(missing)}. Bring `POINTS` up to date.")
    return 0


def parse_size(text: str) -> int:
    """A number of bytes: `64KiB`, `1 MiB`, `4096`."""
    if (match := _SIZE.fullmatch(text.strip())) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write a number of bytes, or 64KiB, or 1MiB")
    return int(match[1]) * _UNITS[match[2]]


def _measure(arguments: argparse.Namespace, with_marks: bool) -> list[Measured]:
    settings = Settings(arguments.kind, arguments.size, arguments.calls, arguments.pause_ms / 1e3, with_marks)
    env = {"RPCDIST_CHANNELS": arguments.channels, "OMP_NUM_THREADS": "1"}
    return launch(measure, (settings,), workers=2, join_timeout_s=LIMIT_S, env=env)


if __name__ == "__main__":
    import profile_call  # the processes find its functions by this name

    sys.exit(profile_call.main())
