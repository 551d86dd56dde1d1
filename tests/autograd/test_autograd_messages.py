"""How many messages training takes: a small step of two workers writes three times to a socket on each side."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import write_counts
from autograd_write_counts import forward, make_layer
from rpc_cluster import Cluster
from torch import nn

import rpcdist.autograd as autograd
import rpcdist.rpc as rpc
from rpcdist.optim import DistributedOptimizer

pytestmark = pytest.mark.multiproc

NUM_STEPS = 30
rpc_sync: Any = rpc.rpc_sync


def test_a_small_step_takes_three_writes_on_each_side(cluster: Cluster) -> None:
    """The call and its result; begin with gradients, and begin, gradients and done; the optimizer's call and reply.

    The ends of contexts, acknowledgements and heartbeats go by the clock, so that some steps have more writes.
    """
    encoder, head = nn.Linear(4, 4), nn.Linear(4, 4)
    rrefs = [rpc.RRef(parameter) for layer in (encoder, head) for parameter in layer.parameters()]
    try:
        rrefs += rpc_sync("worker1", make_layer)
        optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1)
        x = torch.randn(2, 4)
        with write_counts.counted_writes():
            here = []
            for _ in range(NUM_STEPS):
                before = write_counts.num_writes()
                with autograd.context() as context_id:
                    loss = head(rpc_sync("worker1", forward, (encoder(x),))).pow(2).mean()
                    autograd.backward(context_id, [loss])
                    optimizer.step(context_id)
                here.append(write_counts.num_writes() - before)
        there = rpc_sync("worker1", write_counts.writes_between_marks)
    finally:
        rpc_sync("worker1", write_counts.stop_counting)
    assert (min(here), min(there)) == (3, 3), (here, there)
