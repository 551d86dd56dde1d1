"""The functions that call other workers, with torch's names and signatures; `call` and `call_async` are additions.

The overloads type what the caller gets: the result of a coroutine function or an `async_execution` function, and a
`Stream` for a generator function.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import iscoroutine
from typing import Any, Literal, ParamSpec, TypeVar, overload

import torch
from torch.autograd import profiler

from rpcdist.errors import ConfigError, RpcdistError
from rpcdist.profile_ranges import profile, profiles_itself, profiling_key
from rpcdist.rpc._actors.actor_names import MAX_NAME_CHARS
from rpcdist.rpc._api.restarting_actor import RestartingActor
from rpcdist.rpc._calling.caller import Destination
from rpcdist.rpc._calling.new_calls import Invocation, by_keyword, positional
from rpcdist.rpc._calling.result_streams import StartingStream, Stream, check_is_stream
from rpcdist.rpc._current import current_agent
from rpcdist.rpc._executors.blocking import async_form, check_off_loop, off_loop
from rpcdist.rpc._futures.waiting import note_started
from rpcdist.rpc._peers.device_maps import check_own_devices
from rpcdist.rpc._serving.producers import is_generator
from rpcdist.rpc.constants import UNSET_RPC_TIMEOUT
from rpcdist.rpc.functions import IDEMPOTENT_MARK, async_execution, is_async_execution
from rpcdist.rpc.future import Future
from rpcdist.rpc.options import DeviceMap, DeviceType, RpcOptions, to_device_map
from rpcdist.rpc.rref import Items, Later, RRef
from rpcdist.time_limits import RREF_DELETION_LIMIT_S

logger = logging.getLogger(__name__)


@off_loop("await rpc.get_actor_async(...)")
def get_actor(name: str, timeout: float = UNSET_RPC_TIMEOUT) -> RRef[Any]:
    """Returns a reference to the actor that `rpc.remote(..., name=...)` created under this name, on any worker.

    Args:
        name: the name of the actor.
        timeout: limit in seconds; 0 for none; by default the `rpc_timeout` of `init_rpc`.

    Raises:
        UnknownActor: no actor has this name, perhaps because its worker, with which the name ends, has ended.
        BlockingInLoop: called on an event loop.
    """
    found: RRef[Any] = current_agent().actor_names.find(name, timeout)
    return found


get_actor_async = async_form(get_actor)
"""`get_actor` as a coroutine function."""


@off_loop("await rpc.remote_async(..., name=...)", "rpc.remote(..., name=...)")
def named_remote(to: Destination, what: Invocation, is_serial: bool, name: str) -> RRef[Any]:
    """`rpc.remote` with a name: waits until the actor exists, and raises the error of its creation."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise ConfigError(
            f"the name of an actor must be a string of 1 to {MAX_NAME_CHARS} characters, not {name!r:.100}"
        )
    agent = current_agent()
    owner, names, timeout = agent.directory.resolve(to), agent.actor_names, what.timeout_s
    names.reserve(name, owner, timeout)
    try:
        rref: RRef[Any] = agent.rref_calls.remote(owner, what, is_serial)
        agent.caller.sync(owner, Invocation(keep_actor, (name, rref), None, timeout))
        names.confirm(name, timeout)
    except BaseException:
        try:
            names.release(name, RREF_DELETION_LIMIT_S)
        except RpcdistError as exc:  # the first error matters more
            logger.warning("the actor name %r stays reserved although the actor was not created: %s", name, exc)
        raise
    return rref


async def keep_actor(name: str, rref: RRef[Any]) -> None:
    await current_agent().actor_names.keep(name, rref)


P = ParamSpec("P")
T = TypeVar("T")


@overload
def rpc_sync(
    to: Destination,
    func: Callable[..., Later[T]],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    device_map: Mapping[DeviceType, DeviceType] | None = None,
) -> T: ...
@overload
def rpc_sync(
    to: Destination,
    func: Callable[..., Items[T]],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    device_map: Mapping[DeviceType, DeviceType] | None = None,
) -> Stream[T]: ...
@overload
def rpc_sync(
    to: Destination,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    device_map: Mapping[DeviceType, DeviceType] | None = None,
) -> T: ...
def rpc_sync(
    to: Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    device_map: Mapping[DeviceType, DeviceType] | None = None,
) -> Any:
    """Runs a function on another worker and waits for its result.

    Args:
        to: a worker's name, rank or `WorkerInfo`; may be this worker.
        func: a function that the callee can import by the same name, or a bound method or other picklable callable. A
            coroutine function runs on the callee's event loop; the result of a generator function is a `Stream`.
        args: positional arguments. Tensors are not copied before they are sent.
        kwargs: keyword arguments.
        timeout: limit for the whole call, in seconds; 0 for none; by default the `rpc_timeout` of `init_rpc`.
        device_map: maps this worker's devices to the callee's for the tensors of this call, instead of the map of
            `RpcOptions.set_device_map`. Results use the inverse map. docs/gpus.md has examples.

    Returns:
        The function's result.

    Raises:
        DeadlineExceeded: no result before the deadline, which the callee also sees.
        WorkerLost: the callee died or its connection broke. A call of a function marked with `rpc.idempotent` is
            retried until the deadline instead.
        UnknownWorker: no worker has this name or rank.
        Exception: the function's own exception, with the remote traceback as `__cause__`.
    """
    what = Invocation(func, args, kwargs, timeout, None, None if device_map is None else _own_map(to, device_map))
    if profile.running and profile.here() is not None and asyncio._get_running_loop() is None:
        with _profiled("sync", to, what) as start:
            return start().wait()
    if getattr(func, IDEMPOTENT_MARK, None) is True:
        check_off_loop("rpc_sync", "await rpc.rpc_async(...)")
        return current_agent().retries.start_call(to, what).wait()
    return current_agent().caller.sync(to, what)


@overload
def rpc_async(
    to: Destination,
    func: Callable[..., Later[T]],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    device_map: Mapping[DeviceType, DeviceType] | None = None,
) -> Future[T]: ...
@overload
def rpc_async(
    to: Destination,
    func: Callable[..., Items[T]],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    device_map: Mapping[DeviceType, DeviceType] | None = None,
) -> Future[Stream[T]]: ...
@overload
def rpc_async(
    to: Destination,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    device_map: Mapping[DeviceType, DeviceType] | None = None,
) -> Future[T]: ...
def rpc_async(
    to: Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    device_map: Mapping[DeviceType, DeviceType] | None = None,
) -> Future[Any]:
    """Starts a call and returns its future: wait for it, await it, or cancel it.

    The arguments are those of `rpc_sync`. Do not modify their tensors before the future is done. Errors in the
    arguments (`UnknownWorker`, a value that cannot be pickled) are raised at once, all others through the future. On an
    event loop, a call to a worker that is unknown here is made when the coordinator has answered, and has all errors in
    its future.
    """
    what = Invocation(func, args, kwargs, timeout, None, None if device_map is None else _own_map(to, device_map))
    if profile.running and profile.here() is not None:
        with _profiled("async", to, what) as start:
            future: Future[Any] = start()
    else:
        agent = current_agent()
        is_retried = getattr(func, IDEMPOTENT_MARK, None) is True or agent.retries.asks_first(to)
        future = (agent.retries if is_retried else agent.caller).start_call(to, what)
    note_started(future)
    return future


@overload
def call(to: Destination, func: Callable[P, Later[T]], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
@overload
def call(to: Destination, func: Callable[P, Items[T]], /, *args: P.args, **kwargs: P.kwargs) -> Stream[T]: ...
@overload
def call(to: Destination, func: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
def call(to: Destination, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """`rpc_sync` with the arguments written as in a local call, so that type checkers can check them.

        rpc.call("worker1", resize, image, width=64)

    The `rpc_timeout` of `init_rpc` limits the call. Results and errors are those of `rpc_sync`.
    """
    return rpc_sync(to, func, args, kwargs)


@overload
def call_async(to: Destination, func: Callable[P, Later[T]], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...
@overload
def call_async(
    to: Destination, func: Callable[P, Items[T]], /, *args: P.args, **kwargs: P.kwargs
) -> Future[Stream[T]]: ...
@overload
def call_async(to: Destination, func: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...
def call_async(to: Destination, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
    """`rpc_async` with the arguments written as in a local call; see `call`.

    width = await rpc.call_async("worker1", width_of, image)
    """
    return rpc_async(to, func, args, kwargs)


def rpc_stream(
    to: Destination,
    func: Callable[..., Iterable[T] | AsyncIterable[T]],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    device_map: Mapping[DeviceType, DeviceType] | None = None,
) -> Stream[T]:
    """Runs a generator function (or async generator function) on another worker and returns a stream of its items.

    The arguments are those of `rpc_sync`; `timeout` limits the start, and then the wait for each item. In a thread,
    `rpc_stream` waits for the callee's answer. On an event loop it returns at once, and the first item waits for it:

        async for item in rpc.rpc_stream("worker1", count, args=(3,)):
            ...

    Raises:
        TypeError: not a generator function; on an event loop, the first item raises this.
    """
    agent = current_agent()
    what = Invocation(func, args, kwargs, timeout, None, None if device_map is None else _own_map(to, device_map))
    if asyncio._get_running_loop() is not None:
        calls = agent.retries if agent.retries.asks_first(to) else agent.caller
        return StartingStream(calls.start_call(to, what), func)
    return check_is_stream(agent.caller.sync(to, what), func)


@overload
def remote(
    to: Destination,
    func: Callable[..., Later[T]],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    serial: bool = False,
    name: str | None = None,
    device_map: Mapping[DeviceType, DeviceType] | None = None,
) -> RRef[T]: ...
@overload
def remote(
    to: Destination,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    serial: bool = False,
    name: str | None = None,
    device_map: Mapping[DeviceType, DeviceType] | None = None,
) -> RRef[T]: ...
@overload
def remote(
    to: Destination,
    func: type[T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    serial: Literal[True],
    max_restarts: int,
    checkpoint_every: int = 1,
    device_map: Mapping[DeviceType, DeviceType] | None = None,
) -> RestartingActor[T]: ...
def remote(
    to: Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    serial: bool = False,
    name: str | None = None,
    max_restarts: int | None = None,
    checkpoint_every: int = 1,
    device_map: Mapping[DeviceType, DeviceType] | None = None,
) -> RRef[Any] | RestartingActor[Any]:
    """Runs a function on another worker, leaves its result there, and immediately returns a reference to it.

        counter = rpc.remote("worker1", Counter, serial=True)
        counter.rpc_sync().add(1)

    Without `serial`, method calls on the object run like other calls: concurrently, on several threads, and in any
    order. Then the object needs its own locks.

    The other arguments are those of `rpc_sync`; `timeout` limits the creation. Errors of the function or of the
    creation are raised when the reference is used.

    Args:
        serial: makes the object an actor: calls through this reference, and through all made from it, run one at a
            time, in the order in which each process made them; see `docs/actors.md`.
        name: a name by which every worker can find the actor (`rpc.get_actor`). The actor then lives as long as its
            worker, and `remote` waits until the actor exists; it raises the error of the creation, or `ActorNameTaken`.
        max_restarts: how often an actor is recreated (-1: no limit) if its worker is lost and another process replaces
            it. The new actor's `restore(state)` gets the last result of `checkpoint()`. Returns a `RestartingActor`,
            which keeps the state.
        checkpoint_every: the number of calls between checkpoints. Changes after the last one are lost with the worker.
        device_map: as for `rpc_sync`, for the arguments. Fetching the value uses its owner's map.
    """
    if max_restarts is not None:
        if not serial or name is not None:
            raise ConfigError("max_restarts= is for actors without a name: pass serial=True, and omit name=")
        if device_map is not None:
            raise ConfigError("max_restarts= and device_map= exclude each other: use RpcOptions.set_device_map")
        kind: Any = func
        return RestartingActor(to, kind, tuple(args or ()), dict(kwargs or {}), timeout, max_restarts, checkpoint_every)
    what = Invocation(func, args, kwargs, timeout, None, None if device_map is None else _own_map(to, device_map))
    if name is not None:
        return named_remote(to, what, serial, name)
    if profile.running and profile.here() is not None and not serial:
        with _profiled("remote", to, what) as start:
            profiled: RRef[Any] = start()
            return profiled
    rref: RRef[Any] = current_agent().rref_calls.remote(to, what, serial)
    return rref


# ---------------------------------------------------------------- under torch's older profiler


@contextmanager
def _profiled(mode: str, to: Destination, what: Invocation) -> Iterator[Callable[[], Any]]:
    """Opens a range of `profile` on this thread; yields a function that starts the call and has the callee profile it.

    It calls `run_profiled` at the callee, or, if this worker itself would refuse that, the user's function. Coroutines
    and generators run on other threads, so the profile has no events of theirs.
    """
    found, agent = profile.here(), current_agent()
    assert found is not None
    me, callee = agent.directory.me, agent.directory.resolve(to)
    func, timeout = what.func, what.timeout_s
    name = getattr(func, "__qualname__", type(func).__qualname__)
    key = profiling_key(mode, name, me.name, agent.directory.name_of(callee))
    calls = agent.retries if getattr(func, IDEMPOTENT_MARK, None) is True else agent.caller

    def start() -> Any:
        if not callable(func) or not _is_allowed(agent.options):
            if mode == "remote":
                return agent.rref_calls.remote(callee, what)
            future = calls.start_call(callee, what)
            future._when_done(partial(ended, None))
            return future
        packed = found.options(), func, positional(what.args), dict(by_keyword(what.kwargs))
        profiled = what._replace(func=run_profiled, args=packed, kwargs=None)
        if mode == "remote":
            pair = agent.rref_calls.remote(callee, profiled)
            try:
                rref = agent.rref_calls.remote(callee, Invocation(part_of, (pair, 0), None, timeout))
                events = agent.caller.start_call(callee, Invocation(part_of, (pair, 1), None, timeout))
            except Exception:
                created = pair._get_future()
                if not created.done() or created.exception() is None:
                    raise
                ended(None, created)
                pair._profiled = created
                return pair  # the function has already failed; uses of the reference raise its error
            events._when_done(partial(ended, lambda rows: rows))
            rref._profiled = _part(events, lambda rows: None)
            events.is_quiet = rref._profiled.is_quiet = True  # uses of the reference raise the error
            return rref
        future = calls.start_call(callee, profiled)
        future._when_done(partial(ended, lambda pair: _item(pair, 1)))
        return _part(future, lambda pair: _item(pair, 0))

    with profiler.record_function(key):
        ended = found.add(key, me.id)
        yield start


def _is_allowed(options: RpcOptions) -> bool:
    """Whether peers may call `run_profiled` here, and so most likely this worker at peers."""
    functions = (run_profiled, part_of)
    return options.allow_pickle and all(options.allows(each.__module__, each.__qualname__) for each in functions)


def _part(future: Any, part: Callable[[Any], Any]) -> Future[Any]:
    """Returns a future of a part of a future's result, with the same error, unlike `then`, which wraps it."""
    child: Future[Any] = Future(on_cancel=getattr(future, "cancel", None))

    def ended(done: Any) -> None:
        if child.done():  # cancelled
            return
        try:
            result = part(done.wait())
            if (arrived := getattr(done, "_arrived", None)) is not None:
                child._arrived = arrived.followed_by(result)
        except BaseException as exc:
            child._fail(exc)
        else:
            child._complete(result)

    getattr(future, "_when_done", future.add_done_callback)(ended)
    return child


def _item(result: Any, index: int) -> Any:
    """Returns the value (0) or the events (1) of a `run_profiled` result; a generator has no events."""
    if type(result) is tuple:
        return result[index]
    return [] if index else result


@async_execution
def run_profiled(options: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """At the callee: runs a function under a profiler on this thread; returns its result and the events."""
    with profile(**options) as ran:  # type: ignore[no-untyped-call]
        result = func(*args, **kwargs)
    ran.note()
    me = current_agent().directory.me.id

    def with_events(value: Any) -> Any:
        return value if is_generator(value) else (value, ran.rows(me))

    async def awaited() -> Any:
        return with_events(await result)

    if iscoroutine(result):
        return awaited()
    if is_async_execution(func):  # if it returns no future, it fails like without a profile
        return _part(result, with_events) if isinstance(result, torch._C.Future) else result
    done: Future[Any] = Future()
    done.set_result(with_events(result))
    return done


profiles_itself.append(run_profiled)


async def part_of(pair: RRef[Any], index: int) -> Any:
    """At the owner: returns the value or the events that `run_profiled` made for a `remote`."""
    return _item(await pair, index)


def _own_map(to: Destination, device_map: Mapping[DeviceType, DeviceType]) -> DeviceMap:
    """Checks the device map of one call, like `init_rpc` checks those in the options."""
    if not isinstance(device_map, Mapping):
        raise TypeError(
            "device_map must be a dictionary from this worker's devices to the callee's, such as "
            f"{{'cuda:0': 'cuda:1'}}, not a {type(device_map).__name__}"
        )
    own_map, directory = to_device_map(device_map), current_agent().directory
    check_own_devices(directory.me.name, directory.name_of(directory.resolve(to)), own_map)
    return own_map


_remote_off_loop = async_form(remote)


@overload
def remote_async(
    to: Destination,
    func: Callable[..., Later[T]],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    serial: bool = False,
    name: str | None = None,
    device_map: Mapping[DeviceType, DeviceType] | None = None,
) -> Coroutine[Any, Any, RRef[T]]: ...
@overload
def remote_async(
    to: Destination,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    serial: bool = False,
    name: str | None = None,
    device_map: Mapping[DeviceType, DeviceType] | None = None,
) -> Coroutine[Any, Any, RRef[T]]: ...
def remote_async(
    to: Destination,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    serial: bool = False,
    name: str | None = None,
    device_map: Mapping[DeviceType, DeviceType] | None = None,
) -> Coroutine[Any, Any, RRef[Any]]:
    """`remote` for coroutines. Only waits if there is a name; cancelling the task then does not stop the creation.

    counter = await rpc.remote_async("worker1", Counter, serial=True, name="counter")
    """
    made: Coroutine[Any, Any, RRef[Any]] = _remote_off_loop(
        to, func, args, kwargs, timeout, serial=serial, name=name, device_map=device_map
    )
    return made
