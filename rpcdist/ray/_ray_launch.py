"""`rpcdist.ray.launch`: the ranks of a job on Ray's nodes."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, TypeVarTuple, overload

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from rpcdist._launch.job_plan import RankPlan, Role, plan_job
from rpcdist._launch.job_records import job_record
from rpcdist._launch.launching import check_join_timeout, progress_of, results_of, roles_of, run_here
from rpcdist._launch.output import JobOutput
from rpcdist._launch.placement import placement_from_environment
from rpcdist._launch.progress import Late, Outcome, Progress
from rpcdist._launch.rank_main import check_not_importing_main
from rpcdist._launch.reports import RankCall, main_has_a_file, pickle_call
from rpcdist._launch.supervisor import StopSignals, run_job
from rpcdist.deadline import Deadline
from rpcdist.errors import ConfigError, raised_as
from rpcdist.ray._ray_ranks import MainModule, RayRanks, Where
from rpcdist.time_limits import INIT_NOTICE_S, LONGEST_WAIT_S

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

Variables = Mapping[str, str] | Sequence[Mapping[str, str]]


@overload
def launch(
    function: Callable[[int, *Ts], T],
    args: tuple[*Ts] = ...,
    *,
    workers: int,
    resources: Mapping[str, float] | None = None,
    max_restarts: int = 0,
    join_timeout_s: float | None = None,
    env: Variables | None = None,
    strategy: str = "PACK",
    runtime_env: dict[str, Any] | None = None,
    name: str | None = None,
) -> list[T]: ...


@overload
def launch(
    *,
    roles: Sequence[Role],
    join_timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    strategy: str = "PACK",
    runtime_env: dict[str, Any] | None = None,
    name: str | None = None,
) -> dict[str, list[Any]]: ...


def launch(
    function: Callable[..., Any] | None = None,
    args: tuple[Any, ...] = (),
    *,
    workers: int | None = None,
    roles: Sequence[Role] | None = None,
    resources: Mapping[str, float] | None = None,
    max_restarts: int = 0,
    join_timeout_s: float | None = None,
    env: Variables | None = None,
    strategy: str = "PACK",
    runtime_env: dict[str, Any] | None = None,
    name: str | None = None,
) -> list[Any] | dict[str, list[Any]]:
    """`rpcdist.launch` on Ray's nodes: each rank is an actor's process. Connects to Ray if that was not done before.

    This process serves the store at which the ranks meet, so even rank 0 can be lost and restart on another
    node. After the loss of its process or node, a rank restarts up to `max_restarts` times under its rank and name; the
    others continue. The job token travels in a call of an actor, never in an environment or a file.

    The nodes import the script of this program, so put the call under `if __name__ == "__main__":`. In a
    notebook, functions and classes are sent by value.

    Args:
        function, args, workers, roles, max_restarts, name: as in `rpcdist.launch`.
        resources: for each rank, e.g. `{"CPU": 2, "GPU": 1}`; by default one CPU.
        join_timeout_s: limit for the whole job in seconds, the wait for Ray's resources included.
        env: environment variables of the ranks; they do not inherit those of this process.
        strategy: how Ray places the ranks on its nodes: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".
        runtime_env: Ray's runtime environment for the ranks; `{"working_dir": "."}` ships the folder of the script.

    Raises:
        ProcessFailed, SerializationError, SystemExit: as `rpcdist.launch`.
        DeadlineExceeded: the job did not end within `join_timeout_s`.
        ConfigError: an argument is wrong, or the cluster lacks the requested resources.
    """
    check_not_importing_main("rpcdist.ray.launch")
    check_join_timeout(join_timeout_s)
    all_roles, common = roles_of(function, args, workers, roles, env, max_restarts, resources)
    plans, _ = plan_job(all_roles, common, {}, None, named=roles is not None)
    placement = placement_from_environment()
    if placement is not None:
        return run_here(placement, plans, by_role=roles is not None)
    calls = {role.name: pickle_call(role.function, role.args) for role in all_roles}
    if not ray.is_initialized():
        ray.init(log_to_driver=True)
    deadline = Deadline.after(join_timeout_s)
    progress = progress_of(plans, join_timeout_s)
    with StopSignals() as stop:
        group = reserve(plans, strategy, deadline, stop)
        if group is None:
            outcome: Any = stop.received or Late(tuple(range(len(plans))))
        else:
            outcome = _run(plans, calls, group, runtime_env, progress, stop, name)
    return results_of(outcome, plans, progress, JobOutput(), join_timeout_s, by_role=roles is not None)


def _run(
    plans: Sequence[RankPlan],
    calls: Mapping[str, RankCall],
    group: PlacementGroup,
    runtime_env: dict[str, Any] | None,
    progress: Progress,
    stop: StopSignals,
    name: str | None,
) -> Outcome | signal.Signals:
    from rpcdist.collectives import TCPStore
    from rpcdist.transport.token import job_token

    host = ray.util.get_node_ip_address()
    store = TCPStore(host, 0, None, True, wait_for_workers=False)
    try:
        address = f"{host}:{store.port}"
        common = {
            "MASTER_ADDR": host,
            "MASTER_PORT": str(store.port),
            "RPCDIST_STORE": address,
            "RPCDIST_ATTEMPT": secrets.token_hex(8),
        }
        token = job_token().decode("utf-8", "surrogateescape")
        by_rank = dict(enumerate(plans))
        placed = partial(say_where, by_rank)
        engine = RayRanks(by_rank, calls, common, token, main_module(), group, runtime_env, stop, placed)
        with job_record(name, address, None) as write:
            return run_job(engine, progress, stop, partial(write, plans, progress))
    finally:
        store.close()


def main_module() -> MainModule | None:
    """The script of this program, for the ranks; None if functions are sent by value."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None or not main_has_a_file():
        return None
    absolute = os.path.abspath(path)
    below = os.path.relpath(absolute)
    return MainModule(absolute, None if below.startswith("..") else below, sys.argv)


def reserve(plans: Sequence[RankPlan], strategy: str, deadline: Deadline, stop: StopSignals) -> PlacementGroup | None:
    """A bundle of resources for each rank; None if a signal or the deadline came first.

    Raises:
        ConfigError: no node has the resources of a rank, or all nodes together lack those of the job. With a
            deadline, a growing cluster has until then to get them.
    """
    bundles = [dict(one.role.resources or {"CPU": 1}) for one in plans]
    if (lack := lacking(bundles, plans)) and not deadline.is_finite:
        raise ConfigError(lack)
    with raised_as(ConfigError, "Ray refuses to place the ranks", ValueError):
        group = placement_group(bundles, strategy=strategy)
    notice_at = time.monotonic() + INIT_NOTICE_S
    try:
        while not group.wait(min(LONGEST_WAIT_S, 0.2)):
            if stop.received:
                remove_placement_group(group)
                return None
            if deadline.expired():
                raise ConfigError(lack or f"Ray had no room within join_timeout_s: {_free(bundles)}")
            if time.monotonic() >= notice_at:
                notice_at = float("inf")
                print(f"waiting for room on Ray: {_free(bundles)}", file=sys.stderr)
    except BaseException:
        with suppress(RayError, ValueError):
            remove_placement_group(group)
        raise
    return group


def lacking(bundles: Sequence[Mapping[str, float]], plans: Sequence[RankPlan]) -> str:
    """The resources that the cluster lacks, with those that it has; empty if it lacks none."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for bundle, one in zip(bundles, plans, strict=True):
        for resource, amount in bundle.items():
            most = max((node.get(resource, 0) for node in nodes), default=0)
            if amount > most:
                known = ", ".join(sorted({name for node in nodes for name in node if ":" not in name}))
                return (
                    f"{one.name} asks for {amount:g} {resource}, and no node of this cluster has more than {most:g}; "
                    f"its {len(nodes)} nodes have {known}"
                )
    for resource in {resource for bundle in bundles for resource in bundle}:
        wanted, there = sum(bundle.get(resource, 0) for bundle in bundles), sum(node.get(resource, 0) for node in nodes)
        if wanted > there:
            return f"{len(bundles)} ranks ask for {wanted:g} {resource}, and this cluster has {there:g}"
    return ""


def _free(bundles: Sequence[Mapping[str, float]]) -> str:
    free = ray.available_resources()
    names = sorted({resource for bundle in bundles for resource in bundle})
    asked = {name: sum(bundle.get(name, 0) for bundle in bundles) for name in names}
    return ", ".join(f"{asked[name]:g} {name} are asked for, {free.get(name, 0):g} are free" for name in names)


def say_where(plans: Mapping[int, RankPlan], where: Mapping[int, Where]) -> None:
    """Shows the user, once, where each rank runs."""
    by_node: dict[str, list[str]] = {}
    for rank, place in where.items():
        by_node.setdefault(f"{place.node} ({place.address})", []).append(plans[rank].name)
    print("; ".join(f"{node}: {', '.join(names)}" for node, names in by_node.items()), file=sys.stderr)
