"""Replies that jobs leave to the thread that runs them, and those that wait so that one write takes them all.

In a burst, a write for each answer costs more than the calls: its system call wakes the caller for one answer, and
gives the interpreter's lock away in the middle of the work. So a thread with more jobs before it leaves its answer in
the queue of the session, and writes when it runs out of jobs, when enough answers wait, or when the first one has
waited too long. The job that it runs next may take any time, though: the pool's monitor writes what it finds held at
each tick, and a job that is about to wait writes first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

from rpcdist.rpc._peers.network import AnySession
from rpcdist.time_limits import ANSWER_HOLD_S

MAX_HELD: Final = 16


class DeferredReply(NamedTuple):
    """The value by which a job leaves its answer to the thread of the pool that runs it.

    Attributes:
        answers: the functions that send the job's answer, and others that were ready by it.
        session: where they go, and where the next job will probably come from.
        is_long: sending takes a while, in which the thread runs no code of users.
    """

    answers: list[Callable[[], object]]
    session: AnySession
    is_long: bool = False

    def send(self) -> None:
        """Sends all of them, also those after one that raises; called once, whatever happens."""
        problem: BaseException | None = None
        while self.answers:
            try:
                self.answers.pop(0)()
            except BaseException as error:
                problem = error
        if problem is not None:
            raise problem


class HeldAnswers:
    """Those of one pool; any thread may call any of it.

    Args:
        on_held: called after each answer that was held back, when it can be found by `write`.
        on_error: told what went wrong while an answer was sent or written; `write` goes on.

    Invariant:
        A session in which an answer is queued is in the set, or on a thread that is about to flush it.
    """

    def __init__(
        self, on_held: Callable[[], object], on_error: Callable[[BaseException, Callable[..., object]], object]
    ) -> None:
        self._on_held = on_held
        self._on_error = on_error
        self._sinks: set[AnySession] = set()  # changed by single operations, which are atomic in CPython
        self._num_held = 0  # roughly: threads that count at once may miss one
        self._since = 0.0

    def __bool__(self) -> bool:
        return bool(self._sinks)

    def hold(self, sink: AnySession, answer: Callable[[], object]) -> None:
        """Sends an answer; it is written now, or with the next ones."""
        try:
            sink.hold_back(answer)
        except BaseException as error:
            self._on_error(error, answer)
        if not self._sinks:
            self._num_held, self._since = 0, time.monotonic()
        self._sinks.add(sink)  # after the answer was queued: a thread that finds the sink writes it
        self._num_held += 1
        if self._num_held >= MAX_HELD or time.monotonic() - self._since >= ANSWER_HOLD_S:
            self.write()
        else:
            self._on_held()

    def write(self) -> None:
        """Writes all that is held."""
        while self._sinks:
            try:
                sink = self._sinks.pop()
            except KeyError:  # another thread was faster
                return
            try:
                sink.flush()
            except BaseException as error:
                self._on_error(error, sink.flush)

    def after_fork_in_child(self) -> None:
        """The connections are the parent's."""
        self._sinks = set()
