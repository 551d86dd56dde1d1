"""The functions that the tests of remote modules call on workers; driver and workers import this module."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

import rpcdist.autograd as autograd
from rpcdist.nn import RemoteModule


class Net(nn.Module):
    def __init__(self, seed: int, size: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(size, size)
        self.norm = nn.BatchNorm1d(size)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, times: int = 1, word: str = "") -> Any:
        result = torch.tanh(self.inner(x)) * self.scale * times
        return (word, result) if word else result


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, count: int) -> Tensor:
        for _ in range(count):
            x = x * self.factor
        return x


class _Interface:
    def forward(self, x: Tensor, count: int) -> Tensor:  # type: ignore[empty-body]
        pass


# torch deprecates TorchScript, and goes on offering it; workers must not write that, and here it is no error.
warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated")
ScriptedInterface = torch.jit.interface(_Interface)


class Child(RemoteModule):
    """A class of the user's own."""


class Hybrid(nn.Module):
    """A local module with a remote part."""

    def __init__(self, remote: RemoteModule) -> None:
        super().__init__()
        self.remote = remote
        self.local = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.local(self.remote(x))
        return result


def not_a_module(*args: object) -> int:
    return 3


def is_training(rref: Any) -> bool:
    return bool(rref.local_value().training)


def is_scripted(rref: Any) -> bool:
    return isinstance(rref.local_value(), torch.jit.ScriptModule)


def call_it(module: RemoteModule, *args: Any, **kwargs: Any) -> Any:
    return module.forward(*args, **kwargs)


def call_it_async(module: RemoteModule, x: Tensor) -> Any:
    return module.forward_async(x).wait()


def attributes(module: RemoteModule) -> list[str]:
    return list(module.__dict__)


def echo(module: RemoteModule) -> RemoteModule:
    return module


def in_hybrid(module: RemoteModule, x: Tensor) -> tuple[list[str], bool]:
    """A handle that came in a call is part of a local module, like one that was made here."""
    hybrid = Hybrid(module)
    hybrid.eval()
    hybrid.load_state_dict(hybrid.state_dict())
    assert hybrid(x).shape == (2, 1)
    return [name for name, _ in hybrid.named_parameters()], is_training_there(module)


def is_training_there(module: RemoteModule) -> bool:
    import rpcdist.rpc as rpc

    return rpc.rpc_sync(module.module_rref.owner(), is_training, (module.module_rref,))


def collected(rref: Any, context_id: int) -> dict[str, Tensor]:
    found = autograd.get_gradients(context_id)
    return {name: found[p] for name, p in rref.local_value().named_parameters() if p in found}
