"""The distributed optimizer, against the same optimizer over the same parameters in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import optim_functions as functions
import pytest
import rpc_functions
import torch
from docs_programs import run_page
from peer_timeouts import CALM_S, PROMPT_S
from rpc_cluster import Cluster
from torch import Tensor
from torch.optim import lr_scheduler

import rpcdist.autograd as autograd
import rpcdist.rpc as rpc
from rpcdist.errors import BlockingInLoop, ConfigError, DeadlineExceeded
from rpcdist.optim import DistributedOptimizer
from rpcdist.optim._local_optimizer import call_local_optimizer
from rpcdist.testing import WorkerPool, eventually

pytestmark = pytest.mark.multiproc

SEEDS = {"worker1": 1, "worker2": 2, "worker0": 3}
rpc_sync: Any = rpc.rpc_sync
rpc_async: Any = rpc.rpc_async


class Twins:
    """The same layers twice: here, and on the workers (one of them this one)."""

    def __init__(self) -> None:
        self.here = [functions.Layer(seed) for seed in SEEDS.values()]
        self.there = [rpc.remote(worker, functions.Layer, (seed,)) for worker, seed in SEEDS.items()]
        torch.manual_seed(0)
        self.x = torch.randn(5, 4)

    def parameters(self) -> list[Tensor]:
        return [parameter for layer in self.here for parameter in layer.parameters()]

    def rrefs(self) -> list[Any]:
        return [rref for layer in self.there for rref in layer.rpc_sync().parameter_rrefs()]

    def step_here(self, optimizer: torch.optim.Optimizer, max_norm: float | None = None) -> float:
        optimizer.zero_grad()
        self._loss([layer.forward for layer in self.here]).backward()
        norm = torch.tensor(0.0)
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm)
        optimizer.step()
        return norm.item()

    def step_there(self, optimizer: DistributedOptimizer, max_norm: float | None = None) -> float:
        with autograd.context() as context_id:
            autograd.backward(context_id, [self.loss_there()])
            norm = optimizer.clip_grad_norm_(context_id, max_norm) if max_norm is not None else torch.tensor(0.0)
            optimizer.step(context_id)
        return norm.item()

    def step_there_at_once(self, optimizer: DistributedOptimizer) -> None:
        with autograd.context() as context_id:
            optimizer.backward_and_step(context_id, [self.loss_there()])

    def loss_there(self) -> Tensor:
        return self._loss([layer.rpc_sync().forward for layer in self.there])

    def _loss(self, layers: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
        value = self.x
        for layer in layers:
            value = layer(value)
        return value.square().sum()

    def values_there(self) -> list[Tensor]:
        return [value for layer in self.there for value in layer.rpc_sync().values()]

    def assert_equal(self) -> None:
        torch.testing.assert_close(self.values_there(), [p.detach() for p in self.parameters()])


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
        (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    ],
    ids=["SGD", "Adam"],
)
def test_several_steps_equal_those_of_one_process(
    cluster: Cluster, optimizer_class: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    twins = Twins()
    single = optimizer_class(twins.parameters(), **options)
    distributed = DistributedOptimizer(optimizer_class, twins.rrefs(), **options)
    assert [rref.owner_name() for rref in distributed.remote_optimizers] == list(SEEDS)
    assert not distributed.is_functional_optim
    for _ in range(4):
        twins.step_here(single)
        twins.step_there(distributed)
    twins.assert_equal()


def test_grad_is_left_alone_and_zero_grad_resets_it(cluster: Cluster) -> None:
    layer = rpc.remote("worker1", functions.Layer, (1,))
    before = layer.rpc_sync().values()
    layer.rpc_sync().set_grads(7.0)
    optimizer = DistributedOptimizer(torch.optim.SGD, layer.rpc_sync().parameter_rrefs(), lr=0.1)
    with autograd.context() as context_id:
        autograd.backward(context_id, [layer.rpc_sync().forward(torch.ones(1, 4)).sum()])
        optimizer.step(context_id)
    after = layer.rpc_sync().values()
    # The third parameter has no gradient in the context, and the one in `.grad` is not taken for it.
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [False, False, True]
    assert all(bool((grad == 7.0).all()) for grad in layer.rpc_sync().grads())
    optimizer.zero_grad()
    assert layer.rpc_sync().grads() == [None, None, None]


def test_an_owner_that_took_no_part_does_nothing(cluster: Cluster) -> None:
    twins = Twins()
    optimizer = DistributedOptimizer(torch.optim.SGD, twins.rrefs(), lr=0.1)
    before = twins.values_there()
    w = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        autograd.backward(context_id, [w.sum()])
        thread_errors: list[BaseException] = []

        def step() -> None:  # outside of the context, so that the calls do not take it along
            try:
                optimizer.step(context_id)
            except BaseException as exc:
                thread_errors.append(exc)

        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        assert not thread_errors
    torch.testing.assert_close(twins.values_there(), before, rtol=0, atol=0)


def test_sparse_gradients(cluster: Cluster) -> None:
    here, there = functions.Table(), rpc.remote("worker2", functions.Table)
    single = torch.optim.SparseAdam(here.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(torch.optim.SparseAdam, there.rpc_sync().parameter_rrefs(), lr=0.1)
    rows = torch.tensor([1, 4, 1])
    for _ in range(2):
        single.zero_grad()
        here(rows).sum().backward()
        norm = torch.linalg.vector_norm(here.table.weight.grad.coalesce().values())  # type: ignore[union-attr]
        here.table.weight.grad.mul_(0.5 / (norm.item() + 1e-6))  # type: ignore[union-attr]
        single.step()
        with autograd.context() as context_id:
            autograd.backward(context_id, [there.rpc_sync().forward(rows).sum()])
            torch.testing.assert_close(optimizer.clip_grad_norm_(context_id, 0.5), norm)
            optimizer.step(context_id)
    torch.testing.assert_close(there.rpc_sync().values(), here.values())


def test_the_page_runs(cluster: Cluster) -> None:
    run_page("docs/optim.md")


# ---------------------------------------------------------------- groups, schedulers, clipping


def test_param_groups_have_options_of_their_own(cluster: Cluster) -> None:
    twins = Twins()
    mine, theirs = twins.parameters(), twins.rrefs()
    # The first group is spread over two workers, and the second one lies on one of these as well.

    def groups(params: list[Any]) -> Any:
        return [{"params": [params[i] for i in (0, 1, 3)], "lr": 0.2}, {"params": [params[i] for i in (2, 4, 6, 7)]}]

    single = torch.optim.SGD(groups(mine), lr=0.01)
    optimizer = DistributedOptimizer(torch.optim.SGD, groups(theirs), lr=0.01)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.01]
    twins.step_here(single)
    twins.step_there(optimizer)
    single.param_groups[1]["lr"] = optimizer.param_groups[1]["lr"] = 0.3
    twins.step_here(single)
    twins.step_there(optimizer)
    twins.assert_equal()


SCHEDULERS: list[Callable[[Any], Any]] = [
    lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5),
    lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=5),  # changes momentum as well
    lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
]


@pytest.mark.parametrize("make", SCHEDULERS, ids=["StepLR", "OneCycleLR", "LambdaLR"])
def test_schedulers(cluster: Cluster, make: Callable[[Any], Any]) -> None:
    twins = Twins()
    single = torch.optim.SGD(twins.parameters(), lr=0.1, momentum=0.9)
    optimizer = DistributedOptimizer(torch.optim.SGD, twins.rrefs(), lr=0.1, momentum=0.9)
    schedulers = make(single), make(optimizer)
    for _ in range(3):
        twins.step_here(single)
        twins.step_there(optimizer)
        for scheduler in schedulers:
            scheduler.step()
        assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
    twins.assert_equal()


def test_make_scheduler_and_a_plateau(cluster: Cluster) -> None:
    layer = rpc.remote("worker1", functions.Layer, (1,))
    optimizer = DistributedOptimizer(torch.optim.SGD, layer.rpc_sync().parameter_rrefs(), lr=0.1)
    plateau = optimizer.make_scheduler(lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.1)
    for loss in (1.0, 1.0, 1.0):
        plateau.step(loss)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_by_the_global_norm(cluster: Cluster, max_norm: float) -> None:
    twins = Twins()
    single = torch.optim.SGD(twins.parameters(), lr=0.5)
    optimizer = DistributedOptimizer(torch.optim.SGD, twins.rrefs(), lr=0.5)
    for _ in range(2):
        assert twins.step_there(optimizer, max_norm) == pytest.approx(twins.step_here(single, max_norm), rel=1e-5)
    twins.assert_equal()


def test_clipping_changes_the_gradients_of_the_context_only_when_it_should(cluster: Cluster) -> None:
    layer = rpc.remote("worker1", functions.Layer, (1,))
    first, *others = layer.rpc_sync().parameter_rrefs()
    optimizer = DistributedOptimizer(torch.optim.SGD, [first], lr=0.5)
    with autograd.context() as context_id:
        autograd.backward(context_id, [layer.rpc_sync().forward(torch.ones(1, 4)).sum()])
        weight, bias = layer.rpc_sync().collected(context_id)
        norm = optimizer.clip_grad_norm_(context_id, 0.25, norm_type=float("inf"))
        assert norm.item() == pytest.approx(weight.abs().max().item())
        clipped, same = layer.rpc_sync().collected(context_id)
        torch.testing.assert_close(clipped, weight * 0.25 / norm)
        assert torch.equal(same, bias)  # it is not this optimizer's
        autograd_result = optimizer.clip_grad_norm_(context_id, 100.0)
        torch.testing.assert_close(autograd_result, torch.linalg.vector_norm(clipped))
    del others


def test_a_norm_that_is_not_finite(cluster: Cluster) -> None:
    layer = rpc.remote("worker1", functions.Layer, (1,))
    optimizer = DistributedOptimizer(torch.optim.SGD, layer.rpc_sync().parameter_rrefs(), lr=0.5)
    with autograd.context() as context_id:
        loss = layer.rpc_sync().forward(torch.ones(1, 4)).sum() * float("inf")
        autograd.backward(context_id, [loss])
        with pytest.raises(RuntimeError, match=r"total norm of order 2\.0 .* cannot be clipped"):
            optimizer.clip_grad_norm_(context_id, 1.0, error_if_nonfinite=True)


# ---------------------------------------------------------------- state


def test_state_goes_to_and_from_one_process(cluster: Cluster) -> None:
    twins = Twins()
    single = torch.optim.Adam(twins.parameters(), lr=0.01)
    optimizer = DistributedOptimizer(torch.optim.Adam, twins.rrefs(), lr=0.01)
    for _ in range(2):
        twins.step_here(single)
        twins.step_there(optimizer)
    state, expected = optimizer.state_dict(), single.state_dict()
    assert list(state["state"]) == list(expected["state"])
    assert state["param_groups"] == expected["param_groups"]
    torch.testing.assert_close(state["state"], expected["state"])

    # A new one, whose owners have its parameters in another order, goes on where the state was taken.
    order = [4, 0, 8, 3, 1, 7, 2, 6, 5]
    rrefs = twins.rrefs()
    other = DistributedOptimizer(torch.optim.Adam, [rrefs[i] for i in order], lr=1.0)
    mixed = torch.optim.Adam([twins.parameters()[i] for i in order], lr=1.0)
    keys = {number: place for place, number in enumerate(order)}
    moved = {
        "state": {keys[number]: value for number, value in expected["state"].items()},
        "param_groups": expected["param_groups"],
    }
    other.load_state_dict(moved)
    mixed.load_state_dict(moved)
    assert other.param_groups[0]["lr"] == 0.01
    twins.step_here(mixed)
    twins.step_there(other)
    twins.assert_equal()


def test_state_of_other_parameters_is_refused(cluster: Cluster) -> None:
    layer = rpc.remote("worker1", functions.Layer, (1,))
    optimizer = DistributedOptimizer(torch.optim.Adam, layer.rpc_sync().parameter_rrefs(), lr=0.01)
    state = torch.optim.Adam([torch.zeros(1, requires_grad=True)]).state_dict()
    with pytest.raises(ConfigError, match=r"groups of \[1\] parameters, but this optimizer has groups of \[3\]"):
        optimizer.load_state_dict(state)


def test_it_travels_in_calls(cluster: Cluster) -> None:
    layer = rpc.remote("worker1", functions.Layer, (1,))
    before = layer.rpc_sync().values()
    optimizer = DistributedOptimizer(torch.optim.SGD, layer.rpc_sync().parameter_rrefs(), lr=0.5)
    lr_scheduler.StepLR(optimizer, step_size=1)
    assert rpc_sync("worker2", functions.use, (optimizer, layer, torch.ones(1, 4))) == ["worker1"]
    assert not torch.equal(layer.rpc_sync().values()[0], before[0])
    assert repr(optimizer) == "<DistributedOptimizer SGD [parameters: 3 on worker1]>"


def test_an_owner_that_has_no_such_optimizer_says_so(cluster: Cluster) -> None:
    with pytest.raises(RuntimeError, match="optimizer 0 does not exist any more"):
        rpc_sync("worker1", call_local_optimizer, (0, "zero_grad", True))


# ---------------------------------------------------------------- several trainers


def test_trainers_at_the_same_time_are_served_one_by_one(cluster: Cluster) -> None:
    layers = [rpc.remote(worker, functions.Layer, (1,)) for worker in ("worker1", "worker2")]
    before = [layer.rpc_sync().values()[1] for layer in layers]
    x = torch.tensor(1.0)
    trainers = [rpc_async(worker, functions.train, (layers, x, 10, 0.125)) for worker in cluster.names]
    rpc.wait_all(trainers)
    for layer, start in zip(layers, before, strict=True):
        # Every step of every trainer counts once: gradients are 1, and 1/8 is exact.
        torch.testing.assert_close(layer.rpc_sync().values()[1], start - 4 * 10 * 0.125)
        assert rpc_sync(layer.owner(), functions.most_running) == 1


@pytest.mark.parametrize("hogwild", [False, True])
def test_a_step_between_forward_and_backward_of_another(cluster: Cluster, hogwild: bool) -> None:
    first = rpc.remote("worker1", functions.Layer, (1,))
    second = rpc.remote("worker1", functions.Layer, (2,))
    optimizer = DistributedOptimizer(torch.optim.SGD, second.rpc_sync().parameter_rrefs(), lr=0.5)

    def forward() -> Tensor:
        hidden = first.rpc_sync().forward(torch.ones(1, 4))
        loss: Tensor = second.rpc_sync().forward(hidden).sum()
        return loss

    def other_trainer() -> None:
        with autograd.context() as context_id:
            autograd.backward(context_id, [forward()])
            optimizer.step(context_id, hogwild=hogwild)

    with autograd.context() as context_id:
        loss = forward()  # the second layer saves its weight
        thread = threading.Thread(target=other_trainer)
        thread.start()
        thread.join()
        if hogwild:
            autograd.backward(context_id, [loss])
            assert len(first.rpc_sync().collected(context_id)) == 2
        else:
            with pytest.raises(autograd.BackwardError, match="modified by an inplace operation"):
                autograd.backward(context_id, [loss])


# ---------------------------------------------------------------- asynchronous


@pytest.fixture
def trained_layer(cluster: Cluster) -> tuple[Any, DistributedOptimizer]:
    layer = rpc.remote("worker1", functions.Layer, (1,))
    return layer, DistributedOptimizer(torch.optim.SGD, layer.rpc_sync().parameter_rrefs(), lr=0.5)


async def test_in_a_coroutine(trained_layer: tuple[Any, DistributedOptimizer]) -> None:
    layer, optimizer = trained_layer
    before = await layer.rpc_async().values()
    scheduler = lr_scheduler.StepLR(optimizer, step_size=1)
    async with autograd.context() as context_id:
        loss = (await layer.rpc_async().forward(torch.ones(1, 4))).sum()
        await autograd.backward_async(context_id, [loss])
        with pytest.raises(BlockingInLoop, match=r"await optimizer\.step_async"):
            optimizer.step(context_id)
        await optimizer.step_async(context_id)
    scheduler.step()  # it knows of the step, and does not warn
    assert not torch.equal((await layer.rpc_async().values())[0], before[0])
    with pytest.raises(autograd.ContextNotFound):
        await optimizer.step_async(context_id)


# ---------------------------------------------------------------- errors


def test_errors_of_a_step_name_the_worker(cluster: Cluster) -> None:
    twins = Twins()
    optimizer = DistributedOptimizer(functions.PickySGD, twins.rrefs(), lr=0.1, fails=True)
    layer = rpc.remote("worker3", functions.Layer, (1,))
    good = DistributedOptimizer(functions.PickySGD, layer.rpc_sync().parameter_rrefs(), lr=0.1)
    with autograd.context() as context_id:
        autograd.backward(context_id, [twins.loss_there()])
        with pytest.raises(ArithmeticError, match="this step fails") as caught:
            optimizer.step(context_id)
        good.step(context_id)  # the lock is free again
        with pytest.raises(ArithmeticError, match="this step fails") as caught_async:
            optimizer.step_async(context_id).wait()
    for error in (caught.value, caught_async.value):
        assert error.__notes__[0] == (
            "step of a distributed PickySGD failed on worker 'worker1'; it succeeded on: no worker"
        )
        assert len(error.__notes__) == 3


def test_errors_of_the_constructor_name_the_worker(cluster: Cluster) -> None:
    layer = rpc.remote("worker1", functions.Layer, (1,))
    rrefs = layer.rpc_sync().parameter_rrefs()
    with pytest.raises(LookupError, match="this optimizer cannot be made") as caught:
        DistributedOptimizer(functions.NoConstructor, rrefs)
    assert "creating a distributed NoConstructor failed on worker 'worker1'" in caught.value.__notes__[0]
    with pytest.raises(TypeError, match="unexpected keyword argument 'warmth'") as wrong:
        DistributedOptimizer(torch.optim.SGD, rrefs, warmth=3)
    assert "failed on worker 'worker1'" in wrong.value.__notes__[0]


def test_what_is_no_parameter_is_refused(cluster: Cluster) -> None:
    tensor = torch.zeros(2, requires_grad=True)
    number = rpc.remote("worker1", functions.most_running)
    cases: list[tuple[Any, type[Exception], str]] = [
        ([], ValueError, "empty parameter list"),
        (tensor, TypeError, "params_rref is a Tensor; it must be a list of RRefs"),
        ([tensor], TypeError, r"params_rref\[0\] is a Tensor, not an RRef"),
        ([rpc.RRef(tensor), number], TypeError, r"params_rref\[1\] refers to a int on worker 'worker1'"),
    ]
    for params, error, text in cases:
        with pytest.raises(error, match=text):
            DistributedOptimizer(torch.optim.SGD, params, lr=0.1)
    optimizer = DistributedOptimizer(torch.optim.SGD, [rpc.RRef(tensor)], lr=0.1)
    with pytest.raises(RuntimeError, match="give them all to its constructor"):
        optimizer.add_param_group({"params": []})


def test_a_context_that_is_over(cluster: Cluster) -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, [rpc.RRef(torch.zeros(2, requires_grad=True))], lr=0.1)
    with autograd.context() as context_id:
        pass
    for use in (optimizer.step, optimizer.step_async, lambda id: optimizer.clip_grad_norm_(id, 1.0)):
        with pytest.raises(autograd.ContextNotFound, match=f"id: {context_id}"):
            use(context_id)


def test_an_owner_that_dies_in_a_step(worker_pool: WorkerPool) -> None:
    world = worker_pool.world("a", "b", peer_timeout=CALM_S)
    running = worker_pool.folder / "running"
    pending = world["a"].begin(functions.train_until_death, "b", str(running))
    eventually(running.exists, "the step has begun")
    killed = time.monotonic()
    world["b"].kill()
    kind, text, notes, at = pending.result()
    assert kind == "OwnerLost" and "'b'" in text
    assert notes == ["step of a distributed StuckSGD failed on worker 'b'; it succeeded on: no worker"]
    assert at - killed < PROMPT_S


def test_waiting_for_another_step_has_a_limit(cluster: Cluster) -> None:
    layer = rpc.remote("worker1", functions.Layer, (1,))
    optimizer = DistributedOptimizer(torch.optim.SGD, layer.rpc_sync().parameter_rrefs(), lr=0.1)
    key = f"limit {time.monotonic_ns()}"
    holder = rpc_async("worker1", functions.hold_the_lock, (key,))
    rpc_sync("worker1", rpc_functions.board_wait, (f"{key} held",))
    usual = rpc.get_rpc_timeout()
    with autograd.context() as context_id:
        try:
            rpc.api._set_rpc_timeout(0.2)
            with pytest.raises(DeadlineExceeded):
                optimizer.step(context_id)
        finally:
            rpc.api._set_rpc_timeout(usual)
        rpc_sync("worker1", rpc_functions.board_put, (f"{key} let go",))
        holder.wait()
        optimizer.step(context_id)
