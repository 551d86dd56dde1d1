"""What a worker of a pipeline waits in: it reads where its tensors will arrive, and others may wake it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import nn

from rpcdist import rpc
from rpcdist.deadline import Deadline
from rpcdist.errors import DeadlineExceeded, RpcdistError
from rpcdist.parallel import Pipeline
from rpcdist.parallel.pipeline._mailbox import Mailbox, push, receivers
from rpcdist.parallel.pipeline._schedules import Action
from rpcdist.testing import InProcessCluster

LIMIT_S = 30.0
FORWARD = Action(1, "F", 0)


class Channel:
    """Stands for a session: a thread that leads reads by `on_read`, and then sleeps until it is rung.

    Attributes:
        asleep: set when a thread sleeps.
    """

    def __init__(self, on_read: Callable[[], object], may_lead: bool = True) -> None:
        self.asleep = threading.Event()
        self._on_read = on_read
        self._may_lead = may_lead
        self._bell = threading.Semaphore(0)

    def lead(self, is_waiting: Callable[[], bool], timeout_s: float | None) -> bool:
        self._on_read()
        while self._may_lead and is_waiting():
            self.asleep.set()
            if not self._bell.acquire(timeout=timeout_s):
                return False
        return self._may_lead

    def ring(self) -> None:
        self._bell.release()


def test_what_the_waiting_thread_reads_it_takes() -> None:
    def read() -> None:
        mailbox.put(FORWARD, ["tensor"])

    mailbox = Mailbox({(1, "F"): Channel(read)})
    assert mailbox.take(FORWARD, Deadline.after(LIMIT_S)) == ["tensor"]


@pytest.mark.parametrize("may_lead", [True, False])
def test_what_another_thread_puts_wakes_the_one_that_reads(may_lead: bool) -> None:
    channel = Channel(lambda: None, may_lead)
    mailbox = Mailbox({(1, "F"): channel})
    with ThreadPoolExecutor(1) as threads:
        taken = threads.submit(mailbox.take, FORWARD, Deadline.after(LIMIT_S))
        if may_lead:
            assert channel.asleep.wait(LIMIT_S)
        mailbox.put(FORWARD, ["tensor"])
        assert taken.result(LIMIT_S) == ["tensor"]


def test_a_failure_wakes_the_one_that_reads() -> None:
    channel = Channel(lambda: None)
    mailbox = Mailbox({(1, "F"): channel})
    with ThreadPoolExecutor(1) as threads:
        taken = threads.submit(mailbox.take, FORWARD, Deadline.after(LIMIT_S))
        assert channel.asleep.wait(LIMIT_S)
        mailbox.fail(RpcdistError("the step has ended"))
        with pytest.raises(RpcdistError, match="the step has ended"):
            taken.result(LIMIT_S)


def test_nothing_comes() -> None:
    mailbox = Mailbox({(1, "F"): Channel(lambda: None)})
    with pytest.raises(DeadlineExceeded):
        mailbox.take(FORWARD, Deadline.after(0.01))


@pytest.mark.parametrize(("stage", "kind"), [(0, "F"), (2, "B"), (1, "X")])
def test_tensors_for_an_action_that_a_worker_does_not_have_are_refused(no_agent: None, stage: int, kind: str) -> None:
    with InProcessCluster("ada", "bob") as cluster, cluster.use("ada"):
        pipe = Pipeline([nn.Identity(), nn.Identity()], ["ada", "bob"])
        ((key, _),) = receivers.get()
        with pytest.raises(RpcdistError, match=f"{stage}{kind}0 came to worker 'bob', which has no such action"):
            rpc.rpc_sync("bob", push, (key, 1, 1, stage, kind, 0, []))
        del pipe
