"""Handlers that are held back: where, and in which order they come back."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from types import FrameType

import pytest

from rpcdist.ids import Identity
from rpcdist.rpc._peers.network import Loopback
from rpcdist.transport._channels.polling_and_signals import SignalShield, may_raise_here
from rpcdist.transport.wire_messages import ReplyMessage


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Those of a program that sets none."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


async def ask() -> bool:
    return may_raise_here()


def test_ctrl_c_may_strike_unless_it_is_held_back_or_cancels_a_task() -> None:
    assert may_raise_here()
    shield = SignalShield()
    shield.enter()
    assert not may_raise_here()
    shield.leave()
    assert may_raise_here()
    assert not asyncio.run(ask())
    loop = asyncio.new_event_loop()  # as in a notebook: a loop, and the handler that raises
    try:
        assert loop.run_until_complete(ask())
    finally:
        loop.close()


def test_what_comes_meanwhile_is_handled_after_and_leaves_the_handlers_as_they_were() -> None:
    ran: list[str] = []

    def handler(number: int, frame: FrameType | None) -> None:
        ran.append("SIGUSR1")

    signal.signal(signal.SIGUSR1, handler)
    shield = SignalShield()
    shield.enter()
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGINT)
    assert not ran
    with pytest.raises(KeyboardInterrupt):
        shield.leave()
    assert ran == ["SIGUSR1"] and may_raise_here()
    assert signal.getsignal(signal.SIGUSR1) is handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_raises_while_the_shield_goes_up_leaves_none_behind() -> None:
    shield = SignalShield()
    shield._handler = None  # type: ignore[assignment]  # what `signal` refuses stands for a handler that raises
    with pytest.raises(TypeError):
        shield.enter()
    assert may_raise_here() and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_harmless_handler_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def handler(number: int, frame: FrameType | None) -> None:
        ran.append("SIGUSR1")

    monkeypatch.setattr(SignalShield, "harmless", [handler])
    signal.signal(signal.SIGUSR1, handler)
    shield = SignalShield()
    shield.enter()
    try:
        assert signal.getsignal(signal.SIGUSR1) is handler
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        signal.raise_signal(signal.SIGUSR1)
        assert ran == ["SIGUSR1"], "it runs at once"
    finally:
        shield.leave()
    assert signal.getsignal(signal.SIGUSR1) is handler


def test_ctrl_c_while_a_worker_takes_a_message_of_its_own_is_the_sender_s() -> None:
    """The code that serves calls answers a call with every exception raised there, so Ctrl-C was lost to the caller."""
    taken: list[int] = []

    def deliver(session: object, messages: object) -> None:
        signal.raise_signal(signal.SIGINT)
        taken.append(1)

    with pytest.raises(KeyboardInterrupt):
        Loopback(Identity("a", 0, 1), deliver).send(ReplyMessage(1))
    assert taken == [1]
