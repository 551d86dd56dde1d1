"""The flight recorder: the last operations of this process's groups, to show what ran when a group failed.

It keeps the newest 1,000 collective operations and messages of all groups (`RPCDIST_FLIGHT_RECORDER_SIZE`; 0 switches
it off). When a group fails, each rank writes them to its own file in `RPCDIST_FLIGHT_RECORDER_DIR` (by default the
folder `rpcdist-flight-<user id>` of the system's temporary folder), which the next failure of that rank overwrites.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rpcdist.collectives._group.flight_records import Record, label
from rpcdist.collectives._group.world import current_world
from rpcdist.profile_ranges import record_function

__all__ = ["Record", "dump", "entries", "record_comm"]


def entries() -> list[Record]:
    """Returns the remembered operations, oldest first."""
    return current_world().process.recorder.entries()


def dump(rank: int | None = None) -> str:
    """Returns all records as JSON text: `{"version", "pid", "rank", "time_ns", "entries": [...]}`."""
    return current_world().process.recorder.dump(rank)


@contextmanager
def record_comm(name: str) -> Iterator[None]:
    """Names the operations of a `with` block: in the flight recorder, and as a range in torch's profiler."""
    token = label.set(name)
    try:
        with record_function(name):
            yield
    finally:
        label.reset(token)
