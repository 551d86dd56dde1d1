"""A backward pass and the steps that follow it as one operation: nobody steps unless the whole pass has succeeded."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import optim_functions as functions
import pytest
import torch
from inside_agents import current_agent
from peer_timeouts import CALM_S, LIMIT_S
from rpc_cluster import Cluster
from test_optim_distributed import Twins
from torch import Tensor
from torch.optim import lr_scheduler

import rpcdist.autograd as autograd
import rpcdist.rpc as rpc
from rpcdist.autograd import BackwardError
from rpcdist.autograd._pass_message import PassMessage
from rpcdist.deadline import Deadline
from rpcdist.errors import BlockingInLoop, DeadlineExceeded, RpcdistError
from rpcdist.optim import DistributedOptimizer
from rpcdist.optim._local_optimizer import OptimizerTable, call_local_optimizer, encode_step, own_table
from rpcdist.testing import InProcessCluster, WorkerPool

rpc_sync: Any = rpc.rpc_sync
multiproc = pytest.mark.multiproc


@multiproc
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam], ids=["SGD", "Adam"])
def test_it_equals_backward_and_step(cluster: Cluster, kind: Any) -> None:
    """With a scheduler, so that options travel along; on three workers, one of which is this one."""
    twins = Twins()
    single, distributed = kind(twins.parameters(), lr=0.05), DistributedOptimizer(kind, twins.rrefs(), lr=0.05)
    schedulers = [lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in (single, distributed)]
    for number in range(4):
        twins.step_here(single)
        twins.step_there_at_once(distributed) if number % 2 else twins.step_there(distributed)
        for scheduler in schedulers:
            scheduler.step()
    twins.assert_equal()


@multiproc
def test_hooks_of_a_step_are_called(cluster: Cluster) -> None:
    twins = Twins()
    optimizer = DistributedOptimizer(torch.optim.SGD, twins.rrefs(), lr=0.1)
    seen: list[int] = []
    optimizer.register_step_post_hook(lambda *arguments: seen.append(1))
    twins.step_there_at_once(optimizer)
    assert seen == [1]


@multiproc
def test_options_that_only_a_call_can_carry(cluster: Cluster) -> None:
    twins = Twins()
    single = torch.optim.Adam(twins.parameters(), lr=torch.tensor(0.05))
    distributed = DistributedOptimizer(torch.optim.Adam, twins.rrefs(), lr=torch.tensor(0.05))
    for optimizer in (single, distributed):
        optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
    twins.step_here(single)
    twins.step_there_at_once(distributed)
    twins.assert_equal()


@multiproc
def test_nobody_steps_when_the_pass_fails(cluster: Cluster) -> None:
    twins = Twins()
    before = twins.values_there()
    optimizer = DistributedOptimizer(torch.optim.SGD, twins.rrefs(), lr=0.1)

    def fail(gradient: Tensor) -> Tensor:
        raise ArithmeticError("a hook of the last part of the pass")

    x = twins.x.clone().requires_grad_()
    x.register_hook(fail)
    twins.x = x * 1
    with autograd.context() as context_id:
        with pytest.raises(BackwardError, match="a hook of the last part"):
            optimizer.backward_and_step(context_id, [twins.loss_there()])
    torch.testing.assert_close(twins.values_there(), before)


@multiproc
def test_a_step_that_fails_says_where_it_was_done(cluster: Cluster) -> None:
    layers = [rpc.remote(worker, functions.Layer, (1,)) for worker in ("worker1", "worker2")]
    rrefs = [rref for layer in layers for rref in layer.rpc_sync().parameter_rrefs()]
    optimizer = DistributedOptimizer(functions.PickySGD, rrefs, lr=0.1, fails=True)
    with autograd.context() as context_id:
        loss = sum(layer.rpc_sync().forward(torch.ones(1, 4)).sum() for layer in layers)
        with pytest.raises(ArithmeticError, match="this step fails") as caught:
            optimizer.backward_and_step(context_id, [loss])
        assert autograd.get_gradients(context_id) == {}  # the pass is over, and the context goes on
    assert "backward_and_step of a distributed PickySGD failed on worker 'worker1'" in caught.value.__notes__[0]


@multiproc
@pytest.mark.parametrize("at", ["pass", "step"])
def test_an_owner_that_dies(worker_pool: WorkerPool, at: str) -> None:
    world = worker_pool.world("worker0", "worker1", "worker2", peer_timeout=CALM_S)
    text = world["worker0"].begin(functions.step_at_once_with_death, at).result()
    if at == "pass":
        assert text.startswith("BackwardError") and "worker1" in text
    else:
        assert text.startswith("OwnerLost") and "it succeeded on: worker2" in text, text


class NoisySGD(torch.optim.SGD):
    """Counts its steps."""

    steps: ClassVar[dict[int, int]] = {}

    def step(self, closure: Any = None) -> Any:
        self.steps[id(self)] = self.steps.get(id(self), 0) + 1
        return super().step(closure)


def with_owner(
    cluster: InProcessCluster,
    attack: Callable[[DistributedOptimizer, int, Tensor], object],
    kind: Any = torch.optim.SGD,
) -> None:
    """Calls a function on worker a with an optimizer of a parameter on b, a context, and a loss."""

    def body() -> None:
        rref = rpc.remote("b", weight)
        optimizer = DistributedOptimizer(kind, [rref], lr=1.0)
        with autograd.context() as context_id:
            attack(optimizer, context_id, rpc_sync("b", total, (rref,)))

    cluster.run("a", body)


def weight() -> Tensor:
    return torch.ones(3, requires_grad=True)


def total(rref: Any) -> Tensor:
    result: Tensor = rref.local_value().sum()
    return result


def test_only_an_owner_that_was_asked_says_that_it_has_stepped(no_agent: None) -> None:
    """A third worker answers for the owner, for each pass that there may be, while the owner works."""
    with InProcessCluster("a", "b", "c", peer_timeout=CALM_S) as cluster:

        def attack(optimizer: DistributedOptimizer, context_id: int, loss: Tensor) -> None:
            forged = PassMessage()
            forged.outcome = b"\1" + bytes(8)

            def answer() -> None:
                rpc_sync("a", abs, (-1,))
                session = current_agent().router.session_with(0)
                assert session is not None
                for number in range(1, 20):
                    session.send(forged.encode(context_id, number)[0])
                rpc_sync("a", abs, (-1,))

            loss.register_hook(lambda gradient: cluster.begin("c", answer).result(LIMIT_S) and None)
            optimizer.backward_and_step(context_id, [loss])

        with_owner(cluster, attack)


def test_work_for_what_is_not_here_is_answered(no_agent: None) -> None:
    with InProcessCluster("a", "b", peer_timeout=CALM_S) as cluster:

        def ask(work: bytes) -> Any:
            with autograd.context() as context_id:
                agent: Any = current_agent()
                return agent.autograd.step(context_id, {1: work}, lambda: None, Deadline.after(5.0))

        for work in (b"", b"x" * 8, (77).to_bytes(8, "little") + b"\0", bytes(9) + b"\xff\xff"):
            outcome = cluster.run("a", ask, work)[1]
            assert outcome[0] == 2, outcome

        def count() -> int:
            return len(kept_errors())

        assert cluster.run("b", count) == 4


def test_the_deadline_names_who_has_not_stepped(no_agent: None) -> None:
    with InProcessCluster("a", "b", peer_timeout=CALM_S) as cluster:

        def attack(optimizer: DistributedOptimizer, context_id: int, loss: Tensor) -> None:
            table = cluster.run("b", own_table)
            late = r"has not said that its step is done|another one's step"  # whose limit is over first
            with table.lock, pytest.raises(DeadlineExceeded, match=late):
                optimizer.backward_and_step(context_id, [loss], timeout=0.3)

        with_owner(cluster, attack)


def test_on_an_event_loop_it_is_refused(no_agent: None) -> None:
    with InProcessCluster("a", "b", peer_timeout=CALM_S) as cluster:

        def attack(optimizer: DistributedOptimizer, context_id: int, loss: Tensor) -> None:
            import asyncio

            async def step() -> None:
                optimizer.backward_and_step(context_id, [loss])

            with pytest.raises(BlockingInLoop, match=r"optimizer\.backward_and_step"):
                asyncio.run(step())

        with_owner(cluster, attack)


def test_each_owner_steps_once_a_call(no_agent: None) -> None:
    NoisySGD.steps.clear()
    with InProcessCluster("a", "b", peer_timeout=CALM_S) as cluster:

        def attack(optimizer: DistributedOptimizer, context_id: int, loss: Tensor) -> None:
            optimizer.backward_and_step(context_id, [loss])
            optimizer.step(context_id)

        for _ in itertools.repeat(None, 3):
            with_owner(cluster, attack, NoisySGD)
    assert sorted(NoisySGD.steps.values()) == [2, 2, 2]


PARAMETER = torch.ones(2, requires_grad=True)


def scaled(x: Tensor) -> Tensor:
    return (PARAMETER * x).sum()


def test_a_restricted_owner_steps_for_nobody_who_may_not_call_that(no_agent: None) -> None:
    with InProcessCluster("a", "b", allow_functions=[f"{__name__}:scaled"], peer_timeout=CALM_S) as cluster:
        with cluster.use("b"):
            optimizer = DistributedOptimizer(torch.optim.SGD, [rpc.RRef(PARAMETER)], lr=0.1)
        with cluster.use("a") as agent, autograd.context() as context_id:
            autograd.backward(context_id, [rpc_sync("b", scaled, (torch.ones(2, requires_grad=True),))])
            work = encode_step(optimizer._numbers[0], [{"lr": -1e9}], False)
            hooks: Any = agent.autograd
            outcomes = hooks.step(context_id, {1: work}, lambda: None, Deadline.after(LIMIT_S))
        assert outcomes[1][0] == 2 and PARAMETER.tolist() == [1.0, 1.0]
        [error] = cluster.run("b", kept_errors)
        assert "does not allow calls of rpcdist.optim._local_optimizer:call_local_optimizer" in str(error)


def test_a_step_changes_no_parameters(no_agent: None) -> None:
    with InProcessCluster("a", "b", peer_timeout=CALM_S) as cluster:

        def attack(optimizer: DistributedOptimizer, context_id: int, loss: Tensor) -> None:
            arguments = (optimizer._numbers[0], "step", context_id, [{"params": [1, 2]}], False)
            with pytest.raises(RpcdistError, match="would set the parameters of its group"):
                rpc_sync("b", call_local_optimizer, arguments)
            optimizer.backward_and_step(context_id, [loss])

        with_owner(cluster, attack)


def test_nobody_steps_when_the_time_is_over_after_the_pass(no_agent: None) -> None:
    with InProcessCluster("a", "b", peer_timeout=CALM_S) as cluster:

        def attack(optimizer: DistributedOptimizer, context_id: int, loss: Tensor) -> None:
            reached = threading.Event()
            root = loss * 1
            root.register_hook(lambda gradient: reached.wait(0.3) or None)
            with pytest.raises(DeadlineExceeded):
                optimizer.backward_and_step(context_id, [root], timeout=0.1)
            assert not NoisySGD.steps

        NoisySGD.steps.clear()
        with_owner(cluster, attack, NoisySGD)


def kept_errors(table: OptimizerTable | None = None) -> list[BaseException]:
    """The errors of steps that a table, by default this worker's, keeps for those who asked for the steps."""
    found = own_table() if table is None else table
    return list(found._errors.values())


def test_the_error_of_a_step_holds_no_gradients(no_agent: None) -> None:
    def fail() -> None:
        gradient = torch.ones(3)
        raise ArithmeticError(f"a step with {gradient.numel()} elements")

    table = OptimizerTable()
    try:
        fail()
    except ArithmeticError as error:
        table.keep_error(error)
    [kept] = kept_errors(table)
    trace = kept.__traceback__
    while trace is not None:
        assert "gradient" not in trace.tb_frame.f_locals
        trace = trace.tb_next


class WatchedMessages:
    """Counts what the messages of passes bring, in all workers of this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        encode = PassMessage.encode

        def watched(message: PassMessage, *arguments: Any) -> Any:
            kinds = ("follow_up", "follows", "work", "outcome")
            self.seen += [kind for kind in kinds if getattr(message, kind) not in (None, False)]
            return encode(message, *arguments)

        monkeypatch.setattr(PassMessage, "encode", watched)


def half(x: Tensor) -> Tensor:
    """A part of a model on b, with a parameter of its own; the gradient of `x` goes back."""
    return PARAMETER * x


def own_parameter() -> Any:
    return rpc.RRef(PARAMETER)


def between(
    cluster: InProcessCluster, first: Tensor, kind: Any = NoisySGD, parameter: Any = own_parameter
) -> list[str]:
    """One step of worker a, which has `first` of the model, and of b; the notes of its error."""

    def body() -> list[str]:
        optimizer = DistributedOptimizer(kind, [rpc_sync("b", parameter)], lr=0.5)
        with autograd.context() as context_id:
            try:
                optimizer.backward_and_step(context_id, [rpc_sync("b", half, (first,)).sum()])
            except (BackwardError, ArithmeticError) as error:
                return list(getattr(error, "__notes__", ["no note"]))
        return []

    NoisySGD.steps.clear()
    result: list[str] = cluster.run("a", body)
    return result


def test_the_only_other_worker_steps_without_being_asked_again(no_agent: None, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = WatchedMessages(monkeypatch)
    with InProcessCluster("a", "b", peer_timeout=CALM_S) as cluster:
        before = PARAMETER.detach().clone()
        assert between(cluster, torch.ones(2, requires_grad=True) * 3) == []
        torch.testing.assert_close(PARAMETER.detach(), before - 0.5 * 3)
    assert watched.seen == ["follow_up", "follows", "outcome"]
    assert list(NoisySGD.steps.values()) == [1]


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ArithmeticError("the last part of the pass")


@pytest.mark.parametrize("where", ["function", "leaf"])
def test_nobody_steps_before_code_that_may_fail(no_agent: None, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    watched = WatchedMessages(monkeypatch)

    def fail(gradient: Tensor) -> Tensor:
        raise ArithmeticError("the last part of the pass")

    leaf = torch.ones(2, requires_grad=True)
    first: Any = Fails.apply(leaf) if where == "function" else leaf * 1  # type: ignore[no-untyped-call]
    if where == "leaf":
        leaf.register_hook(fail)
    with InProcessCluster("a", "b", peer_timeout=CALM_S) as cluster:
        assert between(cluster, first) == ["no note"]
    assert watched.seen == [] and not NoisySGD.steps


def test_an_error_after_the_step_of_the_other_worker_names_it(no_agent: None) -> None:
    """Nobody can see the hook of a tensor that is no leaf before it is called."""

    def fail(gradient: Tensor) -> Tensor:
        raise ArithmeticError("the last part of the pass")

    first = torch.ones(2, requires_grad=True) * 1
    first.register_hook(fail)
    with InProcessCluster("a", "b", peer_timeout=CALM_S) as cluster:
        assert between(cluster, first) == ["worker 'b' has taken its step; this worker has not"]
    assert list(NoisySGD.steps.values()) == [1]


def test_a_step_that_was_not_asked_for_again_says_what_it_raised(no_agent: None) -> None:
    with InProcessCluster("a", "b", peer_timeout=CALM_S) as cluster:
        [note] = between(cluster, torch.ones(2, requires_grad=True) * 3, kind=FailingSGD)
    assert note.endswith("failed on worker 'b'; it succeeded on: no worker"), note


class FailingSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ArithmeticError("this step fails")


def through_c(x: Tensor) -> Tensor:
    result: Tensor = rpc_sync("c", half, (x * 2,))
    return result


def test_an_owner_with_another_neighbour_waits_until_it_is_asked(
    no_agent: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with InProcessCluster("a", "b", "c", peer_timeout=CALM_S) as cluster:

        def body() -> None:
            optimizer = DistributedOptimizer(NoisySGD, [rpc_sync("b", own_parameter)], lr=0.5)
            with autograd.context() as context_id:
                loss = rpc_sync("b", through_c, (torch.ones(2, requires_grad=True) * 3,)).sum()
                watched = WatchedMessages(monkeypatch)
                optimizer.backward_and_step(context_id, [loss])
            assert watched.seen == ["follow_up", "work", "outcome"]

        cluster.run("a", body)
