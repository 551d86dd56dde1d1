"""Values of which every agent has its own, as every thread has its own of a `threading.local`. For upper layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from rpcdist.rpc._agent import Agent
from rpcdist.rpc._current import current_agent

T = TypeVar("T")


class AgentLocal(Generic[T]):
    """One value per agent: made at its first use, dropped with the agent. Any thread may use it.

    Args:
        make: makes the value of an agent; the value must not refer to the agent.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: WeakKeyDictionary[Agent, T] = WeakKeyDictionary()

    def get(self) -> T:
        """The value of the current agent. Raises `NotInitialized` if there is no agent."""
        agent = current_agent()
        value = self._values.get(agent)
        return self._values.setdefault(agent, self._make()) if value is None else value
