"""The parts of agents that users do not see, for tests that inspect a worker from within, or attack it.

Tests reach these parts by way of the following functions only, so that one place changes with the code.
"""

from __future__ import annotations

from typing import Any

from rpcdist.ids import ProcessId
from rpcdist.rpc._agent import Agent
from rpcdist.rpc._current import current_agent
from rpcdist.rpc._executors.thread_pool import ThreadPool
from rpcdist.rpc._peers.control import ControlOutbox
from rpcdist.rpc._peers.peer import Peer
from rpcdist.rpc._rref.handles import HandleState
from rpcdist.testing import InProcessCluster
from rpcdist.testing.memory_network import MemoryNode
from rpcdist.transport import Node, Session
from rpcdist.transport.announced_bytes import AnnouncedBytes

__all__ = [
    "Agent",
    "ThreadPool",
    "agent_of",
    "control_outbox",
    "current_agent",
    "handle_of",
    "heard_senders",
    "mapped_bytes",
    "node_of",
    "own_node",
    "peers_of",
    "reader_of",
    "reserved_bytes",
    "turn_queues",
]


def agent_of(cluster: InProcessCluster, name: str) -> Agent:
    with cluster.use(name) as agent:
        return agent


def own_node() -> Node:
    """The network of the worker that this thread acts for."""
    network = current_agent().network
    assert isinstance(network, Node)
    return network


def node_of(cluster: InProcessCluster, name: str) -> MemoryNode:
    """The worker's place on the network; that of a worker that is gone, until it is replaced."""
    return cluster._nodes[name]


def peers_of(agent: Agent) -> dict[int, Peer]:
    """The workers that it has sent something to, by id."""
    return agent.router._peers


def control_outbox(peer: Peer) -> ControlOutbox:
    """The control messages that the other worker has not acknowledged."""
    return peer._control


def heard_senders(agent: Agent) -> set[ProcessId]:
    """The workers of whose control messages it keeps something."""
    return set(agent._control._applied)


def handle_of(rref: Any) -> HandleState:
    """The state of a reference, as the agents know it."""
    state: HandleState = rref._handle.state
    return state


def turn_queues(agent: Agent) -> list[Any]:
    """The queues of the actors of one worker."""
    return [actor._queue for actor in set(agent.actors._by_rref.values())]


def reserved_bytes(account: AnnouncedBytes) -> int:
    """The bytes that a peer makes this process reserve."""
    return account._num_bytes


def mapped_bytes(account: AnnouncedBytes) -> int:
    """The bytes of a peer's memory that this process has mapped."""
    return account._num_mapped


def reader_of(session: Session) -> Any:
    """Reads the session's socket, on a thread that waits."""
    direct: Any = session._direct
    return direct._reader
