"""The cases of `parameter_server.py`: a trainer's step, by our classes and by a server written for torch's RPC."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["CASES", "Case"]

SERVER = "callee"
LEARNING_RATE = 0.1
NUM_ROWS, ROW_LENGTH = 1_000_000, 64
NUM_LAYERS = 4
WARM_UP_STEPS = 5


class PlainServer:
    """A server as a user would write it for torch's RPC: all gradients in one call, all new values in its answer."""

    def __init__(self, values: list[Tensor]) -> None:
        self.parameters = [nn.Parameter(value) for value in values]
        self.optimizer = torch.optim.SGD(self.parameters, lr=LEARNING_RATE)

    def push(self, gradients: list[Tensor]) -> list[Tensor]:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        return [parameter.detach() for parameter in self.parameters]


class PlainTable:
    """An embedding: rows by their numbers, and sparse gradients back."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.randn(NUM_ROWS, ROW_LENGTH))
        self.optimizer = torch.optim.SGD([self.weight], lr=LEARNING_RATE)

    def pull(self, ids: Tensor) -> Tensor:
        return self.weight.detach()[ids]

    def push(self, ids: Tensor, gradient: Tensor) -> None:
        self.weight.grad = torch.sparse_coo_tensor(
            ids.unsqueeze(0), gradient, self.weight.shape, check_invariants=False
        )
        self.optimizer.step()


@dataclass(frozen=True)
class Case:
    """A step of one trainer, in milliseconds.

    Attributes:
        name: on the command line.
        what: in the table.
        prepare: makes a function that takes a step; its arguments are the RPC module, and whether it is ours.
    """

    name: str
    what: str
    prepare: Callable[[Any, bool], Callable[[], None]]
    num_steps: int

    def measure(self, rpc: Any, effort: float) -> dict[str, float]:
        step = self.prepare(rpc, rpc.__name__.startswith("rpcdist"))
        for _ in range(WARM_UP_STEPS):
            step()
        times = []
        for _ in range(max(3, int(self.num_steps * effort))):
            began = time.perf_counter()
            step()
            times.append(time.perf_counter() - began)
        return {"step": 1e3 * median(times)}


def dense(num_bytes: int) -> Callable[[Any, bool], Callable[[], None]]:
    def prepare(rpc: Any, ours: bool) -> Callable[[], None]:
        width = int((num_bytes / 4 / NUM_LAYERS) ** 0.5)
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(NUM_LAYERS)))
        gradients = [torch.full_like(parameter, 1e-6) for parameter in model.parameters()]

        def give_gradients() -> None:  # what a backward pass would do
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient

        if ours:
            from rpcdist.parallel import ParameterServer

            server = ParameterServer(model, [SERVER], torch.optim.SGD, lr=LEARNING_RATE)

            def our_step() -> None:
                give_gradients()
                server.step(model)

            return our_step
        plain = rpc.remote(SERVER, PlainServer, ([parameter.detach() for parameter in model.parameters()],))

        @torch.no_grad()
        def plain_step() -> None:
            give_gradients()
            values = plain.rpc_sync().push([parameter.grad for parameter in model.parameters()])
            for parameter, value in zip(model.parameters(), values, strict=True):
                parameter.copy_(value)
            model.zero_grad(set_to_none=True)

        return plain_step

    return prepare


def embedding(num_ids: int) -> Callable[[Any, bool], Callable[[], None]]:
    def prepare(rpc: Any, ours: bool) -> Callable[[], None]:
        ids = torch.randint(NUM_ROWS, (num_ids,))
        if ours:
            from rpcdist.parallel import ShardedEmbedding

            table = ShardedEmbedding(NUM_ROWS, ROW_LENGTH, [SERVER], torch.optim.SGD, lr=LEARNING_RATE)

            def our_step() -> None:
                table(ids).sum().backward()
                table.step()

            return our_step
        plain = rpc.remote(SERVER, PlainTable)

        def plain_step() -> None:
            needed, positions = torch.unique(ids, return_inverse=True)
            rows = plain.rpc_sync().pull(needed).requires_grad_()
            nn.functional.embedding(positions, rows).sum().backward()
            plain.rpc_sync().push(needed, rows.grad)

        return plain_step

    return prepare


CASES = (
    Case("dense-256KiB", f"push and new values, {NUM_LAYERS} tensors, 256 KiB together", dense(2**18), 200),
    Case("dense-16MiB", f"push and new values, {NUM_LAYERS} tensors, 16 MiB together", dense(2**24), 40),
    Case(
        "embedding-1024",
        f"look-up, backward and step of 1,024 rows of {NUM_ROWS:,} x {ROW_LENGTH}",
        embedding(1024),
        100,
    ),
)
