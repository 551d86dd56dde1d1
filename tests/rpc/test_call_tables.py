"""Control messages, calls in flight and leases, as tables."""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rpcdist._proto import rpc_pb2, rref_pb2
from rpcdist.deadline import Deadline
from rpcdist.errors import DeadlineExceeded, ProtocolViolation, RpcdistError, SerializationError, WorkerLost
from rpcdist.ids import Identity
from rpcdist.rpc._autograd_hooks import current_autograd
from rpcdist.rpc._calling.call_table import CallTable, PendingCall
from rpcdist.rpc._calling.in_flight import InFlightBytes
from rpcdist.rpc._calling.new_calls import CallFuture
from rpcdist.rpc._marshal.arrived_value import ArrivedCompact
from rpcdist.rpc._peers.connections import LeaseWatch
from rpcdist.rpc._peers.control import ControlOutbox, is_next
from rpcdist.rpc._peers.directory import PeerEvents
from rpcdist.rpc._values.codec import write_plain
from rpcdist.rpc._values.compact import compact_value
from rpcdist.time_limits import CALL_QUESTION_LEAD_S, LEASE_IN_PEER_TIMEOUTS
from rpcdist.transport._framing.incoming import MissingBuffer
from rpcdist.transport.wire_messages import ReplyMessage

# ---------------------------------------------------------------- control messages


class Inbox:
    """The receiver's side of one peer incarnation."""

    def __init__(self) -> None:
        self.applied: int | None = None

    def accept(self, number: int) -> bool:
        if not is_next(number, self.applied):
            return False
        self.applied = number
        return True


def test_control_messages_are_kept_until_acknowledged_and_applied_once() -> None:
    outbox, inbox = ControlOutbox(), Inbox()
    sent = [outbox.add(rref_pb2.RRefMessage()) for _ in range(5)]
    assert [message.control_seq for message in sent] == [1, 2, 3, 4, 5]
    assert [inbox.accept(number) for number in (1, 2, 1, 2, 3)] == [True, True, False, False, True]
    outbox.acknowledged(inbox.applied or 0)
    outbox.acknowledged(1)  # a late one
    assert [message.control_seq for message in outbox.to_resend()] == [4, 5] and len(outbox) == 2
    assert [inbox.accept(message.control_seq) for message in outbox.to_resend()] == [True, True]
    with pytest.raises(ProtocolViolation, match="7 arrived after 5"):
        inbox.accept(7)


def test_a_sender_that_was_forgotten_goes_on_with_its_numbers() -> None:
    """It was said to have left, and was only silent. It sends unacknowledged messages first."""
    outbox = ControlOutbox()
    for _ in range(5):
        outbox.add(rref_pb2.RRefMessage())
    outbox.acknowledged(3)
    inbox = Inbox()
    assert [inbox.accept(message.control_seq) for message in outbox.to_resend()] == [True, True]
    assert inbox.applied == 5


@given(st.lists(st.integers(0, 3), max_size=30))
def test_control_messages_survive_any_number_of_broken_connections(script: list[int]) -> None:
    """0: send one more; 1: deliver one; 2: acknowledge; 3: the connection breaks, and what was on its way is lost."""
    outbox, inbox = ControlOutbox(), Inbox()
    made, applied = 0, []
    wire: list[int] = []

    def deliver() -> None:
        number = wire.pop(0)
        if inbox.accept(number):
            applied.append(number)

    for step in [*script, 3]:
        if step == 0:
            made += 1
            wire.append(outbox.add(rref_pb2.RRefMessage()).control_seq)
        elif step == 1 and wire:
            deliver()
        elif step == 2:
            outbox.acknowledged(inbox.applied or 0)
        elif step == 3:
            wire[:] = [message.control_seq for message in outbox.to_resend()]
    while wire:
        deliver()
    assert applied == list(range(1, made + 1))


# ---------------------------------------------------------------- calls


class Outcome:
    """A reply_sink that remembers."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    def replied(self, failure: object, payload: object, jobs: list[Any]) -> None:
        raise AssertionError("nothing replies here")

    def failed(self, exc: BaseException) -> None:
        self.errors.append(exc)


class Loop:
    """An I/O loop whose timers are set and never fire by themselves."""

    def __init__(self) -> None:
        self.loop = self
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def call_soon(self, function: Callable[..., None], *args: Any) -> None:
        function(*args)

    def time(self) -> float:
        return time.monotonic()

    def call_at(self, when: float, function: Callable[[], None]) -> Any:
        self.timers.append((when, function))
        return SimpleNamespace(cancel=lambda: None, cancelled=lambda: False)

    def fire(self) -> None:
        self.timers[-1][1]()


def new_table(loop: Loop | None = None, give_back: Callable[..., None] = lambda forks: None) -> CallTable:
    io: Any = loop or Loop()
    return CallTable(io, InFlightBytes(1), lambda worker: "b", lambda *job: None, give_back, lambda *message: None)


def pending(table: CallTable, timeout_s: float, deadline: Deadline | None = None) -> PendingCall:
    now = time.monotonic()
    deadline = deadline or Deadline(now + timeout_s)
    made = PendingCall(table, table.next_id(), 1, "f", deadline, timeout_s, now, Outcome())
    table.add(made)
    return made


def errors_of(call: PendingCall) -> list[type]:
    assert isinstance(call.reply_sink, Outcome)
    return [type(error) for error in call.reply_sink.errors]


def test_a_call_is_taken_once() -> None:
    table = new_table()
    made = pending(table, 10)
    assert list(table) == [made] and len(table) == 1
    assert [table.take(made.id), table.take(made.id)] == [made, None]
    assert table.wait_empty(0)


def test_to_ask_how_many_calls_were_made_uses_up_no_number() -> None:
    table = new_table()
    assert [(table.num_made, table.next_id()) for _ in range(3)] == [(0, 1), (1, 2), (2, 3)]


def test_calls_expire_at_their_deadline_and_the_timer_follows_the_earliest() -> None:
    loop = Loop()
    table = new_table(loop)
    now = time.monotonic()
    late, past, never = (pending(table, at, Deadline(now + at)) for at in (50, -1, float("inf")))
    assert [at for at, _ in loop.timers] == pytest.approx([now + 50 - CALL_QUESTION_LEAD_S, past.ask_at], abs=1)
    loop.fire()
    assert (errors_of(past), errors_of(late)) == ([DeadlineExceeded], [])
    assert list(table) == [late, never] and loop.timers[2][0] == pytest.approx(late.ask_at, abs=1)
    table.take(late.id)
    del loop.timers[:-1]
    loop.fire()
    assert list(table) == [never] and len(loop.timers) == 1 and errors_of(never) == []


def test_the_callee_is_asked_once_when_a_deadline_is_near() -> None:
    loop, sent = Loop(), list[rpc_pb2.Message]()
    table = new_table(loop)
    session: Any = SimpleNamespace(send=sent.append, flush=lambda: None, closed_reason=None)
    now = time.monotonic()
    near = pending(table, 50, Deadline(now + CALL_QUESTION_LEAD_S / 2))
    near.on_sent(session, 0)
    loop.fire()
    assert [message.call_question.id for message in sent] == [near.id]
    assert loop.timers[-1][0] == pytest.approx(near.deadline.at, abs=0.1)
    loop.fire()
    assert len(sent) == 1
    short = pending(table, 10, Deadline(now + 10))
    assert short.ask_at == now + 10 - CALL_QUESTION_LEAD_S
    assert pending(table, 0.5, Deadline(now + 0.5)).ask_at == pytest.approx(now + 0.4)


CallState = rpc_pb2.CallState


@pytest.mark.parametrize(
    ("phase", "text"),
    [
        (CallState.QUEUED, "was waiting for a thread on 'b'"),
        (CallState.RUNNING, "had been running on 'b' for 7."),
        (CallState.WAITING, "On 'b' it was waiting for"),
        (CallState.STREAMING, "had been producing items on 'b' for 7."),
        (CallState.IN_LINE, "was waiting for its turn at an actor on 'b'"),
        (CallState.ENDED, "had ended on 'b', and its reply was on the way"),
        (99, "had ended on 'b'"),  # of a later version
    ],
)
def test_the_error_at_the_deadline_says_how_far_the_call_was(phase: Any, text: str) -> None:
    table = new_table()
    call = pending(table, 10)
    session: Any = SimpleNamespace(peer=Identity("b", 1, 2), last_received=time.monotonic(), closed_reason=None)
    assert "It was not sent" in str(call.deadline_error())
    call.session, call.was_asked = session, True
    assert "'b' did not report its progress; its last message arrived 0.0 s ago" in str(call.deadline_error())
    for sender, id in ((cast(Any, object()), call.id), (session, call.id + 1)):  # of somebody else, of no call
        table.on_state(sender, rpc_pb2.Message(call_state=CallState(id=id, phase=phase)), [])
    assert "did not report" in str(call.deadline_error())
    said = CallState(id=call.id, phase=phase, running_us=7_000_000)
    table.on_state(session, rpc_pb2.Message(call_state=said), [])
    assert text in str(call.deadline_error())
    call.transfer = 3
    session.transfer_progress = {3: (1 << 19, 3 << 20)}.get
    assert "Only 0.5 of 3.0 MiB of its arguments were sent." in str(call.deadline_error())


def arrived(value: object, autograd: Any = None, buffers: Any = ()) -> ArrivedCompact:
    writer = write_plain(value)
    assert writer is not None
    compact = compact_value(writer)
    assert compact is not None
    payload = ArrivedCompact(ReplyMessage(1, compact[0], len(writer.tensors)), buffers, Identity("b", 1, 7))
    payload.autograd = autograd
    return payload


def test_the_thread_that_reads_a_short_reply_with_tensors_completes_the_future() -> None:
    received: list[int] = []
    context = SimpleNamespace(received=lambda history, tensors, sender: received.append(sender))
    future, jobs = CallFuture(), list[Any]()
    future.replied(None, arrived(torch.ones(3), context), jobs)
    assert future.done()
    assert torch.equal(future.wait(), torch.ones(3))
    assert (jobs, received) == ([], [1])


def test_a_thread_in_a_mode_of_torch_leaves_the_tensors_of_other_calls_to_the_pool() -> None:
    future, jobs, payload = CallFuture(), list[Any](), arrived(torch.ones(3))
    with torch.device("meta"):
        future.replied(None, payload, jobs)
        assert not future.done()
    for function, arguments in jobs:
        function(*arguments)
    assert future.wait().device.type == "cpu"


def test_a_reply_whose_buffers_were_not_received_fails_with_the_reason() -> None:
    """The thread that reads it finds the error first, and then the pool, which must not find another."""
    buffers = [MissingBuffer(1 << 20, "this worker accepts 8 bytes from one peer at a time")]
    future, jobs = CallFuture(), list[Any]()
    future.replied(None, arrived(torch.zeros(1 << 18), buffers=buffers), jobs)
    for function, arguments in jobs:
        function(*arguments)
    with pytest.raises(SerializationError, match="accepts 8 bytes"):
        future.wait()


def test_callbacks_run_in_the_pool_and_in_the_context_of_the_call() -> None:
    context = SimpleNamespace(received=lambda history, tensors, sender: None)
    future, jobs, seen = CallFuture(), list[Any](), list[object]()
    future.add_done_callback(lambda _: seen.append(current_autograd.get()))
    future.replied(None, arrived(torch.ones(3), context), jobs)
    assert future.done()
    assert seen == []
    for function, arguments in jobs:
        contextvars.copy_context().run(function, *arguments)
    assert seen == [context]


def test_all_calls_fail_at_the_end_of_an_agent() -> None:
    table = new_table()
    calls = [pending(table, 10) for _ in range(4)]
    assert not table.wait_empty(0)
    table.fail_all(RpcdistError("over"))
    assert [errors_of(call) for call in calls] == [[RpcdistError]] * 4
    assert table.wait_empty(0) and table.num_work == 4


def test_a_call_that_met_a_closed_session_is_lost() -> None:
    table = new_table()
    made = pending(table, 10)
    peer = Identity("b", 1, 7)
    session: Any = SimpleNamespace(peer=peer, closed_reason=None, last_received=0.0)
    made.on_sent(session, 3)
    assert made.transfer == 3 and not made.ended
    session = SimpleNamespace(peer=peer, closed_reason="broken", last_received=0.0)
    made.on_sent(session, 0)
    assert made.ended and errors_of(made) == [WorkerLost]


UNKNOWN = "It is unknown whether the call ran."
NOT_SENT = "The call was not sent, so it did not run."


def test_the_error_of_a_lost_call_says_whether_it_may_have_run() -> None:
    """Calls that were never sent may be repeated; their error said that they may have run."""
    table = new_table()
    unsent, sent, repeated, shortage = (pending(table, 10) for _ in range(4))
    session: Any = SimpleNamespace(peer=Identity("b", 1, 7), closed_reason=None, last_received=0.0)
    unsent.on_not_sent(1.0, "it was killed")
    sent.on_sent(session, 0)
    for call in (repeated, shortage):
        call.repeat = cast(Any, "the message")
        call.on_sent(session, 0)
    table.on_broken(session, "it was killed")
    assert not repeated.ended  # it waits for a connection
    assert "not sent again after its connection broke: " in str(repeated.deadline_error())
    repeated.on_not_sent(1.0, "it did not answer")
    shortage.on_not_sent(1.0, "no descriptors", is_lost=False)
    errors = [call.reply_sink.errors[0] for call in (unsent, sent, repeated) if isinstance(call.reply_sink, Outcome)]
    assert [error.was_sent for error in errors if isinstance(error, WorkerLost)] == [False, True, True]
    assert [UNKNOWN in str(error) for error in errors] == [False, True, True]
    assert [NOT_SENT in str(error) for error in errors] == [True, False, False]
    assert isinstance(shortage.reply_sink, Outcome) and "was not sent again: no desc" in str(shortage.reply_sink.errors)
    no_call = str(WorkerLost("b", "a barrier", 1.0, "it was killed"))
    assert UNKNOWN not in no_call and NOT_SENT not in no_call


def test_the_error_of_a_deadline_says_how_long_it_was() -> None:
    table = new_table()
    assert str(pending(table, 0.25).deadline_error()) == (
        "RPC ran for more than set timeout (250 ms) and will now be marked with an error: rpc to 'b' of f. It was not "
        "sent: there was no connection, or its arguments were still being written to it."
    )
    inherited = pending(table, 60, Deadline.after(0.1)).deadline_error()
    assert isinstance(inherited, DeadlineExceeded)
    assert "60000 ms" not in str(inherited) and "(100 ms, the remaining time" in str(inherited)


# ---------------------------------------------------------------- leases


def test_leases_are_renewed_by_signs_of_life_and_end_once() -> None:
    events, ended = PeerEvents(), list[Identity]()
    events.lease_ended.listen(ended.append)
    leases = LeaseWatch(10.0 / LEASE_IN_PEER_TIMEOUTS, list, events)

    def ended_at(now: float) -> list[Identity]:
        ended.clear()
        leases.renew(now)
        return list(ended)

    a, b = Identity("a", 1, 5), Identity("b", 2, 6)
    leases.seen(a, 100.0)
    leases.seen(b, 95.0)
    leases.seen(b, 90.0)  # an older sign does not shorten a lease
    assert ended_at(105.0) == []
    assert ended_at(106.0) == [b] and ended_at(106.0) == []
    leases.seen(a, 104.0)
    assert ended_at(114.0) == []
    assert ended_at(114.5) == [a]
    leases.seen(a, 114.5)  # one that comes back
    assert ended_at(114.5) == []
