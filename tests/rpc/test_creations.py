"""The outcome of the call of a `remote()`: its listeners, and the future for callers that ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from rpcdist._proto import rpc_pb2
from rpcdist.deadline import Deadline
from rpcdist.errors import Cancelled, DeadlineExceeded, RemoteError
from rpcdist.ids import UniqueId
from rpcdist.rpc._calling.call_table import PendingCall
from rpcdist.rpc._calling.creations import NOT_INCLUDED, Creation
from rpcdist.rpc._calling.new_calls import SyncReplySink
from rpcdist.rpc._marshal.arrived_value import Arrived, ArrivedFailure
from rpcdist.rpc._rref.messages import ReferenceShare
from rpcdist.rpc._rref.shell import RRefShell

SHARE = ReferenceShare(UniqueId(1, 2, 3), UniqueId(1, 4, 3))


class Told:
    """A listener, and a pool that runs what it is given when it is asked to."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.jobs: list[tuple[Callable[..., object], tuple[object, ...]]] = []
        self.creation = Creation(SHARE, cast(RRefShell, self), self.submit)

    def on_created(self, share: ReferenceShare) -> None:
        self.heard.append(share)

    def on_creation_failed(self, share: ReferenceShare, exc: BaseException) -> None:
        self.heard.append((share, exc))

    def submit(self, function: Callable[..., object], /, *arguments: object) -> None:
        self.jobs.append((function, arguments))

    def run(self) -> None:
        while self.jobs:
            function, arguments = self.jobs.pop()
            function(*arguments)


@pytest.fixture
def told() -> Told:
    return Told()


def test_a_creation_that_nobody_asks_about_needs_no_pool_and_no_future(told: Told) -> None:
    told.creation.replied(None, None, told.jobs)
    assert told.heard == [SHARE] and told.jobs == [] and told.creation._future is None


def test_the_future_that_was_asked_for_before_is_completed_in_the_pool(told: Told) -> None:
    future, seen = told.creation.future(), list[object]()
    future.add_done_callback(lambda done: seen.append(done.value()))
    told.creation.replied(None, None, told.jobs)
    assert told.heard == [SHARE] and not future.done()
    told.run()
    assert seen == [None] and told.creation.future() is future


def test_the_future_that_is_asked_for_afterwards_is_done(told: Told) -> None:
    told.creation.replied(None, None, told.jobs)
    assert told.creation.future().wait() is None and told.creation.future() is told.creation.future()


@pytest.mark.parametrize("asked_before", [False, True])
def test_a_failure_is_told_in_the_pool(told: Told, asked_before: bool) -> None:
    future = told.creation.future() if asked_before else None
    failure = ArrivedFailure(rpc_pb2.Failure(type_name="ValueError", text="bad", worker="w1"))
    told.creation.replied(failure, None, told.jobs)
    assert told.heard == []
    told.run()
    [(share, error)] = told.heard
    assert share == SHARE and isinstance(error, RemoteError)
    with pytest.raises(RemoteError, match="bad"):
        (future or told.creation.future()).wait()


def test_a_call_that_ends_otherwise_fails_in_the_pool(told: Told) -> None:
    error = ValueError("lost")
    told.creation.failed(error)
    assert told.heard == []
    told.run()
    assert told.heard == [(SHARE, error)]
    with pytest.raises(ValueError, match="lost"):
        told.creation.future().wait()


class Conversation:
    """A session whose queue still has the message of a call, or not."""

    def __init__(self, has_message: bool) -> None:
        self.has_message = has_message
        self.asked: list[int] = []

    def want_value(self, call: int) -> bool:
        self.asked.append(call)
        return self.has_message


class Calls:
    def cancel(self, call: PendingCall, exc: BaseException | None) -> bool:
        return True

    def name_of(self, worker_id: int) -> str:
        return "b"


def begun(told: Told, has_message: bool = True, timeout_s: float = 5.0) -> tuple[PendingCall, SyncReplySink]:
    """The call of a creation, and what would wait for its value."""
    calls: Any = Calls()
    call = PendingCall(calls, 7, 1, "f", Deadline.after(timeout_s), timeout_s, 0.0, told.creation)
    session: Any = Conversation(has_message)
    call.session = session
    told.creation.began(call)
    return call, SyncReplySink()


def outcome(value_sink: SyncReplySink, call: PendingCall) -> object:
    """The values that it got already; a wait ends at once."""
    call.deadline = Deadline(0.0)
    call.session = None
    creation: Any = call.reply_sink
    return value_sink.wait(call, forget=lambda: creation.forget(value_sink))


class Value(Arrived):
    def __init__(self) -> None:
        self.was_discarded = False

    def decode(self) -> object:
        return "value"

    def discard(self) -> None:
        self.was_discarded = True


def test_the_reply_brings_the_value_to_who_waits_for_it(told: Told) -> None:
    call, value_sink = begun(told)
    assert told.creation.want_value(value_sink, 5.0) is call
    told.creation.replied(None, Value(), told.jobs)
    assert outcome(value_sink, call) == "value" and told.heard == [SHARE] and not told.jobs


@pytest.mark.parametrize(("payload", "value"), [(Arrived(), None), (None, NOT_INCLUDED)])
def test_a_value_of_none_is_not_a_value_that_was_withheld(told: Told, payload: object, value: object) -> None:
    call, value_sink = begun(told)
    assert told.creation.want_value(value_sink, 5.0) is call
    told.creation.replied(None, payload, told.jobs)
    assert outcome(value_sink, call) is value and told.heard == [SHARE]


def test_a_failure_reaches_who_waits_for_the_value_and_the_reference(told: Told) -> None:
    call, value_sink = begun(told)
    assert told.creation.want_value(value_sink, 5.0) is call
    failure = ArrivedFailure(rpc_pb2.Failure(type_name="ValueError", text="bad", worker="w1"))
    told.creation.replied(failure, None, told.jobs)
    told.run()
    with pytest.raises(RemoteError, match="bad") as raised:
        outcome(value_sink, call)
    assert isinstance(told.heard[0][1], RemoteError)
    assert raised.value is not told.heard[0][1]  # two threads would write their frames into it


@pytest.mark.parametrize("error", [KeyboardInterrupt("in __setstate__"), SystemExit(3), ValueError("hostile")])
def test_a_failure_that_cannot_be_unpickled_ends_the_creation_all_the_same(told: Told, error: BaseException) -> None:
    class Broken(ArrivedFailure):
        def exception(self) -> Exception:
            raise error

    call, value_sink = begun(told)
    assert told.creation.want_value(value_sink, 5.0) is call
    told.creation.replied(Broken(rpc_pb2.Failure()), None, told.jobs)
    told.run()
    with pytest.raises(type(error)):
        outcome(value_sink, call)
    assert told.heard == [(SHARE, error)]


@pytest.mark.parametrize("how", ["failed", "cancelled"])
def test_who_waits_for_the_value_hears_of_every_end(told: Told, how: str) -> None:
    call, value_sink = begun(told)
    assert told.creation.want_value(value_sink, 5.0) is call
    if how == "failed":
        told.creation.failed(ValueError("lost"))
    else:
        assert told.creation.cancel()
    with pytest.raises(ValueError if how == "failed" else Cancelled, match=r"lost|was cancelled"):
        outcome(value_sink, call)
    told.run()
    assert len(told.heard) == 1


def test_who_gives_up_leaves_the_call_alone(told: Told) -> None:
    call, value_sink = begun(told)
    assert told.creation.want_value(value_sink, 5.0) is call
    with pytest.raises(DeadlineExceeded, match="rpc to 'b' of f"):
        outcome(value_sink, call)
    late = Value()
    told.creation.replied(None, late, told.jobs)
    assert late.was_discarded and told.heard == [SHARE]


def test_one_waits_for_the_value_that_comes_with_the_reply_and_others_fetch_it(told: Told) -> None:
    call, value_sink = begun(told)
    assert told.creation.want_value(value_sink, 5.0) is call
    assert told.creation.want_value(SyncReplySink(), 5.0) is None


@pytest.mark.parametrize("why", ["it has left", "it may take longer", "it has ended", "it is in a context"])
def test_the_value_is_fetched_where_the_call_cannot_bring_it(told: Told, why: str) -> None:
    call, value_sink = begun(told, has_message=why != "it has left")
    if why == "it has ended":
        told.creation.replied(None, None, told.jobs)
    elif why == "it is in a context":
        context: Any = object()
        call.autograd = context
    assert told.creation.want_value(value_sink, 1.0 if why == "it may take longer" else 5.0) is None
    assert not told.creation.forget(value_sink)
