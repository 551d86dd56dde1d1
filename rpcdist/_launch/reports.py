"""The call that a rank carries out, the reports of the rank, and how a report travels through a pipe.

A function and its arguments go to the rank as pickles. Where the main module has no file that another process could
import, as in a notebook or under `python -c` and `python -`, functions and classes of it travel by value, as
cloudpickle writes them.

A rank writes `Ready` when everything is imported, and one report when its function has ended: each a length of 8 bytes
and a pickle. Then its process ends, which the other side sees as the end of the pipe. Pure: no pipe is touched here.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import struct
import sys
import time
import traceback
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

from rpcdist.errors import GroupAborted, SerializationError


@dataclass(frozen=True, slots=True)
class RankCall:
    """A function and its arguments after the rank.

    Attributes:
        pickled: both as a pickle.
        by_value: whether the pickle contains the definitions of the main module.
        imports: further modules that the other process imports before it reports that it is ready.
    """

    pickled: bytes
    by_value: bool
    imports: tuple[str, ...] = ()

    def load(self) -> tuple[Any, tuple[Any, ...]]:
        """The function and its arguments; imports their modules."""
        for module in self.imports:
            importlib.import_module(module)
        function, args = pickle.loads(self.pickled)
        return function, args

    def dump_result(self, result: object) -> bytes:
        """A result for the process that made the call."""
        return _dump(result, self.by_value)


def pickle_call(function: object, args: tuple[object, ...], imports: tuple[str, ...] = ()) -> RankCall:
    """A call for other processes; `imports` as in `RankCall`. Raises `SerializationError`."""
    by_value = not main_has_a_file()
    name = getattr(function, "__qualname__", "")
    if not by_value and ("<lambda>" in name or "<locals>" in name):
        raise SerializationError(
            f"{name} has no name by which a new process finds it. Define the function at the top of a module, and pass "
            "what it needs as arguments."
        )
    try:
        return RankCall(_dump((function, args), by_value), by_value, imports)
    except Exception as exc:  # pickle raises many types, and objects may raise any
        raise SerializationError(
            f"{function!r} with {len(args)} arguments cannot be sent to a new process: {exc}. Define the function at "
            "the top of a module, and pass arguments that can be pickled."
        ) from exc


def load_result(rank: int, result: bytes) -> Any:
    """The result that `RankCall.dump_result` of a rank wrote. Raises `SerializationError`."""
    try:
        return pickle.loads(result)
    except Exception as exc:
        raise SerializationError(f"the result of rank {rank} cannot be rebuilt here: {exc}") from exc


def main_has_a_file() -> bool:
    """Whether another process can import the main module of this one."""
    main = sys.modules.get("__main__")
    if getattr(main, "__spec__", None) is not None:  # python -m
        return True
    path = getattr(main, "__file__", None)
    return path is not None and os.path.isfile(path)  # under `python -` it is "<stdin>"


def _dump(value: object, by_value: bool) -> bytes:
    if not by_value:
        return pickle.dumps(value)
    import cloudpickle  # type: ignore[import-untyped]  # needed here only, and slow to import

    pickled: bytes = cloudpickle.dumps(value)
    return pickled


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
            return "closed the pipe to the process that started it, but kept running"
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
