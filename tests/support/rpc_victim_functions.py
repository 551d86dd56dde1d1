"""The functions that victims run, also at each other. All processes import this module by the same name."""

from __future__ import annotations

import _thread
import asyncio
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from inside_agents import current_agent, own_node
from transport_nodes import tcp_port

from rpcdist import rpc
from rpcdist.errors import Cancelled, RpcdistError
from rpcdist.rpc._peers import peer
from rpcdist.testing import eventually, wait_until_asleep

LIMIT_S = 60.0

held: list[Any] = []
"""The objects that this process holds on purpose."""
_never = threading.Event()


# ---------------------------------------------------------------- handlers


def add(a: Any, b: Any) -> Any:
    return a + b


def pid() -> int:
    return os.getpid()


def address() -> str:
    """Where this worker listens."""
    found = own_node().address
    assert found is not None
    return found


def raw_port() -> int:
    """Where this worker takes raw connections."""
    return tcp_port(own_node())


def announce_and_wait(path: str) -> None:
    """Says that it runs, and does not return."""
    Path(path).touch()
    _never.wait(LIMIT_S)


async def announce_and_wait_async(path: str) -> None:
    Path(path).touch()  # noqa: ASYNC240  (a file is how the test hears of it)
    await asyncio.sleep(LIMIT_S)


def stream_and_wait(path: str) -> Iterator[int]:
    yield 1
    Path(path).touch()
    _never.wait(LIMIT_S)


async def stream_and_wait_async(path: str) -> AsyncIterator[int]:
    yield 1
    Path(path).touch()  # noqa: ASYNC240
    await asyncio.sleep(LIMIT_S)


def make_slowly(path: str) -> torch.Tensor:
    announce_and_wait(path)
    return torch.ones(2)


def make(value: Any = 7) -> Any:
    return value


def exit_at_once(how: str) -> None:
    """Ends the process, or tries to."""
    match how:
        case "os._exit":
            os._exit(3)
        case "abort":
            os.abort()
        case "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
            _never.wait(LIMIT_S)  # it does not survive this
        case "sys.exit":
            sys.exit(3)
        case "KeyboardInterrupt":
            raise KeyboardInterrupt("a handler")


def hold(*values: Any) -> None:
    held.extend(values)


def drop() -> None:
    held.clear()


# ---------------------------------------------------------------- orders


def call(how: str, to: str, path: str) -> Any:
    """Makes one call that does not return by itself, in one of the ways that there are."""
    match how:
        case "rpc_sync":
            return rpc.rpc_sync(to, announce_and_wait, (path,))
        case "rpc_sync of a coroutine":
            return rpc.rpc_sync(to, announce_and_wait_async, (path,))
        case "rpc_async":
            return rpc.rpc_async(to, announce_and_wait, (path,)).wait()
        case "wait_all":
            return torch.futures.wait_all([rpc.rpc_async(to, announce_and_wait, (path,)) for _ in range(3)])
        case "collect_all":
            return torch.futures.collect_all([rpc.rpc_async(to, announce_and_wait, (path,))]).wait()
        case "rpc.wait_all":
            return rpc.wait_all([rpc.rpc_async(to, announce_and_wait, (path,))])
        case "wait_any":
            return rpc.wait_any([rpc.rpc_async(to, announce_and_wait, (path,)) for _ in range(2)]).done[0].wait()
        case "as_completed":
            calls = [rpc.rpc_async(to, announce_and_wait, (path,)) for _ in range(2)]
            return [future.wait() for future in rpc.as_completed(calls)]
        case "all_gather":
            return rpc.api._all_gather(1)
        case "await":

            async def awaiting() -> Any:
                return await rpc.rpc_async(to, announce_and_wait, (path,))

            return asyncio.run(awaiting())
        case "stream":
            return list(rpc.rpc_stream(to, stream_and_wait, (path,)))
        case "async stream":
            return list(rpc.rpc_stream(to, stream_and_wait_async, (path,)))
        case "stream on a loop":

            async def reading() -> Any:
                return [item async for item in rpc.rpc_stream(to, stream_and_wait, (path,))]

            return asyncio.run(reading())
        case "to_here":
            return rpc.remote(to, make_slowly, (path,)).to_here()
        case "rref.rpc_sync":
            return rpc.remote(to, Slow).rpc_sync().work(path)
        case "large":  # 256 MiB: the callee is killed while they come
            big = torch.zeros(64 << 20)
            rpc.rpc_sync(to, pid)  # the connection stands
            Path(path).touch()
            return rpc.rpc_sync(to, torch.Tensor.clone, (big,))
    raise ValueError(how)


def call_and_lose_ctrl_c(how: str, to: str, path: str) -> Any:
    """As `call`; once it runs, Ctrl-C comes in a way that does not wake this thread up."""

    def interrupt() -> None:
        eventually(Path(path).exists, "the call runs")
        wait_until_asleep(threading.main_thread())
        _thread.interrupt_main()

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        return call(how, to, path)
    finally:
        interrupting.join(LIMIT_S)


class Slow:
    def work(self, path: str) -> None:
        announce_and_wait(path)


def sees() -> dict[str, str]:
    """The counters of this worker that must be zero when nothing is left."""
    info = rpc.debug_info()
    keys = ("num_owner_rrefs", "num_pending_users", "num_forks", "num_pending_futures", "agent.client_active_calls")
    return {key: info[key] for key in keys if info[key] != "0"}


def cancel_all() -> None:
    caller = current_agent().caller
    for call in caller.calls:
        caller.calls.cancel(call, Cancelled(f"{call.what()} was cancelled by the test"))


def is_empty() -> bool:
    return not rpc.debug_rrefs() and not sees()


def tables() -> str:
    return f"{list(map(str, rpc.debug_rrefs()))} {sees()}"


def wait_until_empty(limit_s: float = 20.0) -> str:
    """Waits until no reference is left in this worker's tables; returns the rest when the time is over."""
    try:
        eventually(is_empty, "no reference is left", limit_s)
    except AssertionError:
        return tables()
    return ""


def error_of(function: Any, *args: Any) -> tuple[str, str, float]:
    """Calls it, and tells type and text of its error, and after how many seconds it came."""
    started = time.monotonic()
    try:
        value = function(*args)
    except BaseException as exc:
        return type(exc).__name__, str(exc), time.monotonic() - started
    raise AssertionError(f"no error, but {value!r}")


def outcome_of(function: Any, *args: Any) -> object:
    """Its result, or its error as text."""
    try:
        return function(*args)
    except Exception as exc:
        return repr(exc)


# ---------------------------------------------------------------- who is there


async def call_from_a_coroutine(to: str) -> int:
    """A worker that came later, called from the user loop."""
    result: int = await rpc.rpc_async(to, pid)
    return result


def call_unknown_from_a_coroutine(to: Any) -> str:
    async def run() -> str:
        try:
            await rpc.rpc_async(to, pid)
        except RpcdistError as exc:
            return type(exc).__name__
        return "no error"

    return asyncio.run(run())


def names_in_the_job() -> list[str]:
    return sorted(info.name for info in current_agent().get_worker_infos())


def names_that_live() -> list[str]:
    """As this worker knows; nobody is asked."""
    return sorted(info.name for info in rpc.workers())


def call_all_the_time(to: str, limit_s: float) -> int:
    limit = time.monotonic() + limit_s
    calls = 0
    while time.monotonic() < limit:
        rpc.rpc_sync(to, pid)
        calls += 1
    return calls


def error_saying(says: str, function: Any, *args: Any) -> str:
    """Calls it until it fails with that text; the type of the error. It may work before, or fail in other ways."""

    def name_of_error() -> str | None:
        try:
            function(*args)
        except RpcdistError as exc:
            return type(exc).__name__ if says in str(exc) else None
        return None

    return eventually(name_of_error, f"an error that says {says!r}", 20.0) or ""


def call_until_it_works(to: str, limit_s: float = 20.0) -> int:

    def answer() -> int | None:
        try:
            return rpc.rpc_sync(to, pid)
        except RpcdistError:
            return None

    return eventually(answer, f"a call to {to} that works", limit_s) or 0


# ---------------------------------------------------------------- the end


def left_behind() -> list[str]:
    """The resources of RPC that are left in this process after its shutdown."""
    try:
        eventually(lambda: not _threads_and_sockets(), "nothing is left", 20.0)
    except AssertionError:
        return _threads_and_sockets()
    return []


def _threads_and_sockets() -> list[str]:
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("rpcdist")]
    return [*threads, *_listening_sockets()]


def _listening_sockets() -> list[str]:
    found = []
    for connection in psutil.Process().net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN:
            found.append(str(connection.laddr))
    return found


def _sleep_and_touch(seconds: float, path: str) -> None:
    _never.wait(seconds)
    Path(path).touch()


def _pass_on(to: str, seconds: float, path: str) -> None:
    held.append(rpc.rpc_async(to, _sleep_and_touch, (seconds, path)))


def start_slow_chain(first: str, second: str, seconds: float, path: str) -> None:
    """A call that starts another one, which nobody waits for."""
    rpc.rpc_async(first, _pass_on, (second, seconds, path))


def start_coroutine_call(to: str, path: str) -> None:
    held.append(rpc.rpc_async(to, announce_and_wait_async, (path,)))


def end_of_started_call() -> tuple[str, str]:
    error = held[0].exception(10.0)
    return type(error).__name__, str(error)


# ---------------------------------------------------------------- connections


def connection_to(name: str) -> str:
    """Which session leads to a worker."""
    agent = current_agent()
    rpc.rpc_sync(name, pid)
    session = agent.router.peer(agent.directory.resolve(name)).session
    assert session is not None
    return session.id.hex()


def num_unproven() -> int:
    """How many peers are in the middle of a handshake."""
    return own_node().strangers.unproven


def limit_closing(seconds: float) -> None:
    agent: Any = current_agent()
    agent.close = functools.partial(agent.close, seconds)


def limit_handshakes(seconds: float, count: int = 512) -> None:
    from rpcdist.transport._server import admission

    vars(admission)["HANDSHAKE_LIMIT_S"] = seconds
    vars(admission)["MAX_UNPROVEN"] = count


def set_refused_grace(seconds: float) -> None:
    """How long a worker may refuse connections before it is lost."""
    vars(peer)["REFUSED_GRACE_S"] = seconds


def has_news_of_loans() -> bool:
    """Whether a lender of memory of GPUs has to hear something yet."""
    return bool(current_agent().gpus.borrowed.news)


def num_calls() -> int:
    """How many calls this worker has not answered."""
    return len(current_agent().dispatcher.calls)
