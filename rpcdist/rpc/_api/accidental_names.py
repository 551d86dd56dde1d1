"""Names that `torch.distributed.rpc` exports without meaning to, for programs that import them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from rpcdist.rpc.rref import RRef


class AllGatherStates:
    """What torch's workers gather in; ours do that elsewhere, so nothing here changes one.

    Attributes:
        gathered_objects: by worker.
        proceed_signal: set when all are there.
    """

    def __init__(self) -> None:
        self.gathered_objects: dict[str, object] = {}
        self.proceed_signal = threading.Event()


def method_factory(method_name: str, docstring: str) -> Callable[..., Any]:
    """A function that calls the method of this name of a reference, its first argument."""

    def method(self: RRef[Any], *args: Any, **kwargs: Any) -> Any:
        return getattr(self, method_name)(*args, **kwargs)

    method.__doc__ = docstring
    return method


new_method: Final = method_factory("to_here", RRef.to_here.__doc__ or "")
"""The last one that torch's module happens to make."""
