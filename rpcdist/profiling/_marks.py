"""Marks: the nanosecond at which a function of the call path begins or ends, on any thread of a process.

A mark costs a call, a look at the clock and an append, about 0.3 us when it runs hot; the command says how much slower
a call was with them. `time.monotonic_ns` is one clock for all processes of a host, so marks of two processes can be put
into one order.
"""

from __future__ import annotations

import functools
import importlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple


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
    """What has the function of a `Point`, under which name, and the function; None if there is none."""
    module_name, _, path = name.partition(":")
    *parents, last = path.split(".")
    try:
        owner: Any = importlib.import_module(module_name)
        for parent in parents:
            owner = getattr(owner, parent)
        return owner, last, getattr(owner, last)
    except (ImportError, AttributeError):
        return None
