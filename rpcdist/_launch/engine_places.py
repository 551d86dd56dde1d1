"""The table of engines: the variables by which Open MPI, Slurm, PMIx, Kubeflow's Trainer and Kubernetes name a process.

Each row is a function from an environment to a place, or None where the engine did not start this process. Pure.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from rpcdist.errors import ConfigError

LOOPBACK: Final = "127.0.0.1"
TORCH_PORT: Final = 29500

# Below the range from which Linux takes the ports of programs that ask for any.
_FIRST_PORT: Final = 20000
_NUM_PORTS: Final = 10000


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """The place that an engine gives to a process.

    Attributes:
        says: the engine and its variables, for messages.
        rank, world_size, local_rank, node_rank: as in `Placement`.
        host: the address of rank 0; None where the engine does not say it.
        port: the port there, the same in all processes of this job and likely another one in the next job.
        advice: what the user has to set where there is no host.
    """

    says: str
    rank: int
    world_size: int
    local_rank: int | None = None
    node_rank: int | None = None
    host: str | None = None
    port: int = TORCH_PORT
    advice: str = ""


def engine_places(environment: Mapping[str, str], own_name: Callable[[], str]) -> list[EnginePlace]:
    """The places that all engines give, the innermost first.

    `mpirun` starts its daemons by Slurm, so a rank of it finds the place of its daemon in Slurm's variables: these are
    left out there. `own_name` gives the full name of this host, and is called for an Indexed Job only.

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
    return EnginePlace(says, rank, size, local_rank, None, host, _port(job), _set_address("mpirun -x MASTER_ADDR=host"))


def _host_of_mpirun(environment: Mapping[str, str], rank: int) -> str | None:
    """The host of `mpirun`, where rank 0 runs as well unless it says otherwise on rank 0's own host."""
    uri = environment.get("OMPI_MCA_orte_hnp_uri", "")
    if rank == 0 and environment.get("OMPI_MCA_orte_local_daemon_uri", uri) != uri:
        return None
    return _host_in_uris([uri, *_pmix_uris(environment)])


def _slurm(environment: Mapping[str, str]) -> EnginePlace | None:
    step = environment.get("SLURM_STEP_ID") or environment.get("SLURM_STEPID")
    if step is None or "SLURM_PROCID" not in environment:  # a batch script has a SLURM_PROCID, and is no step
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    says, (rank, size, local_rank) = _read("Slurm", environment, ("SLURM_PROCID", size_name, "SLURM_LOCALID"))
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    on_one_host = environment.get("SLURM_STEP_NUM_NODES") == "1"
    host = LOOPBACK if on_one_host else first_host(nodes)
    port = _port(f"{environment.get('SLURM_JOB_ID')}.{step}")
    node_rank = environment.get("SLURM_NODEID", "")
    return EnginePlace(
        says,
        rank,
        size,
        local_rank,
        int(node_rank) if node_rank.isdecimal() else None,
        host or None,
        port,
        _set_address("SLURM_STEP_NODELIST is empty"),
    )


def first_host(node_list: str) -> str:
    """The first host of a list as Slurm writes it: `n01` of `n[01-04,9],m3`, and `r0n2-ib` of `r[0-1]n[2-3]-ib`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", node_list)
    return re.sub(r"\[([^\]]*)\]", lambda numbers: re.split("[-,]", numbers[1])[0], first[0] if first else "")


def _pmix(environment: Mapping[str, str]) -> EnginePlace | None:
    """PMIx has no variable for the size of the world: its launchers set their own, or the user sets WORLD_SIZE."""
    if "PMIX_RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    says, (rank, size) = _read("PMIx", environment, ("PMIX_RANK", "WORLD_SIZE"))
    host = _host_in_uris(_pmix_uris(environment))
    return EnginePlace(says, rank, size, None, None, host, _port(environment.get("PMIX_NAMESPACE", "")), _set_address())


def _pmix_uris(environment: Mapping[str, str]) -> list[str]:
    return [environment[name] for name in sorted(environment) if name.startswith("PMIX_SERVER_URI")]


def _host_in_uris(uris: Iterable[str]) -> str | None:
    """The first address of `1234.0;tcp://10.0.0.1,10.1.0.1:4567` and the like that other hosts can mean."""
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
    port = environment.get("PET_MASTER_PORT", "")
    return EnginePlace(
        says,
        rank,
        size,
        0,
        rank,
        environment.get("PET_MASTER_ADDR"),
        int(port) if port.isdecimal() else TORCH_PORT,
        _set_address("PET_MASTER_ADDR is missing"),
    )


def _indexed_job(environment: Mapping[str, str], own_name: Callable[[], str]) -> EnginePlace | None:
    """A pod's full name is JOB-INDEX.SUBDOMAIN...; RANK beside it is that of a process which the pod has started."""
    if "JOB_COMPLETION_INDEX" not in environment or "WORLD_SIZE" not in environment or "RANK" in environment:
        return None
    says, (rank, size) = _read("an Indexed Job", environment, ("JOB_COMPLETION_INDEX", "WORLD_SIZE"))
    pod, dot, subdomain = own_name().partition(".")
    job, dash, index = pod.rpartition("-")
    host = f"{job}-0.{subdomain}" if dot and dash and index == str(rank) else None
    advice = _set_address("a pod has a name for others when its template has a `subdomain`, that of a headless Service")
    return EnginePlace(says, rank, size, 0, rank, host, TORCH_PORT, advice)


def _set_address(how: str = "") -> str:
    return "set MASTER_ADDR to its host, the same for all processes" + (f" ({how})" if how else "")


def _read(engine: str, environment: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, list[int]]:
    """The words of an engine, as text and as numbers: rank, world size and, for a third name, local rank."""
    says = f"{engine} ({' '.join(f'{name}={environment.get(name)}' for name in names)})"
    try:
        numbers = [int(environment[name]) for name in names]
    except (KeyError, ValueError) as exc:
        raise ConfigError(
            f"{says}: these variables have to be whole numbers. Unset them if {engine} did not start this process"
        ) from exc
    if not 0 <= numbers[0] < numbers[1]:
        raise ConfigError(f"{says}: the rank is not from 0 to {numbers[1] - 1}")
    return says, numbers


def _port(job: str) -> int:
    return _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS
