"""The records of the flight recorder: the operations, their times, and how they ended."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from rpcdist.collectives.work import Work
from rpcdist.errors import text_of
from rpcdist.private_files import flight_recorder_size, write_flight_file
from rpcdist.profile_ranges import operation_taps

logger = logging.getLogger(__name__)

VERSION: Final = 1

label: Final[ContextVar[str]] = ContextVar("rpcdist_comm_label", default="")
"""The program's name for the operations that it calls now; see `record_comm`."""


@dataclass(slots=True, eq=False, repr=False)
class Record:
    """One operation of one rank. Times are in nanoseconds since the epoch.

    Attributes:
        family: "collective", or "point" for send and recv, which each rank numbers by itself.
        sequence: its number among the group's operations of that family.
        operation: e.g. "all_reduce".
        dtype: e.g. "float32"; empty without tensors.
        input_sizes, output_sizes: the numbers of elements, tensor by tensor.
        detail: the reduce operation, or the other rank and the tag.
        label: its name from `record_comm`; usually empty.
        state: "queued", "running", "done" or "failed".
        listeners: functions that are called when it has ended; see `operation_taps`.
    """

    group: str
    sequence: int
    operation: str
    dtype: str = ""
    input_sizes: list[int] = field(default_factory=list)
    output_sizes: list[int] = field(default_factory=list)
    detail: str = ""
    family: str = "collective"
    label: str = field(default_factory=label.get)
    state: str = "queued"
    error: str = ""
    queued_ns: int = field(default_factory=time.time_ns)
    started_ns: int = 0
    ended_ns: int = 0
    listeners: tuple[Callable[[float, float, BaseException | None], object], ...] = ()

    def __post_init__(self) -> None:
        if operation_taps:
            self.listeners = tuple([tap(self.group, self.operation) for tap in operation_taps])

    def __str__(self) -> str:
        """Names the operation in errors; only then, as most operations never fail."""
        with_whom = f" {self.detail.replace(', ', ' with ')}" if self.family == "point" else ""
        return f"{self.operation} #{self.sequence}{with_whom} of group {self.group!r}"

    def mark_started(self) -> None:
        self.state = "running"
        self.started_ns = time.time_ns()

    def end(self, error: BaseException | None = None) -> None:
        self.ended_ns = time.time_ns()
        self.state = "done" if error is None else "failed"
        if error is not None:
            self.error = text_of(error)
        listeners, self.listeners = self.listeners, ()
        for listener in listeners:
            try:
                listener((self.started_ns or self.queued_ns) / 1e9, self.ended_ns / 1e9, error)
            except Exception:  # must not change the operation
                logger.exception("a listener of operations failed at the end of %s", self.operation)

    def follow(self, work: Work) -> None:
        """Ends the record when the work ends; call `start` before."""
        if work.is_success():
            self.end()
        else:
            work.when_done(lambda done: self.end(done.exception()))

    def to_json(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__slots__ if name != "listeners"}


def record_of_message(
    group: str, number: int, operation: str, tensor: torch.Tensor, world_rank: int | None, tag: int
) -> Record:
    """Makes the record of a send or recv that starts now. `world_rank` is None for a receive from any rank."""
    sizes, sends = [tensor.numel()], operation == "send"
    whom = "any rank" if world_rank is None else f"rank {world_rank}"
    detail, dtype = f"{'to' if sends else 'from'} {whom}, tag {tag}", str(tensor.dtype).removeprefix("torch.")
    given, taken = (sizes, []) if sends else ([], sizes)
    record = Record(group, number, operation, dtype, given, taken, detail, "point")
    record.state, record.started_ns = "running", record.queued_ns
    return record


class FlightRecorder:
    """Remembers the newest operations of the groups of one process. Any thread may use it.

    Attributes:
        note: remembers a record. Appending to a deque is atomic, so operations need no lock for it.
    """

    def __init__(self) -> None:
        self._records: deque[Record] = deque(maxlen=flight_recorder_size())
        self._began = time.strftime("%Y%m%dT%H%M%S")
        self.note: Callable[[Record], None] = self._records.append

    def entries(self) -> list[Record]:
        return list(self._records)

    def dump(self, rank: int | None = None) -> str:
        """Returns all records as JSON text: `{"version", "pid", "rank", "time_ns", "entries": [...]}`."""
        fields = {"version": VERSION, "pid": os.getpid(), "rank": rank, "time_ns": time.time_ns()}
        return json.dumps({**fields, "entries": [record.to_json() for record in self.entries()]})

    def write_dump(self, rank: int) -> Path | None:
        """Writes the dump to `rank<rank>-<time>-<pid>.json`, in a folder that only this user can read.

        The time is when the process began to record, so ranks of other jobs and attempts write other files, and a later
        failure in this process replaces its file. Only the newest files of each rank are kept.

        Returns:
            The file; None, with a warning in the log, if it could not be written, as an error here would hide the
            failure itself.
        """
        return write_flight_file(f"rank{rank}-{self._began}-{os.getpid()}.json", f"rank{rank}-*.json", self.dump(rank))
