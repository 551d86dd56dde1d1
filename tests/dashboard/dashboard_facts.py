"""Facts of workers, as tests of the live views make them up."""

from __future__ import annotations

from typing import Any

from rpcdist.inspection import CallServed, ChannelFacts, PoolFacts, WorkerFacts


def facts(worker: str = "worker0", **changes: Any) -> WorkerFacts:
    """Facts of a worker that does nothing."""
    number = int(worker[-1]) if worker[-1].isdigit() else 0
    values: dict[str, Any] = {
        "worker": worker, "id": number, "incarnation": "a", "job": "default/1", "role": "", "host": "host",
        "pid": 100 + number, "address": f"127.0.0.1:{2000 + number}", "time_ns": 0, "age_s": 10.0, "phase": "working",
        "pool": PoolFacts(threads=2, idle=1, running=1, blocked=0, queued=0, lent=0, max_threads=8),
    }  # fmt: skip
    return WorkerFacts(**{**values, **changes})


def channel(session: str, sent: int, received: int = 0, peer: str = "worker1", kind: str = "tcp") -> ChannelFacts:
    return ChannelFacts(session, peer, True, kind, bytes_sent=sent, bytes_received=received)


def served(function: str, age_s: float, phase: str = "running") -> CallServed:
    return CallServed(1, "s", function, "worker1", phase, age_s, running_s=age_s)
