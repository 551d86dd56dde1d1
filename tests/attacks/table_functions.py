"""The functions that a worker of test_tables_after_a_peer.py runs to report on its tables."""

from __future__ import annotations

from inside_agents import current_agent
from table_walk import grown, tables

from rpcdist import rpc

BOUNDED = (
    ".dispatcher._answers._logged",  # one entry for each account
    ".dispatcher._coroutine_functions",  # names that led to a function
    ".flight_log._events",  # the last events
    ".contexts._released",  # the last of other workers
    "._silent._known",  # the last connections
    ".recorder._made",  # the last calls
    ".recorder._served",
    ".protocol.refused_shares",  # each remembers the last 4,096
    ".protocol.owners.refused",
    ".protocol.owners.expired",
)
"""Tables that keep the last entries, or one for each thing of this worker."""

_before: dict[str, int] = {}


def remember() -> int:
    """Notes how large the tables are now; returns their number."""
    _before.clear()
    _before.update(tables(current_agent()))
    return len(_before)


def larger_tables() -> dict[str, tuple[int, int]]:
    """The tables that have grown since `remember`, except those with a bound of their own."""
    found = grown(_before, tables(current_agent()))
    return {path: sizes for path, sizes in found.items() if not path.removesuffix("[]").endswith(BOUNDED)}


def address() -> str:
    return current_agent().network.address or ""


def num_sessions() -> int:
    return len(current_agent().connections.taken)


def call(worker: str) -> int:
    return int(rpc.rpc_sync(worker, pow, (2, 3)))


def has_no_larger_tables() -> bool:
    return not larger_tables()
