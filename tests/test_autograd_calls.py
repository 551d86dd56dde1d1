"""Gradients through calls of every kind, against the single-process gradient."""

from __future__ import annotations

import autograd_functions as functions
import pytest
import torch
from rpc_cluster import Cluster

import rpcdist.autograd as autograd
import rpcdist.rpc as rpc

pytestmark = pytest.mark.multiproc


def test_one_call(cluster: Cluster) -> None:
    x = torch.randn(2, 3, requires_grad=True)
    w = torch.randn(3, 3, requires_grad=True)
    expected = torch.autograd.grad(functions.scaled(x, w).sum(), [x, w])
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", functions.scaled, (x, w)).sum()
        autograd.backward(context_id, [loss])
        found = autograd.get_gradients(context_id)
    torch.testing.assert_close(found[x], expected[0])
    torch.testing.assert_close(found[w], expected[1])
    assert x.grad is None and w.grad is None
