"""The cases of the benchmark of distributed autograd; both libraries run this code on their own modules."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from _cases import CALLEE, MIB, Case, Metrics, Row, percentiles, scaled, time_calls
from torch import Tensor, nn

__all__ = ["CASES"]

NUM_CALLS = 100
LEARNING_RATE = 0.01


class Half(nn.Module):
    """One half of a model, on the worker that made it."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [layer for _ in range(num_layers) for layer in (nn.Linear(width, width), nn.Tanh())]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


class Scale(nn.Module):
    """A model that costs nothing but the transfer of its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


_models: dict[str, Any] = {}


def make(key: str, kind: str, *arguments: int) -> None:
    _models[key] = {"half": Half, "scale": Scale}[kind](*arguments)


def run(key: str, x: Tensor) -> Tensor:
    result: Tensor = _models[key](x)
    return result


def parameters(key: str, library: str) -> list[Any]:
    """References to the parameters of a model here."""
    return [importlib.import_module(library).RRef(parameter) for parameter in _models[key].parameters()]


def weighted(x: Tensor, w: Tensor) -> Tensor:
    return x * w


def part_of(rpc: ModuleType, name: str) -> Any:
    """`autograd` or `optim` of the same library."""
    return importlib.import_module(f"{rpc.__name__.removesuffix('.rpc')}.{name}")


def measure_training_step(num_rows: int, width: int, at_once: bool = False) -> Callable[[ModuleType, float], Metrics]:
    """Forward, distributed backward, and a step of a distributed optimizer over the parameters of both workers.

    Beside the time of a step, that of its backward, and the processor time of both workers.

    Args:
        num_rows, width: of the activations.
        at_once: whether ours makes the backward and the step in one operation, which torch does not have.
    """

    def measure(rpc: ModuleType, effort: float) -> Metrics:
        autograd, key = part_of(rpc, "autograd"), "small"
        rpc.rpc_sync(CALLEE, make, (key, "half", width, 2))
        encoder, head = Half(width, 1), Half(width, 1)
        rrefs = [rpc.RRef(parameter) for half in (encoder, head) for parameter in half.parameters()]
        rrefs += rpc.rpc_sync(CALLEE, parameters, (key, rpc.__name__))
        optimizer = part_of(rpc, "optim").DistributedOptimizer(torch.optim.SGD, rrefs, lr=LEARNING_RATE)
        in_one = getattr(optimizer, "backward_and_step", None) if at_once else None
        x = torch.randn(num_rows, width)
        backwards: list[float] = []

        def once() -> None:
            with autograd.context() as context_id:
                loss = head(rpc.rpc_sync(CALLEE, run, (key, encoder(x)))).pow(2).mean()
                if in_one is not None:
                    in_one(context_id, [loss])
                    return
                began = time.perf_counter()
                autograd.backward(context_id, [loss])
                backwards.append(time.perf_counter() - began)
                optimizer.step(context_id)

        before = time.process_time() + rpc.rpc_sync(CALLEE, time.process_time)
        times = time_calls(once, scaled(200, effort), num_warm_up=20)
        used_s = time.process_time() + rpc.rpc_sync(CALLEE, time.process_time) - before
        found = percentiles(times)
        found["processor"] = used_s / (len(times) + 20)
        if backwards:
            found["backward"] = statistics.median(backwards[20:])
        return found

    return measure


def measure_activations(size_bytes: int) -> Callable[[ModuleType, float], Metrics]:
    """Forward and backward with activations and gradients of a size, there and back."""

    def measure(rpc: ModuleType, effort: float) -> Metrics:
        autograd, key = part_of(rpc, "autograd"), "large"
        rpc.rpc_sync(CALLEE, make, (key, "scale"))
        x = torch.randn(size_bytes // 4, requires_grad=True)

        def once() -> None:
            with autograd.context() as context_id:
                loss = rpc.rpc_sync(CALLEE, run, (key, x)).sum()
                autograd.backward(context_id, [loss])

        return percentiles(time_calls(once, scaled(15, effort), num_warm_up=3))

    return measure


def measure_many_calls(chained: bool) -> Callable[[ModuleType, float], Metrics]:
    """A context with many calls: one after the other's result, or side by side."""

    def measure(rpc: ModuleType, effort: float) -> Metrics:
        autograd = part_of(rpc, "autograd")
        x, w = torch.randn(4, requires_grad=True), torch.ones(4, requires_grad=True)

        def in_a_chain() -> Tensor:
            value: Tensor = x
            for _ in range(NUM_CALLS):
                value = rpc.rpc_sync(CALLEE, weighted, (value, w))
            return value.sum()

        def side_by_side() -> Tensor:
            futures = [rpc.rpc_async(CALLEE, weighted, (x, w)) for _ in range(NUM_CALLS)]
            return torch.stack([future.wait() for future in futures]).sum()

        forward = in_a_chain if chained else side_by_side

        def once() -> None:
            with autograd.context() as context_id:
                autograd.backward(context_id, [forward()])

        return percentiles(time_calls(once, scaled(12, effort), num_warm_up=2))

    return measure


def row(
    what: str, size: str, unit: str, scale: float, local: float, stretch: float, tcp: float, grpc: float = 0.9
) -> tuple[Row, ...]:
    """A line of the table; `local`, `stretch`, `tcp` and `grpc` are its budgets, as shares of torch's time."""
    ratios = {"local": local, "tcp": tcp, "grpc": grpc}
    return (Row(what, size, "p50", unit, scale, ratios=ratios, stretch=stretch),)


STEP = "forward, backward and optimizer step, 2 workers"
ONE_CALL, CHAIN, MANY = (f"forward and backward{how}" for how in ("", ", calls in a chain", ", calls side by side"))

AT_ONCE = "the same, backward and step in one operation"

CASES = (
    Case(
        "step",
        measure_training_step(8, 32),
        (
            *row(STEP, "8x32", "us", 1e6, local=0.75, stretch=0.6, tcp=0.9, grpc=1.5),
            Row("its backward", "8x32", "backward", "us", 1e6, ratios={"local": 1.0}, stretch=0.8),
            Row(
                "its processor time, both workers", "8x32", "processor", "us", 1e6, ratios={"local": 0.45}, stretch=0.3
            ),
        ),
    ),
    Case(
        "step16",
        measure_training_step(16, 16),
        row(STEP, "16x16", "us", 1e6, local=0.75, stretch=0.6, tcp=0.9, grpc=1.5),
    ),
    Case("at_once", measure_training_step(8, 32, True), row(AT_ONCE, "8x32", "us", 1e6, 0.6, 0.5, tcp=0.9)),
    Case("activations", measure_activations(16 * MIB), row(ONE_CALL, "16 MiB", "ms", 1e3, 0.5, 0.4, tcp=0.9)),
    Case("chain", measure_many_calls(True), row(CHAIN, "100", "ms", 1e3, 0.85, 0.6, tcp=0.9)),
    Case("many", measure_many_calls(False), row(MANY, "100", "ms", 1e3, 0.45, 0.3, tcp=0.9)),
)
