"""The call of a rank, the rank's reports, and their format on a pipe.

A function and its arguments are sent to the rank as pickles. If the main module has no file that another process could
import, as in a notebook or under `python -c` and `python -`, its functions and classes are sent by value, pickled by
cloudpickle.

A rank writes `Ready` when all modules are imported, and one report when its function has ended: each a length of 8
bytes and a pickle. Then its process ends, which the reader sees as the end of the pipe. Pure: uses no pipe.
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

from rpcdist.errors import GroupAborted, SerializationError, raised_as, text_of


@dataclass(frozen=True, slots=True)
class RankCall:
    """A function and its arguments after the rank.

    Attributes:
        pickled: the pickle of both.
        by_value: whether the pickle contains the definitions of the main module.
        imports: further modules that the other process imports before it reports that it is ready.
    """

    pickled: bytes
    by_value: bool
    imports: tuple[str, ...] = ()

    def load(self) -> tuple[Any, tuple[Any, ...]]:
        """Returns the function and its arguments; imports their modules."""
        for module in self.imports:
            importlib.import_module(module)
        function, args = pickle.loads(self.pickled)
        return function, args

    def dump_result(self, result: object) -> bytes:
        """Returns the pickle of a result for the calling process."""
        return _dump(result, self.by_value)


def pickle_call(function: object, args: tuple[object, ...], imports: tuple[str, ...] = ()) -> RankCall:
    """Makes a call for other processes; `imports` as in `RankCall`. Raises `SerializationError`."""
    by_value = not main_has_a_file()
    name = getattr(function, "__qualname__", "")
    if not by_value and ("<lambda>" in name or "<locals>" in name):
        raise SerializationError(
            f"a new process cannot find {name} by name. Define the function at the top of a module, and pass the "
            "values that it needs as arguments."
        )
    try:
        return RankCall(_dump((function, args), by_value), by_value, imports)
    except Exception as exc:  # pickle raises many types, and objects may raise others
        raise SerializationError(
            f"{function!r} with {len(args)} arguments cannot be sent to a new process: {text_of(exc)}. "
            "Define the function at the top of a module, and pass arguments that can be pickled."
        ) from exc


def load_result(rank: int, result: bytes) -> Any:
    """Loads the result from `RankCall.dump_result` of a rank. Raises `SerializationError`."""
    with raised_as(SerializationError, f"the result of rank {rank} cannot be rebuilt here", Exception):
        return pickle.loads(result)


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

_PACKAGES_ON_THE_WAY: Final = (__package__, "rpcdist.ray", "importlib")
_IMPORTERS: Final = ("multiprocessing.spawn", "runpy")

# Errors that the loss of another rank causes; a rank that fails with one of them is rarely the first to fail.
_CONSEQUENCES: Final = (ConnectionError, TimeoutError, GroupAborted)


@dataclass(frozen=True, slots=True)
class Ready:
    """The main module and the function are imported, and the call begins."""


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
    """The process has ended, as reported by its engine.

    Attributes:
        returncode: as in `subprocess`; None if unknown, or if the process closed its pipe and continued.
        alive_at: the last time at which its end had not been seen, by the clock of the supervisor.
        reason: the engine's reason for the loss; empty if the return code is enough.
        has_run: False if the engine lost it before it ran; then it is started again, which does not count as a restart.
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
    """Makes the report of a function that raised `error`."""
    now = time.monotonic()
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return Returned(pickle.dumps(None))
        return Exited(error.code if isinstance(error.code, int) else str(error.code), now)
    return Raised(type(error).__qualname__, text_of_error(error), isinstance(error, _CONSEQUENCES), now)


def text_of_error(error: BaseException) -> str:
    """Returns the traceback of an error as text, from the first frame of the user's code on."""
    frames = error.__traceback__
    while frames is not None and _is_on_the_way(frames.tb_frame):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _is_on_the_way(frame: FrameType) -> bool:
    """Whether a frame comes before the user's frames: ours, or one that imports the user's module."""
    return frame.f_globals.get("__package__") in _PACKAGES_ON_THE_WAY or frame.f_globals.get("__name__") in _IMPORTERS


def frame(report: Ready | Report) -> bytes:
    """Returns the bytes of a report on a pipe."""
    content = pickle.dumps(report)
    return _LENGTH.pack(len(content)) + content


def take_reports(received: bytearray) -> list[Ready | Report]:
    """Removes the complete reports from the received bytes, and returns them."""
    complete: list[Ready | Report] = []
    while len(received) >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(received)
        end = _LENGTH.size + length
        if len(received) < end:
            break
        complete.append(pickle.loads(received[_LENGTH.size : end]))
        del received[:end]
    return complete
