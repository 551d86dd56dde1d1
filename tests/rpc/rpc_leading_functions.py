"""The functions of the workers of `test_rpc_leading`. Their main thread makes calls, and so reads its connections
itself.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn
from unittest.mock import patch

from inside_agents import current_agent, reader_of
from threads_at_once import problems_of_threads

from rpcdist import rpc
from rpcdist.errors import RpcdistError
from rpcdist.rpc._calling.new_calls import SyncReplySink
from rpcdist.testing import LIMIT_S
from rpcdist.transport.memory_copies import LargeBuffer
from rpcdist.transport.session import Session
from rpcdist.transport.wire_messages import CallMessage, WireMessage

_doubled = itertools.count(1)
_num_doubled = 0


def double(number: int) -> int:
    global _num_doubled
    _num_doubled = next(_doubled)
    return 2 * number


def num_doubled() -> int:
    """How often `double` has run here."""
    return _num_doubled


def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def session_with(name: str) -> int:
    """Identifies the connection that calls to a worker take."""
    agent = current_agent()
    return id(agent.router.session_with(agent.directory.resolve(name)))


def calls_left_by_ctrl_c(to: str) -> dict[str, int]:
    """Ctrl-C comes after each way of calling has entered its call into the table, and before it is sent."""

    rpc.rpc_sync(to, double, args=(1,))  # the connection stands, so this thread sends its calls itself
    send = Session.send

    def press(*arguments: object, **named: object) -> NoReturn:
        raise KeyboardInterrupt

    def press_at_calls(session: Session, message: WireMessage, buffers: Sequence[LargeBuffer] = ()) -> int:
        return press() if type(message) is CallMessage else send(session, message, buffers)

    caller, left = current_agent().caller, {}
    starts: dict[str, Callable[[], object]] = {
        "rpc_sync": lambda: rpc.rpc_sync(to, double, args=(1,)),
        "rpc_async": lambda: rpc.rpc_async(to, double, args=(1,)),
        "remote": lambda: rpc.remote(to, double, args=(1,)),
        "on a loop": lambda: asyncio.run(awaited(to)),
    }
    places: list[tuple[Any, dict[str, Callable[[], object]]]] = [
        (patch.object(Session, "send", press_at_calls), starts),
        (patch.object(SyncReplySink, "wait", press), {"rpc_sync, before its wait": starts["rpc_sync"]}),
    ]
    for place, pressed in places:
        with place:
            for name, start in pressed.items():
                try:
                    start()
                except KeyboardInterrupt:
                    left[name] = len(caller.calls)
    return left


async def awaited(to: str) -> int:
    return await rpc.rpc_async(to, double, args=(1,))


def call_until_interrupted(to: str, how: str = "rpc_sync") -> tuple[str, int]:
    """Calls without pause; returns the error that ended them, and the number of calls."""
    number = 0
    try:
        while True:
            if how == "rpc_sync":
                results = [rpc.rpc_sync(to, double, args=(number,))]
            elif how == "remote":
                results = [rpc.remote(to, double, args=(number,)).to_here()]
            else:  # all but the first and the last are written while nobody waits
                results = rpc.wait_all([rpc.rpc_async(to, double, args=(number,)) for _ in range(100)])
            if set(results) != {2 * number}:
                return "a wrong result", number
            number += 1
    except KeyboardInterrupt:
        return "KeyboardInterrupt", number


def call_while_signals_come(to: str, num_signals: int) -> tuple[int, list[int]]:
    """Calls until a handler of SIGUSR1, which makes calls itself, has run so often; returns calls and its results."""
    results: list[int] = []
    calls = 0
    numbers = itertools.count()

    def handler(number: int, frame: FrameType | None) -> None:
        results.append(rpc.rpc_sync(to, double, args=(next(numbers),)))  # the next signal may come meanwhile

    signal.signal(signal.SIGUSR1, handler)
    try:
        while len(results) < num_signals:
            assert rpc.rpc_sync(to, double, args=(calls,)) == 2 * calls
            calls += 1
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # more may be on their way
    return calls, results


def fork_while_another_leads(to: str) -> tuple[int, float]:
    """A thread waits for a call and reads; then this one forks. The child's status, and the result of the call."""
    results: list[float] = []
    rpc.rpc_sync(to, double, args=(1,))  # the connection is there
    waiting = threading.Thread(target=lambda: results.append(rpc.rpc_sync(to, sleep, args=(1.0,))))
    waiting.start()
    with _until_led(to, waiting):
        pid = os.fork()
        if pid == 0:
            import gc

            gc.collect()
            os._exit(7)
    _, status = os.waitpid(pid, 0)
    waiting.join(60)
    return os.waitstatus_to_exitcode(status), results[0]


@contextmanager
def _until_led(to: str, by: threading.Thread) -> Iterator[None]:
    agent = current_agent()
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        session: Any = agent.router.session_with(agent.directory.resolve(to))
        if session is not None and reader_of(session)._holder == by.ident:
            yield
            return
        time.sleep(0.001)  # until the other thread sleeps in its read
    raise AssertionError("no thread reads")


def call_from_threads(to: str, num_threads: int, num_calls: int) -> list[str]:
    """Calls from several threads at once, without pause; returns what went wrong."""

    def calls(thread: int) -> Iterator[str]:
        for number in range(1000 * thread, 1000 * thread + num_calls):
            if rpc.rpc_sync(to, double, args=(number,)) != 2 * number:
                yield f"{number}: wrong"
            if rpc.rpc_async(to, double, args=(number,)).wait() != 2 * number:
                yield f"{number}: wrong, async"

    return problems_of_threads(calls, num_threads)


def _call_at(depth: int, how: str, to: str) -> object:
    if depth > 0:
        return _call_at(depth - 1, how, to)
    if how == "rpc_sync":
        return rpc.rpc_sync(to, pow, (2, 3))
    return rpc.rpc_async(to, pow, (2, 3)).wait()


def call_near_the_recursion_limit(to: str, how: str) -> list[str]:
    """The outcomes of calls, the last ones of which find no room on the stack."""
    outcomes = []
    limit = sys.getrecursionlimit()
    for depth in range(limit - 250, limit, 2):
        try:
            outcomes.append(str(_call_at(depth, how, to)))
        except RecursionError:
            outcomes.append("RecursionError")
        except RpcdistError as exc:
            outcomes.append(f"{type(exc).__name__}: {exc}")
    return outcomes
