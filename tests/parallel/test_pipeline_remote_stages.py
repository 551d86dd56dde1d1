"""GPipe through distributed autograd: its gradients, too, equal those of the unsplit model."""

from __future__ import annotations

import pytest
import torch
from pipeline_stages import Loss, gradients_at, make_blocks
from rpc_cluster import Cluster
from torch import nn

import rpcdist.autograd as dist_autograd
import rpcdist.rpc as rpc
from rpcdist.errors import ConfigError
from rpcdist.parallel.pipeline import RemoteStages

pytestmark = pytest.mark.multiproc


@pytest.mark.parametrize(
    ("num_workers", "num_stages", "num_microbatches"), [(1, 1, 1), (2, 2, 3), (3, 3, 4), (2, 4, 2)]
)
def test_gradients_equal_the_unsplit_model(
    cluster: Cluster, num_workers: int, num_stages: int, num_microbatches: int
) -> None:
    blocks = make_blocks(num_stages)
    model = nn.Sequential(*blocks)
    inputs, targets = torch.rand(2, 7, 6, dtype=torch.float64)
    stages = RemoteStages(blocks, cluster.names[1 : 1 + num_workers], num_microbatches=num_microbatches)
    parameters = stages.parameter_rrefs()
    with dist_autograd.context() as context:
        output = stages(inputs)
        dist_autograd.backward(context, [Loss()(output, targets)])
        found = [rpc.rpc_sync(rref.owner(), gradients_at, (context, rref)) for rref in parameters]
    expected = model(inputs)
    torch.testing.assert_close(output, expected)
    Loss()(expected, targets).backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in model.parameters()])


def test_wrong_numbers_are_explained(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="at least one stage"):
        RemoteStages(make_blocks(1), cluster.names[:1], num_microbatches=0)
