"""The reports of a rank to the process that started it, and how a report travels through a pipe.

A rank writes `Ready` when everything is imported, and one report when its function has ended: each a length of 8 bytes
and a pickle. Then its process ends, which the other side sees as the end of the pipe. Pure: no pipe is touched here.
"""

from __future__ import annotations

import pickle
import signal
import struct
import time
import traceback
from dataclasses import dataclass
from types import FrameType
from typing import Final

from rpcdist.errors import GroupAborted

_LENGTH: Final = struct.Struct("<Q")

_OWN_PACKAGES: Final = (__package__, "rpcdist.ray")
_IMPORTERS: Final = ("multiprocessing.spawn", "runpy")

# Errors that the loss of another rank causes. A rank that fails with one of these is rarely the first to fail.
_CONSEQUENCES: Final = (ConnectionError, TimeoutError, GroupAborted)


@dataclass(frozen=True, slots=True)
class Ready:
    """The main module and the function are imported; the function is called now, at `where` (host and process id)."""

    where: str = ""


@dataclass(frozen=True, slots=True)
class Returned:
    """The function returned; `result` is pickled."""

    result: bytes


@dataclass(frozen=True, slots=True)
class Exited:
    """The function called `sys.exit` with a code other than 0. `moment` is read from `time.monotonic`."""

    code: int | str
    moment: float


@dataclass(frozen=True, slots=True)
class Raised:
    """The function raised an exception. `moment` is read from `time.monotonic`, which ranks of one machine share."""

    type_name: str
    traceback: str
    may_be_consequence: bool
    moment: float


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """The process is gone: said by the engine that started it.

    Attributes:
        returncode: as in `subprocess`; None if the engine knows none, or the process closed its pipe and went on.
        alive_at: when its end had not been seen yet, by the clock of the supervisor.
        reason: why it was lost, in the engine's words; empty where the return code says all.
        has_run: False if the engine lost it before it ran: then it is started again, and that counts as no restart.
        has_returned: whether the function had returned before.
    """

    returncode: int | None
    alive_at: float
    reason: str = ""
    has_run: bool = True
    has_returned: bool = False

    def __str__(self) -> str:
        when = "after" if self.has_returned else "before"
        if self.reason:
            return f"was lost: {self.reason}"
        if self.returncode is None:
            return "closed the pipe to the process that started it, and went on"
        if self.returncode >= 0:
            return f"ended with exit code {self.returncode} {when} its function returned"
        number = -self.returncode
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        return f"was killed by {name} {when} its function returned"


Report = Returned | Exited | Raised
Event = Ready | Report | ProcessEnded


def report_of_exception(error: BaseException) -> Report:
    """The report of a function that was left by `error`."""
    now = time.monotonic()
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return Returned(pickle.dumps(None))
        return Exited(error.code if isinstance(error.code, int) else str(error.code), now)
    frames = error.__traceback__
    while frames is not None and _is_on_the_way(frames.tb_frame):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    return Raised(type(error).__qualname__, text, isinstance(error, _CONSEQUENCES), now)


def _is_on_the_way(frame: FrameType) -> bool:
    """Whether a frame comes before the user's: our own, and those that import the main module."""
    return frame.f_globals.get("__package__") in _OWN_PACKAGES or frame.f_globals.get("__name__") in _IMPORTERS


def frame(report: Ready | Report) -> bytes:
    """The bytes of a report on a pipe."""
    content = pickle.dumps(report)
    return _LENGTH.pack(len(content)) + content


def take_reports(received: bytearray) -> list[Ready | Report]:
    """The complete reports in the bytes that a rank has written so far, which are taken out of them."""
    complete: list[Ready | Report] = []
    while len(received) >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(received)
        end = _LENGTH.size + length
        if len(received) < end:
            break
        complete.append(pickle.loads(received[_LENGTH.size : end]))
        del received[:end]
    return complete
