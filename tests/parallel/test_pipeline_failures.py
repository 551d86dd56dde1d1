"""A failure in a pipeline ends the step everywhere, is named, and leaves nothing behind."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import pipeline_stages
import pytest
import torch
from peer_timeouts import CALM_S, PROMPT_S, UNIT_S
from pipeline_stages import Block, Failing, Loss, Pass, Sleeping
from rpc_cluster import Cluster
from torch import Tensor, nn

import rpcdist.rpc as rpc
from rpcdist.errors import Cancelled
from rpcdist.parallel.pipeline import Pipeline, PipelineError, PipelineTimeout
from rpcdist.testing import WorkerPool, eventually

pytestmark = pytest.mark.multiproc


def batch(first_value: float, part: int = 2) -> tuple[Tensor, Tensor]:
    """Four micro-batches of two; the first value of one of them tells `Failing` and `Sleeping` what to do."""
    inputs = torch.rand(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    inputs[2 * part, 0] = first_value
    return inputs, torch.ones(8, 6, dtype=torch.float64)


def assert_a_step_works(pipe: Pipeline, model: nn.Module) -> None:
    inputs, targets = batch(0.5)
    assert all(gradient is None for gradient in pipe.gradients().values())
    pipe.step(inputs, targets)
    model.zero_grad()
    Loss()(model(inputs), targets).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(pipe.gradients()[name], parameter.grad)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (-1, "forward", "ValueError: forward was told to fail"),
        (-2, "backward", "ArithmeticError: backward was told to fail"),
    ],
)
def test_an_error_of_a_stage_ends_the_step_everywhere(
    cluster: Cluster, schedule: str, failing: int, value: float, kind: str, text: str
) -> None:
    stages: list[nn.Module] = [Pass(stage) for stage in range(3)]
    stages[failing] = Failing(failing)
    pipe = Pipeline(stages, cluster.names[1:], schedule=schedule, num_microbatches=4, loss_fn=Loss())
    for _ in range(2):
        begin = time.monotonic()
        with pytest.raises(PipelineError) as caught:
            pipe.step(*batch(value))
        assert time.monotonic() - begin < PROMPT_S
        error = caught.value
        worker = cluster.names[1 + failing]
        assert (error.worker, error.stages, error.microbatch) == (worker, (failing,), 2)
        assert str(error) == f"{kind} of micro-batch 2 in stage {failing} on worker {worker!r} failed: {text}"
        assert "in forward" in str(error.__cause__) or "in backward" in str(error.__cause__)  # the remote traceback
        assert_a_step_works(pipe, nn.Sequential(*stages))
        pipe.zero_grad()


def test_an_error_of_the_loss_names_the_last_stage(cluster: Cluster) -> None:
    pipe = Pipeline([Block(0), Block(1)], cluster.names[:2], num_microbatches=2, loss_fn=torch.sub)
    with pytest.raises(PipelineError, match="stage 1 on worker 'worker1' failed: ValueError: loss_fn must return one"):
        pipe.step(*batch(0.5))


@pytest.fixture
def sleepers(cluster: Cluster) -> Iterator[str]:
    """A worker on which `Sleeping` stages sleep until the end of the test at the latest."""
    name = cluster.names[2]
    rpc.rpc_sync(name, pipeline_stages.fall_asleep)
    yield name
    rpc.rpc_sync(name, pipeline_stages.wake)


def test_a_worker_that_takes_too_long_is_named(cluster: Cluster, sleepers: str) -> None:
    stages = [Pass(0), Sleeping(1), Block(2)]
    pipe = Pipeline(stages, cluster.names[1:], num_microbatches=4, loss_fn=Loss(), timeout=UNIT_S)
    with pytest.raises(PipelineTimeout) as caught:
        pipe.step(*batch(-1.0))
    assert isinstance(caught.value, TimeoutError)
    assert (caught.value.worker, caught.value.stages) == (sleepers, (1,))  # not one of those that wait for it
    assert "is still busy" in str(caught.value)
    # The stage still sleeps, and the next step waits for it, in vain.
    with pytest.raises(PipelineTimeout, match="an earlier step still runs"):
        pipe.step(*batch(0.5))
    rpc.rpc_sync(sleepers, pipeline_stages.wake)
    pipe.zero_grad()
    assert_a_step_works(pipe, nn.Sequential(*stages))


def test_one_step_at_a_time(cluster: Cluster, sleepers: str) -> None:
    pipe = Pipeline([Sleeping(0), Block(1)], cluster.names[2:], num_microbatches=4, loss_fn=Loss())
    losses: list[float] = []
    thread = threading.Thread(target=lambda: losses.append(pipe.step(*batch(-1.0)).loss))
    thread.start()
    try:
        eventually(pipe._busy.locked, "the step runs")
        with pytest.raises(RuntimeError, match="is busy: another thread"):
            pipe.step(*batch(0.5))
    finally:
        rpc.rpc_sync(sleepers, pipeline_stages.wake)
        thread.join(30)
    assert len(losses) == 1


def test_an_interrupted_driver_ends_the_step(cluster: Cluster, sleepers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C cancels all calls of the driver's process; here one is cancelled, which ends the wait in the same way."""
    stages = [Sleeping(0), Block(1)]
    pipe = Pipeline(stages, cluster.names[2:], num_microbatches=4, loss_fn=Loss())
    as_completed = rpc.as_completed

    def cancel_and_wait(calls: list[rpc.Future[object]]) -> object:
        calls[1].cancel()
        threading.Timer(UNIT_S, rpc.rpc_sync, (sleepers, pipeline_stages.wake)).start()
        return as_completed(calls)

    with monkeypatch.context() as patch:
        patch.setattr(rpc, "as_completed", cancel_and_wait)
        with pytest.raises((PipelineError, Cancelled)):
            pipe.step(*batch(-1.0))
    assert_a_step_works(pipe, nn.Sequential(*stages))


def test_stages_end_with_their_pipeline(cluster: Cluster) -> None:
    wait_for_end_of_runners(cluster)
    pipe = Pipeline([Block(0), Block(1)], cluster.names[1:3], num_microbatches=2, loss_fn=Loss())
    pipe.step(*batch(0.5))
    assert [rpc.rpc_sync(name, pipeline_stages.num_runners) for name in cluster.names] == [0, 1, 1, 0]
    del pipe
    wait_for_end_of_runners(cluster)


def wait_for_end_of_runners(cluster: Cluster) -> None:
    gc.collect()
    eventually(  # references are dropped in the background, and nothing tells us
        lambda: not any(rpc.rpc_sync(name, pipeline_stages.num_runners) for name in cluster.names), "no runner is left"
    )


def test_the_death_of_a_worker_ends_the_step(worker_pool: WorkerPool) -> None:
    world = worker_pool.world("a", "b", "c", peer_timeout=CALM_S)
    kind, text, took_s = world["a"].run(pipeline_stages.step_of_doom, ["b", "c", "a"], 0)
    assert kind == "PipelineError" and "'b'" in text and "WorkerLost" in text
    assert took_s < PROMPT_S
