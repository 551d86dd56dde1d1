"""The methods of `torch.nn.Module` that a `RemoteModule` refuses, with torch's error messages."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, NoReturn

from torch import nn

from rpcdist.errors import ConfigError

REFUSED = (
    "add_module",
    "apply",
    "bfloat16",
    "buffers",
    "children",
    "compile",
    "cpu",
    "cuda",
    "double",
    "extra_repr",
    "float",
    "get_buffer",
    "get_parameter",
    "get_submodule",
    "half",
    "ipu",
    "modules",
    "mtia",
    "named_buffers",
    "named_children",
    "register_backward_hook",
    "register_buffer",
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_load_state_dict_post_hook",
    "register_load_state_dict_pre_hook",
    "register_module",
    "register_parameter",
    "register_state_dict_post_hook",
    "register_state_dict_pre_hook",
    "set_submodule",
    "share_memory",
    "to_empty",
    "type",
    "xpu",
    "zero_grad",
)


def refuse(name: str, advice: str) -> NoReturn:
    """Raises `ConfigError`, which is a `ValueError` like torch's error."""
    raise ConfigError(f"Method ``{name}`` not supported for RemoteModule. {advice}")


class RefusesLocalMethods(nn.Module):
    """A module without parameters, buffers and submodules in this process."""


def _refusing(name: str) -> Any:
    def refused(self: RefusesLocalMethods, *args: Any, **kwargs: Any) -> NoReturn:
        refuse(name, f"Call it where the module lives: remote_module.get_module_rref().rpc_sync().{name}(...)")

    refused.__name__ = name
    refused.__qualname__ = f"RefusesLocalMethods.{name}"
    refused.__doc__ = "Not supported for remote modules; raises ValueError."
    return refused


# A handle that arrived in a call lacks the attributes that `nn.Module.__init__` sets. As a submodule of a local module
# it needs some of them, so the class has empty ones.
for _name, _empty in {
    "training": True,
    "_parameters": MappingProxyType({}),
    "_buffers": MappingProxyType({}),
    "_modules": MappingProxyType({}),
    "_non_persistent_buffers_set": frozenset(),
    "_load_state_dict_post_hooks": MappingProxyType({}),
}.items():
    setattr(RefusesLocalMethods, _name, _empty)

for _name in REFUSED:
    setattr(RefusesLocalMethods, _name, _refusing(_name))
