"""`rpcdist.ray.Cluster`: this process and Ray actors are the workers of a job during a `with` block."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Self

import ray

from rpcdist import rpc
from rpcdist._launch.job_plan import RankPlan, Role, check_environment, held_port
from rpcdist._launch.placement import placement_from_environment
from rpcdist._launch.progress import interrupted
from rpcdist._launch.rank_main import check_not_importing_main
from rpcdist._launch.reports import main_has_a_file, pickle_call
from rpcdist._launch.supervisor import BackgroundRanks, StopSignals
from rpcdist._local_cluster import ClusterBlock, worker_names
from rpcdist.deadline import Deadline
from rpcdist.errors import AlreadyInitialized, ConfigError, DeadlineExceeded, NotInitialized, WorkerLost
from rpcdist.ids import check_worker_name
from rpcdist.ray._ray_launch import main_module, reserve, say_where
from rpcdist.ray._ray_ranks import RayRanks
from rpcdist.rpc import RpcOptions
from rpcdist.time_limits import CLUSTER_START_LIMIT_S, INIT_NOTICE_S
from rpcdist.transport.token import job_token


class Cluster(ClusterBlock):
    """A job on Ray: this process is its worker of rank 0, `worker0`, and the others are actors on Ray's nodes.

        with rpcdist.ray.Cluster(8, resources={"GPU": 1}) as cluster:
            rpc.rpc_sync("worker7", pow, (2, 10))
            cluster.add("extra")
            cluster.remove("worker3")

    Like `rpcdist.LocalCluster`, but workers may join and leave (`rpc.workers()`, `world_size=None`). Use `async with`
    in a coroutine, and `await cluster.start_async()` and `await cluster.close_async()` in a notebook. If the block
    raises an exception, the actors are killed.

    Args:
        workers: the number of workers, this process included; or their names.
        resources: for each other worker, e.g. `{"CPU": 2, "GPU": 1}`; by default one CPU. This process takes none.
        options: for all workers; the cluster chooses `init_method`.
        env: environment variables of the other workers.
        max_restarts: how often a worker restarts after the loss of its process or node.
        join_timeout_s: limit of the start, and of each `add`, in seconds; None waits for Ray's resources without limit.
        strategy, runtime_env: as in `rpcdist.ray.launch`.

    Raises:
        ConfigError: an argument is wrong, or the cluster lacks the requested resources.
        AlreadyInitialized: this process is a worker already.
        ProcessFailed: a worker failed before it joined.
        DeadlineExceeded: the workers did not join in time.
    """

    def __init__(
        self,
        workers: int | Sequence[str],
        *,
        resources: Mapping[str, float] | None = None,
        options: RpcOptions | None = None,
        env: Mapping[str, str] | None = None,
        max_restarts: int = 0,
        join_timeout_s: float | None = None,
        strategy: str = "PACK",
        runtime_env: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        check_environment(env or {})
        self._first_names = worker_names(workers)
        self._resources = resources
        self._options = RpcOptions() if options is None else copy.copy(options)
        self._env = dict(env or {})
        self._max_restarts = max_restarts
        self._join_timeout_s = join_timeout_s
        self._strategy = strategy
        self._runtime_env = runtime_env
        self._others: dict[str, tuple[int, BackgroundRanks]] = {}  # the rank, and what watches its actor and others
        self._next_rank = 1

    def __repr__(self) -> str:
        return f"<Cluster on Ray of {', '.join(self.names)}{'' if self._is_worker else ' [closed]'}>"

    @property
    def names(self) -> list[str]:
        """The names of the workers that were started and not removed, this process first."""
        return [self._first_names[0], *self._others]

    def start(self) -> Self:
        """Joins the job and starts the others; blocks until all have joined. Errors: see the class."""
        check_not_importing_main("rpcdist.ray.Cluster")
        if placement_from_environment() is not None:
            raise ConfigError(
                "a launcher started this process as one of several: start one process, and the cluster starts the "
                "others; or call rpc.init_rpc(name) in each"
            )
        if rpc.api._is_current_rpc_agent_set():
            raise AlreadyInitialized("this process is a worker already: call rpc.shutdown() before rpcdist.ray.Cluster")
        if not ray.is_initialized():
            ray.init(log_to_driver=True)
        try:
            host = ray.util.get_node_ip_address()
            port = self._held.enter_context(held_port(0, host))
            self._options.init_method = f"tcp://{host}:{port}"
            if not main_has_a_file():
                self._options.by_value = True
            rpc.init_rpc(self._first_names[0], rank=0, rpc_backend_options=copy.copy(self._options))
            self._is_worker = True
            if self._first_names[1:]:
                self._add(self._first_names[1:], self._resources, self._env)
        except BaseException as error:
            self._abandon()
            if type(error) is KeyboardInterrupt:
                raise interrupted() from None
            raise
        return self

    def add(
        self,
        name: str | None = None,
        *,
        resources: Mapping[str, float] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Starts one more worker, and returns its name, by default `worker` and its rank, when it has joined.

        By default it gets the `resources` and `env` of the others. Errors: see the class.
        """
        self._check_open()
        name = f"worker{self._next_rank}" if name is None else name
        check_worker_name(name)
        if name in self.names:
            raise ConfigError(f"there is a worker {name!r} already: {', '.join(self.names)}")
        check_environment(env or {})
        self._add([name], resources or self._resources, dict(self._env if env is None else env))
        return name

    def remove(self, name: str) -> None:
        """Makes a worker finish its work, leave the job, and end.

        Raises:
            ConfigError: no worker has this name, or it is this process.
            WorkerLost: the worker was lost before.
            DeadlineExceeded: the worker did not end; the end of the cluster will kill it.
        """
        self._check_open()
        if name not in self._others:
            raise ConfigError(f"{name!r} is no worker that can be removed; there are {', '.join(self.names[1:])}")
        rank, watched = self._others[name]
        rpc.stop_serving(name)
        watched.wait_until_ended([rank])
        del self._others[name]
        if all(ranks is not watched for _, ranks in self._others.values()):
            self._running.remove(watched)
            watched.end()

    def _stop_others(self) -> None:
        for name in self.names[1:]:
            with suppress(WorkerLost):  # a lost worker needs no request to stop
                rpc.stop_serving(name)

    def _check_open(self) -> None:
        if not self._is_worker:
            raise NotInitialized("the cluster is not open: use it in its `with` block")

    def _add(self, names: Sequence[str], resources: Mapping[str, float] | None, env: Mapping[str, str]) -> None:
        deadline = Deadline.after(self._join_timeout_s)
        ranks = range(self._next_rank, self._next_rank + len(names))
        self._next_rank += len(names)
        by_rank = dict(zip(ranks, names, strict=True))
        role = Role("worker", join_and_serve, len(names), resources=resources, max_restarts=self._max_restarts)
        plans = {rank: RankPlan(name, role, {**env, "RANK": str(rank)}) for rank, name in by_rank.items()}
        with StopSignals() as stop:
            group = reserve(list(plans.values()), self._strategy, deadline, stop)
            if group is None:
                raise interrupted() if stop.received else DeadlineExceeded("Ray had no room for the workers in time")
        call = pickle_call(join_and_serve, (by_rank, self._options), imports=("rpcdist.rpc",))
        token = job_token(self._options.token if isinstance(self._options.token, str) else None)
        make_engine = partial(
            RayRanks,
            plans,
            {role.name: call},
            {},
            token.decode("utf-8", "surrogateescape"),
            main_module(),
            group,
            self._runtime_env,
            _placed=partial(say_where, plans),
        )
        started = BackgroundRanks(ranks, make_engine, dict.fromkeys(ranks, self._max_restarts))
        self._running.append(started)
        self._others |= {name: (rank, started) for rank, name in by_rank.items()}
        started.start_ranks()
        limit_s = min(deadline.remaining_s(), CLUSTER_START_LIMIT_S)
        started.wait_until_ready(limit_s, min(limit_s, INIT_NOTICE_S), lambda missing: None)
        with started.blames_ranks():
            for name in names:
                rpc.wait_for_worker(name, timeout=min(deadline.remaining_s(), CLUSTER_START_LIMIT_S))

    def _abandon(self) -> None:
        self._others.clear()
        super()._abandon()

    def _pause(self) -> None:
        """Does nothing: Ray ends its processes itself."""

    def _drop_output(self) -> None:
        """Does nothing: Ray shows the output of its processes."""


def join_and_serve(rank: int, names: Mapping[int, str], options: RpcOptions) -> None:
    """Runs in a worker's actor: joins, and serves until the worker is stopped."""
    rpc.init_rpc(names[rank], rank=rank, rpc_backend_options=options)
    rpc.serve()
    rpc.shutdown()
