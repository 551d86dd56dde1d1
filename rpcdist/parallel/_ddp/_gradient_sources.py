"""The sources of gradients: an ordinary backward pass, or one of `rpcdist.autograd`. The reducer handles both alike.

An ordinary pass adds to `.grad`, and then calls a hook of the parameter. A distributed pass captures gradients for its
context and leaves `.grad` alone: tensor hooks see the gradients, and a callback at the end of the pass replaces the
captured gradients by the reduced ones.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import ClassVar

import torch
from torch.autograd import Variable

from rpcdist.parallel._ddp._buckets import BucketEntry


class GradientSource(ABC):
    """A backward pass as the reducer sees it.

    Attributes:
        lends: whether the reduction may overwrite its gradients.
    """

    lends: ClassVar[bool]

    @abstractmethod
    def gradient(self, member: BucketEntry) -> torch.Tensor | None:
        """The member's gradient on this rank, once it is ready."""

    @abstractmethod
    def deliver(self, members: list[BucketEntry], reduced: list[torch.Tensor], lasting: bool) -> None:
        """Stores reduced gradients.

        Args:
            members: the parameters.
            reduced: their gradients.
            lasting: whether the tensors may be kept; else the next iteration overwrites them.
        """

    @abstractmethod
    def at_end(self, callback: Callable[[], None]) -> None:
        """Calls a function at the end of the running pass, which raises its exceptions. Only for use in hooks."""


class OrdinaryPass(GradientSource):
    """`loss.backward()`.

    Args:
        view: whether `.grad` may be a view of a bucket, which the next iteration overwrites.
    """

    lends = True

    def __init__(self, view: bool) -> None:
        self._view = view

    def gradient(self, member: BucketEntry) -> torch.Tensor | None:
        return member.parameter.grad

    def deliver(self, members: list[BucketEntry], reduced: list[torch.Tensor], lasting: bool) -> None:
        keep = lasting or self._view
        targets, sources = [], []
        for member, tensor in zip(members, reduced, strict=True):
            gradient = member.parameter.grad
            if gradient is tensor:
                continue  # reduced in place
            if keep or gradient is None or gradient.is_sparse or tensor.is_sparse:
                if gradient is None or _differ(gradient, tensor):
                    member.parameter.grad = tensor if keep else tensor.clone()
            elif gradient.data_ptr() != tensor.data_ptr():
                targets.append(gradient)
                sources.append(tensor)
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)

    def at_end(self, callback: Callable[[], None]) -> None:
        Variable._execution_engine.queue_callback(callback)


def _differ(gradient: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether two gradients have different memory."""
    return gradient.is_sparse or tensor.is_sparse or gradient.data_ptr() != tensor.data_ptr()


class DistributedPass(GradientSource):
    """`rpcdist.autograd.backward` inside a context.

    The pass may need several calls of the engine. The captured gradients are withheld until they are reduced.
    """

    lends = False

    def __init__(self) -> None:
        self._arrived: dict[int, torch.Tensor] = {}
        self._withheld: list[torch.Tensor] = []
        self._reduced: list[tuple[torch.Tensor, torch.Tensor]] = []

    def arrive(self, index: int, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Takes a gradient that the engine is about to capture."""
        self._arrived[index] = gradient
        self._withheld.append(parameter)

    def gradient(self, member: BucketEntry) -> torch.Tensor | None:
        return self._arrived.get(member.index)

    def deliver(self, members: list[BucketEntry], reduced: list[torch.Tensor], lasting: bool) -> None:
        for member, tensor in zip(members, reduced, strict=True):
            self._reduced.append((member.parameter, tensor if lasting else tensor.clone()))

    def at_end(self, callback: Callable[[], None]) -> None:
        from rpcdist import autograd

        def settle(captured: dict[torch.Tensor, torch.Tensor]) -> None:
            callback()
            for parameter in self._withheld:
                captured.pop(parameter, None)
            captured.update(self._reduced)
            self._withheld.clear()
            self._reduced.clear()

        autograd.queue_callback(settle)


class NoPass(GradientSource):
    """The source of a rank without inputs, for as long as it mirrors the others; see `Reducer.shadow`.

    Args:
        parameters: their gradients are put aside.
        view: whether gradients are views of buckets, which the reductions overwrite.
    """

    lends = False

    def __init__(self, parameters: Iterable[torch.Tensor], view: bool) -> None:
        self._own = [
            (parameter, parameter.grad.clone() if view and parameter.grad is not None else parameter.grad)
            for parameter in parameters
        ]

    def gradient(self, member: BucketEntry) -> torch.Tensor | None:
        return None

    def deliver(self, members: list[BucketEntry], reduced: list[torch.Tensor], lasting: bool) -> None:
        """Leaves them in `.grad`: a `ZeroRedundancyOptimizer` under the same `Join` steps with them."""
        for member, tensor in zip(members, reduced, strict=True):
            member.parameter.grad = tensor if lasting else tensor.clone()

    def restore(self) -> None:
        """Gives the parameters back the gradients that they had."""
        for parameter, gradient in self._own:
            parameter.grad = gradient

    def at_end(self, callback: Callable[[], None]) -> None:
        raise AssertionError("there is no backward pass")


def in_distributed_pass() -> bool:
    """`rpcdist.autograd.is_in_backward()`, without importing the module."""
    autograd = sys.modules.get("rpcdist.autograd")
    return autograd is not None and bool(autograd.is_in_backward())


def in_distributed_context() -> bool:
    """Whether this thread is in a context of `rpcdist.autograd`, without importing the module."""
    autograd = sys.modules.get("rpcdist.autograd")
    if autograd is None:
        return False
    try:
        autograd._current_context()
    except RuntimeError:
        return False
    return True
