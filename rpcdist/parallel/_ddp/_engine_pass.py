"""Questions to torch's engine about its running pass: does it go through a module's outputs, and what does it add to?

A pass of `torch.autograd.grad` looks like a backward pass to every hook until its end, but adds to no `.grad`. Only
the engine knows: it tells of each node whether the running pass executes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

from rpcdist.parallel._ddp._parameters import Named
from rpcdist.parallel._ddp._tensor_tree import find_tensors


def watch_outputs(value: object, reached: Callable[[], None]) -> bool:
    """Calls a function, on the engine's thread, when a pass comes to tensors in a value, before it goes further.

    Returns:
        Whether there are such tensors.
    """
    nodes = {tensor.grad_fn for tensor in find_tensors(value)} - {None}
    for node in nodes:
        node.register_prehook(partial(_reached, reached))  # type: ignore[union-attr]
    return bool(nodes)


def _reached(reached: Callable[[], None], _: tuple[torch.Tensor, ...]) -> None:
    reached()


class AccumulationNodes:
    """The nodes of the graph that add to the `.grad` of parameters.

    Args:
        parameters: whose nodes they are.
    """

    def __init__(self, parameters: Sequence[Named]) -> None:
        self._parameters = [named.tensor for named in parameters]
        self._nodes: dict[int, tuple[Node, torch.dtype, torch.device]] = {}

    def due(self) -> list[int]:
        """The parameters to which the running pass will add. For use in hooks of an ordinary pass."""
        return [index for index in range(len(self._parameters)) if _will_execute(self._node(index))]

    def _node(self, index: int) -> Node | None:
        """A parameter's node. torch replaces it if dtype or device of the parameter change."""
        parameter = self._parameters[index]
        node, dtype, device = self._nodes.get(index, (None, None, None))
        if node is None or parameter.dtype is not dtype or parameter.device != device:
            if not parameter.requires_grad:
                return None
            node = get_gradient_edge(parameter).node
            self._nodes[index] = (node, parameter.dtype, parameter.device)
        return node


def adds_to_leaves() -> bool:
    """Whether the running pass adds to the `.grad` of a leaf before the node whose hook calls this."""
    seen: set[Node] = set()
    current = torch._C._current_autograd_node()
    pending: list[Any] = [] if current is None else [current]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and _will_execute(node):
            return True
        pending.extend(following for following, _ in node.next_functions if following is not None)
    return False


def _will_execute(node: Node | None) -> bool:
    if node is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # `torch.autograd.grad` takes the gradient of this leaf, and adds it to nothing
        return False
