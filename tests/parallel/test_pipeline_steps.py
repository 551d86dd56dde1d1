"""The pipeline on real workers: its gradients equal those of the unsplit model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_stages import Block, Head, Loss, Mixer, make_blocks, sum_loss
from rpc_cluster import Cluster
from torch import Tensor, nn

from rpcdist.errors import ConfigError
from rpcdist.parallel.pipeline import Pipeline
from rpcdist.parallel.pipeline._simulation import dependencies
from rpcdist.parallel.pipeline._step_messages import as_tuple

pytestmark = pytest.mark.multiproc


def batch(size: int, width: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    inputs, targets = torch.rand(2, size, width, dtype=torch.float64, generator=generator)
    return inputs, targets


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
    assert_gradients(pipe, model)


def test_tuples_travel_between_stages(cluster: Cluster) -> None:
    stages = [Mixer(0), Mixer(1), Head(2)]
    inputs, targets = batch(7)
    ids, weight = torch.arange(7) % 5, torch.rand(7, dtype=torch.float64)
    pipe = Pipeline(
        stages, cluster.names[:3], schedule="gpipe", num_microbatches=3, loss_fn=sum_loss, loss_reduction="sum"
    )
    result = pipe.step((inputs, ids, 2), (targets, weight))
    loss = sum_loss(nested(stages, inputs, ids, 2), targets, weight)
    loss.backward()
    assert result.loss == pytest.approx(loss.item())
    assert result.losses.shape == (3,) and result.outputs is None
    assert_gradients(pipe, nn.Sequential(*stages))


def nested(stages: Sequence[nn.Module], *values: object) -> Tensor:
    for stage in stages:
        values = as_tuple(stage(*values))
    (output,) = values
    assert isinstance(output, Tensor)
    return output


def assert_gradients(pipe: Pipeline, model: nn.Module) -> None:
    gradients = pipe.gradients()
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


def test_frozen_parameters_get_no_gradients(cluster: Cluster) -> None:
    """A stage without anything to train at the beginning, and one in the middle that passes gradients on."""
    stages = make_blocks(4)
    for frozen in (stages[0], stages[2]):
        frozen.requires_grad_(False)
    pipe = Pipeline(stages, cluster.names, num_microbatches=2, loss_fn=Loss())
    inputs, targets = batch(4)
    pipe.step(inputs, targets)
    model = nn.Sequential(*stages)
    Loss()(model(inputs), targets).backward()
    assert_gradients(pipe, model)
    assert sum(gradient is None for gradient in pipe.gradients().values()) == 4


def test_training_equals_the_unsplit_model(cluster: Cluster) -> None:
    """Optimizers, clipping, states and options, over several steps with batches of several sizes."""
    stages = make_blocks(4)
    model = nn.Sequential(*[copy.deepcopy(stage) for stage in stages])
    pipe = Pipeline(stages, cluster.names[:2], schedule="interleaved", num_microbatches=4, loss_fn=Loss())
    ours = pipe.make_optimizer(torch.optim.Adam, lr=0.1)
    theirs = torch.optim.Adam(model.parameters(), lr=0.1)
    for number, size in enumerate((8, 8, 3, 9)):
        inputs, targets = batch(size)
        ours.zero_grad()
        theirs.zero_grad()
        loss = Loss()(model(inputs), targets)
        loss.backward()
        assert pipe.step(inputs, targets).loss == pytest.approx(loss.item())
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert pipe.clip_grad_norm(0.1) == pytest.approx(norm.item())
        ours.step()
        theirs.step()
        if number == 1:
            ours.change(lr=0.05)
            theirs.param_groups[0]["lr"] = 0.05
    state = pipe.state_dict()
    torch.testing.assert_close(state, dict(model.state_dict()))
    assert sorted(ours.state_dict()) == [0, 1, 2, 3]

    other = Pipeline(make_blocks(4), cluster.names, num_microbatches=2, loss_fn=Loss())
    other.load_state_dict(state)
    resumed = other.make_optimizer(torch.optim.Adam, lr=0.05)
    resumed.load_state_dict(ours.state_dict())
    inputs, targets = batch(8)
    for one, optimizer in ((pipe, ours), (other, resumed)):
        optimizer.zero_grad()
        one.step(inputs, targets)
        optimizer.step()
    torch.testing.assert_close(other.state_dict(), pipe.state_dict())


def test_forward_and_evaluate_have_no_gradients(cluster: Cluster) -> None:
    stages: list[nn.Module] = [Block(0), nn.Sequential(nn.Dropout(0.5), Block(1))]
    pipe = Pipeline(stages, cluster.names[1:3], num_microbatches=3, loss_fn=Loss())
    pipe.eval()
    model = nn.Sequential(*stages).eval()
    for size in (1, 2, 7):
        inputs, targets = batch(size)
        torch.testing.assert_close(pipe(inputs), model(inputs), check_device=False)
        found = pipe.evaluate(inputs, targets, with_outputs=True)
        assert found.loss == pytest.approx(Loss()(model(inputs), targets).item())
        assert isinstance(found.outputs, Tensor) and found.outputs.shape == (size, 6)
    assert all(gradient is None for gradient in pipe.gradients().values())


def test_a_schedule_of_ones_own_and_stages_made_at_the_worker(cluster: Cluster) -> None:
    order = ["0F0 0F1 0B1 0B0".split(), "1F1 1B1 1F0 1B0".split()]
    with pytest.raises(ConfigError, match="cannot be executed"):
        Pipeline([Block(0), Block(1)], cluster.names[:2], schedule=[order[0][::-1], order[1]], num_microbatches=2)
    makers = [partial(Block, 0), partial(Block, 1)]
    pipe = Pipeline(makers, cluster.names[:2], schedule=order, num_microbatches=2, loss_fn=Loss())
    inputs, targets = batch(5)
    pipe.step(inputs, targets)
    model = nn.Sequential(Block(0), Block(1))
    Loss()(model(inputs), targets).backward()
    assert_gradients(pipe, model)
    assert "worker 1: " in pipe.grid()


def test_timeline(cluster: Cluster, tmp_path: Path) -> None:
    pipe = Pipeline(make_blocks(2), cluster.names[1:3], num_microbatches=3, loss_fn=Loss())
    with pytest.raises(RuntimeError, match="no timeline yet"):
        pipe.draw_timeline(tmp_path / "none.png")
    pipe.step(*batch(6))
    timeline = pipe.timeline
    assert timeline is not None
    for worker, row in enumerate(pipe.schedule):
        ran = [slot for slot in timeline.slots if slot.worker == worker]
        assert [slot.action for slot in ran] == row
        assert all(one.end_s <= after.start_s for one, after in pairwise(ran))
    # Clocks of two processes are compared to within about the time of a call.
    end_s = {slot.action: slot.end_s for slot in timeline.slots}
    assert all(
        end_s[needed] < slot.start_s + 0.01 for slot in timeline.slots for needed in dependencies(slot.action, 2)
    )
    assert 0 < timeline.bubble < 1 and 0 < timeline.theoretical_bubble < 1 and timeline.length_s > 0
    for name, begin in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml")):
        pipe.draw_timeline(tmp_path / name, "a title")
        assert (tmp_path / name).read_bytes().startswith(begin)
    with pytest.raises(ConfigError, match="must end in"):
        pipe.draw_timeline(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": ["worker0", "worker0"]}, "a worker occurs twice"),
        ({"loss_reduction": "max"}, "must be 'mean' or 'sum'"),
        ({"devices": ["cpu"]}, "1 devices for 2 workers"),
        ({"schedule": "zigzag"}, "unknown schedule 'zigzag'"),
        ({"num_microbatches": 0}, "num_microbatches=0"),
        ({"stages": [int, Block(1)]}, "stage 0 must be a torch.nn.Module .* made a int"),
    ],
)
def test_wrong_arguments_are_explained(cluster: Cluster, changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"stages": make_blocks(2), "workers": cluster.names[:2], "loss_fn": Loss(), **changes}
    with pytest.raises((ValueError, TypeError), match=message):
        Pipeline(**arguments)


def test_wrong_batches_are_explained(cluster: Cluster) -> None:
    pipe = Pipeline(make_blocks(2), cluster.names[:2], num_microbatches=2)
    inputs, targets = batch(4)
    with pytest.raises(ConfigError, match="has no loss"):
        pipe.step(inputs, targets)
    for wrong, message in (
        ((inputs, targets[:3]), "same size in their first dimension"),
        ((1, 2), "at least one tensor"),
        ((inputs[:0],), "is empty"),
    ):
        with pytest.raises(ConfigError, match=message):
            pipe.forward(wrong)
    with pytest.raises(ConfigError, match="weight' does not begin"):
        pipe.load_state_dict({"7.linear.weight": inputs})
