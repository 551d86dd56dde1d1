"""The pipeline on real workers: its gradients equal those of the unsplit model."""

from __future__ import annotations

import pytest
import torch
from pipeline_stages import Loss, make_blocks
from rpc_cluster import Cluster
from torch import Tensor, nn

from rpcdist.parallel.pipeline import Pipeline

pytestmark = pytest.mark.multiproc


def batch(size: int, width: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    return tuple(torch.rand(2, size, width, dtype=torch.float64, generator=generator))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("schedule", "num_workers", "num_stages", "num_microbatches", "size"),
    [
        ("gpipe", 1, 1, 1, 4),
        ("gpipe", 2, 2, 4, 8),
        ("gpipe", 2, 4, 3, 10),
        ("1f1b", 1, 1, 3, 3),
        ("1f1b", 2, 2, 4, 8),
        ("1f1b", 3, 3, 5, 13),
        ("1f1b", 4, 4, 4, 9),
        ("1f1b", 4, 4, 8, 5),
        ("interleaved", 2, 4, 4, 8),
        ("interleaved", 2, 2, 4, 7),
        ("interleaved", 1, 3, 2, 4),
    ],
)
def test_gradients_equal_the_unsplit_model(
    cluster: Cluster, schedule: str, num_workers: int, num_stages: int, num_microbatches: int, size: int
) -> None:
    stages = make_blocks(num_stages)
    model = nn.Sequential(*stages)
    inputs, targets = batch(size)
    pipe = Pipeline(
        stages, cluster.names[:num_workers], schedule=schedule, num_microbatches=num_microbatches, loss_fn=Loss()
    )
    result = pipe.step(inputs, targets, with_outputs=True)
    output = model(inputs)
    loss = Loss()(output, targets)
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(result.outputs, output, check_device=False)
    gradients = pipe.gradients()
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)
