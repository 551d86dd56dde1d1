"""A pipeline and a distributed optimizer between two agents of one process: each agent has its own tables."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from rpcdist import autograd, rpc
from rpcdist.collectives import HashStore
from rpcdist.optim import DistributedOptimizer
from rpcdist.optim._local_optimizer import tables
from rpcdist.parallel import Pipeline
from rpcdist.parallel.pipeline._step_messages import receivers
from rpcdist.rpc._agent import Agent
from rpcdist.rpc._current import forget_agent, use_agent
from rpcdist.rpc._start import node_options, start_agent
from rpcdist.transport import Node

LIMIT_S = 30.0
NAMES = ("ada", "bob")


def start(store: HashStore, rank: int) -> Agent:
    options = rpc.RpcOptions(rpc_timeout=LIMIT_S)
    network = Node(node_options(options)).start()
    return start_agent(
        store=store.clone(), name=NAMES[rank], rank=rank, world_size=len(NAMES), options=options, network=network
    )


def end(agent: Agent) -> None:
    agent.close()
    forget_agent(agent)
    agent.release()


@pytest.fixture
def agents(job_token: str) -> Iterator[tuple[Agent, ...]]:
    store = HashStore(LIMIT_S)
    with ThreadPoolExecutor(len(NAMES)) as starting:
        started = tuple(starting.map(lambda rank: start(store, rank), range(len(NAMES))))
    with ExitStack() as stack:
        for agent in reversed(started):
            stack.callback(end, agent)
        yield started


def parameter() -> rpc.RRef[torch.Tensor]:
    return rpc.RRef(torch.ones(3, requires_grad=True))


def num_receivers() -> int:
    return len(receivers.get())


def test_a_pipeline_has_a_runner_at_each_agent(agents: tuple[Agent, ...]) -> None:
    torch.manual_seed(0)
    stages = [nn.Linear(4, 4), nn.Linear(4, 1)]
    inputs, targets = torch.randn(8, 4), torch.randn(8, 1)
    nn.functional.mse_loss(nn.Sequential(*stages)(inputs), targets).backward()
    expected = {f"{at}.{name}": p.grad for at, stage in enumerate(stages) for name, p in stage.named_parameters()}
    for stage in stages:
        stage.zero_grad()
    with use_agent(agents[0]):
        pipe = Pipeline(stages, NAMES, num_microbatches=4, loss_fn=nn.functional.mse_loss)
        pipe.step(inputs, targets)
        torch.testing.assert_close(pipe.gradients(), expected)
        assert [rpc.rpc_sync(name, num_receivers) for name in NAMES] == [1, 1]


def test_an_optimizer_of_each_agent_has_its_own_number_and_lock(agents: tuple[Agent, ...]) -> None:
    with use_agent(agents[0]):
        parameters = [rpc.rpc_sync(name, parameter) for name in NAMES]
        optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.5)
        with autograd.context() as context_id:
            autograd.backward(context_id, [torch.stack([p.to_here() for p in parameters]).sum()])
            optimizer.step(context_id)
        assert [p.to_here().tolist() for p in parameters] == [[0.5] * 3] * 2
    found = []
    for agent in agents:
        with use_agent(agent):
            found.append(tables.get())
    assert found[0] is not found[1]
    assert found[0].lock is not found[1].lock
    assert [table.find(1) is not None for table in found] == [True, True]
