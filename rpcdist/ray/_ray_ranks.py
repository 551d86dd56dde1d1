"""The Ray engine: ranks are actors, each in its bundle of a placement group."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import spawn
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rpcdist._launch.job_plan import DEVICES_VARIABLE, RankPlan
from rpcdist._launch.reports import (
    Event,
    Exited,
    ProcessEnded,
    Raised,
    RankCall,
    Ready,
    Report,
    Returned,
    report_of_exception,
)
from rpcdist.errors import ConfigError
from rpcdist.time_limits import SIGNAL_CHECK_INTERVAL_S


@dataclass(frozen=True, slots=True)
class Where:
    """Where an actor runs: the address and name of its node, and the GPUs that Ray gave it."""

    address: str
    node: str
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MainModule:
    """How the workers import the script of the driver, so that its functions have one name everywhere.

    Attributes:
        path: absolute; of the driver.
        below: relative to the driver's working directory, which Ray may ship (`working_dir`); None if it is not below.
    """

    path: str
    below: str | None
    argv: list[str]


class RankActor:
    """See the module. Ray shows `repr` in front of each line that the process writes."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def where(self) -> Where:
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return Where(ray.util.get_node_ip_address(), os.uname().nodename, tuple(map(str, gpus)))

    def prepare(self, variables: Mapping[str, str], token: str, main: MainModule | None, call: RankCall) -> None:
        """Sets the environment and the token, and imports what the function needs."""
        os.environ.update(variables)
        os.environ.setdefault("RPCDIST_HOST", ray.util.get_node_ip_address())
        from rpcdist.transport.token import set_job_token  # after the environment is set

        set_job_token(token)
        if main is not None:
            _import_main(main)
        else:
            from rpcdist.rpc import options

            options.by_value_by_default = True
        self._function, self._args = call.load()
        self._call = call

    def run(self, rank: int) -> Report:
        try:
            return Returned(self._call.dump_result(self._function(rank, *self._args)))
        except BaseException as error:  # SystemExit, too, for which Ray would end the actor
            return report_of_exception(error)
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()


def _import_main(main: MainModule) -> None:
    found = next((path for path in (main.below, main.path) if path is not None and os.path.isfile(path)), None)
    if found is None:
        raise ConfigError(
            f"the script {main.path} is not on the node {os.uname().nodename}, whose processes import it: have Ray "
            "ship its folder, rpcdist.ray.launch(..., runtime_env={'working_dir': '.'}), or put it on a shared disk"
        )
    path = os.path.abspath(found)
    if os.path.dirname(path) not in sys.path:
        sys.path.insert(0, os.path.dirname(path))
    preparation: dict[str, Any] = {"init_main_from_path": path, "sys_argv": main.argv}
    spawn.prepare(preparation)


@dataclass(eq=False)
class RayRanks:
    """See `RankEngine`.

    Args:
        token: the job's secret. It travels as an argument of a method, never in an environment or a file.
        main: the script of the driver; None if functions are sent by value.
        group: a bundle for each rank; removed at the end.
        wake: `reports` returns soon while this is readable.
        placed: called once, when all ranks run, with the place of each.
    """

    _plans: Mapping[int, RankPlan]
    _calls: Mapping[str, RankCall]
    _common: Mapping[str, str]
    _token: str
    _main: MainModule | None
    _group: PlacementGroup
    _runtime_env: dict[str, Any] | None
    _wake: Any
    _placed: Callable[[Mapping[int, Where]], object] | None

    def __post_init__(self) -> None:
        self._bundles = {rank: index for index, rank in enumerate(self._plans)}
        self._actors: dict[int, Any] = {}
        self._pending: dict[Any, tuple[int, str]] = {}  # by the future of a call: its rank and method
        self._where: dict[int, Where] = {}  # of the ranks that run
        self._local_ranks: dict[int, int] = {}

    def start_rank(self, rank: int, attempt: int) -> None:
        plan = self._plans[rank]
        wanted = dict(plan.role.resources or {"CPU": 1})
        self._actors[rank] = (
            ray.remote(RankActor)
            .options(
                num_cpus=wanted.pop("CPU", 0),
                num_gpus=wanted.pop("GPU", 0),
                resources=wanted,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=self._bundles[rank]
                ),
                max_restarts=0,
                runtime_env=self._runtime_env,
            )
            .remote(plan.name)
        )
        self._ask(rank, "where")

    def reports(self, limit_s: float) -> list[tuple[int, Event]]:
        end = time.monotonic() + limit_s
        while True:
            wait_s = max(0.0, min(SIGNAL_CHECK_INTERVAL_S, end - time.monotonic()))
            if not self._pending:
                woken = select.select([self._wake], [], [], wait_s)[0]
                done: list[Any] = []
            else:
                done, _ = ray.wait(list(self._pending), num_returns=1, timeout=wait_s)
                woken = select.select([self._wake], [], [], 0)[0]
            events = [event for future in done for event in self._take(future)]
            if events or woken or time.monotonic() >= end:
                return events

    def end(self) -> None:
        for rank in list(self._actors):
            self._kill(rank)
        with suppress(RayError, ValueError):  # Ray has been shut down, or is lost
            remove_placement_group(self._group)

    def _ask(self, rank: int, method: str, *arguments: object) -> None:
        self._pending[getattr(self._actors[rank], method).remote(*arguments)] = rank, method

    def _take(self, future: Any) -> list[tuple[int, Event]]:
        rank, method = self._pending.pop(future)
        now = time.monotonic()
        try:
            answer = ray.get(future)
        except RayTaskError as error:  # the function or the script could not be imported
            cause = error.cause if isinstance(error.cause, Exception) else error
            return self._over(rank, Raised(type(cause).__qualname__, str(error), False, now), 1)
        except RayActorError as error:
            return self._over(rank, None, None, _reason(error), has_run="never ran" not in str(error))
        if method == "where":
            self._place(rank, answer)
            return []
        if method == "prepare":
            self._ask(rank, "run", rank)
            return [(rank, Ready())]
        report: Report = answer
        if isinstance(report, Raised | Exited):
            report = replace(report, moment=now)  # the clock of another machine is not comparable
        return self._over(rank, report, 0)

    def _over(
        self, rank: int, report: Report | None, returncode: int | None, reason: str = "", has_run: bool = True
    ) -> list[tuple[int, Event]]:
        """The report of a rank whose actor cannot be used any more."""
        self._kill(rank)
        end = ProcessEnded(returncode, time.monotonic(), reason, has_run)
        return [(rank, end)] if report is None else [(rank, report), (rank, end)]

    def _kill(self, rank: int) -> None:
        self._where.pop(rank, None)
        self._local_ranks.pop(rank, None)
        with suppress(RayError, ValueError):  # it is dead, or Ray has been shut down
            ray.kill(self._actors.pop(rank), no_restart=True)

    def _place(self, rank: int, where: Where) -> None:
        """Notes the process of a rank. When all ranks have one, prepares them; prepares later ones at once."""
        self._where[rank] = where
        if self._placed is None:
            self._prepare(rank)
        elif len(self._where) == len(self._plans):
            self._placed(dict(sorted(self._where.items())))
            self._placed = None
            for each in sorted(self._where):
                self._local_ranks[each] = self._free_local_rank(each)
            for each in sorted(self._where):
                self._prepare(each)

    def _prepare(self, rank: int) -> None:
        local_rank = self._local_ranks.setdefault(rank, self._free_local_rank(rank))
        plan = self._plans[rank]
        variables = {**self._common, **plan.variables, "LOCAL_RANK": str(local_rank)}
        if visible := self._visible(rank):
            variables[DEVICES_VARIABLE] = ",".join(visible)
        self._ask(rank, "prepare", variables, self._token, self._main, self._calls[plan.role.name])

    def _free_local_rank(self, rank: int) -> int:
        """The lowest number that no other rank of the role has on this node."""
        taken = {self._local_ranks[other] for other in self._neighbours(rank) if other in self._local_ranks}
        return min(set(range(len(taken) + 1)) - taken)

    def _neighbours(self, rank: int) -> list[int]:
        """The other ranks of the role on the same node."""
        here, role = self._where[rank].address, self._plans[rank].role.name
        return [
            other
            for other, where in self._where.items()
            if other != rank and where.address == here and self._plans[other].role.name == role
        ]

    def _visible(self, rank: int) -> list[str]:
        """The GPUs that a rank sees: those of its role on this node, of which LOCAL_RANK is its own.

        Only its own GPUs if it has several, or if the loss of an earlier rank of the node left gaps in the numbers.
        """
        own = list(self._where[rank].gpus)
        by_local_rank = {self._local_ranks[other]: self._where[other].gpus for other in self._neighbours(rank)}
        by_local_rank[self._local_ranks[rank]] = tuple(own)
        gpus = [by_local_rank.get(number, ()) for number in range(self._local_ranks[rank] + 1)]
        if len(own) != 1 or any(len(of_rank) != 1 for of_rank in gpus):
            return own
        return [by_local_rank[number][0] for number in sorted(by_local_rank)]


def _reason(error: RayActorError) -> str:
    """Ray's text of the error, without the table of the actor's data."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and line[:1] not in "\t "]
    return " ".join(lines)[:500] or type(error).__name__
