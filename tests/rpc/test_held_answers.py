"""Answers that are written together, and that no job behind them holds up."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial

import actor_functions
import pytest
from inside_agents import ThreadPool
from peer_timeouts import CALM_S

from rpcdist.errors import TransportError
from rpcdist.ids import Identity
from rpcdist.rpc._executors import deferred_replies
from rpcdist.rpc._executors.blocking import blocking
from rpcdist.rpc._executors.deferred_replies import MAX_HELD, DeferredReply, HeldAnswers
from rpcdist.rpc._peers.network import Loopback
from rpcdist.testing import WorkerPool

LIMIT_S = 30.0


class Connection(Loopback):
    """Stands for a session: answers are queued by `queue` and written by `flush`.

    Attributes:
        writes: the answers of each write.
        written: set by each write.
    """

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(Identity("a", 0, 1), lambda session, messages: None)
        self.writes: list[list[int]] = []
        self.written = threading.Event()
        self._queued: list[int] = []
        self._error = error

    def queue(self, answer: int) -> None:
        self._queued.append(answer)

    def flush(self) -> None:
        if self._error is not None:
            raise self._error
        queued, self._queued = self._queued, []
        self.writes.append(queued)
        self.written.set()

    def read_while_waiting(
        self,
        is_waiting: Callable[[], bool],
        timeout_s: float | None,
        sleep: object = None,
        send_first: Callable[[], object] | None = None,
    ) -> bool:
        assert send_first is not None
        send_first()
        self.flush()
        return False

    @property
    def answers(self) -> list[int]:
        return [answer for write in self.writes for answer in write]


@pytest.fixture
def errors() -> list[BaseException]:
    return []


@pytest.fixture
def held(errors: list[BaseException], monkeypatch: pytest.MonkeyPatch) -> HeldAnswers:
    monkeypatch.setattr(deferred_replies, "ANSWER_HOLD_S", LIMIT_S)
    return HeldAnswers(lambda: None, lambda error, function: errors.append(error))


def test_answers_are_written_together_and_once(held: HeldAnswers) -> None:
    one, other = Connection(), Connection()
    for number in range(3):
        held.hold(one, partial(one.queue, number))
    held.hold(other, partial(other.queue, 9))
    assert one.writes == other.writes == [] and held
    held.write()
    held.write()
    assert one.writes == [[0, 1, 2]] and other.writes == [[9]] and not held


def test_when_enough_answers_wait_they_are_written(held: HeldAnswers) -> None:
    connection = Connection()
    for number in range(2 * MAX_HELD):
        held.hold(connection, partial(connection.queue, number))
    assert [len(write) for write in connection.writes] == [MAX_HELD, MAX_HELD]


def test_an_answer_that_waits_too_long_is_written_with_the_next_one(
    held: HeldAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred_replies, "ANSWER_HOLD_S", 0.0)
    connection = Connection()
    held.hold(connection, partial(connection.queue, 1))
    assert connection.writes == [[1]]


def test_an_error_of_one_connection_keeps_no_answer_of_another(held: HeldAnswers, errors: list[BaseException]) -> None:
    def unsendable() -> None:
        raise ValueError("it cannot be sent")

    broken, sound = Connection(TransportError("gone")), Connection()
    held.hold(sound, unsendable)
    held.hold(broken, partial(broken.queue, 1))
    held.hold(sound, partial(sound.queue, 2))
    held.write()
    assert sound.writes == [[2]]
    assert sorted(type(error).__name__ for error in errors) == ["TransportError", "ValueError"]


def test_any_number_of_answers_that_one_job_makes_ready_are_sent_though_one_fails() -> None:
    def unsendable() -> None:
        raise ValueError("it cannot be sent")

    connection, num_answers = Connection(), 2 * sys.getrecursionlimit()
    answers: list[Callable[[], object]] = [partial(connection.queue, number) for number in range(num_answers)]
    reply = DeferredReply([unsendable, *answers], connection)
    with pytest.raises(ValueError, match="cannot be sent"):
        reply.send()
    reply.send()
    connection.flush()
    assert connection.answers == list(range(num_answers))


# ---------------------------------------------------------------- in the pool


@pytest.fixture
def pool(errors: list[BaseException], monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadPool]:
    monkeypatch.setattr(deferred_replies, "ANSWER_HOLD_S", LIMIT_S)
    pool = ThreadPool(max_threads=1, on_error=lambda error, function: errors.append(error))
    yield pool
    assert pool.close(LIMIT_S) == []
    assert errors == []


def answering(connection: Connection, number: int, do: Callable[[], object] = lambda: None) -> Callable[[], object]:
    def job() -> DeferredReply:
        do()
        return DeferredReply([partial(connection.queue, number)], connection)

    return job


def test_a_burst_is_answered_in_order_by_few_writes(pool: ThreadPool) -> None:
    connection, last = Connection(), threading.Event()
    jobs = [(answering(connection, number), ()) for number in range(100)]
    pool.submit_many([*jobs, (last.set, ())])
    assert last.wait(LIMIT_S)
    pool.close(LIMIT_S)
    assert connection.answers == list(range(100))
    assert len(connection.writes) < 100  # the monitor's ticks, too, write what is held


def test_an_answer_does_not_wait_for_a_slow_call_behind_it(pool: ThreadPool) -> None:
    connection, came = Connection(), []

    def slow() -> None:  # the only thread of the pool is here until somebody else has written
        came.append(connection.written.wait(LIMIT_S))

    pool.submit_many([(answering(connection, 1), ()), (answering(connection, 2, slow), ())])
    assert pool.close(LIMIT_S) == []
    assert came == [True]
    assert connection.writes == [[1], [2]]


def test_a_call_that_is_about_to_wait_writes_what_is_held(pool: ThreadPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool._monitor, "adjust", lambda: False)
    connection, seen = Connection(), []

    def waits() -> None:
        with blocking():
            seen.extend(connection.writes)

    pool.submit_many([(answering(connection, 1), ()), (answering(connection, 2, waits), ())])
    assert pool.close(LIMIT_S) == []
    assert seen == [[1]]


def test_a_failing_job_behind_an_answer_does_not_lose_it(pool: ThreadPool, errors: list[BaseException]) -> None:
    connection = Connection()
    pool.submit_many([(answering(connection, 1), ()), (int, ("no number",))])
    assert connection.written.wait(LIMIT_S)
    assert pool.close(LIMIT_S) == []
    assert connection.writes == [[1]] and [type(error) for error in errors] == [ValueError]
    errors.clear()


@pytest.mark.multiproc
def test_an_answer_of_an_actor_does_not_wait_for_the_next_turn(worker_pool: WorkerPool) -> None:
    """Those of several may: the answers of a burst are left to the I/O thread, which needs the lock as well."""
    world = worker_pool.world("a", "b", peer_timeout=CALM_S)
    times = [world["a"].run(actor_functions.answers_before_the_next_turn, "b") for _ in range(4)]
    # A busy machine may let the caller look later; an answer that waits is never the first.
    assert any(answered_at < ended_at for answered_at, ended_at in times), times
    world.shutdown()
