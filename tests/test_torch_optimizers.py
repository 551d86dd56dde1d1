"""Our uses of torch's optimizers give torch's numbers, and none of them brings torch's compiler into a worker."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from docs_programs import environment, run
from torch.optim.optimizer import Optimizer

from rpcdist.testing import RankPool
from rpcdist.torch_optimizers import take_step

PROGRAM = Path(__file__).parent / "support" / "light_program.py"
COMPILER = ("torch._dynamo", "torch._inductor")


class Halving(torch.optim.SGD):
    """An optimizer of a user, with a `step` of its own."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] /= 2
        return super().step(closure)


class Inheriting(torch.optim.SGD):
    """An optimizer of a user with torch's `step`."""


@pytest.mark.multiproc
def test_nothing_of_ours_imports_the_compiler(tmp_path: Path) -> None:
    """torch itself imports it with the first optimizer: two seconds of processor time in each worker."""
    (printed,) = run([([sys.executable, PROGRAM, *COMPILER, "sympy"], environment())], tmp_path)
    imported = json.loads(printed.splitlines()[-1])
    assert imported.pop("use_checkpoints") == ["sympy"]  # of torch's checkpoints
    assert len(imported) == 6
    assert not any(imported.values()), imported


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adam, {"foreach": True}),
        (torch.optim.LBFGS, {"max_iter": 2}),
        (Halving, {}),
        (Inheriting, {"nesterov": True, "momentum": 0.9}),
    ],
)
@pytest.mark.parametrize("with_closure", [False, True])
def test_a_step_is_that_of_torch(kind: Callable[..., Any], options: dict[str, Any], with_closure: bool) -> None:
    results = []
    for step in (take_step, lambda optim, *args: optim.step(*args)):
        parameter = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 5))
        optimizer = kind([parameter], lr=0.1, **options)
        seen: list[object] = []

        def closure(optimizer: Any = optimizer, parameter: Any = parameter, seen: list[object] = seen) -> torch.Tensor:
            seen.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            loss: torch.Tensor = (parameter**2).sum()
            loss.backward()
            return loss

        losses = []
        for number in range(3):
            closure()
            if number == 2:
                optimizer.register_step_pre_hook(lambda *_, seen=seen: seen.append(("pre", torch.is_grad_enabled())))
                optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append(("post", torch.is_grad_enabled())))
            needs_closure = with_closure or kind is torch.optim.LBFGS
            losses.append(step(optimizer, closure) if needs_closure else step(optimizer))  # type: ignore[no-untyped-call]
        results.append((parameter.tolist(), seen, [loss and loss.item() for loss in losses], torch.is_grad_enabled()))
    assert results[0] == results[1]


def test_a_differentiable_step_has_gradients() -> None:
    start = torch.ones(2, requires_grad=True)
    parameter = start * 2
    parameter.grad = torch.ones(2)
    take_step(torch.optim.SGD([parameter], lr=0.5, differentiable=True))
    parameter.sum().backward()
    assert parameter.tolist() == [1.5, 1.5]
    assert start.grad is not None and start.grad.tolist() == [2.0, 2.0]


def test_a_scheduler_sees_a_step() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(2):
        parameter.grad = torch.ones(4)
        take_step(optimizer)
        scheduler.step()  # warns, which fails a test, when it has not seen a step
    assert parameter.tolist() == [-0.5] * 4


def test_a_step_of_something_else_is_called() -> None:
    class Other:
        def step(self, what: str) -> str:
            return what

    assert take_step(Other(), "its own") == "its own"


@pytest.mark.multiproc
def test_the_compiler_leaves_the_optimizer_alone_once_it_is_there(rank_pool: RankPool) -> None:
    """As in torch: a compiled function that clears gradients or saves the state calls these methods as they are."""
    assert rank_pool.run(1, compile_a_step) == [([-1.0, -1.0], 1, "torch._dynamo.eval_frame")]


def compile_a_step(rank: int, size: int) -> tuple[list[float], int, str]:
    import torch._dynamo

    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)

    @torch.compile(backend="eager")
    def train() -> int:
        optimizer.zero_grad()
        parameter.sum().backward()
        optimizer.step()
        return len(optimizer.state_dict()["param_groups"])

    number = train()
    unseen = vars(Optimizer.zero_grad.__wrapped__)["__dynamo_disable"]  # type: ignore[attr-defined]
    return parameter.tolist(), number, unseen.__module__
