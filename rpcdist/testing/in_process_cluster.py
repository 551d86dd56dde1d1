"""Several RPC workers in this process, connected in memory: no processes to start, and faults on command.

    with InProcessCluster("trainer", "server") as cluster:
        with cluster.use("trainer"):
            assert rpc.rpc_sync("server", torch.add, (1, 2)) == 3
        cluster.network.cut("trainer", "server")
        cluster.kill("server")
        cluster.restart("server")

The workers share the interpreter: module globals, the interpreter lock, Ctrl-C and crashes. A test that is about one of
these needs a `WorkerPool`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from rpcdist import rpc
from rpcdist.collectives import HashStore
from rpcdist.errors import ConfigError, on_error
from rpcdist.rpc._agent import Agent
from rpcdist.rpc._current import end_agent, use_agent
from rpcdist.rpc._start import start_agent
from rpcdist.testing.limits import LIMIT_S
from rpcdist.testing.memory_network import MemoryNetwork, MemoryNode

MAX_CALLS = 64  # at the same time; threads start on demand

T = TypeVar("T")


class InProcessCluster:
    """RPC workers by name. Use it as a context manager: the end of the block shuts all of them down.

    Args:
        names: the workers' names, by rank; the first worker coordinates.
        elastic: workers may join and leave (`world_size=None`).
        options: arguments of `RpcOptions`, for all workers.

    Raises:
        ConfigError: two workers have the same name; methods raise it for a name that no living worker has.

    Attributes:
        names: the names of the living workers.
        network: connects the workers; its methods cause faults.
    """

    def __init__(self, *names: str, elastic: bool = False, **options: Any) -> None:
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"a cluster needs workers with different names, not {list(names)}")
        self.network = MemoryNetwork()
        self._world_size = None if elastic else len(names)
        self._options = {"rpc_timeout": LIMIT_S, **options}
        self._store = HashStore()
        self._ranks = {name: rank for rank, name in enumerate(names)}
        self._agents: dict[str, Agent] = {}
        self._threads = ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="rpcdist-testing")
        self._calls: set[Future[Any]] = set()
        self._nodes: dict[str, MemoryNode] = {}
        with on_error(self.close):
            self._in_threads(self._start, names)

    def __enter__(self) -> InProcessCluster:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self.shutdown()
        finally:
            self.close()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the workers, in the order of their ranks."""
        return tuple(self._agents)

    def use(self, name: str) -> AbstractContextManager[Agent]:
        """Makes the functions of `rpcdist.rpc` act as this worker, on this thread, inside the `with` block."""
        return use_agent(self._agent(name))

    def run(self, name: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Calls a function as this worker, on this thread."""
        with self.use(name):
            return function(*args, **kwargs)

    def begin(self, name: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
        """Calls a function as this worker on a new thread, and does not wait."""
        return self._in_thread(self.run, name, function, *args, **kwargs)

    def join(self, name: str, rank: int) -> None:
        """Adds a worker, or replaces a dead one."""
        self._ranks[name] = rank
        self._in_threads(self._start, (name,))  # an agent that starts on the main thread would take Ctrl-C for itself

    def restart(self, name: str) -> None:
        """Replaces a killed worker by a new one."""
        self.join(name, self._ranks[name])

    def kill(self, name: str) -> None:
        """Kills a worker silently: its connections break, and its address does not answer."""
        agent = self._agent(name)
        del self._agents[name]
        self.network.kill(self._nodes.pop(name))
        end_agent(agent)

    def shutdown(self, *names: str, **arguments: Any) -> None:
        """Calls `rpc.shutdown(**arguments)` on the named workers, by default all, at the same time."""

        def leave(name: str) -> None:
            self.run(name, rpc.shutdown, **arguments)
            del self._agents[name]

        self._in_threads(leave, names or self.names)

    def close(self) -> None:
        """Ends everything immediately; idempotent. Running calls that `begin` started get a limited time to
        end.

        Raises:
            AssertionError: such a call did not end. Its thread continues, and Python waits for it at exit.
        """
        for agent in list(self._agents.values()):
            end_agent(agent)
        self._agents.clear()
        _, running = wait(list(self._calls), LIMIT_S)
        self._threads.shutdown(wait=not running)
        self.network.close()
        assert not running, f"{len(running)} calls of workers did not end within {LIMIT_S} s after their workers"

    def _agent(self, name: str) -> Agent:
        if name not in self._agents:
            raise ConfigError(
                f"no worker {name!r} lives in this cluster; these do: {', '.join(sorted(self._agents)) or 'none'}"
            )
        return self._agents[name]

    def _start(self, name: str) -> None:
        options = rpc.RpcOptions(**self._options)
        node = self._nodes[name] = self.network.node(name, options.peer_timeout)
        self._agents[name] = start_agent(
            store=self._store.clone(),
            name=name,
            rank=self._ranks[name],
            world_size=self._world_size,
            options=options,
            network=node,
        )

    def _in_threads(self, function: Callable[[str], None], names: Iterable[str]) -> None:
        """Calls the function for all names at the same time, because joining and leaving wait for the others.
        Raises the first error."""
        calls = {name: self._in_thread(function, name) for name in names}
        _, running = wait(calls.values(), LIMIT_S)
        assert not running, f"{[name for name in calls if calls[name] in running]} did not finish within {LIMIT_S} s"
        for call in calls.values():
            call.result()

    def _in_thread(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
        call = self._threads.submit(function, *args, **kwargs)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call
