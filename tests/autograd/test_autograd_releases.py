"""When the ends of contexts are told to other workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from inside_agents import Agent
from torch import Tensor

from rpcdist import autograd, rpc
from rpcdist._proto import autograd_pb2
from rpcdist.autograd import _context, _pass_message
from rpcdist.autograd._context import Releases
from rpcdist.rpc._devices.gpu_sharing import GpuSharing
from rpcdist.rpc._values.tensors import DeviceRoute
from rpcdist.testing import InProcessCluster, eventually


class StandIn:
    """The parts of an agent that count here, with a clock that the test moves."""

    def __init__(self) -> None:
        self.is_closed = False
        self.router = self
        self.sent: list[tuple[int, list[int]]] = []
        self.timers: list[Callable[[], object]] = []

    def call_later(self, delay_s: float, function: Callable[[], object]) -> None:
        self.timers.append(function)

    def send_control(self, to: int, message: autograd_pb2.AutogradMessage) -> None:
        assert message.HasField("release")
        self.sent.append((to, [message.context, *message.release.others]))

    def pass_time(self) -> None:
        due, self.timers = self.timers, []
        for function in due:
            function()


@pytest.fixture
def agent() -> StandIn:
    return StandIn()


@pytest.fixture
def releases(agent: StandIn) -> Releases:
    return Releases(cast(Agent, cast(Any, agent)))


def test_one_that_holds_memory_is_told_at_once(agent: StandIn, releases: Releases) -> None:
    releases.tell({1, 2}, 7, at_once=True)
    assert agent.sent == [(1, [7]), (2, [7])]
    assert not agent.timers


def test_light_ones_are_told_together(agent: StandIn, releases: Releases) -> None:
    releases.tell({1}, 7, at_once=False)
    releases.tell({1, 2}, 8, at_once=False)
    assert not agent.sent
    assert len(agent.timers) == 1
    agent.pass_time()
    assert agent.sent == [(1, [7, 8]), (2, [8])]
    releases.tell({2}, 9, at_once=False)
    agent.pass_time()
    assert agent.sent[2:] == [(2, [9])]


def test_nobody_to_tell(agent: StandIn, releases: Releases) -> None:
    releases.tell((), 7, at_once=False)
    assert not agent.timers


def test_many_do_not_wait(agent: StandIn, releases: Releases) -> None:
    for context_id in range(_context.MAX_PUT_OFF):
        releases.tell({1}, context_id, at_once=False)
    assert agent.sent == [(1, list(range(_context.MAX_PUT_OFF)))]
    agent.pass_time()
    assert len(agent.sent) == 1


def test_ends_that_come_before_a_full_list_is_sent_are_messages_of_the_size_that_others_take(
    agent: StandIn, releases: Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Receivers refuse a message of more, and end the connection."""
    with monkeypatch.context() as patch:
        patch.setattr(releases, "flush", lambda: None)  # its thread does not come to it yet
        for context_id in range(2 * _context.MAX_PUT_OFF + 3):
            releases.tell({1}, context_id, at_once=False)
    releases.flush()
    assert [len(contexts) for _, contexts in agent.sent] == [_context.MAX_PUT_OFF] * 2 + [3]
    assert [context for _, contexts in agent.sent for context in contexts] == list(range(2 * _context.MAX_PUT_OFF + 3))


def test_flush_before_the_agent_closes(agent: StandIn, releases: Releases) -> None:
    releases.tell({1}, 7, at_once=False)
    releases.flush()
    assert agent.sent == [(1, [7])]
    releases.tell({1}, 8, at_once=False)
    agent.is_closed = True
    agent.pass_time()
    assert len(agent.sent) == 1


def scaled(tensor: Tensor, weight: Tensor) -> Tensor:
    return tensor * weight


def test_loans_of_gradients_end_with_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker where a pass has failed drops later messages, and does not return the loans in them."""
    doubted: list[int] = []
    route = GpuSharing.route

    def lending(sharing: GpuSharing, *arguments: Any, back: bool = False) -> DeviceRoute:
        made = route(sharing, *arguments, back=back)
        made.loans += [5] if back else []
        return made

    monkeypatch.setattr(_pass_message, "compact_tensors", lambda tensors, shares_memory: None)  # as for GPUs
    monkeypatch.setattr(GpuSharing, "route", lending)
    monkeypatch.setattr(GpuSharing, "doubt", lambda sharing, loan: doubted.append(loan))
    with InProcessCluster("ada", "bob") as cluster, cluster.use("ada"):
        with autograd.context() as context_id:
            weight = torch.ones(2, requires_grad=True)
            result = rpc.rpc_sync("bob", scaled, (torch.ones(2), weight))
            autograd.backward(context_id, [result.sum()])
            assert not doubted
        eventually(lambda: doubted == [5, 5], "both workers have sent gradients")
