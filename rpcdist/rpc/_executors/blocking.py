"""Lets code that is about to wait say so, wherever it runs: the pool then counts its thread as free to be replaced."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rpcdist.rpc._executors.worker_thread import WorkerThread
from rpcdist.rpc._peers.network import MessageSink

Hook = Callable[[], object]


class DeferredReply(NamedTuple):
    """What a job returns that leaves its answer to the pool's thread that runs it.

    Attributes:
        answers: the functions that send the job's answer, and others that were ready by it.
        session: where they go, and where the next job will probably come from.
        is_long: sending takes a while, in which the thread runs no code of users.
    """

    answers: list[Hook]
    session: MessageSink
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


class _ThreadHooks(threading.local):
    """The functions to call around a wait on this thread; None on threads that belong to no pool.

    `reads_jobs` is set while a pool's thread reads its next job; `worker` is what the pool knows of its thread.
    """

    enter: Hook | None = None
    leave: Hook | None = None
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
