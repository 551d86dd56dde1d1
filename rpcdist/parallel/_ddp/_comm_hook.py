"""Communication hooks of the user, which reduce the gradients of a bucket instead of an average."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import NamedTuple

import torch

from rpcdist.errors import ConfigError
from rpcdist.parallel._ddp._dense_bucket import DenseBucket
from rpcdist.parallel._ddp._gradient_layout import view_like

__all__ = ["CommHook", "GradBucket", "RegisteredHook", "check_comm_hook"]


class GradBucket:
    """A bucket as a comm hook sees it. Valid until the hook's future is done."""

    def __init__(self, bucket: DenseBucket, is_last: bool) -> None:
        self._bucket = bucket
        self._is_last = is_last
        self._buffer = bucket.buffer

    def __repr__(self) -> str:
        return f"<GradBucket {self._bucket!r}>"

    def index(self) -> int:
        """Number of the bucket in the order of communication."""
        return self._bucket.number

    def buffer(self) -> torch.Tensor:
        """The gradients of this rank as one flat tensor; a hook may change it in place."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Views of `buffer` in the shapes of the parameters."""
        parameters = self.parameters()
        parts = self._buffer.split([parameter.numel() for parameter in parameters])
        return [view_like(part, parameter) for part, parameter in zip(parts, parameters, strict=True)]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of `gradients`."""
        return [member.parameter for member in self._bucket.members]

    def is_last(self) -> bool:
        """Whether it is the last bucket of the iteration."""
        return self._is_last

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replaces the tensor that `buffer` returns by a flat one of the same size, perhaps of another dtype."""
        if buffer.numel() != self._bucket.buffer.numel():
            count = self._bucket.buffer.numel()
            raise ConfigError(f"the buffer of bucket {self.index()} has {count} elements, not {buffer.numel()}")
        self._buffer = buffer


CommHook = Callable[[object, GradBucket], "torch.futures.Future[torch.Tensor]"]


def check_comm_hook(hook: object) -> None:
    """Raises TypeError or ConfigError for an object that cannot be a comm hook."""
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    try:
        signature = inspect.signature(hook)
    except ValueError:  # no signature to look at
        return
    try:
        signature.bind(None, None)
    except TypeError as exc:
        names = list(signature.parameters)
        raise ConfigError(
            f"a communication hook takes two arguments, state and bucket; this one takes {names}"
        ) from exc


class RegisteredHook(NamedTuple):
    """A hook in use.

    Attributes:
        hook: see `DistributedDataParallel.register_comm_hook`.
        state: first argument of the hook.
        leaves_equal_bits: whether the hook is known to leave the same bits on all ranks.
    """

    hook: CommHook
    state: object
    leaves_equal_bits: bool
