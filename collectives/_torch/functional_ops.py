"""Our side of torch's C++ code and of its compiler, apart from works (`torch_work`).

Functional collectives whose C++ code asks a group for a backend of torch's, which ours do not have, get kernels of
ours; the others call methods of the group that C++ code finds in Python. The compiler runs some functions as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, Final

import torch

_NAMESPACE: Final = "_c10d_functional"
_c10d: Any = torch._C._distributed_c10d
_libraries: Final[list[torch.library.Library]] = []


def serve_functional_ops(group_type: type, devices: Sequence[str]) -> None:
    """Gives these operations kernels of ours for groups of a type; other groups keep torch's. Idempotent."""
    if _libraries:
        return
    library = torch.library.Library(_NAMESPACE, "IMPL")  # ends with the process
    _libraries.append(library)
    for name, position, ours in (("all_gather_into_tensor_out", 2, _all_gather_out), ("batch_p2p_ops", 4, _batch_p2p)):
        if not hasattr(getattr(torch.ops, _NAMESPACE), name):
            continue  # batch_p2p_ops came with torch 2.12
        for device in devices:
            kernel = _choose(name, position, ours, group_type, device.upper())
            library.impl(name, kernel, device.upper(), with_keyset=True)


def _choose(name: str, position: int, ours: Callable[..., Any], group_type: type, key: str) -> Callable[..., Any]:
    """A kernel that looks at the group, which is an argument, or its name is."""
    theirs = torch.library.get_kernel(f"{_NAMESPACE}::{name}", key)

    def kernel(keys: torch._C.DispatchKeySet, *arguments: Any, **named: Any) -> Any:
        given = arguments[position]
        group = _c10d._resolve_process_group(given) if isinstance(given, str) else given
        if isinstance(group, group_type):
            return ours(group, *arguments[:position], **named)
        return theirs.call_boxed(keys, *arguments, **named)

    return kernel


def _all_gather_out(group: Any, given: torch.Tensor, _size: int, *, out: torch.Tensor) -> torch.Tensor:
    _c10d._register_work(out, group.all_gather_single(out, given))
    return out


def _batch_p2p(
    group: Any, names: Sequence[str], peers: Sequence[int], tags: Sequence[int], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """As torch: what is received into comes back, and an empty tensor for each message that is sent."""
    results = []
    for name, peer, tag, tensor in zip(names, peers, tags, tensors, strict=True):
        sends = name == "isend"
        work = (group.send if sends else group.recv)([tensor], peer, tag)
        results.append(tensor.new_empty(0) if sends else tensor)
        _c10d._register_work(results[-1], work)
    return results


def hide_from_compiler(*classes: type) -> None:
    """Hides the methods of the classes, and what these call.

    torch's compiler would trace them, and from there the engine of a group. `torch.compiler.disable` does the same, but
    imports the compiler.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for attribute in (attribute for cls in classes for attribute in vars(cls).values()):
        function = attribute.fget if isinstance(attribute, property) else getattr(attribute, "__func__", attribute)
        if isinstance(function, FunctionType):
            frames.set_code_exec_strategy(function.__code__, skip)


def hide_frame_from_compiler(function: Any) -> None:
    """Hides a function; functions that it calls are compiled."""
    frames = torch._C._dynamo.eval_frame
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, strategy)
