"""The parts of rpcdist that torch's C++ code and its compiler use.

Our Work takes the place of torch's, and lives as long as torch's C++ code holds it. Some functional collectives have
C++ code that asks a group for a backend of torch, which our groups do not have; these get our kernels. The others call
methods of the group that C++ code finds in Python. The compiler does not trace some functions.

[Note: halves] An object of a Python class that is derived from a class of torch has two halves. The C++ half calls the
methods of the Python half, if that is alive. Otherwise it runs torch's own methods, which for a Work wait forever,
since no code ends it. C++ code that keeps such an object keeps only the C++ half. So each function of torch that keeps
a Work gets one that owns both halves (`held`). torch makes such an owner itself for values that a group's methods
return to C++, but not in the functions of `keep_what_torch_holds`, which take values from the program.

Groups live until they are destroyed, even without references from Python code. The exceptions are groups of
`torch_group`, which the library that makes them holds. C++ code completes futures; for their errors, see
`fail_future`. Our stores, backends and options have no C++ half.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from types import FunctionType
from typing import Any, Final

import torch

from rpcdist.collectives.work import Work

# torch's stubs describe overloads of its C++ classes, which no single Python method can have.
_c10d: Any = torch._C._distributed_c10d


class TorchWork(_c10d.Work):  # type: ignore[misc]  # see _c10d
    """One or several Works of rpcdist as a Work of torch."""

    def __init__(self, *works: Work) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | float = timedelta(0)) -> bool:
        """Blocks until it is done; 0 means the limits of the operations."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[torch.Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    @property
    def timeout(self) -> timedelta:
        return max(work.timeout for work in self._works)

    def synchronize(self) -> None:
        for work in self._works:
            work.synchronize()

    def block_current_stream(self) -> None:
        for work in self._works:
            work.block_current_stream()

    def source_rank(self) -> int:
        return self._works[0].source_rank()

    _source_rank = source_rank

    def boxed(self) -> torch.ScriptObject:
        box: torch.ScriptObject = held(self).boxed()
        return box

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        futures = [work.get_future() for work in self._works]
        return futures[0] if len(futures) == 1 else futures[0].then(lambda _: _flatten(futures))

    def get_future_result(self) -> torch.futures.Future[int]:
        futures = [work.get_future_result() for work in self._works]
        if len(futures) == 1:
            return futures[0]
        return torch.futures.collect_all(futures).then(lambda done: max(future.value() for future in done.value()))


def _flatten(futures: Sequence[torch.futures.Future[list[torch.Tensor]]]) -> list[torch.Tensor]:
    return [tensor for future in futures for tensor in future.wait()]


class _OwnerMaker(_c10d.ProcessGroup):  # type: ignore[misc]  # see _c10d
    """A group whose only purpose is that torch's C++ code makes an owner of the Work that its method returns."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self._of_thread = threading.local()

    def owner_of(self, work: TorchWork) -> Any:
        self._of_thread.work = work
        try:
            return _c10d.ProcessGroup.barrier(self)
        finally:
            del self._of_thread.work

    def barrier(self, _opts: object) -> TorchWork:
        work: TorchWork = self._of_thread.work
        return work


_owner_maker: Final = _OwnerMaker()


def held(work: object) -> Any:
    """Returns a Work of torch that owns both halves of ours, for C++ code; returns other objects unchanged."""
    return _owner_maker.owner_of(work) if isinstance(work, TorchWork) else work


def keep_what_torch_holds() -> None:
    """Makes torch's functions that keep a Work get one that owns both halves. Idempotent."""
    _change(_c10d.Reducer, "_set_forward_pass_work_handle", lambda self, work, static: (self, held(work), static))
    _change(_c10d, "_register_work", lambda tensor, work: (tensor, held(work)))


def _change(owner: Any, name: str, arguments: Callable[..., tuple[object, ...]]) -> None:
    original = getattr(owner, name)
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def changed(*given: Any, **named: Any) -> Any:
        return original(*arguments(*given, **named))

    setattr(owner, name, changed)


_NAMESPACE: Final = "_c10d_functional"
_libraries: Final[list[torch.library.Library]] = []


def serve_functional_ops(group_type: type, devices: Sequence[str]) -> None:
    """Registers our kernels of these operations for groups of a type; other groups keep torch's. Idempotent."""
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
    """Makes a kernel that chooses by the group; the group or its name is an argument."""
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
    """Like torch, returns the tensors that were received, and an empty tensor for each message that was sent."""
    results = []
    for name, peer, tag, tensor in zip(names, peers, tags, tensors, strict=True):
        sends = name == "isend"
        work = (group.send if sends else group.recv)([tensor], peer, tag)
        results.append(tensor.new_empty(0) if sends else tensor)
        _c10d._register_work(results[-1], work)
    return results


def hide_from_compiler(*classes: type) -> None:
    """Hides the methods of the classes, and the functions that they call.

    torch's compiler would trace them, and through them the engine of a group. `torch.compiler.disable` does the same,
    but imports the compiler.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for attribute in (attribute for cls in classes for attribute in vars(cls).values()):
        function = attribute.fget if isinstance(attribute, property) else getattr(attribute, "__func__", attribute)
        if isinstance(function, FunctionType):
            frames.set_code_exec_strategy(function.__code__, skip)


def hide_frame_from_compiler(function: Any) -> None:
    frames = torch._C._dynamo.eval_frame
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, strategy)
