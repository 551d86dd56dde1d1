"""`LocalCluster`: this process and new ones are the workers of a job, while a `with` block lasts.

Clusters on Ray use the same names of workers, the same block with its asynchronous forms, and the same way to join.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import logging
import os
import selectors
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Self

from rpcdist._launch.job_plan import HOST, Role, held_port, plan_job, this_machine
from rpcdist._launch.local_ranks import LocalRanks
from rpcdist._launch.output import KEPT_LINES, JobOutput
from rpcdist._launch.placement import Placement, placement_from_environment
from rpcdist._launch.progress import error_of, interrupted
from rpcdist._launch.rank_main import check_not_importing_main, takes_output
from rpcdist._launch.reports import RankCall, main_has_a_file, pickle_call
from rpcdist._launch.supervisor import BackgroundRanks, StopSignals, kept_interrupt
from rpcdist.deadline import Deadline
from rpcdist.errors import (
    AlreadyInitialized,
    BlockingInLoop,
    ConfigError,
    DeadlineExceeded,
    NotInitialized,
    RpcdistError,
    WorkerLost,
)
from rpcdist.giving_up import check_not_given_up
from rpcdist.ids import check_worker_name
from rpcdist.own_shortage import check_can_start, names_shortage
from rpcdist.time_limits import (
    CHECK_INTERVAL_S,
    CLOSE_LIMIT_S,
    CLUSTER_START_LIMIT_S,
    INIT_NOTICE_S,
    QUICK_ANSWER_LIMIT_S,
)
from rpcdist.waiters import run_in_thread

if TYPE_CHECKING:
    from rpcdist.rpc import RpcOptions


def worker_names(workers: int | Sequence[str]) -> tuple[str, ...]:
    """The names of the workers, by rank; raises `ConfigError`."""
    if isinstance(workers, int):
        names = [f"worker{rank}" for rank in range(workers)]
    else:
        names = [] if isinstance(workers, str) or not isinstance(workers, Iterable) else list(workers)
    if not names:
        raise ConfigError(f"workers={workers!r}: give the number of workers, at least 1, or a list of their names")
    for name in names:
        check_worker_name(name)
        if names.count(name) > 1:
            raise ConfigError(
                f"workers={workers!r}: the name {name!r} occurs twice; give every worker a different name"
            )
    return tuple(names)


class ClusterBlock(ABC):
    """A cluster that a `with` block starts and closes; `start` and `close` also have forms for coroutines."""

    def __init__(self) -> None:
        self._running: list[BackgroundRanks] = []  # the processes of the other workers
        self._held = ExitStack()  # what the cluster needs until its end, such as the port
        self._is_worker = False

    @abstractmethod
    def start(self) -> Self:
        """Starts the workers."""

    def close(self) -> None:
        """Shuts the job down: waits until no worker has unfinished work, and then until the processes have ended.

        Raises:
            ProcessFailed: the shutdown of another worker failed.
            DeadlineExceeded: a process did not end.
        """
        if not self._is_worker:
            return
        from rpcdist import rpc

        try:
            self._stop_others()
            if rpc.api._is_current_rpc_agent_set():  # otherwise the block has called `shutdown` itself
                rpc.shutdown()
            self._is_worker = False
            for ranks in self._running:
                ranks.wait_until_ended()
                ranks.raise_exception()
        except KeyboardInterrupt:
            raise interrupted() from None
        finally:
            self._abandon()

    @abstractmethod
    def _stop_others(self) -> None:
        """Asks the other workers to leave the job, before this one leaves."""

    def _abandon(self) -> None:
        """Ends what is left of the job at once. After a signal, it waits for no reader of the output; then the signal
        takes effect, if it is the first one.
        """
        is_first = not isinstance(sys.exc_info()[1], KeyboardInterrupt)
        if not is_first:
            self._drop_output()
        with StopSignals(self._drop_output) as stop:
            self._pause()
            running, self._running = self._running, []
            try:
                if self._is_worker:
                    self._is_worker = False
                    with suppress(NotInitialized):  # the block, or another thread, has shut it down
                        sys.modules["rpcdist.rpc"].shutdown(graceful=False)
            finally:
                for ranks in running:
                    ranks.end()
                self._held.close()
        if is_first and stop.received is signal.SIGINT:
            raise interrupted()
        if is_first and stop.received is not None:
            signal.raise_signal(stop.received)

    @abstractmethod
    def _pause(self) -> None:
        """Stops the processes, so that none reports the end of the job as a failure."""

    @abstractmethod
    def _drop_output(self) -> None:
        """Drops the output of the processes that its reader has not read."""

    def _cancel(self) -> None:
        """Ends a start that is under way on another thread."""
        self._abandon()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
            return
        self._abandon()
        if kind is KeyboardInterrupt:
            raise interrupted() from None

    async def start_async(self) -> Self:
        """`start` for coroutines and notebooks. If the task is cancelled, no process is left behind."""
        await run_in_thread(self.start, self._cancel, name="rpcdist-cluster-start", ends_waits=True)
        return self

    async def close_async(self) -> None:
        """`close` for coroutines and notebooks. If the task is cancelled, the job ends at once."""
        await run_in_thread(self.close, self._abandon, name="rpcdist-cluster-end")

    async def __aenter__(self) -> Self:
        return await self.start_async()

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        await run_in_thread(partial(self.__exit__, kind, error, traceback), self._abandon, name="rpcdist-cluster-end")


def join_cluster(rank: int, names: Sequence[str], address: str, given: RpcOptions | None, serve: bool = False) -> None:
    """Joins as worker `rank` of `names`, with the user's options; with `serve`, serves until the job ends."""
    from rpcdist import rpc  # late: this process starts the other ones before it imports torch

    options = rpc.RpcOptions() if given is None else copy.copy(given)
    options.init_method = address
    if not main_has_a_file():
        options.by_value = True
    rpc.init_rpc(names[rank], rank=rank, world_size=len(names), rpc_backend_options=options)
    if serve:
        rpc.shutdown()


logger = logging.getLogger("rpcdist.cluster")


class LocalCluster(ClusterBlock):
    """A job on this machine: this process is its worker of rank 0, and the others are processes started for it.

        if __name__ == "__main__":
            with rpcdist.LocalCluster(4):
                print(rpc.rpc_sync("worker3", pow, (2, 10)))

    Inside the block, everything in `rpcdist.rpc` works. The block ends with a graceful `shutdown`, after which the
    processes end; after an exception they are ended at once. Use `async with` in a coroutine, `start` and `close` at a
    prompt, and `await start_async()` and `await close_async()` in a notebook, whose cells run on an event loop.

    Each process imports the main module, as with `multiprocessing`, so a script needs the guard above, and functions
    that are called must be defined at the top level of a module. In a notebook, and under `python -c` and `python -`,
    functions and classes of the main module are sent by value. No process outlives this one (on Linux).

    Under torchrun, srun, mpirun or another launcher of several processes, this starts no process. The launcher's
    process of rank 0 runs the block; the others serve in `with` until it ends, and then exit.

    Args:
        workers: the number of workers, including this process, with the names `worker0`, `worker1` and so on; or the
            names.
        options: for all workers; the cluster sets `init_method`.
        env: additional environment variables of the new processes; or a list with those of each worker, empty for the
            first, which is this process.
        resources: of each worker, as in `launch`: with `{"GPU": 1}`, the workers see as many GPUs as there are workers,
            and LOCAL_RANK is the number of a worker's own GPU.
        prefix: whether each line that a new process writes begins with its worker's name.
        log_dir: a folder for the output of the new processes, in files `NAME.0.log`.
        dashboard: whether another process serves a web page that shows the job live; its address is printed.

    Attributes:
        names: the names of the workers, by rank.
        dashboard_url: the address of that page, once the job is complete; None without a page.

    Raises:
        ConfigError: an argument is invalid, or the launcher's WORLD_SIZE is not the number of workers.
        SystemExit: the script has no guard; the text has the line where it belongs.
        AlreadyInitialized: this process is a worker already.
        ProcessFailed: a new process failed before the job was complete; the text has its traceback.
        DeadlineExceeded, RendezvousError: the workers did not join in time.
    """

    def __init__(
        self,
        workers: int | Sequence[str],
        *,
        options: RpcOptions | None = None,
        env: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
        resources: Mapping[str, float] | None = None,
        prefix: bool = False,
        log_dir: str | os.PathLike[str] | None = None,
        dashboard: bool = False,
    ) -> None:
        super().__init__()
        self.names = worker_names(workers)
        # Checked here, since otherwise each new process would report it with a traceback.
        if options is not None and not hasattr(options, "init_method"):
            raise ConfigError(f"options={options!r}: give an rpc.RpcOptions, or nothing")
        if env and not isinstance(env, Mapping) and env[0]:
            raise ConfigError(
                f"env has {dict(env[0])} for {self.names[0]!r}, which is this process and has started already: leave "
                "it empty, and set os.environ"
            )
        role = Role("worker", join_cluster, len(self.names), env=env, resources=resources)
        check_can_start("the cluster")
        self._plans, _ = plan_job([role], {}, os.environ, this_machine(os.environ), named=False)
        self._options = options
        self._output = JobOutput(prefix, log_dir, takes_output)
        self._wants_dashboard = dashboard
        self.dashboard_url: str | None = None
        self._engine: LocalRanks | None = None
        self._cancelled = False

    def __repr__(self) -> str:
        return f"<LocalCluster of {', '.join(self.names)}{'' if self._is_worker else ' [closed]'}>"

    def start(self) -> Self:
        """Starts the processes and joins the job; blocks until it is complete. Raises the errors of the class."""
        if asyncio._get_running_loop() is not None:  # checked before a process starts
            raise BlockingInLoop("LocalCluster.start", "async with LocalCluster(3):, or await cluster.start_async()")
        check_not_importing_main("LocalCluster")
        rpc = sys.modules.get("rpcdist.rpc")  # not imported yet: the new processes import it at the same time
        if rpc is not None and rpc.api._is_current_rpc_agent_set():
            raise AlreadyInitialized("this process is a worker already: call rpc.shutdown() before LocalCluster")
        placement = placement_from_environment()
        try:
            if placement is not None:
                self._join_launched(placement)
            else:
                self._start_here()
            if self._wants_dashboard:
                self._serve_dashboard()
                self._check_not_cancelled()
        except BaseException as error:
            self._abandon()
            if type(error) is KeyboardInterrupt:
                raise interrupted() from None
            if isinstance(error, RpcdistError):  # it says what to do; a traceback would hide that
                raise error.with_traceback(None) from error.__cause__
            raise
        return self

    def _stop_others(self) -> None:
        """Does nothing, since the workers of a static world leave together."""

    def logs(self, name: str) -> str:
        """The last lines that the process of a worker has written, at most 200; `log_dir` has all of them.

        Raises:
            ConfigError: no worker has this name, or it is this process.
        """
        if name not in self.names[1:]:
            raise ConfigError(f"no process was started for {name!r}; there are {', '.join(self.names[1:]) or 'none'}")
        return self._output.tail(name, KEPT_LINES)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, WorkerLost):
            self._note_failure(error)
        super().__exit__(kind, error, traceback)

    @names_shortage("starting the cluster")
    def _start_here(self) -> None:
        check_can_start("the cluster")
        port = self._held.enter_context(held_port(0))
        address = f"tcp://{HOST}:{port}"
        # The new processes import torch at the same time as this one.
        call = pickle_call(join_cluster, (self.names, address, self._options, True), imports=("rpcdist.rpc",))
        common = {**os.environ, "MASTER_ADDR": HOST, "MASTER_PORT": str(port)}
        make_engine = partial(self._make_engine, call, common)
        processes = BackgroundRanks(range(1, len(self.names)), make_engine)
        self._running.append(processes)
        self._check_not_cancelled()  # from here on, `_cancel` finds the processes
        processes.start_ranks()
        with kept_interrupt():
            importlib.import_module("rpcdist.rpc")
        with kept_interrupt():
            self._join(processes, address)
        self._is_worker = True
        self._check_not_cancelled()

    def _serve_dashboard(self) -> None:
        from rpcdist import rpc
        from rpcdist.rpc._current import current_agent

        options = self._options or rpc.RpcOptions()
        if not isinstance(options.tls, bool | None):
            raise ConfigError(
                "dashboard=True does not support tls=TlsOptions(...): leave it out, set RPCDIST_TLS "
                "(docs/security.md), and run python -m rpcdist dashboard"
            )
        variables = {"RPCDIST_JOB": options.job or ""}
        if options.token is not None:
            variables["RPCDIST_TOKEN"] = os.fsdecode(options.token)
        setting = os.environ.get("RPCDIST_TLS", "")  # it may name certificates, which the workers use, too
        if options.tls is False:
            variables["RPCDIST_TLS"] = "off"
        elif options.tls and setting.partition(",")[0] == "off":
            variables["RPCDIST_TLS"] = "auto" + setting.removeprefix("off")
        address = current_agent().inspector.facts().address
        page = served_page(address, {name: value for name, value in variables.items() if value})
        self.dashboard_url = self._held.enter_context(page)
        print(f"dashboard: {self.dashboard_url}", file=sys.stderr, flush=True)

    def _make_engine(self, call: RankCall, common: Mapping[str, str], wake: int) -> LocalRanks:
        plans = {rank: replace(one, name=self.names[rank]) for rank, one in enumerate(self._plans)}
        self._engine = LocalRanks(plans, {one.role.name: call for one in plans.values()}, common, wake, self._output)
        return self._engine

    def _join(self, processes: BackgroundRanks, address: str) -> None:
        processes.wait_until_ready(CLUSTER_START_LIMIT_S, INIT_NOTICE_S, self._warn_about_missing)
        with processes.blames_ranks():
            join_cluster(0, self.names, address, self._options)

    def _warn_about_missing(self, ranks: Sequence[int]) -> None:
        missing = ", ".join(self.names[rank] for rank in ranks)
        logger.warning("after %g s, still waiting until these have imported the program: %s", INIT_NOTICE_S, missing)

    def _cancel(self) -> None:
        """Ends the processes, and makes `start` fail when its thread checks next."""
        self._cancelled = True
        self._abandon()

    def _check_not_cancelled(self) -> None:
        if self._cancelled:
            raise DeadlineExceeded("the start of the cluster was cancelled")

    def _join_launched(self, placement: Placement) -> None:
        """Joins under a launcher: only rank 0 returns, to run the block."""
        if placement.world_size != len(self.names):
            raise ConfigError(
                f"workers={len(self.names)}, but the launcher started WORLD_SIZE={placement.world_size} processes: "
                "give LocalCluster as many workers, or call rpc.init_rpc(name) instead, or start one process"
            )
        with kept_interrupt():
            join_cluster(placement.rank, self.names, "env://", self._options, serve=placement.rank != 0)
        if placement.rank != 0:
            raise SystemExit(0)
        self._is_worker = True

    def _pause(self) -> None:
        if self._running and self._engine is not None:
            self._engine.pause()

    def _drop_output(self) -> None:
        self._output.is_unwanted = True

    def _note_failure(self, error: BaseException) -> None:
        """Adds what is known of the process that was lost."""
        for ranks in self._running:
            if (failure := ranks.failure(QUICK_ANSWER_LIMIT_S)) is not None:
                error.add_note(str(error_of(failure)))


MAX_URL_CHARS = 1000


@contextmanager
def served_page(address: str, variables: Mapping[str, str]) -> Iterator[str]:
    """The URL of the web page of a job, with its token. Another process serves the page while the block lasts.

    Args:
        address: the address of a worker of the job.
        variables: environment variables that say how to reach the job, such as its token.

    Raises:
        RpcdistError: the process has ended; its lines on the standard error stream say why.
        DeadlineExceeded: the page is not served in time.
    """
    # The address is not secret. The token is passed in the environment, which other users cannot read.
    process = subprocess.Popen(
        [sys.executable, "-m", "rpcdist", "dashboard", address, "--until-stdin-ends"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **variables},
        start_new_session=True,  # Ctrl-C at the terminal is meant for the job
    )  # fmt: skip
    try:
        yield _first_line(process)
    finally:
        process.kill()
        process.wait(CLOSE_LIMIT_S)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def _first_line(process: subprocess.Popen[bytes]) -> str:
    stream = process.stdout
    assert stream is not None
    deadline = Deadline.after(CLUSTER_START_LIMIT_S)
    line = b""
    with selectors.DefaultSelector() as ready:
        ready.register(stream, selectors.EVENT_READ)
        while not line.endswith(b"\n") and len(line) < MAX_URL_CHARS:
            check_not_given_up()
            if not ready.select(min(CHECK_INTERVAL_S, deadline.remaining_s())):
                if not deadline.expired():
                    continue
                raise DeadlineExceeded(f"the dashboard was not served within {CLUSTER_START_LIMIT_S:g} s")
            more = os.read(stream.fileno(), 4096)
            if not more:
                raise RpcdistError("the dashboard was not served; the lines of its process above say why")
            line += more
    return line.decode().strip()
