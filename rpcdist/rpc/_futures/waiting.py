"""Waiting for many futures: `wait_all`, `collect_all`, `wait_any`, `as_completed`.

`torch.futures.wait_all` and `collect_all` also accept our futures, but they wait in C++: Ctrl-C is ignored, an error
ends the wait only after all others are done, and callbacks of the future from `collect_all` would run on the thread
that reads a reply. So `replace_torch_functions` replaces the functions that they call, which also serves programs that
imported them by name before. Lists without a future of ours go to torch's own functions.

A thread that waits for several futures reads the connection that will bring the first pending one, and makes the
results that arrive for any of them (`FutureObserver`), so no other thread wakes up. `async for` can do neither: the
thread of an event loop sleeps in the loop's own selector.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from _thread import LockType, allocate_lock
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast

import torch.futures

from rpcdist.deadline import acquire
from rpcdist.errors import BlockingInLoop, DeadlineExceeded
from rpcdist.rpc._executors.blocking import blocking
from rpcdist.rpc._peers.network import AnySession
from rpcdist.rpc.future import Future, FutureObserver
from rpcdist.waiters import running_loop, wake_threadsafe

_INSTEAD: Final = {
    "wait_all()": "await asyncio.gather(*futures)",
    "wait_any()": "await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)",
    "as_completed()": "async for future in rpc.as_completed(futures)",
}

T = TypeVar("T")

_torch_c: Final = cast(Any, torch._C)
_torch_futures: Final = cast(Any, torch.futures)
_torch_collect_all: Final = _torch_c._collect_all
_torch_wait_all: Final = torch.futures.wait_all


class AnyDone(NamedTuple, Generic[T]):
    """The result of `wait_any`; both lists keep the order of the argument."""

    done: list[torch.futures.Future[T]]
    pending: list[torch.futures.Future[T]]


def collect_all(futures: Sequence[torch.futures.Future[T]]) -> Future[list[torch.futures.Future[T]]]:
    """A future of the list of these futures, done when all are done, or when the first of them fails.

    Cancelling it cancels the futures that can be cancelled.
    """
    members = _list_of(futures, "collect_all()")
    combined: Future[list[torch.futures.Future[T]]] = Future(on_cancel=partial(_cancel_all, members))
    missing = [None] * len(members)

    def one_done(member: torch.futures.Future[T]) -> None:
        error = _error_of(member)
        missing.pop()
        if error is not None:
            combined._fail(error)
        elif not missing:
            combined._complete(members)

    if not members:
        combined._complete(members)
    for member in members:
        if isinstance(member, Future):
            member.is_quiet = True  # its error is reported through the combined future
            member._when_done(one_done)
        else:
            member.add_done_callback(one_done)
    return combined


def wait_all(futures: Sequence[torch.futures.Future[T]], timeout: float | None = None) -> list[T]:
    """Waits for all, and returns their results in order; the first error ends the wait at once.

    Args:
        futures: ours or torch's own.
        timeout: the limit of the wait in seconds; the calls continue after it.

    Raises:
        DeadlineExceeded: the timeout passed.
        BlockingInLoop: called on an event loop's thread while a future is pending.
        BaseException: the error of the first future that failed.
    """
    return wait_all_from(futures, timeout)


def wait_all_from(
    futures: Sequence[torch.futures.Future[T]],
    timeout: float | None = None,
    session: AnySession | None = None,
    send: Callable[[], object] | None = None,
) -> list[T]:
    """`wait_all`, which calls `send` once, if possible while this thread reads the session."""
    members = _list_of(futures, "wait_all()")
    for member in members:
        if isinstance(member, Future):
            member.is_quiet = True  # the first error is raised here
    completions = Completions(list(dict.fromkeys(members)), timeout, "wait_all()")
    error: BaseException | None = None
    with contextlib.closing(completions), completions._taking():
        completions._send, completions._reading = send, session
        if (failed := completions._wait_for_all()) is not None:
            error = _error_of(failed)
        if completions._send is not None:  # one had failed already, so there was no wait
            completions._send()
    if error is None:
        return [member.wait() for member in members]
    try:
        raise error  # not inside: leaving a `contextmanager` sets attributes of the error, which its class may refuse
    finally:
        del error


def wait_any(futures: Iterable[torch.futures.Future[T]], timeout: float | None = None) -> AnyDone[T]:
    """Waits until at least one future is done, or for `timeout` seconds; returns the done and the pending ones.


    Raises:
        BlockingInLoop: called on an event loop's thread with all pending; there, use `asyncio.wait`.
    """
    members = list(futures)
    if members and not any(member.done() for member in members):
        completions = Completions(members, timeout, "wait_any()")
        with contextlib.closing(completions), completions._taking():
            completions._wait_for(1)
    return AnyDone([member for member in members if member.done()], [member for member in members if not member.done()])


def as_completed(futures: Iterable[torch.futures.Future[T]], timeout: float | None = None) -> Completions[T]:
    """The futures in the order in which they become done, for `for` and for `async for`.

    Args:
        futures: each is yielded once.
        timeout: limit in seconds from now; if some are still pending then, `DeadlineExceeded` is raised.

    The calls continue if the loop is left early or cancelled.
    """
    return Completions(list(dict.fromkeys(futures)), timeout, "as_completed()")


class Completions(FutureObserver, Generic[T]):
    """A sync and async iterator over futures in the order of their completion, for one consumer at a time."""

    def __init__(self, futures: Sequence[torch.futures.Future[T]], timeout: float | None, what: str) -> None:
        self._arrived: deque[torch.futures.Future[T]] = deque()
        self._taken: deque[Future[T]] = deque()  # taken by the waiting thread, which makes their results
        self._is_taking = False  # the waiting thread reads `_taken` after it has cleared this
        self._reading: AnySession | None = None  # the session that the thread may be reading
        self._send: Callable[[], object] | None = None  # called first in the next wait
        self._num_finished = 0  # the number of done futures at the beginning of `_observed`
        self._num_wanted = 1  # the number of arrived futures that wakes the sleeping thread
        self._failed: torch.futures.Future[T] | None = None  # the first one
        self._sleepers: list[Callable[[], object]] = []
        self._num_total = self._num_left = len(futures)
        self._timeout = timeout
        self._what = what
        self._ends_at = None if timeout is None else time.monotonic() + timeout
        self._observed: list[Future[T]] = [future for future in futures if isinstance(future, Future)]
        for future in futures:
            if isinstance(future, Future):
                future._observe(self)
            else:
                future.add_done_callback(self.note_done)

    def __len__(self) -> int:
        return self._num_left

    def __iter__(self) -> Completions[T]:
        return self

    def __next__(self) -> torch.futures.Future[T]:
        if self._num_left == 0:
            raise StopIteration
        with self._taking():
            return self._next()

    def __aiter__(self) -> Completions[T]:
        return self

    async def __anext__(self) -> torch.futures.Future[T]:
        if self._num_left == 0:
            raise StopAsyncIteration
        while not self._arrived:
            waiter: asyncio.Future[None] = running_loop().create_future()
            sleeper = partial(wake_threadsafe, waiter)
            self._sleepers.append(sleeper)
            try:
                if not self._arrived:
                    await asyncio.wait([waiter], timeout=self._left_s())
            finally:
                waiter.cancel()
                self._forget(sleeper)
            if not self._arrived and self._left_s() == 0:
                raise self._timed_out()
        return self._take()

    def close(self) -> None:
        """Stops observing; the futures themselves continue."""
        for future in self._observed:
            if not future._finished:
                future._forget(self)
        self._observed.clear()

    def note_done(self, future: torch.futures.Future[T]) -> None:
        if self._failed is None and _has_failed(future):
            self._failed = future
        self._arrived.append(future)
        if self._failed is not None or len(self._arrived) >= self._num_wanted:
            self._wake_one()

    def take_over(self, future: Future[T]) -> bool:
        self._taken.append(future)
        if not self._is_taking:
            try:
                self._taken.remove(future)
            except ValueError:
                return True  # the thread has taken it in between
            return False
        self._wake_one()
        return True

    def _wake_one(self) -> None:
        try:
            sleeper = self._sleepers.pop()
        except IndexError:
            return
        sleeper()

    @contextlib.contextmanager
    def _taking(self) -> Iterator[None]:
        """Inside, this thread makes the results that arrive; encloses waits, and no user code."""
        self._is_taking = True
        try:
            yield
        finally:
            self._is_taking = False
            self._make_taken()

    def _next(self) -> torch.futures.Future[T]:
        if not self._wait_for(1):
            raise self._timed_out()
        return self._take()

    def _wait_for_all(self) -> torch.futures.Future[T] | None:
        """Waits until all are done, or until one has failed, and returns that one."""
        self._num_wanted = self._num_left
        if not self._wait_for(self._num_left) and self._failed is None:
            raise self._timed_out()
        return self._failed

    def _wait_for(self, number: int) -> bool:
        """Waits until `number` futures have arrived; False on timeout, or if one failed and more than one is needed."""
        self._make_taken()
        while not self._has_ended(number):
            if asyncio._get_running_loop() is not None:
                raise BlockingInLoop(self._what, _INSTEAD[self._what])
            baton: LockType = allocate_lock()
            baton.acquire()
            sleeper = partial(self._give, baton)
            self._sleepers.append(sleeper)
            try:
                with blocking():
                    if not (self._has_ended(number) or self._taken or self._sleep(baton)):
                        break  # timeout
            finally:
                self._forget(sleeper)
            self._make_taken()
        self._make_taken()
        return len(self._arrived) >= number

    def _has_ended(self, number: int) -> bool:
        return len(self._arrived) >= number or (self._failed is not None and number > 1)

    def _make_taken(self) -> None:
        while self._taken:
            try:
                future = self._taken[0]
            except IndexError:
                return  # `take_over` has removed it in between
            future._settle()  # completes it, which calls `note_done`, unless another thread is doing so
            with contextlib.suppress(ValueError):
                self._taken.remove(future)  # only now, so that a caller that returns after Ctrl-C finds it

    def _sleep(self, baton: LockType) -> bool:
        """Waits until the baton is given; False on timeout."""
        send, self._send = self._send, None
        if send is not None:
            if self._reading is None:
                send()
            elif self._reading.read_while_waiting(baton.locked, self._left_s(), None, send):
                return True
        observed = self._observed
        while self._num_finished < len(observed) and observed[self._num_finished]._finished:
            self._num_finished += 1
        if self._is_taking and self._num_finished < len(observed):
            session = observed[self._num_finished]._session()
            self._reading = session  # before the baton is checked, so that a thread that gives it later interrupts
            if session is not None and session.read_while_waiting(baton.locked, self._left_s()):
                return True
        return acquire(baton, self._left_s())

    def _give(self, baton: LockType) -> None:
        baton.release()
        reading = self._reading
        if reading is not None:
            reading.interrupt()

    def _take(self) -> torch.futures.Future[T]:
        self._num_left -= 1
        future = self._arrived.popleft()
        if self._num_left == 0:
            self._observed.clear()
        return future

    def _forget(self, sleeper: Callable[[], object]) -> None:
        if sleeper in self._sleepers:
            try:
                self._sleepers.remove(sleeper)
            except ValueError:
                return  # the completing thread has removed it in between

    def _left_s(self) -> float | None:
        return None if self._ends_at is None else max(0.0, self._ends_at - time.monotonic())

    def _timed_out(self) -> DeadlineExceeded:
        pending = self._num_left - len(self._arrived)
        return DeadlineExceeded(
            f"{pending} of {self._num_total} futures were not done within the {self._timeout} s of {self._what}"
        )


def replace_torch_functions() -> Callable[[], None]:
    """Makes `torch.futures.wait_all` and `collect_all` use our functions for lists with a future of ours.


    Returns:
        A function that undoes it, once every agent of the process has undone it.
    """

    def undo() -> None:
        with _replacing:
            _users.discard(undo)
            if not _users:
                _torch_c._collect_all = _torch_collect_all
                _torch_futures.wait_all = _torch_wait_all

    with _replacing:
        _users.add(undo)
        _torch_c._collect_all = _collect_all_of_any_kind
        _torch_futures.wait_all = _wait_all_of_any_kind
    return undo


# The users of the replacements; global, like the replaced functions of torch.
_users: Final[set[Callable[[], None]]] = set()
_replacing: Final = allocate_lock()


def _collect_all_of_any_kind(futures: list[Any]) -> Any:
    return collect_all(futures) if _has_ours(futures) else _torch_collect_all(futures)


def _wait_all_of_any_kind(futures: list[Any]) -> list[Any]:
    return wait_all(futures) if _has_ours(futures) else _torch_wait_all(futures)


def _has_ours(futures: Sequence[object]) -> bool:
    return any(isinstance(future, Future) for future in futures)


def _list_of(futures: Sequence[torch.futures.Future[T]], what: str) -> list[torch.futures.Future[T]]:
    members = list(futures)
    for member in members:
        if not isinstance(member, torch._C.Future):
            raise TypeError(f"{what}: incompatible function arguments. {member!r} is not a future")
    return members


def _error_of(future: torch.futures.Future[T]) -> BaseException | None:
    if isinstance(future, Future):
        return future.exception()
    try:
        future.value()
    except BaseException as error:
        return error
    return None


def _has_failed(future: torch.futures.Future[T]) -> bool:
    return (future._error if isinstance(future, Future) else _error_of(future)) is not None


def _cancel_all(futures: Sequence[torch.futures.Future[T]]) -> None:
    for future in futures:
        if isinstance(future, Future):
            future.cancel()


collecting = threading.local()
"""torch's `rpc.api._thread_local_var`: it has a `future_list` while a thread collects futures."""


def note_started(future: Future[Any]) -> None:
    """Adds a future that this thread has started to its list, if it collects futures."""
    if "future_list" in collecting.__dict__:  # `hasattr` would take a microsecond
        collecting.future_list.append(future)
