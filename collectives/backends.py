"""The backends of device types: names, the registry, and strings such as "cpu:tcp,cuda:nccl"."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib.util import find_spec
from typing import ClassVar

import torch

from rpcdist.collectives._group.backend_contract import GroupBackend, GroupContext
from rpcdist.errors import ConfigError

__all__ = [
    "Backend", "BackendConfig", "get_default_backend_for_device", "is_available", "is_backend_available",
    "is_gloo_available", "is_mpi_available", "is_nccl_available", "is_torchelastic_launched", "is_ucc_available",
    "is_xccl_available",
]  # fmt: skip

BackendFactory = Callable[..., GroupBackend]


class Backend(str):
    """The name of a backend, in lower case; `Backend("GLOO") == "gloo" == Backend.GLOO`.

    "tcp" carries CPU tensors through sockets and shared memory, and has the second name "gloo"; "nccl" carries CUDA
    tensors; "mpi" uses mpi4py; other backends can be registered.
    """

    UNDEFINED = "undefined"
    TCP = "tcp"
    GLOO = "gloo"
    NCCL = "nccl"
    UCC = "ucc"
    MPI = "mpi"
    XCCL = "xccl"
    FAKE = "fake"

    _plugins: ClassVar[dict[str, tuple[BackendFactory, bool]]] = {}  # whether it takes the extended arguments
    backend_list: ClassVar[list[str]] = [UNDEFINED, TCP, GLOO, NCCL, MPI]
    default_device_backend_map: ClassVar[dict[str, str]] = {"cpu": GLOO, "cuda": NCCL}  # programs compare with "gloo"
    backend_capability: ClassVar[dict[str, list[str]]] = {
        TCP: ["cpu", "cuda"], GLOO: ["cpu", "cuda"], NCCL: ["cuda"], MPI: ["cpu", "cuda"],
    }  # fmt: skip

    def __new__(cls, name: str) -> Backend:
        if not isinstance(name, str):
            raise ConfigError("Backend constructor parameter must be string-ish")
        return super().__new__(cls, name.lower())

    @classmethod
    def register_backend(
        cls, name: str, func: BackendFactory, extended_api: bool = False, devices: str | Sequence[str] | None = None
    ) -> None:
        """Registers a backend.

        Args:
            name: as in `init_process_group(backend=name)`.
            func: returns an object of `rpcdist.collectives.BackendBase`; called as `func(store, rank, size, timeout)`.
            extended_api: whether to call `func(context, pg_options)` instead, with a `GroupContext`.
            devices: the device types whose tensors it carries; by default "cpu" and "cuda", with a warning.
        """
        lower = name.lower()
        if not hasattr(cls, name.upper()):
            setattr(cls, name.upper(), lower)
        if lower not in cls.backend_list:
            cls.backend_list.append(lower)
        if devices is None:
            warnings.warn(
                f"Device capability of {name} unspecified, assuming `cpu` and `cuda`. Please specify it via the "
                "`devices` argument of `register_backend`.",
                stacklevel=2,
            )
        capable = ["cpu", "cuda"] if devices is None else [devices] if isinstance(devices, str) else list(devices)
        cls.backend_capability[lower] = capable
        if devices is not None:
            for device in capable:
                cls.default_device_backend_map.setdefault(device, lower)
        cls._plugins[name.upper()] = func, extended_api


class BackendConfig:
    """Device type to backend, from "tcp" or from "cpu:tcp,cuda:nccl"."""

    def __init__(self, backend: Backend | str) -> None:
        text = str(backend).lower()
        self.device_backend_map: dict[str, Backend] = {}
        if text == Backend.UNDEFINED:
            text = default_backend()
        if ":" in text:
            self._parse(text)
        elif text in Backend.backend_capability:
            self.device_backend_map = dict.fromkeys(Backend.backend_capability[text], Backend(text))
        else:
            known = ", ".join(sorted(Backend.backend_capability))
            raise ConfigError(
                f"Unknown backend type {text}; known types are {known}. Register others with Backend.register_backend."
            )

    def _parse(self, text: str) -> None:
        for pair in text.split(","):
            device, colon, name = (part.strip() for part in pair.partition(":"))
            if not (device and colon and name) or ":" in name:
                why = f"Invalid device:backend pairing: {pair!r} in {text!r}; write e.g. 'cpu:tcp,cuda:nccl'"
                raise ConfigError(why)
            if device in self.device_backend_map:
                raise ConfigError(f"Duplicate device type {device} in backend string: {text}")
            if name not in Backend.backend_capability:
                raise ConfigError(f"Unknown backend type {name} in {text!r}")
            self.device_backend_map[device] = Backend(name)

    def __repr__(self) -> str:
        return ",".join(f"{device}:{backend}" for device, backend in self.device_backend_map.items())

    def get_device_backend_map(self) -> dict[str, Backend]:
        """Returns the backend of each device type."""
        return self.device_backend_map


def make_backend(name: Backend | str, context: GroupContext) -> GroupBackend:
    """Constructs a backend; blocks until all ranks of the group can be reached.

    Raises:
        ConfigError: no backend has this name, or its dependencies are not installed.
    """
    plugin = Backend._plugins.get(name.upper())
    if plugin is not None:
        create, extended_api = plugin
        store, rank, size, timeout = context.store, context.rank, context.size, timedelta(seconds=context.timeout_s)
        made = create(context, context.options) if extended_api else create(store, rank, size, timeout)
        if not isinstance(made, GroupBackend):
            raise ConfigError(
                f"the function that was registered for the backend {name} returned {made!r}; return an object of "
                "rpcdist.collectives.BackendBase, or run the program without compat"
            )
        return made
    return _built_in(str(name))(context)


def _built_in(name: str) -> BackendFactory:
    if name in (Backend.TCP, Backend.GLOO):
        from rpcdist.collectives.tcp import TcpBackend

        return TcpBackend
    if name == Backend.NCCL:
        from rpcdist.collectives.nccl import NcclBackend

        return NcclBackend
    if name == Backend.MPI:
        from rpcdist.collectives.mpi import MpiBackend

        return MpiBackend
    raise ConfigError(f"Unknown backend type {name}; register it with Backend.register_backend")


def default_backend() -> str:
    """Returns the default of `init_process_group()`: "cpu:tcp,cuda:nccl" if both can run, otherwise "tcp"."""
    return "cpu:tcp,cuda:nccl" if is_nccl_available() else "tcp"


def get_default_backend_for_device(device: str | torch.device) -> str:
    """Returns the name of the default backend for this device's tensors: torch's name, "gloo", for those of the CPU."""
    device_type = torch.device(device).type
    backend = Backend.default_device_backend_map.get(device_type)
    if backend is None:
        raise ConfigError(f"Default backend not registered for device : {device}")
    return backend


def is_available() -> bool:
    """Returns True: this package works on every machine."""
    return True


def is_gloo_available() -> bool:
    """Returns True: "gloo" is a name of the `tcp` backend."""
    return True


def is_nccl_available() -> bool:
    """Whether this machine has a CUDA device, a recent enough CuPy, and an NCCL that CuPy can load."""
    if not torch.cuda.is_available():
        return False
    from rpcdist.collectives._nccl.communicator_calls import nccl_is_usable

    return nccl_is_usable()


def is_mpi_available() -> bool:
    """Whether mpi4py is installed."""
    return find_spec("mpi4py") is not None


def is_ucc_available() -> bool:
    """Returns False."""
    return False


def is_xccl_available() -> bool:
    """Returns False."""
    return False


def is_backend_available(backend: str) -> bool:
    """Whether the backend, or each backend in a string such as "cpu:tcp,cuda:nccl", is registered and usable here."""
    if ":" in backend:
        return all(is_backend_available(str(name)) for name in BackendConfig(backend).device_backend_map.values())
    name = backend.lower()
    if name.upper() in Backend._plugins:
        return True
    checks = {"tcp": is_gloo_available, "gloo": is_gloo_available, "nccl": is_nccl_available, "mpi": is_mpi_available}
    return name in checks and checks[name]()


def is_torchelastic_launched() -> bool:
    """Whether `torchrun` started this process."""
    return os.environ.get("TORCHELASTIC_RUN_ID") is not None
