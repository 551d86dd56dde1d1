"""The rendezvous of a job's processes: turns an address into a store, a rank and a world size."""

from __future__ import annotations

import numbers
import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Final
from urllib.parse import SplitResult, urlsplit, urlunsplit

from rpcdist._launch.placement import how_to_set_address, torch_variables
from rpcdist.collectives.constants import default_pg_timeout
from rpcdist.deadline import Deadline, backoff
from rpcdist.errors import ConfigError, ConnectFailed, RendezvousError, RpcdistError, raised_as
from rpcdist.giving_up import pause
from rpcdist.time_limits import ATTEMPT_LIMIT_S, FIRST_PAUSE_S, LONGEST_PAUSE_S, MIN_ATTEMPT_S

if TYPE_CHECKING:
    from rpcdist.collectives._stores.store_base import Store, Timeout

__all__ = [
    "ATTEMPT_VARIABLE", "RendezvousHandler", "create_store", "job_attempt", "open_rendezvous", "outside_store",
    "register_rendezvous_handler", "rendezvous",
]  # fmt: skip

ATTEMPT_VARIABLE: Final = "RPCDIST_ATTEMPT"

STORE_VARIABLE: Final = "RPCDIST_STORE"
"""Names the host and port of a store that no rank serves, so that rank 0 may be lost and return elsewhere."""

FILE_SUFFIX: Final = ".rpcdist"

RendezvousHandler = Callable[..., Iterator[tuple["Store", int, int]]]
"""Called with the URL and the keyword arguments of `rendezvous`; yields (store, rank, world_size)."""

_handlers: dict[str, RendezvousHandler] = {}
"""The handlers by scheme, an extension point as in torch: modules register theirs on import, for the process."""


def register_rendezvous_handler(scheme: str, handler: RendezvousHandler) -> None:
    """Registers the handler of `scheme://` for `rendezvous`.

    Args:
        scheme: the part of the URL before the colon.
        handler: see `RendezvousHandler`; usually a generator function.

    Raises:
        RendezvousError: the scheme has a handler already.
    """
    if scheme in _handlers:
        raise RendezvousError(f"Rendezvous handler for {scheme}:// already registered")
    _handlers[scheme] = handler


def rendezvous(url: str, rank: int = -1, world_size: int = -1, **options: object) -> Iterator[tuple[Store, int, int]]:
    """Finds the other processes; the first `next()` yields (store, rank, world_size).

    `env://` reads MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, or the variables of Slurm, Open MPI and Kubernetes
    (docs/clusters.md). `tcp://host:port?rank=0&world_size=2` and `file:///path?rank=0&world_size=2` contain the values,
    or the arguments `rank` and `world_size` do. Rank 0 serves the store on the host and port; if `torchrun` started
    the process, its agent serves the store.

    Args:
        url: as above, or with a registered scheme.
        rank: rank of this process; -1 takes it from the URL or the environment.
        world_size: the number of processes; -1 as for `rank`.
        **options: for the handler, e.g. `timeout` (a `timedelta` or seconds) for connecting and for the store.

    Raises:
        ConfigError: a part is missing or wrong.
        RendezvousError: the scheme is unknown, or a second `next()` asks for another rendezvous.
        ConnectFailed: the coordinator did not answer within the timeout.
        DistNetworkError: rank 0's port is in use.
    """
    if not isinstance(url, str | bytes):
        raise ConfigError(f"`url` must be a string. {type(url)}: {url}")
    for name, value in (("rank", rank), ("world_size", world_size)):
        if not isinstance(value, numbers.Integral):
            raise ConfigError(f"`{name}` must be an integer. {value}")
    return open_rendezvous(os.fsdecode(url), rank, world_size, **options)


def open_rendezvous(url: str, rank: int, world_size: int | None, **options: object) -> Iterator[tuple[Store, int, int]]:
    """Like `rendezvous`, also for groups without a fixed size: for a `world_size` of None it yields -1.

    With None, RANK and WORLD_SIZE are optional for `env://`.
    """
    parts = urlsplit(url)
    query = _query(parts)
    size = -1 if world_size is None else world_size
    if world_size is None and parts.scheme == "env":
        # An engine's variables, unlike RANK, do not replace a rank that the caller gives.
        found = torch_variables(os.environ, socket.getfqdn) if rank == -1 else os.environ
        rank = _number("RANK", found.get("RANK") or str(rank))
        size = _number("WORLD_SIZE", found.get("WORLD_SIZE") or "-1")
    given = {"rank": rank} if rank != -1 else {}
    if size != -1 or world_size is None:
        given["world_size"] = size
    if given:
        if query.keys() & {"rank", "world_size"}:
            raise ConfigError(f"The url: {url} has node-specific arguments(rank, world_size) already.")
        text = "&".join(f"{name}={value}" for name, value in {**query, **given}.items())
        # Without a host, urlunsplit would drop the slashes of `env://`.
        url = urlunsplit(parts._replace(query=text)) if parts.netloc else f"{parts.scheme}://{parts.path}?{text}"
    if parts.scheme not in _handlers:
        known = ", ".join(f"{scheme}://" for scheme in sorted(_handlers))
        advice = "" if parts.scheme else f". Did you mean 'tcp://{parts.path}'?"
        why = f"No rendezvous handler for {parts.scheme}://; known are {known}, not {parts.geturl()!r}{advice}"
        raise RendezvousError(why)
    return _handlers[parts.scheme](url, **options)


def create_store(
    host: str, port: int, rank: int, world_size: int, timeout: Timeout | None = None, wait_for_workers: bool = True
) -> Store:
    """Returns the store at an address, which rank 0, `torchrun`'s agent or the host in RPCDIST_STORE serves.

    Args:
        host: MASTER_ADDR.
        port: MASTER_PORT.
        rank: rank of this process; 0 serves the store, or shares it if this process already serves it there.
        world_size: the number of processes; -1 for any number.
        timeout: limit for connecting and for the store's own waits; 30 minutes by default.
        wait_for_workers: whether rank 0 waits for the others. With RPC its list of members waits instead, and can name
            the missing workers.

    Raises:
        ConnectFailed: no process answered at the address within `timeout`.
        DistNetworkError: rank 0's port is in use.
    """
    from rpcdist.collectives._stores.tcp_store import TCPStore

    if not 0 <= port < 2**16:
        raise ConfigError(f"port must have value from 0 to 65535 but was {port}.")
    timeout = default_pg_timeout if timeout is None else timeout
    if uses_agent_store():
        return _agent_store(host, port, world_size, timeout)
    if (outside := outside_store()) is not None:
        return TCPStore(*outside, world_size, is_master=False, timeout=timeout, wait_for_workers=False)
    return TCPStore(host, port, world_size, rank == 0, timeout, wait_for_workers, multi_tenant=True)


def job_attempt() -> str:
    """Returns a name of this start of the job's processes, if it has one; it is a part of every key in the store.

    It separates processes of two starts that live at the same time. Dead processes of an earlier start do no harm: the
    ranks of a group agree on the members (`agreement`), and workers of RPC search again if a coordinator does not
    answer.

    Returns:
        RPCDIST_ATTEMPT if it is set, equal on all ranks and different for each start; otherwise SLURM_RESTART_COUNT,
        which is one number for the whole job. Not TORCHELASTIC_RESTART_COUNT: each agent of `torchrun` counts its own
        failures, so it differs between the nodes of one start.
    """
    return os.environ.get(ATTEMPT_VARIABLE) or os.environ.get("SLURM_RESTART_COUNT") or "0"


def outside_store() -> tuple[str, int] | None:
    """Returns host and port of the store in RPCDIST_STORE; None if it is not set, or under `torchrun`.

    Raises:
        ConfigError: the variable does not have the form host:port.
    """
    from rpcdist.transport.addresses import split_address

    named = os.environ.get(STORE_VARIABLE)
    if not named or uses_agent_store():
        return None
    with raised_as(ConfigError, f"{STORE_VARIABLE}={named}", ConfigError):
        return split_address(named)


def uses_agent_store() -> bool:
    """Whether `torchrun` started this process and its agent serves a store at MASTER_ADDR:MASTER_PORT."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _agent_store(host: str, port: int, world_size: int, timeout: Timeout) -> Store:
    import torch.distributed as torch_distributed

    from rpcdist.collectives._stores.derived_stores import TorchStoreAdapter
    from rpcdist.collectives._stores.store_base import seconds

    timeout_s = seconds(timeout)
    # torch's constructor cannot be interrupted while it connects, so it is called only when a process listens there.
    _wait_for_listener(host, port, timeout_s)
    size, limit = world_size if world_size > 0 else None, timedelta(seconds=timeout_s)
    try:
        store = torch_distributed.TCPStore(host, port, size, False, timeout=limit)
    except RuntimeError as exc:
        text = f"the store of torchrun's agent did not answer: {exc}"
        raise ConnectFailed(f"{host}:{port}", text, timeout_s) from exc
    return TorchStoreAdapter(store)


def _wait_for_listener(host: str, port: int, timeout_s: float) -> None:
    deadline = Deadline.after(timeout_s)
    pauses = backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, deadline)
    while True:
        limit_s = max(MIN_ATTEMPT_S, min(ATTEMPT_LIMIT_S, deadline.remaining_s()))
        try:
            socket.create_connection((host, port), limit_s).close()
            return
        except OSError as exc:
            if deadline.expired():
                reason = f"the store of torchrun's agent did not answer ({exc.strerror or exc}); is the agent running?"
                raise ConnectFailed(f"{host}:{port}", reason, timeout_s) from exc
        pause(next(pauses))  # no event tells that a process on another machine listens


# ---------------------------------------------------------------- env://, tcp://, file://


_HOW_TO_START = (
    "Start the processes with torchrun, srun or mpirun, or set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE in each, "
    "or pass the rank, the world size, and an init_method like tcp://127.0.0.1:29500."
)


def _env_handler(
    url: str, timeout: Timeout | None = None, wait_for_workers: bool = True, **_: object
) -> Iterator[tuple[Store, int, int]]:
    found = torch_variables(os.environ, socket.getfqdn)

    def variable(name: str) -> str:
        value = found.get(name)
        if not value:
            error = _error("env", f"environment variable {name} expected, but not set")
            advice = how_to_set_address(os.environ, socket.getfqdn) if name == "MASTER_ADDR" else ""
            error.add_note(advice or _HOW_TO_START)  # the text itself is torch's
            raise error
        return value

    query = _query(urlsplit(url))
    rank = _number("rank", query["rank"]) if "rank" in query else _number("RANK", variable("RANK"))
    size = query["world_size"] if "world_size" in query else variable("WORLD_SIZE")
    world_size = _number("WORLD_SIZE", size)
    # Ranks need only the address of an outside store, from which they read that of rank 0.
    host, port = outside_store() or (variable("MASTER_ADDR"), _number("MASTER_PORT", variable("MASTER_PORT")))
    if not 0 <= port <= 65535:
        raise _error("env", f"MASTER_PORT must be a number from 0 to 65535, not {port}")
    if "/" in host or host.count(":") == 1:
        raise _error("env", f"MASTER_ADDR must be a name or an address, and MASTER_PORT the port, but it is {host!r}")
    _check_rank("env", rank, world_size)
    _check_port("env", port, world_size)
    yield create_store(host, port, rank, world_size, timeout, wait_for_workers), rank, world_size
    raise _once("env")


def _tcp_handler(
    url: str, timeout: Timeout | None = None, wait_for_workers: bool = True, **_: object
) -> Iterator[tuple[Store, int, int]]:
    parts = urlsplit(url)
    port = _port(parts)
    if port is None:
        raise _error("tcp", "port number missing")
    if parts.hostname is None:
        raise _error("tcp", "host name missing")
    rank, world_size = _rank_and_size("tcp", _query(parts))
    _check_port("tcp", port, world_size)
    yield create_store(parts.hostname, port, rank, world_size, timeout, wait_for_workers), rank, world_size
    raise _once("tcp")


def _file_handler(url: str, timeout: Timeout | None = None, **_: object) -> Iterator[tuple[Store, int, int]]:
    from rpcdist.collectives._stores.file_store import FileStore
    from rpcdist.collectives._stores.store_base import DEFAULT_TIMEOUT

    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise _error("file", f"path missing: {parts.netloc!r} is read as a host; write three slashes, file:///path")
    if not parts.path:
        raise _error("file", "path missing")
    rank, world_size = _rank_and_size("file", _query(parts))
    # Another name than torch's file for the same URL, which has another format.
    store = FileStore(parts.path + FILE_SUFFIX, world_size, DEFAULT_TIMEOUT if timeout is None else timeout)
    yield store, rank, world_size
    raise _once("file")


def _rank_and_size(scheme: str, query: dict[str, str]) -> tuple[int, int]:
    for name in ("rank", "world_size"):
        if name not in query:
            raise _error(scheme, f"{name.replace('_', ' ')} parameter missing")
    rank, world_size = _number("rank", query["rank"]), _number("world_size", query["world_size"])
    _check_rank(scheme, rank, world_size)
    return rank, world_size


def _check_rank(scheme: str, rank: int, world_size: int) -> None:
    if world_size == 0:
        text = "the world size must be at least 1, but is 0. Check the argument world_size, or WORLD_SIZE"
        raise _error(scheme, text)
    if world_size >= 0 and not 0 <= rank < world_size:
        raise _error(scheme, f"rank {rank} is not from 0 to {world_size - 1}, though the world size is {world_size}")


def _check_port(scheme: str, port: int, world_size: int) -> None:
    if port == 0 and world_size > 1:
        raise _error(
            scheme,
            "the port is 0, so rank 0 would listen on a port that the others do not know. Choose a port that is free "
            "on the host of rank 0",
        )


def _query(parts: SplitResult) -> dict[str, str]:
    pairs = (pair.partition("=") for pair in parts.query.split("&") if pair)
    return {name: value for name, _, value in pairs}


def _port(parts: SplitResult) -> int | None:
    try:
        return parts.port
    except ValueError as exc:
        raise _error("tcp", f"the port of {parts.netloc!r} is not a number from 0 to 65535") from exc


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as exc:
        raise ConfigError(f"{name} must be a whole number, not {text!r}") from exc


def _error(scheme: str, text: str) -> ConfigError:
    return ConfigError(f"Error initializing rpcdist using {scheme}:// rendezvous: {text}")


def _once(scheme: str) -> RpcdistError:
    return RendezvousError(f"Unable to perform re-rendezvous using {scheme}:// method")


register_rendezvous_handler("env", _env_handler)
register_rendezvous_handler("tcp", _tcp_handler)
register_rendezvous_handler("file", _file_handler)
