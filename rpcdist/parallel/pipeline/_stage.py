"""One stage at its worker: the module, and the graphs of the micro-batches that are between forward and backward.

The graph of a micro-batch ends at the stage's inputs, which are leaves, and starts at the edges of its outputs. Only
the edges are kept, not the outputs: their memory is free when the next stage has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

__all__ = ["Stage"]


@dataclass(slots=True)
class _Graph:
    """What the backward of one micro-batch needs; both lists have None where nothing can be differentiated."""

    inputs: list[Tensor | None]
    outputs: list[GradientEdge | None]


class Stage:
    """Runs forwards and backwards of one module, on the thread that calls.

    Args:
        index: of the stage in the pipeline.
        module: takes the outputs of the stage before as positional arguments; returns a value or a tuple of values.
        device: where the module is, and to which its inputs are moved.
    """

    def __init__(self, index: int, module: nn.Module, device: torch.device) -> None:
        self.index = index
        self.module = module
        self.device = device
        self._graphs: dict[int, _Graph] = {}

    def __repr__(self) -> str:
        return f"<Stage {self.index} [{len(self._graphs)} micro-batches alive]>"

    def forward(self, part: int, values: Sequence[object], *, with_grad: bool) -> object:
        """The module's output for one micro-batch. Call `keep` with what its backward shall start from."""
        arguments = [self._own(value) for value in values]
        if with_grad:
            inputs = [value if isinstance(value, Tensor) and value.requires_grad else None for value in arguments]
            self._graphs[part] = _Graph(inputs, [])
        return self.module(*arguments)

    def _own(self, value: object) -> object:
        """A leaf on the device of this stage: the graph of the sender ends here, also when it is on this worker."""
        if not isinstance(value, Tensor):
            return value
        return value.detach().to(self.device, non_blocking=True).requires_grad_(value.requires_grad)

    def keep(self, part: int, outputs: Sequence[object]) -> None:
        """Says from which values the backward of a micro-batch starts."""
        self._graphs[part].outputs = [
            get_gradient_edge(value) if isinstance(value, Tensor) and value.requires_grad else None for value in outputs
        ]

    def backward(self, part: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Adds the gradients of one micro-batch to those of the parameters; returns those of the stage's inputs.

        Args:
            part: the micro-batch; its graph is given up.
            gradients: one for each output that was kept; None for those that got none.
        """
        graph = self._graphs.pop(part)
        if len(gradients) != len(graph.outputs):
            raise RuntimeError(f"{len(graph.outputs)} outputs were sent on, but {len(gradients)} gradients came back")
        roots = [
            (edge, gradient.to(self.device, non_blocking=True))
            for edge, gradient in zip(graph.outputs, gradients, strict=True)
            if edge is not None and gradient is not None
        ]
        if roots:
            edges, values = zip(*roots, strict=True)
            torch.autograd.backward(edges, values)
        return [None if value is None else value.grad for value in graph.inputs]

    def drop_graphs(self) -> None:
        """Gives up what a failed step left."""
        self._graphs.clear()

    def zero_grad(self) -> None:
        self.module.zero_grad(set_to_none=True)
