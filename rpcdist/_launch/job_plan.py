"""The roles of a job, and the plan of its ranks: their names, environments and devices. Pure."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from rpcdist._launch.placement import ROLE_VARIABLE
from rpcdist.errors import ConfigError, raised_as
from rpcdist.ids import check_worker_name

OWN_VARIABLES: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
THREADS_VARIABLE: Final = "OMP_NUM_THREADS"
DEVICES_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"

Variables = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Role:
    """Ranks of a job that run the same function: `Role("trainer", train, 4)` has trainer0, trainer1 and so on.

    Args:
        function: called with the rank of the process in the whole job, and `args`.
        count: the number of its ranks.
        args: the other arguments of the function, pickled.
        max_restarts: how often each rank is started again after its process was killed or lost.
        env: environment variables of its ranks; or a list with those of each rank.
        resources: the resources of each rank: `{"CPU": 2, "GPU": 1}`, and on Ray any resource of its nodes.
        daemon: whether the job ends without it: its ranks are stopped when all other roles have returned.
    """

    name: str
    function: Callable[..., object]
    count: int
    args: tuple[Any, ...] = ()
    max_restarts: int = 0
    env: Variables | Sequence[Variables] | None = None
    resources: Mapping[str, float] | None = None
    daemon: bool = False


Machine = tuple[int, tuple[str, ...]]
"""The resources of a machine for this process: how many cores, and the GPUs by `CUDA_VISIBLE_DEVICES` names."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank; `variables` are those that differ from the environment of this process."""

    name: str
    role: Role
    variables: dict[str, str]


def this_machine(environment: Variables) -> Machine:
    """Returns the cores and GPUs that this process may use."""
    cores = len(os.sched_getaffinity(0))
    visible = environment.get(DEVICES_VARIABLE)
    if visible is not None:
        return cores, tuple(name.strip() for name in visible.split(",") if name.strip() not in ("", "-1"))
    found = [name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)] if os.path.isdir("/dev") else []
    return cores, tuple(str(number) for number in range(len(found)))


def plan_job(
    roles: Sequence[Role], common: Variables, environment: Variables, machine: Machine | None, *, named: bool = True
) -> tuple[list[RankPlan], str]:
    """Numbers the ranks in the order of the roles, and makes the environment of each.

    LOCAL_RANK counts the ranks of a role, so that it is the number of the rank's GPU among those that the role sees.

    Args:
        common: variables of all ranks, which those of a role override.
        environment: the environment of this process, which the ranks get as well.
        machine: the machine of all ranks; None if an engine places them and gives them devices.
        named: whether the ranks learn their roles.

    Returns:
        The plans, and a text for the choices that were made without the user.

    Raises:
        ConfigError: a role is invalid, or requests more than the machine has.
    """
    _check(roles, common)
    if machine is not None:
        _check_resources(roles, machine)
    size = sum(role.count for role in roles)
    num_cores, free = (0, ()) if machine is None else machine
    plans: list[RankPlan] = []
    threads: set[int] = set()
    for role in roles:
        num_gpus = _num_gpus(role) * role.count
        gpus, free = free[:num_gpus], free[num_gpus:]
        for index in range(role.count):
            given = {**common, **_env_of(role, index)}
            own = {"RANK": str(len(plans)), "LOCAL_RANK": str(index), "WORLD_SIZE": str(size)}
            if named:
                own[ROLE_VARIABLE] = f"{role.name}:{index}"
            if gpus:
                own[DEVICES_VARIABLE] = ",".join(_visible(gpus, _num_gpus(role), index))
            if machine is not None and not {**environment, **given}.get(THREADS_VARIABLE):
                cores = int((role.resources or {}).get("CPU", num_cores // size))
                threads.add(max(1, cores))
                own[THREADS_VARIABLE] = str(max(1, cores))
            plans.append(RankPlan(f"{role.name}{index}", role, given | own))
    _check_names(plans)
    if machine is None or not threads:
        return plans, ""
    each = " or ".join(map(str, sorted(threads)))
    return plans, f"{size} processes on {num_cores} cores: {THREADS_VARIABLE}={each} in each"


def _visible(gpus: Sequence[str], per_rank: int, index: int) -> Sequence[str]:
    """Returns the GPUs that a rank sees: those of its role, with one per rank; otherwise only its own."""
    return gpus if per_rank == 1 else gpus[per_rank * index : per_rank * (index + 1)]


def _num_gpus(role: Role) -> int:
    return int((role.resources or {}).get("GPU", 0))


def _env_of(role: Role, index: int) -> Variables:
    if role.env is None:
        return {}
    return role.env if isinstance(role.env, Mapping) else role.env[index]


def _check(roles: Sequence[Role], common: Variables) -> None:
    if not roles:
        raise ConfigError("roles is empty: a job needs at least one role")
    names = [role.name for role in roles]
    for role in roles:
        if not isinstance(role.name, str) or not role.name:
            raise ConfigError(f"a role needs a name, with which the names of its workers begin, not {role.name!r}")
        check_worker_name(f"{role.name}0")
        if names.count(role.name) > 1:
            raise ConfigError(f"two roles have the name {role.name!r}: rename one")
        if isinstance(role.count, bool) or not isinstance(role.count, int) or role.count < 1:
            raise ConfigError(f"role {role.name!r}: the count of its ranks must be at least 1, not {role.count!r}")
        if role.max_restarts < 0:
            raise ConfigError(f"role {role.name!r}: max_restarts must not be negative, but is {role.max_restarts}")
        if not callable(role.function):
            raise ConfigError(f"role {role.name!r}: {role.function!r} is not a function")
        if role.env is not None and not isinstance(role.env, Mapping) and len(role.env) != role.count:
            raise ConfigError(
                f"role {role.name!r}: env has variables for {len(role.env)} ranks, but the role has {role.count}"
            )
        for index in range(role.count):
            check_environment({**common, **_env_of(role, index)})
    if all(role.daemon for role in roles):
        raise ConfigError(f"all roles ({', '.join(names)}) are daemons: the job would end when it starts")


def check_environment(variables: Variables) -> None:
    """Raises `ConfigError` if a variable is not a text, or belongs to the launcher."""
    for name, value in variables.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ConfigError(f"env[{name!r}]={value!r}: names and values of environment variables must be strings")
    if clash := sorted(set(variables).intersection(OWN_VARIABLES)):
        raise ConfigError(f"env must not have {', '.join(clash)}: `launch` sets it for each process")


def _check_resources(roles: Sequence[Role], machine: Machine) -> None:
    for role in roles:
        for name, amount in (role.resources or {}).items():
            if name not in ("CPU", "GPU"):
                raise ConfigError(
                    f"role {role.name!r} requests {name!r}: one machine has only CPU and GPU; rpcdist.ray has more"
                )
            if amount < 0 or int(amount) != amount:
                raise ConfigError(
                    f"role {role.name!r} requests {amount} {name}: on one machine it must be a whole number"
                )
    gpus = machine[1]
    wanted = sum(_num_gpus(role) * role.count for role in roles)
    if wanted > len(gpus):
        asked = ", ".join(f"{role.name}: {role.count} x {_num_gpus(role)}" for role in roles if _num_gpus(role))
        has = f"{len(gpus)} ({', '.join(gpus)})" if gpus else "none"
        raise ConfigError(f"the roles request {wanted} GPUs ({asked}), but this machine has {has}")


def _check_names(plans: Iterable[RankPlan]) -> None:
    seen: dict[str, Role] = {}
    for plan in plans:
        other = seen.setdefault(plan.name, plan.role)
        if other is not plan.role:
            raise ConfigError(
                f"roles {other.name!r} and {plan.role.name!r} would both have a worker {plan.name!r}: rename one"
            )


# ---------------------------------------------------------------- the port at which the processes find each other

HOST: Final = "127.0.0.1"


@contextmanager
def held_port(port: int, host: str = HOST) -> Iterator[int]:
    """Reserves a port on which rank 0 can listen, but other programs cannot.

    Our socket is bound but does not listen. With SO_REUSEADDR on both sockets, the kernel lets a second socket bind and
    listen there, as all servers for rendezvous do, torch's too. But the kernel never chooses the port for a program
    that requests any free port, or for an outgoing connection.
    """
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"master_port {port}: must be between 0 and 65535")
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with raised_as(ConfigError, f"master_port {port}", OSError):
            holder.bind((host, port))
        yield holder.getsockname()[1]
