"""The functions that a `RemoteModule` calls at the owner of its module, and the place of that owner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree

from rpcdist.errors import ConfigError
from rpcdist.rpc import RRef


def create(
    module_cls: Callable[..., nn.Module], args: Sequence[Any], kwargs: Mapping[str, Any], device: str, scripted: bool
) -> nn.Module:
    """Makes the module on a device; with `scripted`, compiles it with TorchScript."""
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, "
            f"but it returns an instance of {type(module)}."
        )
    module.to(device)
    return torch.jit.script(module) if scripted else module


def forward(
    module_rref: RRef[nn.Module], device: str, has_device_map: bool, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Calls the module with its inputs on its device.

    Results are moved to the device of the first input, unless the caller has a device map: the caller has that device.
    """
    module = module_rref.local_value()
    place = device_of(module, device)
    if place.type == "cpu":
        return module(*args, **kwargs)
    result = module(*_moved(args, place), **_moved(kwargs, place))
    if has_device_map:
        return result
    inputs = (leaf.device for leaf in tree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and not leaf.is_cpu)
    return _moved(result, next(inputs, torch.device("cpu")))


def device_of(module: nn.Module, otherwise: str) -> torch.device:
    """The device of the module's first parameter or buffer; the caller may not know that the module was moved."""
    first = next(chain(module.parameters(), module.buffers()), None)
    return torch.device(otherwise) if first is None else first.device


def _moved(value: Any, device: torch.device) -> Any:
    return tree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


def parameter_rrefs(module_rref: RRef[nn.Module], recurse: bool) -> list[RRef[nn.Parameter]]:
    return [RRef(parameter) for parameter in module_rref.local_value().parameters(recurse)]


def named_parameter_rrefs(
    module_rref: RRef[nn.Module], prefix: str, recurse: bool, remove_duplicate: bool
) -> list[tuple[str, RRef[nn.Parameter]]]:
    named = module_rref.local_value().named_parameters(prefix, recurse, remove_duplicate)
    return [(name, RRef(parameter)) for name, parameter in named]


def train(module_rref: RRef[nn.Module], mode: bool) -> None:
    module_rref.local_value().train(mode)


def requires_grad_(module_rref: RRef[nn.Module], requires_grad: bool) -> None:
    module_rref.local_value().requires_grad_(requires_grad)


def move(module_rref: RRef[nn.Module], device: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Moves or converts the module in place; returns its device."""
    module = module_rref.local_value().to(*args, **kwargs)
    return str(device_of(module, device))


def state_dict(module_rref: RRef[nn.Module]) -> dict[str, Any]:
    """The state on the CPU, which can be sent without a device map; loading moves it to the module's device."""
    state = module_rref.local_value().state_dict()
    for name, value in state.items():
        state[name] = _moved(value, torch.device("cpu"))
    return state


def load_state_dict(module_rref: RRef[nn.Module], state: Mapping[str, Any], strict: bool, assign: bool) -> Any:
    """Loads a state; returns the missing and the unexpected keys, like the module's own method."""
    return module_rref.local_value().load_state_dict(state, strict=strict, assign=assign)


def parse_remote_device(text: str) -> tuple[str | int | None, torch.device]:
    """Parses a text such as `"trainer0/cuda:0"` or `"rank:0"`; the default device is the CPU.

    Returns:
        The name or rank of the worker, None for this worker; and the device.

    Raises:
        ConfigError: (a ValueError) the text has another form.
        RuntimeError: torch does not know the device.
    """
    if not isinstance(text, str):
        raise TypeError(f"Invalid type for remote_device: {type(text).__name__}; write '<worker>/<device>'")
    worker, slash, device = text.partition("/")
    rank = worker.removeprefix("rank:") if worker.startswith("rank:") else None
    if "/" in device or not worker or (slash and not device) or (rank is not None and not rank.isdecimal()):
        raise ConfigError(
            f"Could not parse remote_device: {text}. The valid format is '<workername>/<device>' or "
            "'rank:<rank>/<device>' or '<device>'"
        )
    if not slash:
        with suppress(RuntimeError):
            return None, torch.device(worker)
    return worker if rank is None else int(rank), torch.device(device or "cpu")
