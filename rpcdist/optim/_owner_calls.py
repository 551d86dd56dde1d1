"""Calls to all owners of an optimizer's parameters at the same time; an error names the owners that failed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import rpcdist.rpc as rpc
from rpcdist.errors import BlockingInLoop, OwnerLost, WorkerLost
from rpcdist.rpc import Future, WorkerInfo
from rpcdist.rpc._agent import Agent
from rpcdist.rpc._autograd_hooks import current_autograd
from rpcdist.rpc._current import current_agent
from rpcdist.rpc._values.exceptions import add_note, text_of

__all__ = ["OwnerCall", "ask_owners", "ask_owners_async"]


@dataclass(frozen=True, slots=True)
class OwnerCall:
    """A function to run at one owner."""

    owner: WorkerInfo
    function: Callable[..., Any]
    args: tuple[Any, ...]


def ask_owners(what: str, calls: Sequence[OwnerCall], instead: str = "asyncio.to_thread(...)") -> list[Any]:
    """Runs the calls at the same time, the one of this process on this thread, and waits for all of them.

    Args:
        what: the operation, for the texts of errors.
        calls: at most one for each owner.
        instead: the asynchronous alternative that the text of `BlockingInLoop` names.

    Raises:
        OwnerLost: an owner died.
        BlockingInLoop: called on an event loop's thread.
        Exception: the error of the first owner that failed; its notes name that owner, the other failed owners, and
            those that succeeded.
    """
    if asyncio._get_running_loop() is not None:
        raise BlockingInLoop(what, f"await {instead}")
    agent = current_agent()
    own = [call.owner.id == agent.worker_id for call in calls]
    outside = current_autograd.set(None)  # what the owners do is no part of the context that the caller is in
    try:
        waits = [None if is_own else _begin(agent, call) for call, is_own in zip(calls, own, strict=True)]
        results: list[Any] = [None] * len(calls)
        for index, call in enumerate(calls):  # this process's own part, while the others do theirs
            if own[index]:
                results[index] = _outcome_of(partial(call.function, *call.args))
        for index, wait in enumerate(waits):
            if wait is not None:
                results[index] = _outcome_of(wait)
    finally:
        current_autograd.reset(outside)
    error = _error_in(what, calls, results)
    if error is not None:
        raise error
    return results


def ask_owners_async(what: str, calls: Sequence[OwnerCall]) -> Future[list[Any]]:
    """`ask_owners` as a future. Cancelling it cancels the calls; an owner that has finished by then has finished."""
    started = [_start(call) for call in calls]
    futures = [future for future in started if isinstance(future, Future)]
    combined: Future[list[Any]] = Future(on_cancel=lambda: [future.cancel() for future in futures])
    left = len(futures)
    lock = threading.Lock()

    def one_done(_: Future[Any] | None) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left > 0:
                return
        results = [_outcome_of(future.value) if isinstance(future, Future) else future for future in started]
        error = _error_in(what, calls, results)
        combined._complete(results) if error is None else combined._fail(error)

    for future in futures:
        future.is_quiet = True  # its error is reported through the combined future
        future._when_done(one_done)
    if not futures:
        one_done(None)
    return combined


@dataclass(frozen=True, slots=True)
class _CallFailed:
    error: Exception


def _begin(agent: Agent, call: OwnerCall) -> Callable[[], Any]:
    """Makes a call; returns what waits for its outcome."""
    try:
        return agent.caller.begin(call.owner.id, call.function, call.args)
    except Exception as exc:
        return partial(_CallFailed, exc)


def _start(call: OwnerCall) -> Future[Any] | _CallFailed:
    try:
        return rpc.rpc_async(call.owner, call.function, args=call.args)
    except Exception as exc:
        return _CallFailed(exc)


def _outcome_of(wait: Callable[[], Any]) -> Any:
    try:
        return wait()
    except Exception as exc:
        return _CallFailed(exc)


def _error_in(what: str, calls: Sequence[OwnerCall], results: Sequence[Any]) -> Exception | None:
    if _CallFailed not in map(type, results):
        return None
    failed = [(call.owner.name, r.error) for call, r in zip(calls, results, strict=True) if isinstance(r, _CallFailed)]
    owner, error = failed[0]
    if type(error) is WorkerLost:  # a user's exception may break `isinstance`
        lost = OwnerLost(error.worker, what, error.last_seen_s, error.reason)
        lost.__cause__ = error
        error = lost
    finished = [call.owner.name for call, r in zip(calls, results, strict=True) if not isinstance(r, _CallFailed)]
    add_note(error, f"{what} failed on worker {owner!r}; it was done on: {', '.join(finished) or 'no worker'}")
    for other, other_error in failed[1:]:
        add_note(error, f"it failed on worker {other!r}, too: {type(other_error).__name__}: {text_of(other_error)}")
    return error
