"""The mailbox of a pipeline's worker: the worker waits there for its tensors, and others may wake it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rpcdist import rpc
from rpcdist.deadline import Deadline
from rpcdist.errors import DeadlineExceeded, RpcdistError
from rpcdist.parallel import Pipeline
from rpcdist.parallel.pipeline import Action, _pipeline, _step_execution, _step_messages
from rpcdist.parallel.pipeline._step_execution import Stage, StepExecution
from rpcdist.parallel.pipeline._step_messages import Mailbox, PipelineConfig, StepOrder, push, receivers
from rpcdist.testing import InProcessCluster, wait_until_asleep

LIMIT_S = 30.0
FORWARD = Action(1, "F", 0)


def wait_in(mailbox: Mailbox, threads: ThreadPoolExecutor) -> Future[Sequence[object]]:
    """Lets a thread wait for the tensors of `FORWARD`; returns when it sleeps."""
    thread = threads.submit(threading.current_thread).result(LIMIT_S)
    taken = threads.submit(mailbox.take, FORWARD, Deadline.after(LIMIT_S))
    wait_until_asleep(thread)
    return taken


def test_what_another_thread_puts_wakes_the_one_that_waits() -> None:
    mailbox = Mailbox()
    with ThreadPoolExecutor(1) as threads:
        taken = wait_in(mailbox, threads)
        mailbox.put(FORWARD, ["tensor"])
        assert taken.result(LIMIT_S) == ["tensor"]


def test_a_failure_wakes_the_one_that_waits() -> None:
    mailbox = Mailbox()
    with ThreadPoolExecutor(1) as threads:
        taken = wait_in(mailbox, threads)
        mailbox.fail(RpcdistError("the step has ended"))
        with pytest.raises(RpcdistError, match="the step has ended"):
            taken.result(LIMIT_S)


def test_nothing_comes() -> None:
    with pytest.raises(DeadlineExceeded):
        Mailbox().take(FORWARD, Deadline.after(0.01))


@pytest.mark.parametrize(("stage", "kind"), [(0, "F"), (2, "B"), (1, "X")])
def test_tensors_for_an_action_that_a_worker_does_not_have_are_refused(no_agent: None, stage: int, kind: str) -> None:
    with InProcessCluster("ada", "bob") as cluster, cluster.use("ada"):
        pipe = Pipeline([nn.Identity(), nn.Identity()], ["ada", "bob"])
        ((key, _),) = receivers()
        with pytest.raises(RpcdistError, match=f"{stage}{kind}0 came to worker 'bob', which has no such action"):
            rpc.rpc_sync("bob", push, (key, 1, 1, stage, kind, 0, []))
        del pipe


def test_tensors_on_gpus_are_waited_for_by_the_thread_that_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the one that puts them."""
    events: list[tuple[str, object]] = []
    noted = ["tensor of a GPU"]

    class Arrived:
        def __init__(self, values: object) -> None:
            events.append(("noted", values))

        of = classmethod(lambda kind, values: kind(values))

        def join_gpus(self) -> None:
            events.append(("joined", threading.get_ident()))

    monkeypatch.setattr(_step_messages, "ArrivedTensors", Arrived)
    mailbox = Mailbox(on_gpu=True)
    mailbox.put(FORWARD, noted)
    assert events == [("noted", noted)]
    with ThreadPoolExecutor(1) as threads:
        taker = threads.submit(threading.get_ident).result(LIMIT_S)
        assert threads.submit(mailbox.take, FORWARD, Deadline.after(LIMIT_S)).result(LIMIT_S) == noted
    assert events[1:] == [("joined", taker)]
    cpu = Mailbox()
    cpu.put(FORWARD, noted)
    assert cpu.take(FORWARD, Deadline.after(LIMIT_S)) == noted and len(events) == 2


class Caller:
    """Notes the calls that a step makes; their results are there at once."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, tuple[object, ...], object]] = []

    def begin(self, to: int, what: Any) -> Callable[[], None]:
        self.calls.append((to, what.args, what.device_map))
        return lambda: None


META = torch.device("meta")


@pytest.mark.parametrize(
    ("there", "expected"),
    [("cuda:1", {META: torch.device("cuda:1")}), ("cpu", {META: torch.device("cpu")})],
)
def test_tensors_stay_on_their_device_when_they_are_pushed(
    monkeypatch: pytest.MonkeyPatch, there: str, expected: object
) -> None:
    """The device meta stands for a GPU: a copy on the CPU cannot be made of its tensors."""
    caller = Caller()
    agent = SimpleNamespace(caller=caller, directory=SimpleNamespace(resolve=["ada", "bob"].index))
    monkeypatch.setattr(_step_execution, "current_agent", lambda: agent)
    config = PipelineConfig("key", ("ada", "bob"), 2, None, (META, torch.device(there)))
    module = Splitting().to(META)
    order = StepOrder(1, [Action(0, "F", 0), Action(0, "B", 0)], [(torch.ones(2, 3),)], [], [], False, 0.0)
    mailbox = Mailbox()
    mailbox.put(Action(0, "B", 0), [(torch.ones(2, 3, device=META)), None])
    stages = {0: Stage(0, module, META)}
    StepExecution(config, "ada", stages, order, mailbox, Deadline.after(LIMIT_S)).run()
    ((to, (*_, values), device_map),) = caller.calls
    assert to == 1 and device_map == expected
    assert isinstance(values, list)
    first, (second, three) = values
    assert (first.device, second.device, three) == (META, META, 3)
    assert first.requires_grad and first.grad_fn is None and not second.requires_grad
    assert module.linear.weight.grad is not None


def test_tensors_on_the_cpu_are_pushed_without_a_map(monkeypatch: pytest.MonkeyPatch) -> None:
    caller = Caller()
    agent = SimpleNamespace(caller=caller, directory=SimpleNamespace(resolve=["ada", "bob"].index))
    monkeypatch.setattr(_step_execution, "current_agent", lambda: agent)
    cpu = torch.device("cpu")
    config = PipelineConfig("key", ("ada", "bob"), 2, None, (cpu, torch.device("cuda:0")))
    order = StepOrder(1, [Action(0, "F", 0)], [(torch.ones(2, 3),)], [], [], False, 0.0)
    StepExecution(config, "ada", {0: Stage(0, Splitting(), cpu)}, order, Mailbox(), Deadline.after(LIMIT_S)).run()
    ((_, _, device_map),) = caller.calls
    assert device_map is None


class Splitting(nn.Module):
    """Returns a tensor with a gradient, and a pair of one without and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, int]]:
        return self.linear(x), (x.detach(), 3)


@pytest.mark.parametrize(("device", "expected"), [("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("cpu", "cpu")])
def test_the_device_of_a_stage_is_one_that_a_map_can_name(device: str, expected: str) -> None:
    assert _pipeline._with_index(device) == torch.device(expected)
