"""Our Work where torch expects its own, alive for as long as torch's C++ code holds it.

[Note: halves] An object of a Python class that is derived from a class of torch's has two halves. The half in C++ calls
the methods of the half in Python, if that lives; if it does not, it runs torch's own methods, which for a Work wait for
ever, as nothing ever ends it. C++ code that keeps such an object keeps its own half only. So each function of torch
that keeps a Work gets one that owns both halves (`held`). torch makes these itself of what a group's methods return to
C++. It does not in the functions of `keep_what_torch_holds`, which take what the program passes.

Groups live until they are destroyed, even if no Python code refers to them, except those of `torch_group`, which a
library holds that makes them. A future is ended by C++ code of its own;
for an error of one, see `fail_future`. Our stores, backends and options have no half in C++.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, Final

import torch

from rpcdist.collectives.work import Work

# torch's stubs describe overloads of its C++ classes, which no single Python method can have.
_c10d: Any = torch._C._distributed_c10d


class TorchWork(_c10d.Work):  # type: ignore[misc]  # see _c10d
    """Our Work, one or several, where torch expects its own."""

    def __init__(self, *works: Work) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | float = timedelta(0)) -> bool:
        """Blocks until it is done; 0 leaves the limit to the operations' own."""
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

    def _source_rank(self) -> int:
        return self.source_rank()

    def boxed(self) -> torch.ScriptObject:
        box: torch.ScriptObject = held(self).boxed()
        return box

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        futures = [work.get_future() for work in self._works]
        return futures[0] if len(futures) == 1 else futures[0].then(lambda _: _flatten(futures))

    def get_future_result(self) -> torch.futures.Future[int]:
        futures = [work.get_future_result() for work in self._works]
        return futures[0] if len(futures) == 1 else torch.futures.collect_all(futures).then(_worst)


def _flatten(futures: Sequence[torch.futures.Future[list[torch.Tensor]]]) -> list[torch.Tensor]:
    return [tensor for future in futures for tensor in future.wait()]


def _worst(done: torch.futures.Future[list[torch.futures.Future[int]]]) -> int:
    return max(future.value() for future in done.value())


class _OwnerMaker(_c10d.ProcessGroup):  # type: ignore[misc]  # see _c10d
    """A group whose only use is that torch's C++ code makes an owner of the Work that a method of it returns."""

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
    """A Work of torch's that owns both halves of one of ours, for C++ code alone; others come back as they are."""
    return _owner_maker.owner_of(work) if isinstance(work, TorchWork) else work


def keep_what_torch_holds() -> None:
    """Has the functions of torch that keep a Work get one that owns both halves. Idempotent."""
    _change(_c10d.Reducer, "_set_forward_pass_work_handle", lambda self, work, static: (self, held(work), static))
    _change(_c10d, "_register_work", lambda tensor, work: (tensor, held(work)))


def _change(owner: Any, name: str, arguments: Callable[..., tuple[object, ...]]) -> None:
    """Replaces a function of torch's by one that changes its arguments."""
    original = getattr(owner, name)
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def changed(*given: Any, **named: Any) -> Any:
        return original(*arguments(*given, **named))

    setattr(owner, name, changed)
