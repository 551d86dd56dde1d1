"""The flight recorder: the last operations of this process's groups, to see what ran when something failed.

Collective operations and messages alike: the newest 1,000 over all groups (`RPCDIST_FLIGHT_RECORDER_SIZE`; 0 switches
it off). When a group fails, they are written to a file of their own for each rank in `RPCDIST_FLIGHT_RECORDER_DIR` (by
default the folder `rpcdist-flight-<user id>` of the system's temporary folder), where the next failure of that rank
overwrites it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rpcdist.collectives._group.flight_records import Record, label
from rpcdist.collectives._group.world import current_world
from rpcdist.profile_ranges import record_function

__all__ = ["Record", "dump", "entries", "record_comm"]


def entries() -> list[Record]:
    """The operations that are remembered, oldest first."""
    return current_world().process.recorder.entries()


def dump(rank: int | None = None) -> str:
    """All of it as JSON text: `{"version", "pid", "rank", "time_ns", "entries": [...]}`."""
    return current_world().process.recorder.dump(rank)


@contextmanager
def record_comm(name: str) -> Iterator[None]:
    """Names the operations that are called inside: in the flight recorder, and as a range in torch's profiler."""
    token = label.set(name)
    try:
        with record_function(name):
            yield
    finally:
        label.reset(token)
