"""The registry of RPC backends: torch's public extension point, with rpcdist itself as the built-in `TENSORPIPE`."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed

from rpcdist.collectives import Store, TorchStoreAdapter
from rpcdist.rpc._start import start_agent
from rpcdist.rpc.constants import DEFAULT_INIT_METHOD, DEFAULT_RPC_TIMEOUT_SEC
from rpcdist.rpc.options import RpcBackendOptions, RpcOptions, TensorPipeRpcBackendOptions

__all__ = [
    "BackendType", "BackendValue", "backend_registered", "construct_rpc_backend_options", "infer_backend",
    "init_backend", "register_backend",
]  # fmt: skip


# Compared by identity: in an enum, members of equal value are aliases of one.
@dataclass(frozen=True, slots=True, eq=False)
class BackendValue:
    """A member of `BackendType`: how to make the backend's options, and how to start its agent."""

    construct_rpc_backend_options_handler: Callable[..., RpcBackendOptions]
    init_backend_handler: Callable[..., object]


class _BackendTypeBase(enum.Enum):
    """The base of every `BackendType`: an enum without members of its own."""

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"

    def __reduce_ex__(self, _protocol: object) -> tuple[Callable[[str], object], tuple[str]]:
        return _named, (self.name,)  # a member of the enum that exists then


_DOC = """The RPC backends that this process knows.

`BackendType.TENSORPIPE`, rpcdist itself under torch's name for its backend, is always there; others are added with
`register_backend`. That makes a new enum under this module's name `BackendType`, so look it up here each time
(`backend_registry.BackendType`) where backends are registered.
"""


def _enum_of(members: dict[str, BackendValue]) -> type[_BackendTypeBase]:
    functional = cast("Callable[..., type[_BackendTypeBase]]", _BackendTypeBase)
    made = functional("BackendType", members, module=__name__)
    made.__doc__ = _DOC
    return made


def _named(name: str) -> object:
    return BackendType[name]


BackendType = _enum_of({})
"""The RPC backends that this process knows, as an enum; `register_backend` makes a new one under this name."""


def backend_registered(backend_name: str) -> bool:
    """Whether a backend of that name was registered."""
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., RpcBackendOptions],
    init_backend_handler: Callable[..., object],
) -> _BackendTypeBase:
    """Add a backend.

    Args:
        backend_name: the name of the new member of `BackendType`.
        construct_rpc_backend_options_handler: called with `(rpc_timeout, init_method, **kwargs)`; makes the options.
        init_backend_handler: called with `store`, `name`, `rank`, `world_size` and `rpc_backend_options`; starts the
            agent and returns it.

    Returns:
        The member of the new `BackendType`.

    Raises:
        RuntimeError: the name is taken.
    """
    global BackendType
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    added = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    BackendType = _enum_of({backend_name: added, **{member.name: member.value for member in BackendType}})
    return BackendType[backend_name]


def construct_rpc_backend_options(
    backend: _BackendTypeBase,
    rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = DEFAULT_INIT_METHOD,
    **kwargs: object,
) -> RpcBackendOptions:
    """Make the options of a backend, with its own defaults for missing arguments."""
    value: BackendValue = backend.value
    return value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)


def init_backend(
    backend: _BackendTypeBase,
    store: object,
    name: str,
    rank: int,
    world_size: int | None,
    rpc_backend_options: RpcBackendOptions,
) -> object:
    """Start the agent of a backend and return it.

    Args:
        backend: a member of `BackendType`.
        store: the store of this job, in which the workers find each other.
        name: this worker's name.
        rank: this worker's rank.
        world_size: the number of workers; None if they may join and leave at any time.
        rpc_backend_options: the options from the backend's constructor of options.
    """
    value: BackendValue = backend.value
    return value.init_backend_handler(
        store=store, name=name, rank=rank, world_size=world_size, rpc_backend_options=rpc_backend_options
    )


def infer_backend(options: RpcBackendOptions) -> _BackendTypeBase:
    """Find the backend of some options by their class.

    Raises:
        TypeError: no registered backend makes options of that class.
    """
    if isinstance(options, RpcOptions):
        return BackendType["TENSORPIPE"]
    for candidate in BackendType:
        if candidate.name != "TENSORPIPE" and isinstance(options, type(construct_rpc_backend_options(candidate))):
            return candidate
    raise TypeError(f"Could not infer backend for options {options}")


def _construct_options(rpc_timeout: float, init_method: str, **options: Any) -> TensorPipeRpcBackendOptions:
    # Unknown keywords are dropped, as in torch: one call may carry the options of several backends.
    known = {name: options[name] for name in ("num_worker_threads", "_transports", "_channels") if name in options}
    return TensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **known)


def _start(
    store: object, name: str, rank: int, world_size: int | None, rpc_backend_options: RpcBackendOptions
) -> object:
    if not isinstance(rpc_backend_options, RpcOptions):
        raise TypeError(
            f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions` or an `RpcOptions`. {rpc_backend_options}"
        )
    return start_agent(store=_as_store(store), name=name, rank=rank, world_size=world_size, options=rpc_backend_options)


def _as_store(store: object) -> Store:
    if isinstance(store, Store):
        return store
    if isinstance(store, torch.distributed.Store):
        return TorchStoreAdapter(store)
    raise TypeError(f"`store` must be a `rpcdist.collectives.Store` or a `torch.distributed.Store`. {store}")


register_backend("TENSORPIPE", _construct_options, _start)
