"""Ctrl-C and SIGTERM as something to wait for, beside the reports of the ranks."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["StopSignals"]


class StopSignals:
    """While entered, SIGINT and SIGTERM interrupt nothing: they are recorded, and make `fileno()` readable.

    Handlers that the program installed stay in place, and so does everything when this is not the main thread, where
    Python delivers signals.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._replaced: dict[signal.Signals, Any] = {}
        self._read_end = self._write_end = -1

    def __enter__(self) -> Self:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(signum) in (signal.SIG_DFL, signal.default_int_handler):
                    self._replaced[signum] = signal.signal(signum, self._record)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for signum, handler in self._replaced.items():
            signal.signal(signum, handler)
        os.close(self._read_end)
        os.close(self._write_end)

    def fileno(self) -> int:
        return self._read_end

    def _record(self, number: int, _: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)
            os.write(self._write_end, b"\0")
