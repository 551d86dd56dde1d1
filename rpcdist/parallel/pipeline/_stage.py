"""One stage at its worker: the module, and the graphs of the micro-batches that are between forward and backward.

The graph of a micro-batch ends at the stage's inputs, which are leaves, and starts at the edges of its outputs. The
edges are kept, but not the outputs, so that their memory is free when the next stage has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

_engine: Final[Any] = Variable._execution_engine  # torch's stubs lack its methods


@dataclass(slots=True)
class _Graph:
    """The ends of one micro-batch's graph; both lists have None for values without gradient."""

    inputs: list[Tensor | None]
    outputs: list[GradientEdge | None]


class Stage:
    """Runs forwards and backwards of one module, on the thread that calls.

    Args:
        index: number of the stage in the pipeline.
        module: takes the outputs of the stage before as positional arguments; returns a value or a tuple of values.
        device: of the module; its inputs are moved there.
    """

    def __init__(self, index: int, module: nn.Module, device: torch.device) -> None:
        self.index = index
        self.module = module
        self.device = device
        self._graphs: dict[int, _Graph] = {}

    def forward(self, microbatch: int, values: Sequence[object], *, with_grad: bool) -> object:
        """The module's output for one micro-batch. Call `keep` with the values from which its backward starts."""
        arguments = [self._own(value) for value in values]
        if with_grad:
            inputs = [value if isinstance(value, Tensor) and value.requires_grad else None for value in arguments]
            self._graphs[microbatch] = _Graph(inputs, [])
        return self.module(*arguments)

    def _own(self, value: object) -> object:
        """A leaf on the device of this stage: the graph of the sender ends here, also when it is on this worker."""
        if not isinstance(value, Tensor):
            return value
        return value.detach().to(self.device, non_blocking=True).requires_grad_(value.requires_grad)

    def keep(self, microbatch: int, outputs: Sequence[object]) -> None:
        """Keeps the edges of the values from which the backward of a micro-batch starts."""
        self._graphs[microbatch].outputs = [
            get_gradient_edge(value) if isinstance(value, Tensor) and value.requires_grad else None for value in outputs
        ]

    def backward(self, microbatch: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Adds the gradients of one micro-batch to those of the parameters; returns those of the stage's inputs.

        Args:
            microbatch: its graph is dropped.
            gradients: one for each output that was kept; None for an output without gradient.
        """
        graph = self._graphs.pop(microbatch)
        if len(gradients) != len(graph.outputs):
            raise RuntimeError(f"{len(graph.outputs)} outputs were sent on, but {len(gradients)} gradients came back")
        roots = [
            (edge, gradient.to(self.device, non_blocking=True))
            for edge, gradient in zip(graph.outputs, gradients, strict=True)
            if edge is not None and gradient is not None
        ]
        if roots:
            edges, values = zip(*roots, strict=True)
            # As `torch.autograd.backward`, whose check of the shapes imports sympy; the engine checks them, too.
            _engine.run_backward(edges, values, False, False, (), allow_unreachable=True, accumulate_grad=True)
        return [None if value is None else value.grad for value in graph.inputs]

    def drop_graphs(self) -> None:
        """Drops the graphs that a failed step has left."""
        self._graphs.clear()

    def zero_grad(self) -> None:
        self.module.zero_grad(set_to_none=True)
