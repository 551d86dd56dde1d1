"""The place that an engine gave this process, from the environment: its rank, the world size and rank 0's address.

`find_placement` and `torch_variables` are pure: an environment is a mapping, and no name is resolved here.

1. Each of torch's variables takes precedence: a MASTER_ADDR that the user sets is combined with the rank from Slurm.
2. An engine that started only one process gave no place: the process may start a job, as under `srun --pty bash` and
   `mpirun -n 1`.
3. Two contradicting engines are an error that names both, unless one started the other: torchrun, and a task that
   starts as many processes as every other task, make their own world.

The table of engines has the variables with which Open MPI, Slurm, PMIx, Kubeflow's Trainer and Kubernetes identify a
process. Each row is a function from an environment to a place, or None if the engine did not start this process.
"""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from rpcdist.errors import ConfigError

ROLE_VARIABLE: Final = "RPCDIST_ROLE"
"""The role of a process and its number in the role, such as "trainer:3"; `launch` sets it."""

_VARIABLES: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of a process in its job.

    Attributes:
        world_size: the number of processes in the job.
        local_rank: its rank on its machine, if known.
        node_rank: the rank of its machine, if known.
        host: the address of rank 0, if known.
        port: the port for the rendezvous on that host.
        role: the role of this process, if `launch` got roles.
        role_rank: its number in the role.
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
    """Returns the place that `launch`, torchrun, Slurm, MPI or Kubernetes gave this process; None if it runs alone.

    Raises:
        ConfigError: the variables are invalid, or two of them contradict each other.
    """
    return find_placement(os.environ, socket.getfqdn)


def launcher_variable(name: str) -> str:
    """Returns one of torch's variables, such as MASTER_ADDR: as it is set, or as the engine implies it; or empty."""
    return torch_variables(os.environ, socket.getfqdn).get(name, "")


def how_to_set_address(environment: Mapping[str, str], own_name: Callable[[], str]) -> str:
    """Returns advice if an engine gave ranks but not the address of rank 0; otherwise empty."""
    place = _engine_of(environment, own_name, also_of_one=True)
    return "" if place is None else f"{place.says} does not contain the address of rank 0: {place.advice}"


def find_placement(environment: Mapping[str, str], own_name: Callable[[], str]) -> Placement | None:
    """Like `placement_from_environment`, for any environment; `own_name` returns the full name of this host."""
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
    """Returns RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as they are set or as an engine implies them.

    Unknown variables are absent. The only process of an engine also has a place here: it joins a world of size 1.

    Raises:
        ConfigError: two engines contradict each other.
    """
    # Spaces and the brackets of IPv6 addresses are dropped: they come from files and from addresses with a port.
    found = {name: text for name in _VARIABLES if (text := environment.get(name, "").strip("[] \t\n"))}
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
    """Returns the engine that started this process; checks it against torch's variables and the other engines."""
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
    """Whether torch's variables fit an engine's: they are equal, or this process is one of several in its task."""
    if rank is None or size is None:
        return rank in (None, place.rank) and size in (None, place.world_size)
    per_task, rest = divmod(size, place.world_size)
    return rest == 0 and per_task > 0 and rank // per_task == place.rank


def _contradiction(one: str, other: str) -> ConfigError:
    return ConfigError(
        f"two launchers contradict each other about this process: {one}, and {other}. Unset the variables of the one "
        "that did not start it."
    )


def _placement(place: EnginePlace, environment: Mapping[str, str]) -> Placement:
    host = environment.get("MASTER_ADDR") or place.host
    port = _number(environment, "MASTER_PORT")
    port = place.port if port is None else port
    return Placement(place.rank, place.world_size, place.local_rank, place.node_rank, host, port)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else None


LOOPBACK: Final = "127.0.0.1"
TORCH_PORT: Final = 29500

# Below the range from which Linux chooses ports for programs.
_FIRST_PORT: Final = 20000
_NUM_PORTS: Final = 10000


@dataclass(frozen=True, slots=True)
class EnginePlace(Placement):
    """The place that an engine gives to a process.

    Attributes:
        host: the address of rank 0; None if the engine does not provide it.
        port: the port on that host, equal in all processes of this job and probably different in the next job.
        says: the engine and its variables, for messages.
        advice: what the user must set if the host is missing.
    """

    says: str = ""
    advice: str = ""


def engine_places(environment: Mapping[str, str], own_name: Callable[[], str]) -> list[EnginePlace]:
    """Returns the places from all engines, the innermost first.

    `mpirun` starts its daemons through Slurm, so Slurm's variables contain the place of a rank's daemon, and are
    ignored for its ranks. `own_name` returns the full name of this host, and is called only for an Indexed Job.

    Raises:
        ConfigError: an engine's variables contradict each other, or say that torchrun is missing.
    """
    places = [_open_mpi(environment), _slurm(environment), _pmix(environment)]
    places += [_kubeflow(environment), _indexed_job(environment, own_name)]
    found = [place for place in places if place is not None]
    if "OMPI_COMM_WORLD_RANK" in environment and "OMPI_MCA_orte_hnp_uri" in environment:
        found = [place for place in found if not place.says.startswith("Slurm")]
    return found


def _open_mpi(environment: Mapping[str, str]) -> EnginePlace | None:
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
    says, (rank, size, local_rank) = _read("Open MPI", environment, names)
    on_one_host = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(size)
    host = LOOPBACK if on_one_host else _host_of_mpirun(environment, rank)
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid", "")
    advice = _set_address("mpirun -x MASTER_ADDR=host")
    return EnginePlace(rank, size, local_rank, None, host, _port(job), says=says, advice=advice)


def _host_of_mpirun(environment: Mapping[str, str], rank: int) -> str | None:
    """Returns the host of `mpirun`, on which rank 0 runs as well unless its variables on rank 0's host differ."""
    uri = environment.get("OMPI_MCA_orte_hnp_uri", "")
    if rank == 0 and environment.get("OMPI_MCA_orte_local_daemon_uri", uri) != uri:
        return None
    return _host_in_uris([uri, *_pmix_uris(environment)])


def _slurm(environment: Mapping[str, str]) -> EnginePlace | None:
    step = environment.get("SLURM_STEP_ID") or environment.get("SLURM_STEPID")
    if step is None or "SLURM_PROCID" not in environment:  # a batch script has a SLURM_PROCID, but is not a step
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    says, (rank, size, local_rank) = _read("Slurm", environment, ("SLURM_PROCID", size_name, "SLURM_LOCALID"))
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    on_one_host = environment.get("SLURM_STEP_NUM_NODES") == "1"
    host = LOOPBACK if on_one_host else first_host(nodes)
    port = _port(f"{environment.get('SLURM_JOB_ID')}.{step}")
    node_rank = _number(environment, "SLURM_NODEID")
    advice = _set_address("SLURM_STEP_NODELIST is empty")
    return EnginePlace(rank, size, local_rank, node_rank, host or None, port, says=says, advice=advice)


def first_host(node_list: str) -> str:
    """Returns the first host of Slurm's list: `n01` for `n[01-04,9],m3`, and `r0n2-ib` for `r[0-1]n[2-3]-ib`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", node_list)
    return re.sub(r"\[([^\]]*)\]", lambda numbers: re.split("[-,]", numbers[1])[0], first[0] if first else "")


def _pmix(environment: Mapping[str, str]) -> EnginePlace | None:
    """PMIx has no variable for the size of the world: its launchers set their own, or the user sets WORLD_SIZE."""
    if "PMIX_RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    says, (rank, size) = _read("PMIx", environment, ("PMIX_RANK", "WORLD_SIZE"))
    host, port = _host_in_uris(_pmix_uris(environment)), _port(environment.get("PMIX_NAMESPACE", ""))
    return EnginePlace(rank, size, None, None, host, port, says=says, advice=_set_address())


def _pmix_uris(environment: Mapping[str, str]) -> list[str]:
    return [environment[name] for name in sorted(environment) if name.startswith("PMIX_SERVER_URI")]


def _host_in_uris(uris: Iterable[str]) -> str | None:
    """Returns the first address that other hosts can use in texts like `1234.0;tcp://10.0.0.1,10.1.0.1:4567`."""
    for uri in uris:
        for match in re.finditer(r"tcp4?://([^;/]*):\d+", uri):
            for host in match[1].split(","):
                if host and not host.startswith("127.") and ":" not in host:
                    return host
    return None


def _kubeflow(environment: Mapping[str, str]) -> EnginePlace | None:
    if "PET_NNODES" not in environment or "PET_NODE_RANK" not in environment:
        return None
    per_node = environment.get("PET_NPROC_PER_NODE", "1")
    if per_node != "1" or not environment["PET_NNODES"].isdecimal():
        if "RANK" in environment or environment["PET_NNODES"] == "1":
            return None
        raise ConfigError(
            f"Kubeflow's Trainer says PET_NNODES={environment['PET_NNODES']} PET_NPROC_PER_NODE={per_node}. Start the "
            "program with torchrun, which reads these variables, or ask the Trainer for a fixed number of nodes with "
            "one process on each"
        )
    says, (rank, size) = _read("Kubeflow's Trainer", environment, ("PET_NODE_RANK", "PET_NNODES"))
    host, port = environment.get("PET_MASTER_ADDR"), _number(environment, "PET_MASTER_PORT")
    advice = _set_address("PET_MASTER_ADDR is missing")
    return EnginePlace(rank, size, 0, rank, host, TORCH_PORT if port is None else port, says=says, advice=advice)


def _indexed_job(environment: Mapping[str, str], own_name: Callable[[], str]) -> EnginePlace | None:
    """A pod's full name is JOB-INDEX.SUBDOMAIN...; if RANK is set too, a process in the pod started this one."""
    if "JOB_COMPLETION_INDEX" not in environment or "WORLD_SIZE" not in environment or "RANK" in environment:
        return None
    says, (rank, size) = _read("an Indexed Job", environment, ("JOB_COMPLETION_INDEX", "WORLD_SIZE"))
    pod, dot, subdomain = own_name().partition(".")
    job, dash, index = pod.rpartition("-")
    host = f"{job}-0.{subdomain}" if dot and dash and index == str(rank) else None
    advice = _set_address(
        "set `subdomain` in the pod's template to a headless Service, so that other pods find it by name"
    )
    return EnginePlace(rank, size, 0, rank, host, TORCH_PORT, says=says, advice=advice)


def _set_address(how: str = "") -> str:
    return "set MASTER_ADDR to its host, the same for all processes" + (f" ({how})" if how else "")


def _read(engine: str, environment: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, list[int]]:
    """Returns an engine's variables as text and as numbers: rank, world size and, for a third name, local rank."""
    says = f"{engine} ({' '.join(f'{name}={environment.get(name)}' for name in names)})"
    try:
        numbers = [int(environment[name]) for name in names]
    except (KeyError, ValueError) as exc:
        raise ConfigError(
            f"{says}: these variables must be whole numbers. Unset them if {engine} did not start this process"
        ) from exc
    if not 0 <= numbers[0] < numbers[1]:
        raise ConfigError(f"{says}: the rank is not from 0 to {numbers[1] - 1}")
    return says, numbers


def _port(job: str) -> int:
    return _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS
