"""`RemoteModule`: a module that lives on another worker, and is called like a local one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, NoReturn, Protocol, Self

from torch import Tensor, nn
from typing_extensions import ParamSpec, TypeVar  # `typing` has no defaults before Python 3.13

import rpcdist.rpc as rpc
from rpcdist.errors import ConfigError, NotInitialized, RpcdistError, SerializationError
from rpcdist.nn import _owner_functions
from rpcdist.nn._owner_functions import parse_remote_device
from rpcdist.rpc import Future, RRef
from rpcdist.rpc._executors.blocking import off_loop

__all__ = ["RemoteModule"]

logger = logging.getLogger(__name__)


def refuse(name: str, advice: str) -> NoReturn:
    """Raises `ConfigError`, which is a `ValueError` like torch's error."""
    raise ConfigError(f"Method ``{name}`` not supported for RemoteModule. {advice}")


def _refusing(name: str) -> Any:
    def refused(self: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
        refuse(name, f"Call it where the module lives: remote_module.get_module_rref().rpc_sync().{name}(...)")

    refused.__name__ = name
    refused.__qualname__ = f"RemoteModule.{name}"
    refused.__doc__ = "Not supported for remote modules; raises ValueError."
    return refused


# The attributes that are sent when a RemoteModule is an argument or a result of a call.
_REMOTE_MODULE_PICKLED_ATTRIBUTES = (
    "on", "device", "is_device_map_set", "is_scriptable", "generated_methods", "module_rref",
)  # fmt: skip
# Attributes that the receiver recreates.
_OWN_METHODS = ("forward_async", "forward")


P = ParamSpec("P", default=...)
R = TypeVar("R", default=Any)
R_co = TypeVar("R_co", default=Any, covariant=True)


class _HasForward(Protocol[P, R_co]):
    """A module, for type checkers: a handle takes the same arguments as the module."""

    def forward(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


def _forward_async(
    module_rref: RRef[nn.Module], device: str, has_device_map: bool, /, *args: Any, **kwargs: Any
) -> Future[Any]:
    return rpc.rpc_async(
        module_rref.owner(), _owner_functions.forward, args=(module_rref, device, has_device_map, args, kwargs)
    )


@off_loop("await module.forward_async(...)", "RemoteModule.forward")
def _forward(module_rref: RRef[nn.Module], device: str, has_device_map: bool, /, *args: Any, **kwargs: Any) -> Any:
    return rpc.rpc_sync(
        module_rref.owner(), _owner_functions.forward, args=(module_rref, device, has_device_map, args, kwargs)
    )


def _reduce(module: RemoteModule) -> tuple[Callable[..., RemoteModule], tuple[Any, ...]]:
    left = module.__dict__.keys() - {*_REMOTE_MODULE_PICKLED_ATTRIBUTES, *_OWN_METHODS, *nn.Module().__dict__}
    if left:
        logger.warning("these attributes of a RemoteModule are not sent: %s", ", ".join(sorted(left)))
    return _rebuild, (type(module), *(module.__dict__[name] for name in _REMOTE_MODULE_PICKLED_ATTRIBUTES))


def _rebuild(cls: type[RemoteModule], *attributes: Any) -> RemoteModule:
    made = cls.__new__(cls)
    made.__dict__.update(zip(_REMOTE_MODULE_PICKLED_ATTRIBUTES, attributes, strict=True))
    made._install_methods()
    return made


class RemoteModule(nn.Module, Generic[P, R]):
    """A handle to a module that lives on another worker.

        net = RemoteModule("ps0/cuda:0", nn.Linear, args=(20, 30))
        out = net(torch.randn(8, 20))               # runs there; waits for the result
        out = net.forward_async(torch.randn(8, 20)) # a future: wait for it, or await it

    Inside `autograd.context()` gradients flow through it, and `DistributedOptimizer` takes its `remote_parameters()`.
    A handle may be an argument or a result of calls: the receiver gets another handle to the same module. The module
    lives as long as one of its handles.

    As a submodule of a local module, it adds the remote state to that module's `state_dict`, follows its `train` and
    `eval`, and adds nothing to its `parameters()`.

    Args:
        remote_device: `"name"`, `"name/cuda:0"` or `"rank:0/cpu"`: the worker, and one of its devices, by default the
            CPU. Inputs are moved to the device; results come back on that of the inputs, unless `RpcOptions` has a
            device map for this worker.
        module_cls: the module's class, or a function that makes one; the owner must be able to import it.
        args, kwargs: arguments of `module_cls`.
        _module_interface_cls: a class made with `torch.jit.interface`: TorchScript compiles the module at its
            owner. Python makes the calls in any case, so the handle itself cannot be compiled.

    Attributes:
        on: name or rank of the worker.
        device: the module's device on that worker.
        module_rref: the reference to the module.

    Raises:
        NotInitialized: before `init_rpc`.
        ConfigError: (a ValueError) `remote_device` cannot be parsed.
        UnknownWorker: there is no such worker.

    If the module's constructor fails, the first use of the handle raises its error.
    """

    forward: Callable[P, R]
    forward_async: Callable[P, Future[R]]

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., _HasForward[P, R]],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        _module_interface_cls: object = None,
    ) -> None:
        super().__init__()
        self._find_worker(remote_device)
        scripted = _module_interface_cls is not None
        creation = (module_cls, args or (), kwargs or {}, self.device, scripted)
        self._refer_to(rpc.remote(self.on, _owner_functions.create, args=creation))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        rpc.internal._internal_rpc_pickler._register_reducer(cls, _reduce)

    def _find_worker(self, remote_device: str) -> None:
        if not rpc.api._is_current_rpc_agent_set():
            raise NotInitialized("RemoteModule only works in RPC. Call rpcdist.rpc.init_rpc first.")
        worker, device = parse_remote_device(remote_device)
        self.on: str | int = rpc.get_worker_info().name if worker is None else worker
        self.device = str(device)
        agent = rpc.api._get_current_rpc_agent()
        self.is_device_map_set = bool(agent._get_device_map(agent.get_worker_info(self.on)))

    def _refer_to(self, module_rref: RRef[nn.Module]) -> None:
        self.is_scriptable = False
        self.generated_methods = (_forward_async, _forward)
        self.module_rref = module_rref
        self._install_methods()

    def _install_methods(self) -> None:
        # They must not refer to this object: the cycle would keep the remote module alive until garbage collection.
        for name, method in zip(_OWN_METHODS, self.generated_methods, strict=True):
            setattr(self, name, partial(method, self.module_rref, self.device, self.is_device_map_set))

    @staticmethod
    def init_from_module_rref(
        remote_device: str, module_rref: RRef[nn.Module], _module_interface_cls: object = None
    ) -> RemoteModule:
        """Makes another handle on an existing module.

        Args:
            remote_device: where the module lives.
            module_rref: a reference to it.
            _module_interface_cls: accepted for compatibility with torch.
        """
        made = RemoteModule.__new__(RemoteModule)
        nn.Module.__init__(made)
        made._find_worker(remote_device)
        made._refer_to(module_rref)
        return made

    # ------------------------------------------------------------ calls

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls `forward`."""
        return self.forward(*args, **kwargs)

    def _ask(self, function: Callable[..., Any], *args: Any) -> Any:
        return rpc.rpc_sync(self.module_rref.owner(), function, args=(self.module_rref, *args))

    def get_module_rref(self) -> RRef[nn.Module]:
        """The reference to the module."""
        return self.module_rref

    @off_loop("await asyncio.to_thread(module.train, ...)")
    def train(self, mode: bool = True) -> Self:
        """Sets the module, at its owner, to training mode or to evaluation mode."""
        self._ask(_owner_functions.train, mode)
        self.training = mode
        return self

    def eval(self) -> Self:
        """The same as `train(False)`."""
        return self.train(False)

    @off_loop("await asyncio.to_thread(module.requires_grad_, ...)")
    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Sets whether the parameters require gradients."""
        self._ask(_owner_functions.requires_grad_, requires_grad)
        return self

    @off_loop("await asyncio.to_thread(module.to, ...)")
    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Moves the module to another device of its owner, or to another dtype, as `torch.nn.Module.to` does."""
        self.device = self._ask(_owner_functions.move, self.device, args, kwargs)
        self._install_methods()
        return self

    # ------------------------------------------------------------ parameters

    @off_loop("await asyncio.to_thread(module.remote_parameters, ...)")
    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """References to the parameters, for a `DistributedOptimizer`.

        Args:
            recurse: include the parameters of submodules.
        """
        parameters: list[RRef[nn.Parameter]] = self._ask(_owner_functions.parameter_rrefs, recurse)
        return parameters

    @off_loop("await asyncio.to_thread(module.named_parameters, ...)")
    def named_parameters(  # type: ignore[override]
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, RRef[nn.Parameter]]]:
        """The names of the parameters, with references to them."""
        return iter(self._ask(_owner_functions.named_parameter_rrefs, prefix, recurse, remove_duplicate))

    def parameters(self, recurse: bool = True) -> NoReturn:
        """Not supported, because the parameters are on another worker. Raises ValueError."""
        refuse("parameters", "Please use ``remote_parameters`` instead.")

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Not supported for direct calls; a local module that contains this one sees a module without parameters.

        Raises:
            ConfigError: (a ValueError) called directly.
        """
        if memo is None:
            refuse("named_modules", "Its submodules are on another worker.")
        return iter(() if self in memo else ((prefix, self),))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Does nothing: moving or converting the enclosing local module does not change this one; see `to`."""
        return self

    # ------------------------------------------------------------ state

    @off_loop("await asyncio.to_thread(module.state_dict, ...)")
    def state_dict(  # type: ignore[override]
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """The state of the module on the CPU. The state of an enclosing local module contains it.

        Args:
            destination: dictionary to which the state is added; a new one by default.
            prefix: the prefix of the names.
            keep_vars: accepted for compatibility with `torch.nn.Module`; the state is always a copy.
        """
        state: Any = self._ask(_owner_functions.state_dict)
        versions = getattr(state, "_metadata", {})
        if destination is None:
            if not prefix:
                found: dict[str, Any] = state
                return found
            destination = type(state)()
        destination.update((prefix + name, value) for name, value in state.items())
        if hasattr(destination, "_metadata"):
            destination._metadata.update(((prefix + name).rstrip("."), version) for name, version in versions.items())
        return destination

    @off_loop("await asyncio.to_thread(module.load_state_dict, ...)")
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a state into the module at its owner. Results and errors are as in `torch.nn.Module`."""
        return self._ask(_owner_functions.load_state_dict, state_dict, strict, assign)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Loads this module's part of a state that the enclosing local module loads."""
        mine = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        assign = bool(local_metadata.get("assign_to_params_buffers", False))
        try:
            problems = self._ask(_owner_functions.load_state_dict, mine, False, assign)
        except RuntimeError as exc:
            if isinstance(exc, RpcdistError):
                raise
            error_msgs.append(str(exc))
            return
        missing_keys += [prefix + name for name in problems.missing_keys]
        unexpected_keys += [prefix + name for name in problems.unexpected_keys]

    # ------------------------------------------------------------ pickling and printing

    def __repr__(self) -> str:
        return f"{type(self).__name__}(on={self.on!r}, device={self.device!r})"

    def __getstate__(self) -> NoReturn:
        raise SerializationError(
            "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC"
        )

    def __setstate__(self, state: object) -> NoReturn:
        raise SerializationError(
            "Cannot unpickle RemoteModule in python pickler. RemoteModule can only be unpickled when using RPC"
        )

    def __prepare_scriptable__(self) -> NoReturn:
        raise RpcdistError(
            "a RemoteModule cannot be compiled by TorchScript, because its calls are made by Python; call it from "
            "Python code. With _module_interface_cls the module itself is compiled, at its owner"
        )


# A handle that arrived in a call lacks the attributes that `nn.Module.__init__` sets. It needs some of them as a
# submodule of a local module, so the class has empty ones.
for _name, _empty in {
    "training": True,
    "_parameters": MappingProxyType({}),
    "_buffers": MappingProxyType({}),
    "_modules": MappingProxyType({}),
    "_non_persistent_buffers_set": frozenset(),
    "_load_state_dict_post_hooks": MappingProxyType({}),
}.items():
    setattr(RemoteModule, _name, _empty)

# The other methods of modules are for modules of this process.
_STAY = ("forward", "get_extra_state", "set_extra_state", *vars(RemoteModule))
REFUSED = [
    name
    for name, value in vars(nn.Module).items()
    if callable(value) and not name.startswith("_") and name not in _STAY
]
for _name in REFUSED:
    setattr(RemoteModule, _name, _refusing(_name))


rpc.internal._internal_rpc_pickler._register_reducer(RemoteModule, _reduce)

_RemoteModule = RemoteModule
"""torch's name of the class whose constructor has `_module_interface_cls`."""
