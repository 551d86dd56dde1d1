"""Lets code that is about to wait say so, wherever it runs: the pool then counts its thread as free to be replaced."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from rpcdist.rpc._executors.worker_thread import WorkerThread

Hook = Callable[[], object]


class JobSource(Protocol):
    """Where the jobs of a pool's thread come from, and where it can read itself while it has nothing to do."""

    def ring(self) -> None:
        """Has a thread that reads ask `is_waiting` again; any thread."""

    def lead(
        self, is_waiting: Callable[[], bool], timeout_s: float | None, sleep: tuple[Hook, Hook] | None, first: Hook
    ) -> bool:
        """Calls `first` in any case, and then reads until `is_waiting` says no, at most so long, unless another thread
        does; `sleep` is called before and after each sleep. Messages of `first` are written, and those held back.
        """

    def hold_back(self, send: Hook) -> None:
        """Calls `send`; its messages stay queued until the next `flush` or `lead`."""

    def flush(self) -> None:
        """Writes what is queued, or has it written; any thread, never blocks."""


class LastAct(NamedTuple):
    """The last act of a job, which it leaves to the pool's thread that ran it.

    Attributes:
        answers: what sends the job's answer, and others that were ready by it.
        source: where they go, and where the next job will probably come from.
        is_long: sending takes a while, in which the thread runs no code of users.
    """

    answers: list[Hook]
    source: JobSource
    is_long: bool = False

    def answer(self) -> None:
        """Sends all of them, also those after one that raises; called once, whatever happens."""
        problem: BaseException | None = None
        while self.answers:
            try:
                self.answers.pop(0)()
            except BaseException as error:
                problem = error
        if problem is not None:
            raise problem


class _ThreadHooks(threading.local):
    """The functions to call around a wait on this thread; None on threads that belong to no pool.

    `last_act` is set by a job, and taken when it has ended; `reads_jobs`, while a pool's thread reads its next job;
    `worker` is what the pool knows of its thread.
    """

    enter: Hook | None = None
    leave: Hook | None = None
    last_act: LastAct | None = None
    reads_jobs: bool = False
    worker: WorkerThread | None = None


hooks = _ThreadHooks()


def set_hooks(enter: Hook, leave: Hook) -> None:
    """Has `enter` and `leave` called around each `blocking` block of this thread, nested ones included."""
    hooks.enter, hooks.leave = enter, leave


def forget_hooks() -> None:
    """Undoes `set_hooks` for this thread."""
    hooks.enter = hooks.leave = hooks.worker = None


@contextlib.contextmanager
def blocking() -> Iterator[None]:
    """While it lasts, this thread does not count as running, so that another may take its place at once."""
    enter, leave = hooks.enter, hooks.leave
    if enter is None or leave is None:
        yield
        return
    enter()
    try:
        yield
    finally:
        leave()
