"""The local optimizer at an owner: a program that watches torch's `step` sees it, at no cost for others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

import rpcdist.autograd as autograd
import rpcdist.rpc as rpc
from rpcdist.optim import DistributedOptimizer, _local_optimizer
from rpcdist.optim._local_optimizer import LocalOptimizer
from rpcdist.testing import InProcessCluster

OPTIMIZERS = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop]


class Doubling(torch.optim.SGD):
    """An optimizer of a user, with a `step` of its own."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return super().step(closure)


@pytest.fixture
def agent() -> Iterator[None]:
    with InProcessCluster("worker0") as cluster, cluster.use("worker0"):
        yield


def make(kind: Callable[..., torch.optim.Optimizer], parameter: torch.Tensor, **options: Any) -> LocalOptimizer:
    return LocalOptimizer(threading.Lock(), kind, [{"params": [rpc.RRef(parameter)]}], True, [[0]], (), options)


def compute(monkeypatch: pytest.MonkeyPatch, *gradients: torch.Tensor | None) -> None:
    """Lets every pass compute these gradients."""
    monkeypatch.setattr(_local_optimizer, "_gradients_of", lambda context_id, parameters: list(gradients))


def stepped(
    local: LocalOptimizer, parameter: torch.Tensor, monkeypatch: pytest.MonkeyPatch, hogwild: bool = False
) -> None:
    compute(monkeypatch, torch.ones_like(parameter))
    for _ in range(3):
        assert local.step(1, [{}], hogwild)


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, in another order in memory."""
    return tensor.t().contiguous().t()


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": False}, {"amsgrad": True, "weight_decay": 0.1}])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize(
    ("parameter_of", "gradient_of"),
    [(torch.clone, torch.clone), (torch.clone, transposed), (transposed, torch.clone), (torch.clone, None)],
)
def test_adam_is_fused_where_that_is_the_same(
    parameter_of: Any, gradient_of: Any, kind: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's fused step would take a gradient of other strides, or an expanded one, for that of other elements."""
    values = torch.arange(12.0).view(3, 4) / 7
    gradient = torch.ones(1, 1).expand(3, 4) if gradient_of is None else gradient_of(values.sin())
    ours, theirs = torch.nn.Parameter(parameter_of(values)), torch.nn.Parameter(parameter_of(values))
    local = make(kind, ours, lr=0.1, **options)
    implementations: list[object] = []
    local.optim.register_step_pre_hook(lambda optim, *_: implementations.append(optim.param_groups[0]["fused"]))
    compute(monkeypatch, gradient)
    reference = kind([theirs], lr=0.1, **options)
    theirs.grad = gradient.clone()
    for _ in range(3):
        assert local.step(1, [{}], False)
        reference.step()
    torch.testing.assert_close(ours, theirs)
    is_free = "foreach" not in options and "fused" not in options
    assert implementations == [True if is_free and parameter_of is torch.clone else options.get("fused")] * 3
    assert local.optim.state_dict()["param_groups"] == reference.state_dict()["param_groups"]


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize("hogwild", [False, True])
@pytest.mark.parametrize("kind", [*OPTIMIZERS, Doubling])
def test_a_step_equals_that_of_torch(kind: Any, hogwild: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))
    stepped(make(kind, ours, lr=0.1), ours, monkeypatch, hogwild)
    reference = kind([theirs], lr=0.1)
    theirs.grad = torch.ones(4)
    for _ in range(3):
        reference.step()
    assert torch.equal(ours, theirs)
    assert ours.grad is None


@pytest.mark.usefixtures("agent")
def test_hooks_of_an_optimizer_run(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter, seen = torch.nn.Parameter(torch.ones(4)), list[str]()
    local = make(torch.optim.SGD, parameter, lr=0.1)
    local.optim.register_step_pre_hook(lambda *_: seen.append("before"))
    local.optim.register_step_post_hook(lambda *_: seen.append("after"))
    stepped(local, parameter, monkeypatch)
    assert seen == ["before", "after"] * 3


@pytest.mark.usefixtures("agent")
def test_hooks_of_all_optimizers_run(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter, seen = torch.nn.Parameter(torch.ones(4)), list[str]()
    local = make(torch.optim.SGD, parameter, lr=0.1)
    handle = torch_optimizer.register_optimizer_step_post_hook(lambda *_: seen.append("after"))
    try:
        stepped(local, parameter, monkeypatch)
    finally:
        handle.remove()
    assert seen == ["after"] * 3


@pytest.mark.usefixtures("agent")
def test_hooks_of_a_distributed_optimizer_run_once_a_step() -> None:
    parameter, seen = torch.nn.Parameter(torch.ones(4)), list[str]()
    optimizer = DistributedOptimizer(torch.optim.SGD, [rpc.RRef(parameter)], lr=0.1)
    handles = [
        optimizer.register_step_pre_hook(lambda *_: seen.append("before")),
        optimizer.register_step_post_hook(lambda *_: seen.append("after")),
    ]
    for _ in range(2):
        with autograd.context() as context_id:
            autograd.backward(context_id, [parameter.sum()])
            optimizer.step(context_id)
        for handle in handles:
            handle.remove()
    assert seen == ["before", "after"]
    assert torch.allclose(parameter.detach(), torch.full((4,), 0.8))


@pytest.mark.usefixtures("agent")
def test_a_profiler_sees_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    local = make(torch.optim.SGD, parameter, lr=0.1)
    with torch.autograd.profiler.profile() as profile:
        stepped(local, parameter, monkeypatch)
    assert sum(event.name == "Optimizer.step#SGD.step" for event in profile.function_events) == 3


@pytest.mark.usefixtures("agent")
def test_a_scheduler_at_the_owner_counts_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    local = make(torch.optim.SGD, parameter, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(local.optim, 1)
    stepped(local, parameter, monkeypatch)
    scheduler.step()  # warns, which fails a test, when it has not seen a step
    assert local.optim.param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.usefixtures("agent")
def test_gradients_on_gpus_are_kept_for_the_stream_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory is of the streams in which backward passes ran; calls that run there now would use it again."""
    kept: list[torch.Tensor] = []

    class OnGpu(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(_local_optimizer, "keep_for_current_streams", kept.extend)
    parameter = torch.ones(3)
    local = make(torch.optim.SGD, parameter, lr=0.1)
    local._parameters = [parameter.as_subclass(OnGpu), torch.ones(3), torch.ones(2, 2)]
    gradients = [torch.ones(3).as_subclass(OnGpu), None, torch.eye(2).to_sparse()]
    compute(monkeypatch, *gradients)
    local.step(1, [{}], False)
    assert len(kept) == 1 and kept[0] is gradients[0]
