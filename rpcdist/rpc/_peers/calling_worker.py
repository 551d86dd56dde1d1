"""Who has made the call that runs, and on which session: for parts of the agent that others call, and that believe no
name."""

from __future__ import annotations

from contextvars import ContextVar

from rpcdist.errors import CallRefused
from rpcdist.ids import Identity
from rpcdist.rpc._peers.network import MessageSink

calling_worker: ContextVar[Identity | None] = ContextVar("rpcdist_calling_worker", default=None)
"""Set in calls of coroutine functions: the proven peer of the session on which the call came."""

calling_session: ContextVar[MessageSink | None] = ContextVar("rpcdist_calling_session", default=None)
"""Set in functions that run on the thread that reads: where the call came, and the next one will probably come."""


def check_speaks_for(name: str) -> None:
    """Raises `CallRefused` unless the call that runs was made by the worker of this name."""
    caller = calling_worker.get()
    if caller is None or caller.name != name:
        who = "code that no worker has called" if caller is None else f"worker {caller.name!r}"
        raise CallRefused(f"{who} cannot speak for worker {name!r}: each worker speaks for itself")
