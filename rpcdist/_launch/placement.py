"""Where an engine put this process: its rank, the world size and rank 0's address, read from the environment.

`find_placement` and `torch_variables` are pure: an environment is a mapping, and no name is resolved here.

1. torch's variables win, each for itself: a MASTER_ADDR that the user sets holds beside the rank that Slurm gave.
2. An engine that started one process gave no place: `srun --pty bash` and `mpirun -n 1` may start a job themselves.
3. Two that say different things are an error that names both, except where one started the other: torchrun, and a task
   that starts as many processes as every other task, make a world of their own.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from rpcdist._launch.engine_places import EnginePlace, engine_places
from rpcdist.errors import ConfigError

ROLE_VARIABLE: Final = "RPCDIST_ROLE"
"""The role of a process and its number there, such as "trainer:3"; `launch` sets it."""

_VARIABLES: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of a process in its job.

    Attributes:
        rank: of this process.
        world_size: how many processes the job has.
        local_rank: of this process among those of its machine, where that is said.
        node_rank: of its machine, where that is said.
        host: the address of rank 0, where that is said.
        port: the port at which the processes meet there.
        role: the role of this process, where `launch` was given roles.
        role_rank: its number among those of its role.
    """

    rank: int
    world_size: int
    local_rank: int | None = None
    node_rank: int | None = None
    host: str | None = None
    port: int | None = None
    role: str | None = None
    role_rank: int | None = None

    @property
    def name(self) -> str:
        """A name for this worker: `trainer0` is the first of the role `trainer`; without roles, `worker3` is rank 3."""
        return f"worker{self.rank}" if self.role is None else f"{self.role}{self.role_rank}"


def placement_from_environment() -> Placement | None:
    """The place that `launch`, torchrun, Slurm, MPI or Kubernetes gave this process; None if it was started alone.

    Raises:
        ConfigError: the variables are not a place, or two of them say different things.
    """
    return find_placement(os.environ, socket.getfqdn)


def launcher_variable(name: str) -> str:
    """One of torch's variables, MASTER_ADDR for example: as it is set, or else as the engine implies it; else empty."""
    return torch_variables(os.environ, socket.getfqdn).get(name, "")


def how_to_set_address(environment: Mapping[str, str], own_name: Callable[[], str]) -> str:
    """Advice where an engine gives ranks, but not the address of rank 0; empty without such an engine."""
    place = _engine_of(environment, own_name, also_of_one=True)
    return "" if place is None else f"{place.says} does not say where rank 0 is: {place.advice}"


def find_placement(environment: Mapping[str, str], own_name: Callable[[], str]) -> Placement | None:
    """`placement_from_environment` for any environment; `own_name` gives the full name of this host."""
    rank, size = environment.get("RANK"), environment.get("WORLD_SIZE")
    place = _engine_of(environment, own_name)
    if place is not None and (rank is None or size is None):
        return _placement(place, environment)
    if rank is None and size is None and "TORCHELASTIC_RUN_ID" not in environment:
        return None
    try:
        placement = Placement(int(rank or ""), int(size or ""))
    except ValueError as exc:
        raise ConfigError(
            f"RANK={rank!r} and WORLD_SIZE={size!r} in the environment: a launcher sets both to whole numbers. "
            "Unset both if no launcher started this process."
        ) from exc
    if not 0 <= placement.rank < placement.world_size:
        raise ConfigError(f"RANK={rank} in the environment is not from 0 to {placement.world_size - 1} (WORLD_SIZE)")
    text = environment.get(ROLE_VARIABLE, "")
    role, _, role_rank = text.rpartition(":")
    if text and not (role and role_rank.isdecimal()):
        raise ConfigError(
            f"{ROLE_VARIABLE}={text!r} in the environment is not a role and a number in it, such as 'trainer:3'; "
            "`launch` sets it. Unset it if no launcher started this process."
        )
    return replace(
        placement,
        local_rank=_number(environment, "LOCAL_RANK"),
        node_rank=_number(environment, "GROUP_RANK"),
        host=environment.get("MASTER_ADDR"),
        port=_number(environment, "MASTER_PORT"),
        role=role or None,
        role_rank=int(role_rank) if role else None,
    )


def torch_variables(environment: Mapping[str, str], own_name: Callable[[], str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as they are set or as an engine implies them.

    Those that nothing says are absent. The only process of an engine has a place here: it joins a world of one.

    Raises:
        ConfigError: two engines say different things.
    """
    found = {name: environment[name] for name in _VARIABLES if environment.get(name)}
    is_placed = "RANK" in found and "WORLD_SIZE" in found
    place = _engine_of(environment, own_name, also_of_one="RANK" not in found and "WORLD_SIZE" not in found)
    if place is None:
        rank = environment.get("PMIX_RANK")  # PMIx has no variable for the size of the world
        return found if rank is None else {"RANK": rank} | found
    if is_placed and (found["RANK"], found["WORLD_SIZE"]) != (str(place.rank), str(place.world_size)):
        return found
    implied = (place.rank, place.world_size, place.local_rank, place.host, place.port)
    return {name: str(value) for name, value in zip(_VARIABLES, implied, strict=True) if value is not None} | found


def _engine_of(
    environment: Mapping[str, str], own_name: Callable[[], str], also_of_one: bool = False
) -> EnginePlace | None:
    """The engine that started this process, whose word agrees with torch's variables and with the other engines."""
    if "TORCHELASTIC_RUN_ID" in environment:
        return None
    places = engine_places(environment, own_name)
    several = [place for place in places if place.world_size > 1]
    rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    for place in several:
        if not _may_be(rank, size, place):
            said = " ".join(f"{name}={environment[name]}" for name in ("RANK", "WORLD_SIZE") if name in environment)
            raise _contradiction(said, place.says)
    for other in several[1:]:
        if other.world_size == several[0].world_size and other.rank != several[0].rank:
            raise _contradiction(several[0].says, other.says)
    return next(iter(several or (places if also_of_one else ())), None)


def _may_be(rank: int | None, size: int | None, place: EnginePlace) -> bool:
    """Whether torch's variables fit an engine's: they say the same, or this process is one of several of its task."""
    if rank is None or size is None:
        return rank in (None, place.rank) and size in (None, place.world_size)
    per_task, rest = divmod(size, place.world_size)
    return rest == 0 and per_task > 0 and rank // per_task == place.rank


def _contradiction(one: str, other: str) -> ConfigError:
    return ConfigError(
        f"two launchers say different things about this process: {one}, and {other}. Unset the variables of the one "
        "that did not start it."
    )


def _placement(place: EnginePlace, environment: Mapping[str, str]) -> Placement:
    host = environment.get("MASTER_ADDR") or place.host
    port = _number(environment, "MASTER_PORT")
    return Placement(
        place.rank, place.world_size, place.local_rank, place.node_rank, host, place.port if port is None else port
    )


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else None
