"""The agent of this process: the only mutable state of the package at module level."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpcdist.errors import NotInitialized
from rpcdist.transport.fork import check_not_forked

if TYPE_CHECKING:
    from rpcdist.rpc._agent import Agent

__all__ = ["agent_or_none", "current_agent", "set_current_agent"]

_agent: Agent | None = None


def current_agent() -> Agent:
    """The running agent. Raises `NotInitialized` before `init_rpc` and after `shutdown`, `ForkedProcess` in a fork."""
    if _agent is None:
        raise NotInitialized
    check_not_forked()
    return _agent


def agent_or_none() -> Agent | None:
    return _agent


def set_current_agent(agent: Agent | None) -> None:
    global _agent
    _agent = agent
