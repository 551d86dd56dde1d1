"""Holds the tensors that arrive for a step until its actions need them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from rpcdist.deadline import Deadline
from rpcdist.errors import DeadlineExceeded
from rpcdist.parallel.pipeline._schedules import Action

__all__ = ["Mailbox"]


class Mailbox:
    """The tensors of one worker and one step. Any thread may put, one thread takes."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._arrived: dict[Action, Sequence[object]] = {}
        self._failure: BaseException | None = None

    def put(self, action: Action, values: Sequence[object]) -> None:
        """Stores the tensors that `action` needs."""
        with self._condition:
            self._arrived[action] = values
            self._condition.notify()

    def fail(self, failure: BaseException) -> None:
        """Ends the step: `take` and `check` raise the first `failure`."""
        with self._condition:
            if self._failure is None:
                self._failure = failure
            self._condition.notify()

    def check(self) -> None:
        """Raises if the step has ended."""
        if self._failure is not None:
            raise self._failure

    def take(self, action: Action, deadline: Deadline) -> Sequence[object]:
        """Removes and returns the tensors that `action` needs; waits for them.

        Raises:
            DeadlineExceeded: they did not come in time.
            BaseException: the failure that `fail` got.
        """
        with self._condition:
            self._condition.wait_for(lambda: action in self._arrived or self._failure is not None, deadline.wait_s())
            self.check()
            if action not in self._arrived:
                raise DeadlineExceeded("what it needs did not arrive in time")
            return self._arrived.pop(action)
