"""Several agents in this process, each with its own place on the network."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from inside_agents import Agent

from rpcdist import rpc
from rpcdist.collectives import HashStore
from rpcdist.rpc._current import end_agent
from rpcdist.rpc._start import node_options, start_agent
from rpcdist.transport import Node

LIMIT_S = 30.0


@contextmanager
def agents_here(*names: str) -> Iterator[tuple[Agent, ...]]:
    """The workers of one world, by rank; the end of the context ends them."""
    store = HashStore(LIMIT_S)

    def start(rank: int) -> Agent:
        options = rpc.RpcOptions(rpc_timeout=LIMIT_S)
        network = Node(node_options(options)).start_loop()
        return start_agent(
            store=store.clone(), name=names[rank], rank=rank, world_size=len(names), options=options, network=network
        )

    with ThreadPoolExecutor(len(names)) as starting:
        started = tuple(starting.map(start, range(len(names))))
    with ExitStack() as stack:
        for agent in reversed(started):
            stack.callback(end_agent, agent)
        yield started
