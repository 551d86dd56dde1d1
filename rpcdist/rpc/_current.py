"""Which agent the public functions use.

A process has one agent, that of `init_rpc`. For tests, notebooks and simulations it may have several with different
names; then the current one is a context variable. User code that an agent runs (handlers, and callbacks of its futures)
sees that agent; every other thread and task sees that of `init_rpc`, except inside `use_agent`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar
from typing import Final, TypeVar
from weakref import WeakKeyDictionary

from rpcdist.errors import ForkedProcess, NotInitialized
from rpcdist.rpc._agent import Agent
from rpcdist.transport import fork

start_lock = threading.RLock()
"""Held while an agent starts, and while a start is undone: one at a time."""
num_starts: Final[Counter[str]] = Counter()
"""How often this process has started RPC at each place; used with `start_lock`.

If a job starts RPC several times, all its workers count alike, so the number distinguishes the starts. Starts in which
the workers did not find each other do not count, since the others may make their first attempt later.
"""


class _AgentPlace:
    """Holds an agent until it has ended. Contexts refer to this, since they may live longer than the agent."""

    __slots__ = ("__weakref__", "agent", "is_forked")

    def __init__(self, agent: Agent | None = None) -> None:
        self.agent = agent
        self.is_forked = False
        fork.register(self)

    def after_fork_in_child(self) -> None:
        """The agent remains in the parent, with its threads and connections."""
        self.is_forked = True


_of_process = _AgentPlace()
_place: ContextVar[_AgentPlace] = ContextVar("rpcdist_agent", default=_of_process)


def current_agent() -> Agent:
    """The current agent. Raises `NotInitialized` before `init_rpc` and after `shutdown`, `ForkedProcess` in a fork."""
    place = _place.get()
    agent = place.agent
    if agent is None:
        raise NotInitialized
    if place.is_forked:
        raise ForkedProcess
    return agent


def agent_or_none() -> Agent | None:
    return _place.get().agent


def set_current_agent(agent: Agent | None) -> None:
    _of_process.agent = agent


def context_of(agent: Agent) -> Context:
    """An empty context in which this agent is the current one; run copies of it."""
    context = Context()
    context.run(_place.set, _AgentPlace(agent))
    return context


@contextmanager
def use_agent(agent: Agent) -> Iterator[Agent]:
    """Makes an agent the current one of this thread or task, while the `with` block lasts."""
    token = _place.set(agent.context.run(_place.get))
    try:
        yield agent
    finally:
        _place.reset(token)


def end_agent(agent: Agent) -> None:
    """Closes an agent, removes it from its place, and releases what it has of the process."""
    try:
        agent.close()
    finally:
        agent.context.run(_place.get).agent = None
        if _of_process.agent is agent:
            _of_process.agent = None
        agent.release()


T = TypeVar("T")


def agent_local(make: Callable[[], T]) -> Callable[[], T]:
    """A function that returns the value of the current agent, and raises `NotInitialized` if there is no agent.

    Args:
        make: makes the value of an agent, at the first use; the value must not refer to the agent, with which it is
            dropped. Any thread may call it.
    """
    values: WeakKeyDictionary[Agent, T] = WeakKeyDictionary()

    def of_current() -> T:
        agent = current_agent()
        value = values.get(agent)
        return values.setdefault(agent, make()) if value is None else value

    return of_current
