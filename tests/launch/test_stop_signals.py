"""Ctrl-C that other code swallows, and where it is left to the program."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress

import pytest

from rpcdist._launch.supervisor import kept_interrupt


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def handler_of_python() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_that_is_swallowed_comes_again_at_the_end() -> None:
    is_over = False
    with pytest.raises(KeyboardInterrupt), kept_interrupt():
        with suppress(KeyboardInterrupt):
            press_ctrl_c()
        is_over = True
    assert is_over
    with pytest.raises(KeyboardInterrupt) as caught, kept_interrupt():
        try:
            press_ctrl_c()
        except KeyboardInterrupt:
            raise ImportError("a module that was not imported to its end") from None
    assert isinstance(caught.value.__cause__, ImportError)


def test_one_that_is_raised_passes_at_once() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, kept_interrupt():
        press_ctrl_c()
        raise AssertionError("it goes on")
    assert caught.value.__cause__ is None


def test_handlers_of_the_program_and_other_threads_are_left_alone() -> None:
    pressed: list[object] = []
    signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        with kept_interrupt():
            press_ctrl_c()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert pressed == [signal.SIGINT]

    def enter() -> None:
        with kept_interrupt():
            pressed.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert pressed[1:] == [signal.default_int_handler]
