"""Replies that the pool thread sends after its job, and answers held back so that one write sends many.

In a burst, one write per answer costs more than the calls: its system call wakes the caller for a single answer, and
releases the GIL in the middle of the work. So if more jobs wait, a thread only queues its answer in the session. It
writes when it runs out of jobs, when enough answers are held, or when the first one has waited too long. Since the next
job may run for any time, the pool's monitor also writes held answers at each tick, and a job writes them before it
waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from rpcdist.rpc._peers.network import AnySession
from rpcdist.time_limits import ANSWER_HOLD_S

MAX_HELD: Final = 16


class DeferredReply(NamedTuple):
    """Returned by a job to have its pool thread send its answer.

    Attributes:
        answers: functions that send the job's answer, and others that became ready with it.
        session: where the answers go, and where the next job will probably come from.
        is_long: sending takes a while, and runs no user code.
    """

    answers: list[Callable[[], object]]
    session: AnySession
    is_long: bool = False

    def send(self) -> None:
        """Sends all answers, even if one raises; called exactly once."""
        problem: BaseException | None = None
        while self.answers:
            try:
                self.answers.pop(0)()
            except BaseException as error:
                problem = error
        if problem is not None:
            raise problem


@dataclass(eq=False, repr=False)
class HeldAnswers:
    """The held-back answers of one pool; thread-safe.

    Args:
        on_held: called after an answer was held back, once `write` can find it.
        on_error: called with an error in sending or writing an answer; `write` continues.

    Invariant:
        A session with a queued answer is in the set, or a thread is about to flush it.
    """

    _on_held: Callable[[], object]
    _on_error: Callable[[BaseException, Callable[..., object]], object]
    _sinks: set[AnySession] = field(default_factory=set)  # changed by single operations, which are atomic in CPython
    _num_held: int = 0  # approximate: concurrent increments may lose one
    _since: float = 0.0

    def __bool__(self) -> bool:
        return bool(self._sinks)

    def hold(self, sink: AnySession, answer: Callable[[], object]) -> None:
        """Queues an answer, and writes it now or with the next ones."""
        try:
            sink.hold_back(answer)
        except BaseException as error:
            self._on_error(error, answer)
        if not self._sinks:
            self._num_held, self._since = 0, time.monotonic()
        self._sinks.add(sink)  # after queueing: a thread that finds the sink flushes it
        self._num_held += 1
        if self._num_held >= MAX_HELD or time.monotonic() - self._since >= ANSWER_HOLD_S:
            self.write()
        else:
            self._on_held()

    def write(self) -> None:
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
        """Forgets the sessions: they belong to the parent."""
        self._sinks = set()
