"""Ctrl-C that other code swallows, and where it is left to the program."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from errno import EIO
from io import StringIO

import pytest

from rpcdist._launch.output import JobOutput
from rpcdist._launch.supervisor import StopSignals, kept_interrupt


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


def test_a_closed_terminal_stops_a_job_unless_the_program_ignores_that() -> None:
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.received == signal.SIGHUP
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_output_that_cannot_be_shown_does_not_keep_a_job_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    class ClosedTerminal(StringIO):
        def flush(self) -> None:
            raise OSError(EIO, "it was closed")

    output = JobOutput()
    worker = output.open("w", 0)
    monkeypatch.setattr("sys.stdout", ClosedTerminal())
    with pytest.raises(OSError, match="it was closed"):
        worker.write("stdout", b"seen by nobody")
    output.is_ending = True
    worker.write("stdout", b"seen by nobody")
