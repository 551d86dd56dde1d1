"""Signal handlers that raise (Ctrl-C) in the middle of sends and receives."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType

import pytest
import torch
from full_sets import FULL, FULL_ONLY
from point_pairs import LIMIT_S, engine_of, in_threads, irecv, isend, mesh, number, recv, send, slow_socket, state_of

from rpcdist.collectives._transports.p2p import messenger, progress_engine
from rpcdist.errors import CollectiveError, GroupAborted, RankLost
from rpcdist.testing import eventually


@pytest.fixture
def only_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group's own thread moves nothing: an interrupt that a test raises somewhere is raised in who calls."""
    monkeypatch.setattr(progress_engine, "BATCH_DELAY_S", LIMIT_S)


def test_an_interrupted_receive_leaves_the_others() -> None:
    """Ctrl-C in a thread that leads: its receive is withdrawn, and somebody else goes on."""
    with mesh(2) as made:
        a, b = made.members
        other = irecv(b, number(0), 0, 2)

        def interrupt() -> None:
            eventually(lambda: len(state_of(b).pending) == 2 and engine_of(b).sleeping)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            recv(b, number(0), 0, 1)
        thread.join(LIMIT_S)
        send(a, number(1), 1, 2)
        assert other.wait(LIMIT_S)
        eventually(lambda: not state_of(b).pending)
        send(a, number(1), 1, 1)
        recv(b, number(0), 0, 1)


class InterruptingLock:
    """A lock for whose `number`-th taking by this thread a signal handler raises."""

    def __init__(self, lock: threading.Lock, number: int) -> None:
        self._lock = lock
        self._thread = threading.current_thread()
        self._number = number

    def __enter__(self) -> None:
        if threading.current_thread() is self._thread:
            self._number -= 1
            if self._number == 0:
                raise KeyboardInterrupt
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("name", ["lock", "entrance"])
@pytest.mark.parametrize("number_of_time", range(1, 9))
def test_an_interrupt_while_the_leader_takes_a_lock(name: str, number_of_time: int) -> None:
    """It is raised as it is, releases nothing that another thread holds, and somebody goes on with the rest."""
    with mesh(2) as made:
        a, b = made.members
        got = number(-1)
        other = irecv(b, got, 0, 2)
        engine = engine_of(b)
        locks = engine.lock, engine.entrance
        setattr(engine, name, InterruptingLock(getattr(engine, name), number_of_time))

        def wake_again_and_again() -> None:
            for num_sent in range(10):  # each of them is a turn
                eventually(lambda: engine.sleeping and state_of(b).matcher.num_messages == num_sent)  # noqa: B023
                send(a, number(4), 1, 3)

        sender = threading.Thread(target=wake_again_and_again)
        sender.start()
        with pytest.raises(KeyboardInterrupt):
            recv(b, number(0), 0, 1)
        sender.join(LIMIT_S)
        send(a, number(5), 1, 2)
        assert other.wait(LIMIT_S) and got == 5
        eventually(lambda: not (state_of(b).pending or any(lock.locked() for lock in locks)))


@pytest.mark.usefixtures("only_callers")
def test_an_interrupted_read_is_named_to_every_thread() -> None:
    with mesh(2) as made:
        a, b = made.members
        send(a, number(1), 1)
        other = irecv(b, number(0), 0, 2)
        connection = state_of(b).incoming[0]

        def receive() -> bool:
            raise KeyboardInterrupt

        connection.receive = receive  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            recv(b, number(0), 0, 1)
        with pytest.raises(GroupAborted, match="group 'test' failed: KeyboardInterrupt interrupted"):
            other.wait(LIMIT_S)
        with pytest.raises(GroupAborted, match="interrupted"):
            recv(b, number(0), 0)


@pytest.mark.usefixtures("only_callers")
def test_an_interrupt_while_it_is_copied_fails_the_receive() -> None:
    """Ctrl-C in the last step: a thread that waits for the same work afterwards, or at the same time, is told."""
    with mesh(2) as made:
        a, b = made.members

        def finish() -> None:
            raise KeyboardInterrupt

        work = irecv(b, number(0), 0, finish=finish)
        send(a, number(8), 1)
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        with pytest.raises(CollectiveError, match=r"recv #\d+ from rank 0 .* interrupted by KeyboardInterrupt"):
            work.wait(LIMIT_S)
        got = number(0)
        send(a, number(9), 1)
        recv(b, got, 0)
        assert got == 9


def interrupted(function: Callable[[], object], number_of_event: int) -> bool:
    """Calls it; raises in it when so many functions of the messages were called, or returned from C, by this thread.

    Returns:
        Whether it was interrupted; False when it ended before.
    """
    left = number_of_event

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        if event in ("call", "c_return") and "p2p" in frame.f_code.co_filename:
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        function()
        return False
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)


CALLS = ["send", "isend", "send in parts", "recv", "early recv", "irecv"]
LARGE = ["send", "recv"]  # of these always: they go other ways than small ones


@pytest.mark.parametrize(
    ("what", "size"),
    [(what, 4) for what in CALLS]
    + [pytest.param(what, 100_000, marks=[] if what in LARGE else FULL_ONLY) for what in CALLS],
)
def test_an_interrupt_anywhere_mixes_no_messages(what: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each later receive gets one whole message, in the order of the sends, or an error."""
    monkeypatch.setattr(messenger, "CLOSE_LIMIT_S", 0.05)  # a thread that copies needs less

    def filled(value: int) -> torch.Tensor:
        return torch.full((size,), float(value))

    for number_of_event in range(1, 200, 1 if FULL or size == 4 else 3):
        with mesh(2) as made:
            a, b = made.members
            first, second = torch.zeros(size), torch.zeros(size)
            in_threads(partial(send, a, filled(1), 1), partial(recv, b, first, 0))
            if "send" in what:
                call = partial(isend if what == "isend" else send, a, filled(2), 1)
                if what == "send in parts":
                    slow_socket(made, 60, 7)
            else:
                isend(a, filled(2), 1)
                if what == "early recv":
                    isend(a, number(0), 1, 9)
                    recv(b, number(0), 0, 9)
                call = partial(irecv if what == "irecv" else recv, b, second, 0)
            was_interrupted = interrupted(call, number_of_event)
            before = second.clone()
            if not was_interrupted:
                return
            values = []
            try:
                for value in (3, 4):
                    isend(a, filled(value), 1)
                for _ in range(2):
                    third = torch.zeros(size)
                    recv(b, third, 0)
                    [got] = third.unique().tolist()
                    values.append(int(got))
            except (RankLost, GroupAborted):
                pass
            assert values in ([], [2], [3], [2, 3], [3, 4]), (number_of_event, values)
            assert "send" in what or torch.equal(before, second), "a receive that was interrupted is written to"
    pytest.fail("it has more steps than were tried")
