"""Options of `init_rpc`: ours (`RpcOptions`), and torch's names for ported scripts.

    RpcBackendOptions                    rpc_timeout and init_method: what every backend has
    └── RpcOptions                       all options of rpcdist; each has a default
        └── TensorPipeRpcBackendOptions  the same, with the constructor that torch's scripts call

Options are plain values: constructing them opens nothing. `rpc_timeout`, `init_method`, `num_worker_threads`, the
devices and the device maps may be changed until `init_rpc` reads them.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from types import UnionType
from typing import SupportsIndex, TypeVar

import torch

from rpcdist.deadline import checked_timeout
from rpcdist.errors import ConfigError
from rpcdist.rpc.constants import (
    DEFAULT_INIT_METHOD,
    DEFAULT_INIT_TIMEOUT_SEC,
    DEFAULT_MAX_IN_FLIGHT_BYTES,
    DEFAULT_MAX_WORKER_THREADS,
    DEFAULT_NUM_WORKER_THREADS,
    DEFAULT_ORPHAN_TIMEOUT_SEC,
    DEFAULT_PEER_TIMEOUT_SEC,
    DEFAULT_RPC_TIMEOUT_SEC,
)
from rpcdist.time_limits import LOG_CALLS_AFTER_S
from rpcdist.transport import TlsOptions

by_value_by_default = False
"""Set by a launcher whose ranks cannot import the program, such as the ranks of a notebook on Ray."""

__all__ = ["DeviceMap", "DeviceType", "RpcBackendOptions", "RpcOptions", "TensorPipeRpcBackendOptions", "TlsOptions"]

T = TypeVar("T")
DeviceType = int | str | torch.device
"""The ways to write a device."""
DeviceMap = dict[torch.device, torch.device]
"""The device at the callee for each device of the caller."""

MAX_ROLE_LENGTH = 128

# Private arguments that torch accepts. The transport layer negotiates channels, so the names have no effect, except
# that GPU tensors travel through host memory if "cuda_ipc" is not among them.
_TRANSPORTS = frozenset({"ibv", "shm", "uv"})
_CHANNELS = frozenset({"basic", "cma", "cuda_basic", "cuda_gdr", "cuda_ipc", "cuda_xth", "mpt_uv", "xth"})


class RpcBackendOptions:
    """The options that every backend has: a default timeout, and the URL at which the workers find each other.

    Backends that are added with `backend_registry.register_backend` derive their options from this class.

    Args:
        rpc_timeout: the default timeout of calls, in seconds; 0 means no limit.
        init_method: `env://`, `tcp://host:port` or `file:///path`, as for `init_process_group`.

    Raises:
        TypeError: an argument has the wrong type (a `timedelta` is not a number of seconds).
        ConfigError: the timeout is negative or not a number.
    """

    def __init__(self, rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC, init_method: str = DEFAULT_INIT_METHOD) -> None:
        self._rpc_timeout = self._checked_timeout(rpc_timeout, "constructor")
        self._init_method = self._checked_init_method(init_method, "constructor")

    @property
    def rpc_timeout(self) -> float:
        """The default timeout of calls, in seconds; 0 means no limit."""
        return self._rpc_timeout

    @rpc_timeout.setter
    def rpc_timeout(self, seconds: float) -> None:
        self._rpc_timeout = self._checked_timeout(seconds, "function")

    @property
    def startup_limit_s(self) -> float | None:
        """The time for which `init_rpc` waits for other workers, in seconds; None for no limit."""
        return self._rpc_timeout or None

    @property
    def init_method(self) -> str:
        """The URL at which the workers find each other."""
        return self._init_method

    @init_method.setter
    def init_method(self, url: str) -> None:
        self._init_method = self._checked_init_method(url, "function")

    # The words "incompatible constructor (function) arguments" are torch's, and callers match them.
    def _checked_timeout(self, seconds: object, kind: str) -> float:
        try:
            return checked_timeout(seconds, "RPC Timeout")
        except TypeError as exc:
            raise TypeError(f"{type(self).__name__}: incompatible {kind} arguments: {exc}") from None

    def _checked_init_method(self, url: object, kind: str) -> str:
        if not isinstance(url, str):
            raise TypeError(
                f"{type(self).__name__}: incompatible {kind} arguments: init_method is a URL (str), but got {url!r}"
            )
        return url


class RpcOptions(RpcBackendOptions):
    """All options of `init_rpc`. All arguments are keyword-only, and all have defaults.

    Args:
        num_worker_threads: accepted for compatibility, reported as `agent.thread_pool_size`. Threads start on demand.
        max_worker_threads: the cap on threads that run synchronous functions; the error at the cap names this option.
        rpc_timeout: the default timeout of calls, in seconds; 0 means no limit.
        init_method: `env://`, `tcp://host:port` or `file:///path`.
        device_maps: for each callee, the map from this worker's devices to the callee's.
        devices: the local CUDA devices that calls may use; by default those of the device maps.
        init_timeout: seconds that `init_rpc` waits for the other workers; by default 60, or `rpc_timeout` if that is
            longer (or 0, no limit).
        peer_timeout: seconds of silence after which a peer is declared lost.
        shutdown_timeout: seconds that `shutdown` waits for the other workers if it has no timeout argument; None waits
            as long as they live, because a server may call `shutdown` hours before its trainers do.
        orphan_timeout: seconds that a worker waits for the replacement of a lost rank 0; then `serve` raises
            `CoordinatorLost`. By default 600; 0 means no limit.
        host: the address to bind; by default loopback, or the interface that reaches the coordinator.
        port: the port to bind; 0 lets the system choose, and the choice is published to the peers.
        ports: the ports for raw connections, and for all others if `port` is 0, such as "29600-29700"; by default
            `RPCDIST_PORTS`, or else any port. Each process needs two ports; the processes of one host share the
            range.
        job: the job's name; by default `RPCDIST_JOB`, or else "default". Workers refuse processes of another job, even
            if those have the token.
        token: the job's secret; by default `RPCDIST_TOKEN`, or else a file that only this user can read.
        tls: False turns encryption off, for networks that are declared trusted; None follows `RPCDIST_TLS`;
            `TlsOptions` names certificates of your own.
        by_value: send functions that the callee cannot import (lambdas, local functions) as code, by cloudpickle; False
            by default.
        allow_functions: patterns `module:qualname` of the callables that peers may call; None allows all. `*` and `?`
            are wildcards, so `torch:*` allows every function of the module `torch`, but not of `torch.nn`. A name that
            matches only a wildcard is looked up in the dictionaries of modules and classes alone, without their
            `__getattr__`; a module is imported only if a pattern contains its whole name.
        autograd_mode: of `rpcdist.autograd.backward`: "smart", or "fast" for torch's, which hangs on unused results.
        allow_pickle: whether this worker receives and sends values that need pickle. False allows only plain values:
            None, bool, numbers, str, bytes, tensors, and lists, tuples and dicts of them; and the receiver copies
            values from shared memory, since the peer could change them while they are read. If `allow_functions` is
            None as well, peers find only functions of modules that are loaded.
        role: a name of your choice for the purpose of this worker, such as "ps"; `rpc.workers("ps")` then lists it.
        share_payloads: whether tensors of 64 KiB and more travel through shared memory between processes of one host.
            A received tensor then behaves as after `share_memory_()`: a forked child sees the same memory, and the
            tensor cannot be resized to more bytes.
        max_incoming_bytes: limit for one peer, on all its connections: the bytes that it has announced and not sent
            yet, its unanswered calls (their arguments, and 5 KiB each), and the answers that it has not read. A call or
            a result that exceeds the limit fails with `SerializationError`, and its bytes are dropped as they arrive; a
            call fails with `Overloaded` if there is no room for it or for its answer; shared memory of a peer beyond
            the limit is not used. None: the memory of this machine.
        max_in_flight_bytes: limit for the arguments of unfinished calls to one worker, in bytes; a thread that makes
            another call waits. A call that exceeds the limit is sent alone; calls of less than 4 KiB, and calls that
            handlers make, do not wait.
        log_calls_after: seconds after which an unfinished call is logged, once, with the stack of the thread or
            coroutine that serves it or waits for it; 0 means never.
        _transports: torch's private argument; the names are checked and otherwise ignored.
        _channels: the same.

    Raises:
        TypeError: an argument has the wrong type.
        ConfigError: an argument has a value that cannot be used.
        ValueError: a device map is not one to one, or a device is not a CUDA device.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        max_worker_threads: int = DEFAULT_MAX_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[DeviceType, DeviceType]] | None = None,
        devices: Iterable[DeviceType] | None = None,
        init_timeout: float | None = None,
        peer_timeout: float = DEFAULT_PEER_TIMEOUT_SEC,
        shutdown_timeout: float | None = None,
        orphan_timeout: float = DEFAULT_ORPHAN_TIMEOUT_SEC,
        host: str | None = None,
        port: int = 0,
        ports: str | None = None,
        job: str | None = None,
        token: str | bytes | None = None,
        tls: bool | TlsOptions | None = None,
        by_value: bool | None = None,
        allow_functions: Sequence[str] | None = None,
        allow_pickle: bool = True,
        autograd_mode: str = "smart",
        share_payloads: bool = True,
        max_incoming_bytes: int | None = None,
        role: str = "",
        max_in_flight_bytes: int = DEFAULT_MAX_IN_FLIGHT_BYTES,
        log_calls_after: float = LOG_CALLS_AFTER_S,
        _transports: Sequence[str] | None = None,
        _channels: Sequence[str] | None = None,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        self.num_worker_threads = num_worker_threads
        self.max_worker_threads = _at_least_one("max_worker_threads", max_worker_threads)
        self._device_maps = {name: to_device_map(map_) for name, map_ in (device_maps or {}).items()}
        self._devices = _to_device_list(devices or ())
        self.init_timeout = None if init_timeout is None else _more_than_zero("init_timeout", init_timeout)
        self.peer_timeout = _more_than_zero("peer_timeout", peer_timeout)
        self.shutdown_timeout = (
            None if shutdown_timeout is None else _more_than_zero("shutdown_timeout", shutdown_timeout)
        )
        self.orphan_timeout = orphan_timeout and _more_than_zero("orphan_timeout", orphan_timeout)
        self.host = host
        self.port = _port(port)
        self.ports = _typed("ports", ports, str | None, "a string such as '29600-29700'")
        self.job = _job(job)
        self.token = _token(token)
        self.tls = _typed("tls", tls, bool | TlsOptions | None, "True, False, TlsOptions or None")
        self.by_value = by_value_by_default if by_value is None else by_value
        self.allow_functions = None if allow_functions is None else tuple(map(_pattern, allow_functions))
        self.allow_pickle = allow_pickle
        if autograd_mode not in ("smart", "fast"):
            raise ConfigError(f"autograd_mode must be 'smart' or 'fast', but got {autograd_mode!r}")
        self.autograd_mode = autograd_mode
        self.share_payloads = share_payloads
        self.max_incoming_bytes = (
            None if max_incoming_bytes is None else _at_least_one("max_incoming_bytes", max_incoming_bytes)
        )
        self.role = role
        self.max_in_flight_bytes = _at_least_one("max_in_flight_bytes", max_in_flight_bytes)
        self.log_calls_after = log_calls_after and _more_than_zero("log_calls_after", log_calls_after)
        _known("transport", _transports, _TRANSPORTS)
        _known("channel", _channels, _CHANNELS)
        self.lends_gpu_memory = _channels is None or "cuda_ipc" in _channels
        """Whether other processes of this host may read GPU memory of this process."""

    @property
    def startup_limit_s(self) -> float | None:
        if self.init_timeout is not None:
            return self.init_timeout
        return max(self.rpc_timeout, DEFAULT_INIT_TIMEOUT_SEC) if self.rpc_timeout else None

    @property
    def role(self) -> str:
        """The purpose of this worker; see the class."""
        return self._role

    @role.setter
    def role(self, role: str) -> None:
        self._role = _role(role)

    @property
    def num_worker_threads(self) -> int:
        """The requested number of threads; see the class."""
        return self._num_worker_threads

    @num_worker_threads.setter
    def num_worker_threads(self, num: int) -> None:
        self._num_worker_threads = _at_least_one("num_worker_threads", num)

    @property
    def device_maps(self) -> dict[str, DeviceMap]:
        """For each callee, the map from this worker's devices to the callee's (a copy)."""
        return {name: dict(map_) for name, map_ in self._device_maps.items()}

    @device_maps.setter
    def device_maps(self, device_maps: Mapping[str, Mapping[DeviceType, DeviceType]]) -> None:
        self._device_maps = {name: to_device_map(map_) for name, map_ in device_maps.items()}

    @property
    def devices(self) -> list[torch.device]:
        """The local CUDA devices that calls may use (a copy)."""
        return list(self._devices)

    @devices.setter
    def devices(self, devices: Iterable[DeviceType]) -> None:
        self._devices = _to_device_list(devices)

    def set_device_map(self, to: str, device_map: Mapping[DeviceType, DeviceType]) -> None:
        """Add to the device map for one callee.

        Args:
            to: the callee's name.
            device_map: maps this worker's devices (int, str or `torch.device`) to the callee's.

        Raises:
            ValueError: two devices of this worker would map to one of the callee's, or one device to two.
        """
        merged = dict(self._device_maps.get(to, {}))
        added = to_device_map(device_map)
        for source, target in added.items():
            if merged.get(source, target) != target:
                raise ValueError(
                    "`set_device_map` only supports 1-to-1 mapping, trying"
                    f" to map {source} to {target} and {merged[source]}"
                )
        merged.update(added)
        self._device_maps[to] = _one_to_one(merged.items())

    def set_devices(self, devices: Iterable[DeviceType]) -> None:
        """Set the local CUDA devices that calls may use (int, str or `torch.device`)."""
        self._devices = _to_device_list(devices)

    def allows(self, module: str, qualname: str) -> bool:
        """Whether peers may call the function of that module and qualified name."""
        if self.allow_functions is None:
            return True
        name = f"{module}:{qualname}"
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.allow_functions)

    def __repr__(self) -> str:
        # Without the token, since reprs appear in logs.
        return (
            f"<{type(self).__name__} init_method={self.init_method!r} rpc_timeout={self.rpc_timeout:g} s "
            f"[at most {self.max_worker_threads} threads, {len(self._device_maps)} device maps]>"
        )


class TensorPipeRpcBackendOptions(RpcOptions):
    """`RpcOptions` under the name, and with the constructor, that scripts written for torch use.

    Args:
        num_worker_threads: see `RpcOptions`.
        rpc_timeout: see `RpcOptions`.
        init_method: see `RpcOptions`.
        device_maps: see `RpcOptions`.
        devices: see `RpcOptions`.
        _transports: checked and otherwise ignored, like `_channels`.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[DeviceType, DeviceType]] | None = None,
        devices: Iterable[DeviceType] | None = None,
        _transports: Sequence[str] | None = None,
        _channels: Sequence[str] | None = None,
    ) -> None:
        super().__init__(
            num_worker_threads=num_worker_threads,
            rpc_timeout=rpc_timeout,
            init_method=init_method,
            device_maps=device_maps,
            devices=devices,
            _transports=_transports,
            _channels=_channels,
        )

    @property
    def startup_limit_s(self) -> float | None:
        return self.rpc_timeout or None  # as in torch


def _more_than_zero(name: str, seconds: float) -> float:
    if not _typed(name, seconds, int | float, "a number of seconds") > 0:
        raise ConfigError(f"{name} must be a positive number of seconds, got {seconds}")
    return checked_timeout(seconds, name, "write a shorter one")


def _at_least_one(name: str, num: int) -> int:
    if _typed(name, num, SupportsIndex, "an integer") < 1:
        raise ConfigError(f"{name} must be positive, got {num}")
    return index(num)


def _typed(name: str, value: T, kind: type | UnionType, what: str) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {what}, but got {value!r}")
    return value


def _port(port: int) -> int:
    if not 0 <= _typed("port", port, SupportsIndex, "an integer") < 2**16:
        raise ConfigError(f"port must be 0 (let the system choose) to 65535, got {port}")
    return index(port)


def _job(job: str | None) -> str | None:
    if job == "":
        raise ConfigError("job must not be empty; leave it out to use RPCDIST_JOB")
    return _typed("job", job, str | None, "a name (str)")


def _token(token: str | bytes | None) -> bytes | None:
    if token is None:
        return None
    if not isinstance(token, (str, bytes)):
        raise TypeError(f"token must be str or bytes, but got {type(token).__name__}")
    if not token:
        raise ConfigError("token must not be empty; leave it out to use RPCDIST_TOKEN or this user's token file")
    return token.encode() if isinstance(token, str) else token


def _pattern(pattern: object) -> str:
    text = pattern if isinstance(pattern, str) else ""
    module, colon, qualname = text.partition(":")
    if not (module and colon and qualname):
        raise ConfigError(
            f"allow_functions takes patterns 'module:qualname' such as 'my_project.jobs:train' or 'torch:*', "
            f"but got {pattern!r}"
        )
    return text


def _known(kind: str, names: Sequence[str] | None, known: frozenset[str]) -> None:
    for name in names or ():
        if name not in known:
            raise ConfigError(f"Unknown {kind}: {name}")


def to_device_map(device_map: Mapping[DeviceType, DeviceType]) -> DeviceMap:
    """Converts a user's device map. Raises `ValueError` if it is not one to one."""
    return _one_to_one((torch.device(source), torch.device(target)) for source, target in device_map.items())


def _one_to_one(pairs: Iterable[tuple[torch.device, torch.device]]) -> DeviceMap:
    sources_of: DeviceMap = {}
    for source, target in pairs:
        if target in sources_of:
            raise ValueError(
                "`device_map` only supports 1-to-1 mapping, "
                f"trying to map {source} and {sources_of[target]} to {target}"
            )
        sources_of[target] = source
    return {source: target for target, source in sources_of.items()}


def _to_device_list(devices: Iterable[DeviceType]) -> list[torch.device]:
    result = [torch.device(device) for device in devices]
    for device in result:
        if device.type != "cuda":
            raise ValueError(f"`set_devices` expect a list of CUDA devices, but got device type {device.type}.")
    return result


def _role(role: str) -> str:
    if len(_typed("role", role, str, "a string")) > MAX_ROLE_LENGTH:
        raise ConfigError(f"role has {len(role)} characters; the limit is {MAX_ROLE_LENGTH}")
    return role
