"""Calls to all owners of an optimizer's parameters at the same time; an error names the owners that failed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

import rpcdist.rpc as rpc
from rpcdist.autograd import BackwardError
from rpcdist.deadline import Deadline, current_deadline
from rpcdist.errors import OwnerLost, WorkerLost, text_of
from rpcdist.optim._local_optimizer import decode_outcome, encode_step
from rpcdist.rpc import Future, WorkerInfo
from rpcdist.rpc._agent import Agent
from rpcdist.rpc._autograd_hooks import outside_contexts
from rpcdist.rpc._calling.new_calls import Invocation
from rpcdist.rpc._current import current_agent
from rpcdist.rpc._executors.blocking import check_off_loop
from rpcdist.rpc._values.exceptions import add_note
from rpcdist.time_limits import THREAD_GRACE_S


class OwnerCall(NamedTuple):
    """A function to run at one owner."""

    owner: WorkerInfo
    function: Callable[..., Any]
    args: tuple[Any, ...]


def ask_owners(what: str, calls: Sequence[OwnerCall], instead: str = "asyncio.to_thread(...)") -> list[Any]:
    """Runs the calls at the same time, the one of this process on this thread, and waits for all of them.

    Args:
        instead: the asynchronous alternative that the text of `BlockingInLoop` names.

    Raises:
        OwnerLost: an owner died.
        BlockingInLoop: called on an event loop's thread.
        Exception: the error of the first owner that failed; its notes name that owner, the other failed owners, and
            those that succeeded.
    """
    check_off_loop(what, f"await {instead}")
    agent = current_agent()
    own = [call.owner.id == agent.worker_id for call in calls]
    with outside_contexts():
        waits = [None if is_own else _begin(agent, call) for call, is_own in zip(calls, own, strict=True)]
        results: list[Any] = [None] * len(calls)
        for index, call in enumerate(calls):  # the call of this process, while the others run theirs
            if own[index]:
                results[index] = _outcome_of(partial(call.function, *call.args))
        for index, wait in enumerate(waits):
            if wait is not None:
                results[index] = _outcome_of(wait)
    if (error := _error_in(what, calls, results)) is not None:
        raise error
    return results


def ask_steps(
    what: str,
    context_id: int,
    calls: Sequence[OwnerCall],
    timeout_s: float,
    instead: str,
    roots: Sequence[torch.Tensor] | None = None,
) -> list[bool] | None:
    """Runs the steps of local optimizers as messages of distributed autograd, after a backward pass if there are roots.

    Args:
        calls: the steps as calls, at most one for each owner; the arguments of each are the number of the local
            optimizer, the method, the context, the options that have changed, and whether it is a hogwild step.
        timeout_s: with torch's conventions, see `rpc_sync`.
        instead: the asynchronous alternative that the text of `BlockingInLoop` names.

    Returns:
        For each owner, whether it took part in the context; None if nothing was done, since only calls can carry the
        arguments.

    Raises:
        As `ask_owners` and `autograd.backward`.
    """
    check_off_loop(what, f"await {instead}")
    worker: Any = current_agent().autograd
    work: dict[int, bytes] = {}
    own = -1
    results: list[Any] = [None] * len(calls)
    me = worker.id
    for index, (owner, _, args) in enumerate(calls):
        to = owner.id
        if to == me:
            own = index
            continue
        number, _, _, options, hogwild = args
        if (encoded := encode_step(number, options, hogwild)) is None:
            return None
        work[to] = encoded

    def step_here() -> None:
        if own >= 0:
            results[own] = _outcome_of(partial(calls[own].function, *calls[own].args))

    deadline = Deadline.after(worker.agent.caller.timeout_of(timeout_s)).earlier(current_deadline.get())
    with outside_contexts():
        try:
            outcomes = worker.step(context_id, work, step_here, deadline, roots)
        except BackwardError:
            if roots is None:
                worker.contexts.find(context_id)  # a context that was released meanwhile has its own error
            raise
        for index, call in enumerate(calls):
            if index != own:
                results[index] = _outcome_of(partial(_stepped, call, outcomes[call.owner.id], deadline))
    if (error := _error_in(what, calls, results)) is not None:
        raise error
    return results


def _stepped(call: OwnerCall, outcome: bytes | Exception, deadline: Deadline) -> bool:
    """Whether an owner took part in the context; raises the error of its step."""
    if isinstance(outcome, Exception):
        raise outcome
    took_part, error = decode_outcome(outcome)
    if error:
        left_s = max(deadline.remaining_s(), THREAD_GRACE_S) if deadline.is_finite else 0.0
        rpc.rpc_sync(call.owner, call.function, (call.args[0], "raise_error", error), timeout=left_s)
    return took_part


def ask_owners_async(what: str, calls: Sequence[OwnerCall], then: Callable[[list[Any]], None]) -> Future[None]:
    """`ask_owners` as a future, which is done after `then` has got the results.

    Cancelling it cancels the calls that have not finished.
    """
    started = [_start(call) for call in calls]
    futures = [future for future in started if isinstance(future, Future)]
    combined: Future[None] = Future(on_cancel=lambda: [future.cancel() for future in futures])
    num_done = itertools.count(1)

    def one_done(_: Future[Any] | None) -> None:
        if next(num_done) < len(futures):
            return
        results = [_outcome_of(future.value) if isinstance(future, Future) else future for future in started]
        error = _error_in(what, calls, results)
        if error is None:
            try:
                then(results)
            except Exception as exc:
                error = exc
        combined._complete(None) if error is None else combined._fail(error)

    for future in futures:
        future.is_quiet = True  # its error is reported through the combined future
        future._when_done(one_done)
    if not futures:
        one_done(None)
    return combined


# The result of a call that failed is its error.


def _begin(agent: Agent, call: OwnerCall) -> Callable[[], Any]:
    """Makes a call; returns a function that waits for its outcome."""
    try:
        return agent.caller.begin(call.owner.id, Invocation(call.function, call.args))
    except Exception as exc:
        error = exc
        return lambda: error


def _start(call: OwnerCall) -> Future[Any] | Exception:
    try:
        return rpc.rpc_async(call.owner, call.function, args=call.args)
    except Exception as exc:
        return exc


def _outcome_of(wait: Callable[[], Any]) -> Any:
    try:
        return wait()
    except Exception as exc:
        return exc


def _error_in(what: str, calls: Sequence[OwnerCall], results: Sequence[Any]) -> Exception | None:
    failed: list[tuple[str, Exception]] = [
        (call.owner.name, result)
        for call, result in zip(calls, results, strict=True)
        if issubclass(type(result), Exception)  # a user's exception may break `isinstance`
    ]
    if not failed:
        return None
    owner, error = failed[0]
    if type(error) is WorkerLost:
        lost = OwnerLost(error.worker, what, error.last_seen_s, error.reason, error.was_sent)
        lost.__cause__ = error
        error = lost
    failing = {name for name, _ in failed}
    finished = [call.owner.name for call in calls if call.owner.name not in failing]
    add_note(error, f"{what} failed on worker {owner!r}; it succeeded on: {', '.join(finished) or 'no worker'}")
    for other, other_error in failed[1:]:
        add_note(error, f"it also failed on worker {other!r}: {type(other_error).__name__}: {text_of(other_error)}")
    return error
