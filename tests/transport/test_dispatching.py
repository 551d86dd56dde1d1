"""Messages dispatched by the thread that read them: their order, and what follows one that the handler chokes on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from rpcdist._proto import rpc_pb2
from rpcdist.ids import Identity
from rpcdist.testing import wait_until_asleep
from rpcdist.transport._channels.socket_channel import SocketChannel
from rpcdist.transport.io_loop import IoLoop
from rpcdist.transport.session import NullHandler, Session

LIMIT_S = 20.0


class ReadSession(Session):
    """A session that nothing carries."""

    def begin(self, on_failure: Callable[[Exception], object]) -> None:
        """Begins to be read; the handler's failures end that."""
        self._direct = cast(SocketChannel, SimpleNamespace(fail=on_failure))

    def hand_on(self, message: rpc_pb2.Message) -> None:
        """As the thread does that has read the message."""
        self._dispatch([(message, [])])

    def end(self) -> None:
        """As the loop does: it waits for the thread that hands on."""
        self._stop_dispatching()


class Scene(NullHandler):
    """A session that a thread reads, and its loop, which runs when it is told to; cancellations are for the loop."""

    limit_bytes = None

    def __init__(self) -> None:
        self.queued: deque[Callable[[], object]] = deque()
        self.handled: list[int] = []
        self.failures: list[Exception] = []
        self.chokes_on = 0
        self.session = ReadSession(
            cast(IoLoop, self), cast(SocketChannel, None), Identity("peer", 1, 1),
            role="r", id=b"", handler=self, silence_limit_s=LIMIT_S, opened_by_me=True,
        )  # fmt: skip
        self.session.begin(self.failures.append)

    def on_thread(self) -> bool:
        return False

    def call_soon(self, function: Callable[[], object]) -> None:
        self.queued.append(function)

    def on_opened(self, session: Any) -> None: ...

    def on_closed(self, session: Any, reason: str) -> None: ...

    def on_messages(self, session: Any, messages: list[tuple[Any, list[Any]]]) -> None:
        for message, _ in messages:
            if message.control_seq == self.chokes_on:
                raise ValueError(f"message {message.control_seq}")
            self.handled.append(message.control_seq)

    def read(self, number: int, *, for_loop: bool = False) -> None:
        body = {"cancel": rpc_pb2.Cancel(id=1)} if for_loop else {"gpu_release": rpc_pb2.GpuRelease()}
        self.session.hand_on(rpc_pb2.Message(control_seq=number, **body))

    def run_loop(self) -> None:
        while self.queued:
            self.queued.popleft()()


def test_what_comes_after_a_message_for_the_loop_waits_for_it() -> None:
    scene = Scene()
    scene.read(1)
    scene.read(2, for_loop=True)
    scene.read(3)
    assert scene.handled == [1]
    scene.run_loop()
    scene.read(4)
    assert scene.handled == [1, 2, 3, 4]


def test_nothing_is_handled_after_a_message_that_could_not_be() -> None:
    scene = Scene()
    scene.chokes_on = 1
    scene.read(1, for_loop=True)
    scene.read(2)
    scene.run_loop()
    assert scene.handled == [] and [str(failure) for failure in scene.failures] == ["message 1"]


def test_a_thread_that_reads_hands_nothing_on_after_the_end() -> None:
    """A call that came on a payload connection as its session ended began after its caller was taken for lost."""
    scene = Scene()
    scene.read(1)
    scene.read(2, for_loop=True)
    scene.session.end()
    scene.read(3)
    scene.run_loop()
    scene.read(4)
    assert scene.handled == [1]


def test_the_end_waits_for_who_hands_on() -> None:
    scene, handling, go_on, ended = Scene(), threading.Event(), threading.Event(), threading.Event()

    def on_messages(session: Any, messages: list[tuple[Any, list[Any]]]) -> None:
        handling.set()
        assert go_on.wait(LIMIT_S)
        assert not ended.is_set()
        scene.handled.append(1)

    def end() -> None:
        assert handling.wait(LIMIT_S)
        scene.session.end()
        ended.set()

    scene.on_messages = on_messages  # type: ignore[method-assign]
    threads = [threading.Thread(target=end), threading.Thread(target=scene.read, args=(1,))]
    for thread in threads:
        thread.start()
    assert handling.wait(LIMIT_S)
    wait_until_asleep(threads[0])
    go_on.set()
    for thread in threads:
        thread.join(LIMIT_S)
    assert ended.is_set() and scene.handled == [1]


def test_the_end_does_not_wait_for_ever() -> None:
    scene, handling, go_on = Scene(), threading.Event(), threading.Event()

    def on_messages(session: Any, messages: list[tuple[Any, list[Any]]]) -> None:
        handling.set()
        assert go_on.wait(LIMIT_S)

    scene.on_messages = on_messages  # type: ignore[method-assign]
    thread = threading.Thread(target=scene.read, args=(1,))
    thread.start()
    assert handling.wait(LIMIT_S)
    scene.session.end()
    go_on.set()
    thread.join(LIMIT_S)
