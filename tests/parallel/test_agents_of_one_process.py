"""A pipeline and a distributed optimizer between two agents of one process: each agent has its own tables."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from agents_here import agents_here
from inside_agents import Agent
from torch import nn

from rpcdist import autograd, rpc
from rpcdist.optim import DistributedOptimizer
from rpcdist.optim._local_optimizer import own_table
from rpcdist.parallel import Pipeline
from rpcdist.parallel.pipeline._step_messages import receivers
from rpcdist.rpc._current import use_agent

NAMES = ("ada", "bob")


@pytest.fixture
def agents(job_token: str) -> Iterator[tuple[Agent, ...]]:
    with agents_here(*NAMES) as started:
        yield started


def parameter() -> rpc.RRef[torch.Tensor]:
    return rpc.RRef(torch.ones(3, requires_grad=True))


def num_receivers() -> int:
    return len(receivers())


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
            found.append(own_table())
    assert found[0] is not found[1]
    assert found[0].lock is not found[1].lock
    assert [table.find(1) is not None for table in found] == [True, True]
