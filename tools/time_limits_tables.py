"""Writes the tables of `docs/time_limits.md` from `rpcdist/time_limits.py`; `--check` compares without writing.

It also has the list of limits that must exceed others, which a test compares.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rpcdist import time_limits

__all__ = ["DEPENDENCIES", "check", "dependency_table", "limit_tables", "updated"]

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "time_limits.md"
TABLES = re.compile(
    r"(<!-- (?P<name>[a-z]+): written by tools/time_limits_tables.py -->\n).*?(<!-- end -->)", re.DOTALL
)
HEADING = re.compile(r"^# -{20,} (.+)$")


DEPENDENCIES: Final = (
    ("RPC_TIMEOUT_S", ("PEER_TIMEOUT_S",), "a call to a dead worker ends as WorkerLost, not by its own timeout"),
    ("PEER_TIMEOUT_S", ("REFUSED_GRACE_S",), "refused connections are the quick sign of a dead worker"),
    ("PEER_TIMEOUT_S", ("TICK_S",), "leases, which last longer, end at ticks"),
    ("HANDSHAKE_LIMIT_S", ("ATTEMPT_LIMIT_S",), "the connecting side abandons the local channel first"),
    ("HANDSHAKE_LIMIT_S", ("SIDE_ATTEMPT_LIMIT_S",), "the handshake on gRPC goes on if the TCP channel fails"),
    ("GROUP_CONNECT_LIMIT_S", ("HANDSHAKE_LIMIT_S",), "a slow handshake must not look like a rank that is gone"),
    (
        "GROUP_VERDICT_LIMIT_S",
        ("GROUP_ANSWER_LIMIT_S", "CHECK_INTERVAL_S"),
        "rank 0 collects answers first, and messages take time",
    ),
    ("GROUP_TIMEOUT_S", ("ELASTIC_TIMEOUT_S",), "a missing rank is left out before the setup fails"),
    (
        "ELASTIC_TIMEOUT_S",
        ("QUICK_ANSWER_LIMIT_S", "CHECK_INTERVAL_S"),
        "a rank that is late is probed more than once",
    ),
    ("STORE_TIMEOUT_S", ("STORE_GRACE_S",), "the grace extends a wait and does not replace it"),
    ("STORE_GRACE_S", ("CONNECTION_CLOSE_LIMIT_S",), "closing a client is bounded by the grace"),
    ("STORE_GRACE_S", ("SIDE_ATTEMPT_LIMIT_S",), "the error that names the cause is raised within the grace"),
    ("CLOSE_LIMIT_S", ("STORE_LINGER_S",), "the stop includes this wait"),
    ("ANSWER_GRACE_S", ("QUICK_ANSWER_LIMIT_S",), "the farewell to the coordinator is bounded by twice the grace"),
    ("PEER_TIMEOUT_S", ("RETURN_LONGEST_PAUSE_S",), "the other workers find the next coordinator while it recovers"),
    ("ORPHAN_TIMEOUT_S", ("PEER_TIMEOUT_S",), "the search lasts much longer than the recovery"),
    ("JOB_STOP_LIMIT_S", ("CLOSE_LIMIT_S", "CLOSE_LIMIT_S"), "the ranks are ended in this time"),
    ("CLOSE_LIMIT_S", ("CLOSE_STEP_LIMIT_S",), "tasks and async generators are ended before a loop is closed"),
    ("PARKED_LIMIT_S", ("GROUP_TIMEOUT_S",), "a server lets a setup wait for its default timeout"),
    (
        "CLOSE_LIMIT_S",
        ("LEAVE_LIMIT_S", "CONNECTION_CLOSE_LIMIT_S", "CONNECTION_CLOSE_LIMIT_S", "GRPC_STOP_GRACE_S"),
        "the transport ends unary calls, links and listeners one after the other",
    ),
    (
        "SLOW_WORK_LIMIT_S",
        ("CLOSE_LIMIT_S", "CLOSE_LIMIT_S", "CLOSE_STEP_LIMIT_S"),
        "a rank that ends normally closes its agent, its transport and its groups first",
    ),
    ("SEGMENTS_TRIM_S", ("CONTROL_DELAY_S",), "a segment is returned before it is given back to the system"),
    ("LONGEST_PAUSE_S", ("FIRST_PAUSE_S",), "pauses grow"),
    ("REFUSED_GRACE_S", ("FIRST_PAUSE_S",), "a worker that refuses is tried more than once"),
    ("LOCK_LONGEST_PAUSE_S", ("LOCK_FIRST_PAUSE_S",), "pauses grow"),
    ("SLOW_ANSWER_LIMIT_S", ("LOCK_LONGEST_PAUSE_S",), "a lock is tried more than once"),
    ("POOL_STALL_S", ("POLL_S",), "the monitor measures the stall in ticks"),
    ("POOL_EXHAUSTED_LIMIT_S", ("POOL_STALL_S",), "a stall starts threads first, up to the maximum"),
    ("TICK_S", ("NCCL_POLL_S",), "the watchdog asks for errors between its checks"),
)
"""A limit, those whose sum it must exceed, and why."""


def check(limits: Mapping[str, float]) -> None:
    """Raises `ValueError` when a limit does not exceed those that it must exceed."""
    for longer, shorter, why in DEPENDENCIES:
        if not limits[longer] > sum(limits[name] for name in shorter):
            raise ValueError(f"{longer} must exceed {' + '.join(shorter)}: {why}")
    if not limits["LEASE_IN_PEER_TIMEOUTS"] >= 3:
        raise ValueError("LEASE_IN_PEER_TIMEOUTS must be at least 3: a user that is only slow keeps its references")
    if not limits["HEARTBEATS_PER_PEER_TIMEOUT"] >= 3:
        raise ValueError("HEARTBEATS_PER_PEER_TIMEOUT must be at least 3: one lost heartbeat is not a lost peer")
    if not 0 < limits["LAST_ATTEMPT_SHARE"] < 1:
        raise ValueError("LAST_ATTEMPT_SHARE must be a part of the peer timeout: it extends it")


def limit_tables() -> str:
    """One table for each group of limits, under the heading that the module gives it."""
    source = (ROOT / "rpcdist" / "time_limits.py").read_text()
    body = ast.parse(source).body
    comments = {
        statement.lineno: after.value.value
        for statement, after in itertools.pairwise(body)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
    }
    lines: list[str] = []
    for number, line in enumerate(source.splitlines(), start=1):
        if heading := HEADING.match(line):
            lines += ["", f"### {heading[1]}", "", "| limit | value | what it covers |", "|---|---|---|"]
        elif limit := re.match(r"([A-Z_]+): Final = ", line):
            value = getattr(time_limits, limit[1])
            lines.append(f"| `{limit[1]}` | {_text(limit[1], value)} | {' '.join(comments[number].split())} |")
    return "\n".join(lines).strip("\n") + "\n"


def dependency_table() -> str:
    """The table of `DEPENDENCIES`."""
    lines = ["| limit | must exceed | because |", "|---|---|---|"]
    for longer, shorter, why in DEPENDENCIES:
        lines.append(f"| `{longer}` | {' + '.join(f'`{name}`' for name in shorter)} | {why} |")
    return "\n".join(lines) + "\n"


def updated(page: str) -> str:
    """The page with its tables as the module has them."""
    tables = {"limits": limit_tables(), "dependencies": dependency_table()}
    return TABLES.sub(lambda match: f"{match[1]}\n{tables[match['name']]}\n{match[3]}", page)


def _text(name: str, value: float) -> str:
    if not name.endswith(("_S", "_MS")):
        return f"{value:g}"
    seconds = value / 1000 if name.endswith("_MS") else value
    for unit, unit_s in (("days", 24 * 3600), ("min", 60), ("s", 1), ("ms", 1e-3)):
        if seconds >= unit_s and not (unit == "min" and seconds < 5 * unit_s):
            return f"{seconds / unit_s:g} {unit}"
    return f"{seconds / 1e-6:g} us"


def main() -> int:
    page = PAGE.read_text()
    if "--check" in sys.argv[1:]:
        is_same = updated(page) == page
        print("" if is_same else "docs/time_limits.md differs: run python tools/time_limits_tables.py")
        return 0 if is_same else 1
    PAGE.write_text(updated(page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
