"""Finds the parameters that a forward pass has used: the leaves on which its outputs depend."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.autograd.graph import Node

__all__ = ["find_tensors", "map_tensors", "reached_leaves", "watch_outputs"]


def find_tensors(value: object) -> list[torch.Tensor]:
    """All tensors in a value: nested lists, tuples, dicts and dataclasses, and local values of remote references."""
    found: list[torch.Tensor] = []
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, list | tuple | set | frozenset):
            pending.extend(item)
        elif isinstance(item, dict):
            pending.extend(item.values())
        elif is_dataclass(item) and not isinstance(item, type):
            pending.extend(getattr(item, field.name) for field in fields(item))
        elif callable(getattr(item, "is_owner", None)) and item.is_owner():  # type: ignore[attr-defined]
            pending.append(item.local_value())  # type: ignore[attr-defined]
    return found


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


def map_tensors(value: Any, change: dict[int, torch.Tensor]) -> Any:
    """A value with some tensors, given by `id`, replaced by others; dataclasses are copied, other objects kept."""
    if isinstance(value, torch.Tensor):
        return change.get(id(value), value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, dict):
        return _map_dict(value, change)
    if is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(value, change)
    return value


def _map_dict(value: dict[Any, Any], change: dict[int, torch.Tensor]) -> dict[Any, Any]:
    import copy

    mapped = copy.copy(value)  # keeps subclasses and their attributes, such as the outputs of model libraries
    for key, item in value.items():
        mapped[key] = map_tensors(item, change)
    return mapped


def _map_dataclass(value: Any, change: dict[int, torch.Tensor]) -> Any:
    import copy

    mapped = copy.copy(value)
    for field in fields(value):
        object.__setattr__(mapped, field.name, map_tensors(getattr(value, field.name), change))
    return mapped


class _Watch(torch.autograd.Function):
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
    passed = _Watch.apply(began, *watched)  # type: ignore[no-untyped-call]
    return map_tensors(value, {id(old): new for old, new in zip(watched, passed, strict=True)})
