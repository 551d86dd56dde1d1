"""The kinds of backward pass for the reducer: ordinary ones, those of `rpcdist.autograd`, and those of other ranks.

An ordinary pass adds to `.grad`, then calls a hook of the parameter. A distributed pass captures gradients for its
context and does not change `.grad`: tensor hooks see the gradients, and a callback at the end of the pass replaces the
captured gradients by the reduced ones. A rank without inputs has no pass, and takes part in those of the others. The
classes `OrdinaryPass`, `DistributedPass` and `NoPass` have the same methods, and an attribute `lends`, which says
whether a reduction may overwrite their gradients.

A pass of `torch.autograd.grad` looks like a backward pass to every hook until its end, but adds to no `.grad`. Only
torch's engine knows, for each node, whether the running pass executes it.

Optimizers may step while the pass runs. `torch.distributed.optim._apply_optimizer_in_backward` gives parameters their
own optimizers, with hooks that step as soon as a gradient exists, which is only this rank's gradient. These hooks are
removed, and the optimizers step when the gradients are averaged. The user's own hooks that step cannot be recognised,
but changed parameters can.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Final

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge

from rpcdist.parallel._ddp._ddp_errors import DataParallelError, list_names
from rpcdist.parallel._ddp._parameters import Trained
from rpcdist.parallel._ddp._tensor_tree import find_tensors

# ---------------------------------------------------------------- sources of gradients


class OrdinaryPass:
    """`loss.backward()`; with `view`, `.grad` may be a view of a bucket, which the next iteration overwrites."""

    lends: Final = True

    def __init__(self, view: bool) -> None:
        self._view = view

    def gradient(self, member: Trained) -> torch.Tensor | None:
        """Returns the parameter's gradient on this rank, when it is ready."""
        return member.tensor.grad

    def deliver(self, members: list[Trained], reduced: list[torch.Tensor], lasting: bool) -> None:
        """Stores reduced gradients; unless they are `lasting`, the next iteration overwrites the tensors."""
        keep = lasting or self._view
        targets, sources = [], []
        for member, tensor in zip(members, reduced, strict=True):
            gradient = member.tensor.grad
            if gradient is tensor:
                continue  # reduced in place
            if keep or gradient is None or gradient.is_sparse or tensor.is_sparse:
                if gradient is None or _differ(gradient, tensor):
                    member.tensor.grad = tensor if keep else tensor.clone()
            elif gradient.data_ptr() != tensor.data_ptr():
                targets.append(gradient)
                sources.append(tensor)
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)

    def at_end(self, callback: Callable[[], None]) -> None:
        """Calls a function at the end of the running pass, which raises its exceptions. Call it only in hooks."""
        Variable._execution_engine.queue_callback(callback)


def _differ(gradient: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether two gradients use different memory."""
    return gradient.is_sparse or tensor.is_sparse or gradient.data_ptr() != tensor.data_ptr()


class DistributedPass:
    """`rpcdist.autograd.backward` inside a context.

    The pass may consist of several calls of the engine. Captured gradients are withheld until they are reduced.
    """

    lends: Final = False

    def __init__(self) -> None:
        self._arrived: dict[int, torch.Tensor] = {}
        self._withheld: list[torch.Tensor] = []
        self._reduced: list[tuple[torch.Tensor, torch.Tensor]] = []

    def arrive(self, index: int, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Takes a gradient that the engine is about to capture."""
        self._arrived[index] = gradient
        self._withheld.append(parameter)

    def gradient(self, member: Trained) -> torch.Tensor | None:
        return self._arrived.get(member.index)

    def deliver(self, members: list[Trained], reduced: list[torch.Tensor], lasting: bool) -> None:
        for member, tensor in zip(members, reduced, strict=True):
            self._reduced.append((member.tensor, tensor if lasting else tensor.clone()))

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


class NoPass:
    """The source of a rank without inputs, while it mirrors the others, whose reductions replace its `.grad`.

    With `view`, gradients are views of buckets, which the reductions overwrite.
    """

    lends: Final = False

    def __init__(self, parameters: Iterable[torch.Tensor], view: bool) -> None:
        self._own = [
            (parameter, parameter.grad.clone() if view and parameter.grad is not None else parameter.grad)
            for parameter in parameters
        ]

    def gradient(self, member: Trained) -> torch.Tensor | None:
        return None

    def deliver(self, members: list[Trained], reduced: list[torch.Tensor], lasting: bool) -> None:
        """Stores the gradients in `.grad`, with which a `ZeroRedundancyOptimizer` under the same `Join` steps."""
        for member, tensor in zip(members, reduced, strict=True):
            member.tensor.grad = tensor if lasting else tensor.clone()

    def restore(self) -> None:
        """Restores the saved gradients of the parameters."""
        for parameter, gradient in self._own:
            parameter.grad = gradient

    def at_end(self, callback: Callable[[], None]) -> None:
        raise AssertionError("there is no backward pass")


GradientSource = OrdinaryPass | DistributedPass | NoPass


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


# ---------------------------------------------------------------- questions to torch's engine


def watch_outputs(value: object, reached: Callable[[], None]) -> bool:
    """Calls a function, on the engine's thread, when a pass reaches tensors in a value; returns whether it has some."""
    nodes = {tensor.grad_fn for tensor in find_tensors(value)} - {None}
    for node in nodes:
        node.register_prehook(lambda _: reached())  # type: ignore[union-attr]
    return bool(nodes)


AccumulationNodes = dict[int, tuple[Node, torch.dtype, torch.device]]
"""The nodes of the graph that add to the `.grad` of parameters, by index, with the dtype and device of each."""


def due_parameters(parameters: Sequence[Trained], nodes: AccumulationNodes) -> list[int]:
    """Returns the parameters to which the running pass will add. Call it in hooks of an ordinary pass."""
    return [each.index for each in parameters if _will_execute(_node_of(each, nodes))]


def _node_of(trained: Trained, nodes: AccumulationNodes) -> Node | None:
    """Returns a parameter's node. torch replaces it if dtype or device of the parameter change."""
    parameter = trained.tensor
    node, dtype, device = nodes.get(trained.index, (None, None, None))
    if node is None or parameter.dtype is not dtype or parameter.device != device:
        if not parameter.requires_grad:
            return None
        node = get_gradient_edge(parameter).node
        nodes[trained.index] = (node, parameter.dtype, parameter.device)
    return node


def adds_to_leaves() -> bool:
    """Whether the running pass will add to the `.grad` of a leaf that feeds the node whose hook calls this."""
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
    except RuntimeError:  # `torch.autograd.grad` returns the gradient of this leaf instead of adding it
        return False


def take_over(parameters: Sequence[Trained]) -> list[nn.Parameter]:
    """Removes the hooks of torch's optimizers in backward; returns the parameters with such optimizers."""
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


_version_of = attrgetter("_version")


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns how often each tensor was changed."""
    return list(map(_version_of, tensors))


def refuse_changes(parameters: Sequence[Trained], before: Sequence[int], iteration: int, rank: int) -> None:
    """Raises DataParallelError if parameters were changed since the backward pass began with the versions `before`."""
    after = versions_of([each.tensor for each in parameters])
    if after == before:
        return
    names = [each.name for each, old, new in zip(parameters, before, after, strict=True) if old != new]
    raise DataParallelError(
        f"parameters were changed during the backward pass of iteration {iteration} on rank {rank}, before their "
        f"gradients were averaged: {list_names(names)}. A hook steps an optimizer with this rank's gradients, "
        "so the ranks' copies differ now: step after backward, or after finalize_backward if you call it, or use "
        "torch.distributed.optim._apply_optimizer_in_backward, which DistributedDataParallel takes over"
    )
