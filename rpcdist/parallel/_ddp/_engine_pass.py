"""Questions to torch's engine about its running pass: does it go through a module's outputs, and what does it add to?

A pass of `torch.autograd.grad` looks like a backward pass to every hook until its end, but adds to no `.grad`. Only
the engine knows: it tells of each node whether the running pass executes it.

Optimizers may step while the pass runs. `torch.distributed.optim._apply_optimizer_in_backward` gives parameters
optimizers of their own, and hooks that step them as soon as a gradient is there, which is this rank's alone. Its hooks
are removed, and the optimizers step when the gradients are averaged. Hooks of the user's own that step cannot be told
from others, but parameters that change can.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from rpcdist.parallel._ddp._ddp_errors import DataParallelError, list_names
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
    """The nodes of the graph that add to the `.grad` of parameters."""

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


def take_over(parameters: Sequence[Named]) -> list[nn.Parameter]:
    """Removes the hooks of torch's optimizers in backward; returns the parameters that have such optimizers."""
    found = [named.tensor for named in parameters if hasattr(named.tensor, "_in_backward_optimizers")]
    module = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    handles = {} if module is None else module.param_to_optim_hook_handle_map
    for parameter in found:
        for handle in handles.get(parameter, ()):
            handle.remove()
    return found


def step_and_clear(parameters: Sequence[nn.Parameter]) -> None:
    """Steps the optimizers of parameters, and clears the gradients, as torch does."""
    for parameter in parameters:
        for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
            optimizer.step()
        parameter.grad = None


class ChangeCheck:
    """Notices that a parameter was changed while a backward pass ran."""

    def __init__(self, parameters: Sequence[Named]) -> None:
        self._parameters = parameters
        self._tensors = [named.tensor for named in parameters]
        self._before = self._versions()

    def begin(self) -> None:
        """A backward pass begins."""
        self._before = self._versions()

    def _versions(self) -> list[int]:
        return list(map(_version_of, self._tensors))

    def end(self, iteration: int, rank: int) -> None:
        """A backward pass has ended.

        Raises:
            DataParallelError: a parameter was changed since it began.
        """
        after = self._versions()
        if after == self._before:
            return
        pairs = zip(self._parameters, self._before, after, strict=True)
        names = [named.name for named, old, new in pairs if old != new]
        raise DataParallelError(
            f"parameters were changed during the backward pass of iteration {iteration} on rank {rank}, before their "
            f"gradients were averaged: {list_names(names)}. A hook steps an optimizer with this rank's gradients, "
            "so the ranks' copies differ now: step after backward, or use "
            "torch.distributed.optim._apply_optimizer_in_backward, which DistributedDataParallel takes over"
        )


_version_of = attrgetter("_version")
