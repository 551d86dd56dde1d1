"""Finds the parameters that a forward pass has used: the leaves on which its outputs depend."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from rpcdist.parallel._ddp._tensor_tree import find_tensors, map_tensors

if TYPE_CHECKING:
    from torch.autograd.graph import Node

__all__ = ["reached_leaves", "watch_outputs"]


def reached_leaves(outputs: Iterable[torch.Tensor]) -> set[int]:
    """The `id`s of the leaf tensors that the outputs depend on."""
    leaves: set[int] = set()
    seen: set[Node] = set()
    pending: list[Node] = []
    for output in outputs:
        if output.grad_fn is not None:
            pending.append(output.grad_fn)
        elif output.requires_grad:
            leaves.add(id(output))
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves.add(id(variable))
        pending.extend(following for following, _ in node.next_functions if following is not None)
    return leaves


class _WatchOutputs(torch.autograd.Function):
    """Passes outputs through unchanged. Its backward runs first in the backward pass, whichever outputs are used."""

    @staticmethod
    def forward(ctx: Any, began: Callable[[], None], *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.began = began
        return tuple(output.clone() for output in outputs)  # views of one node could not be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.began()
        return (None, *gradients)


def watch_outputs(value: Any, began: Callable[[], None]) -> Any:
    """The same value; `began` is called at the beginning of its backward pass, on the engine's thread."""
    watched = list({id(tensor): tensor for tensor in find_tensors(value) if tensor.grad_fn is not None}.values())
    if not watched:
        return value
    passed = _WatchOutputs.apply(began, *watched)  # type: ignore[no-untyped-call]
    replaced = {id(old): new for old, new in zip(watched, passed, strict=True)}
    return map_tensors(value, lambda tensor: replaced.get(id(tensor), tensor))
