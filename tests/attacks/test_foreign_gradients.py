"""A worker with the token speaks in the backward passes of others, or of what was sent to another."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from inside_agents import agent_of
from peer_timeouts import CALM_S, LIMIT_S

from rpcdist import autograd, rpc
from rpcdist._proto import autograd_pb2, rpc_pb2
from rpcdist.autograd._context import MAX_NUMBER, ContextTable, make_id, worker_of
from rpcdist.autograd._pass_message import PassMessage, read_message
from rpcdist.errors import ProtocolViolation
from rpcdist.testing import InProcessCluster, eventually
from rpcdist.transport.wire_messages import CompactPass

FIRST, SECOND, THIRD = 0, 1, 2


def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def triple(x: torch.Tensor) -> torch.Tensor:
    return 3 * x


def tell(cluster: InProcessCluster, to: int, *messages: rpc_pb2.Message | CompactPass) -> None:
    """Has worker c send messages, and waits until they have come."""
    with cluster.use("c") as agent:
        rpc.rpc_sync(to, abs, (-1,))  # connects
        session = agent.router.session_with(to)
        assert session is not None
        for message in messages:
            session.send(message)
        rpc.rpc_sync(to, abs, (-1,))  # comes after them


def test_nobody_ends_or_begins_to_answer_a_pass_of_others() -> None:
    """Numbers of passes follow each other. A peer that knew the context ended its next pass before the pass had
    begun.
    """
    with InProcessCluster("a", "b", "c", peer_timeout=CALM_S) as cluster:

        def attack(context: int) -> None:
            for number in range(1, 4):
                aborted = autograd_pb2.BackwardAborted(worker=FIRST, type_name="Forged", text="forged")
                names: Any = {"context": context, "backward": make_id(FIRST, number)}
                ends = rpc_pb2.Message(autograd=autograd_pb2.AutogradMessage(**names, aborted=aborted))
                told, done = PassMessage(), PassMessage()
                told.verdicts = {1: 0, 2: 0, 3: 0}
                done.is_done = True
                tell(cluster, SECOND, ends, *(one.encode(context, names["backward"])[0] for one in (told, done)))
            with cluster.use("b") as agent:
                worker: Any = agent.autograd
                assert worker._passes == {} and worker.contexts.find(context).ended_passes == {}

        def step() -> list[float]:
            x = torch.ones(3, requires_grad=True)
            with autograd.context() as context:
                loss = rpc.rpc_sync("b", square, (x,)).sum()
                cluster.begin("c", attack, context).result(LIMIT_S)
                autograd.backward(context, [loss])
                return list(autograd.get_gradients(context)[x].tolist())

        assert cluster.run("a", step) == [2.0, 2.0, 2.0]


SPEECHES: dict[str, Callable[[PassMessage], object]] = {
    "used": lambda message: message.verdicts.update({5: 1}),
    "unused": lambda message: message.verdicts.update({5: 0}),
    "open": lambda message: message.verdicts.update({5: None}),
    "gradients": lambda message: message.add_gradients(5, [torch.ones(2)]),
}


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("what", SPEECHES)
def test_verdicts_and_gradients_are_of_what_was_sent_to_their_sender(what: str, begins: bool) -> None:
    """A neighbour gave verdicts on tensors that another one had been sent, and gradients of them."""
    message = PassMessage()
    message.begins = begins
    SPEECHES[what](message)
    part, *_ = message.encode(1, 2)
    tensors = SimpleNamespace(next_functions=(None,))
    sent: Any = {5: SimpleNamespace(to=SECOND, node=tensors), 6: SimpleNamespace(to=THIRD, node=tensors)}
    read_message(part, [], SECOND, sent)
    with pytest.raises(ProtocolViolation, match="worker 2 speaks of message 0x5, which was sent to worker 1"):
        read_message(part, [], THIRD, sent)


def test_a_neighbour_that_speaks_of_what_another_was_sent_ends_its_session_and_changes_nothing() -> None:
    with InProcessCluster("a", "b", "c", peer_timeout=CALM_S) as cluster:

        def attack(context: int) -> None:
            with cluster.use("a") as agent:
                worker: Any = agent.autograd
                [to_b] = [id for id, send in worker.contexts.find(context).sends.items() if send.to == SECOND]
                rpc.rpc_sync("c", abs, (-1,))
            tell(cluster, FIRST)
            [at_first] = [one for one in agent_of(cluster, "a").connections.taken if one.peer.name == "c"]
            forged = PassMessage()
            forged.verdicts = {to_b: 0}
            with cluster.use("c") as agent:
                session = agent.router.session_with(FIRST)
                assert session is not None
                session.send(forged.encode(context, make_id(FIRST, 1))[0])
                eventually(lambda: at_first.closed_reason, "the session has ended", LIMIT_S)
                assert "which was sent to worker 1" in str(at_first.closed_reason)

        def step() -> list[float]:
            x = torch.ones(2, requires_grad=True)
            with autograd.context() as context:
                loss = (rpc.rpc_sync("b", square, (x,)) + rpc.rpc_sync("c", triple, (x,))).sum()
                cluster.begin("c", attack, context).result(LIMIT_S)
                autograd.backward(context, [loss])
                return list(autograd.get_gradients(context)[x].tolist())

        assert cluster.run("a", step) == [5.0, 5.0]


def test_numbers_of_contexts_cannot_be_guessed() -> None:
    """They were counted from a number that all workers know: a peer that named the next one took part in it, and ended
    it.
    """
    table = ContextTable(7)
    numbers = [table.new().id & MAX_NUMBER for _ in range(1000)]
    assert len(set(numbers)) == 1000 and all(worker_of(id) == 7 for id in table._contexts)
    for bit in range(48):  # each is set in about half of them: a deviation of 6 standard deviations fails
        assert abs(sum(number >> bit & 1 for number in numbers) - 500) < 95, bit
